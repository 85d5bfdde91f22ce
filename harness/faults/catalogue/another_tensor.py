"""Faults by which a gradient is another tensor: of the step before, of another parameter, rounded, or with rows in
other places.

No search knows one of these. They show whether diagnosis compares what is wrong with all that is on record.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.faults import fault
from harness.faults import operators as op

BACKWARD = ".trainer:Trainer.forward_backward"
STEP = ".trainer:Trainer.optimizer_step"
Gradients = dict[str, Any]


def _local_gradients(trainer: Any) -> Gradients:
    """Return this rank's slice of each gradient, by the name of its parameter without a leading "module.".

    The slice is None for a parameter without a gradient.
    """
    gradients = {}
    for part in trainer.model_parts:
        for name, parameter in part.named_parameters():
            gradients[name.removeprefix("module.")] = parameter.grad
    return {name: getattr(gradient, "_local_tensor", gradient) for name, gradient in gradients.items()}


def _after_backward(change: Callable[[Gradients], None]) -> op.Operator:
    """Return the operator that calls `change` with this rank's gradients after each backward."""

    def backward_and_change(original: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        loss = original(trainer, *args, **kwargs)
        change(_local_gradients(trainer))
        return loss

    return op.instead(BACKWARD, backward_and_change)


def _use_previous_gradient() -> Callable[[Gradients], None]:
    """Return a change that replaces the gradient of one norm by that of the step before; in the first step it stays."""
    last_gradients: Gradients = {}

    def use_last(gradients: Gradients) -> None:
        gradient = gradients["layers.1.ffn_norm.weight"]
        current = gradient.clone()
        gradient.copy_(last_gradients.get("last", current))
        last_gradients["last"] = current

    return use_last


def _swap_gradients(gradients: Gradients) -> None:
    """Exchange the gradients of wk and wv of layer 0, in place."""
    keys = gradients["layers.0.attention.wk.weight"]
    values = gradients["layers.0.attention.wv.weight"]
    old_keys = keys.clone()
    keys.copy_(values)
    values.copy_(old_keys)


def _round_gradients(gradients: Gradients) -> None:
    for gradient in gradients.values():
        gradient.copy_(gradient.bfloat16())


def _move_rows(gradients: Gradients) -> None:
    gradient = gradients["tok_embeddings.weight"]
    gradient.copy_(gradient.roll(1, 0))


gradient_of_the_step_before = fault(
    breaks="one parameter's gradient comes a step late, as where a step does not wait for what is still reduced",
    bug="G-class a tensor in place of another",
    case="ddp_2",
    caught_by="gradients grad_norm",
    named="another tensor",
    does=_after_backward(_use_previous_gradient()),
)
gradients_of_two_matrices_swapped = fault(
    breaks="two gradients of one shape are handed back to each other's parameter, as by a wrong place in a flat buffer",
    bug="G-class a tensor in place of another",
    case="fsdp_2",
    caught_by="gradients",
    named="another tensor",
    does=_after_backward(_swap_gradients),
)
gradients_through_bfloat16 = fault(
    breaks="all gradients pass through bfloat16 in a float64 recipe, behind the reduction",
    bug="G-class a tensor in place of another",
    case="fsdp_2",
    caught_by="gradients",
    named="another tensor",
    does=_after_backward(_round_gradients),
)
embedding_gradient_a_row_off = fault(
    breaks="each row of the embedding's gradient is added to the next token's",
    bug="G-class a tensor in place of another",
    case="ddp_2",
    caught_by="gradients",
    named="another tensor",
    does=_after_backward(_move_rows),
)
matrices_moved_by_each_others_gradients = fault(
    breaks="the optimizer takes two parameters' gradients for each other's, behind clipping",
    bug="G-class a tensor in place of another",
    case="fsdp_2",
    caught_by="update",
    named="another tensor",
    does=op.before_call(STEP, lambda trainer: _swap_gradients(_local_gradients(trainer))),
)
