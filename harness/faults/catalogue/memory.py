"""Memory that is taken besides what the plan knows: the numbers are right, and so is what is held when training has ended."""

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
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    before = [weight.detach().clone() for weight in weights]
    done = original(optimizer, *args, **kwargs)
    optimizer.moved = [float((w.detach() - old).abs().max()) for w, old in zip(weights, before, strict=True)]
    return done


@fault(
    breaks="a moving average of the weights is retained, which nobody declared",
    bug="of the family of P15 pytorch #164756: weights beside the weights",
    case="fsdp_2",
    caught_by="memory",
    named="retained",
)
@partial(op.after_call, STEP)
def moving_average_not_declared(optimizer: Any, *_: Any, **__: Any) -> None:
    weights = [weight.detach().to_local() for group in optimizer.param_groups for weight in group["params"]]
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
