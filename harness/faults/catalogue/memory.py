"""Faults of memory: what is taken beside what the plan knows, and what a validation leaves behind."""

from __future__ import annotations

from functools import partial
from typing import Any

from harness.faults import fault
from harness.faults import operators as op

STEP = "torch.optim:AdamW.step"

_kept: list[Any] = []


@fault(
    breaks="the logits of every step are kept in a list, as one does to look at them later",
    bug="of the family of P15 pytorch #164756: what was computed lingers",
    case="fsdp_2",
    caught_by="memory",
    named="growing",
)
@partial(op.instead, "harness.reference.model:Llama.forward")
def logits_of_every_step_kept(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the model's logits, and keep them in a list for ever."""
    logits = original(*args, **kwargs)
    _kept.append(logits.detach())
    return logits


@fault(
    breaks="before each optimizer step all weights are copied, for the length of the update, and then given up",
    bug="of the family of P15 pytorch #164756: memory for what nobody needs at once",
    case="hsdp_2x2",
    caught_by="memory",
    named="copied",
)
@partial(op.instead, STEP)
def weights_copied_during_each_step(original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
    """Step the optimizer, with a copy of all weights during the step. The largest change of each is left on the optimizer."""
    weights = []
    for group in optimizer.param_groups:
        weights += group["params"]
    before = [weight.detach().clone() for weight in weights]
    result = original(optimizer, *args, **kwargs)
    optimizer.moved = [
        float((w.detach() - before_step).abs().max()) for w, before_step in zip(weights, before, strict=True)
    ]
    return result


@fault(
    breaks="a moving average of the weights is retained, which is not declared",
    bug="of the family of P15 pytorch #164756: weights beside the weights",
    case="fsdp_2",
    caught_by="memory",
    named="retained",
)
@partial(op.after_call, STEP)
def moving_average_not_declared(optimizer: Any, *_: Any, **__: Any) -> None:
    """Update a moving average of all weights, which is kept on the optimizer."""
    weights = []
    for group in optimizer.param_groups:
        weights += [weight.detach().to_local() for weight in group["params"]]
    if not hasattr(optimizer, "average"):
        optimizer.average = [weight.clone() for weight in weights]
    for average, weight in zip(optimizer.average, weights, strict=True):
        average.lerp_(weight, 0.1)


graph_outlives_backward = fault(
    breaks="backward is called with retain_graph=True: a microbatch's activations are still there in the next one's forward",
    bug="E-class: retain_graph left over from debugging",
    case="single_accum",
    caught_by="memory",
    named="retained graph",
    does=op.override_argument("torch:Tensor.backward", retain_graph=True),
)


def _validate(trainer: Any) -> None:
    """Run one pass without gradients in eval mode, as trainers do it."""
    import torch

    (model,) = trainer.model_parts
    model.eval()
    with torch.no_grad():
        model(torch.zeros(trainer.case.local_batch, trainer.case.training.seq_len, dtype=torch.int64))
    model.train()


@fault(
    breaks="validation keeps all units gathered and leaves them so, which the next step then does not gather",
    bug="of the family of H02 pytorch/torchtitan #4143: parameters stay gathered",
    case="fsdp_2",
    caught_by="reshard traffic",
    named="left gathered by evaluation",
)
@partial(op.after_call, ".trainer:Trainer.train_step")
def validation_leaves_a_unit_gathered(trainer: Any) -> None:
    """Validate after each step without freeing the blocks of layers after forward."""
    blocks = list(trainer.model_parts[0].layers.values())
    for block in blocks:
        block.set_reshard_after_forward(False)
    _validate(trainer)
    for block in blocks:
        block.set_reshard_after_forward(True)


_optimizers: list[Any] = []


def _note_optimizer(optimizer: Any) -> Any:
    _optimizers.append(optimizer)
    return optimizer


def _stepped_parameters(parameters: Any) -> list[Any]:
    """Return the parameters that optimizers step, in place of the model's.

    While units stay gathered, the model has whole parameters; only the optimizers have those with gradients.
    """
    stepped = []
    for optimizer in _optimizers:
        for group in optimizer.param_groups:
            stepped += group["params"]
    return stepped


units_stay_gathered_after_backward = fault(
    breaks="units are freed after backward neither by FSDP2 nor by hand: every step computes with the weights of step 1",
    bug="of the family of H02 pytorch/torchtitan #4143: set_reshard_after_backward(False), and nothing frees them later",
    case="fsdp_2",
    caught_by="reshard traffic memory",
    named="left gathered by backward",
    does=op.together(
        op.after_call(".parallelize:apply_fsdp", lambda model, *_: model.set_reshard_after_backward(False)),
        op.change_result(".recipe:build_optimizer", _note_optimizer),
        op.change_argument(".clip:clip_gradients", parameters=_stepped_parameters),
    ),
)
