"""Mistakes around validation: what a pass that trains nothing leaves behind."""

from __future__ import annotations

from functools import partial
from typing import Any

from harness.faults import fault
from harness.faults import operators as op


def _validate(trainer: Any) -> None:
    """One pass without gradients in eval mode, as trainers do it."""
    import torch

    (model,) = trainer.model_parts
    model.eval()
    with torch.no_grad():
        model(torch.zeros(trainer.case.local_batch, trainer.case.training.seq_len, dtype=torch.int64))
    model.train()


@fault(
    breaks="the averaged weights that are swapped in for validation are not swapped out again",
    bug="of the family of S05 pytorch/torchtitan #3675: weights are not those that the trainer believes",
    case="fsdp_2",
    caught_by="update",
    named="weights changed",
)
@partial(op.after_call, ".trainer:Trainer.train_step")
def validation_leaves_averaged_weights(trainer: Any) -> None:
    (model,) = trainer.model_parts
    for parameter in model.parameters():
        weight = parameter.detach()
        parameter.average = getattr(parameter, "average", weight.clone()).lerp_(weight, 0.5)
        weight.copy_(parameter.average)
    _validate(trainer)
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()


@fault(
    breaks="validation keeps all units gathered and leaves them so, which the next step then does not gather",
    bug="of the family of H02 pytorch/torchtitan #4143: parameters stay gathered",
    case="fsdp_2",
    caught_by="reshard traffic",
    named="left gathered by evaluation",
)
@partial(op.after_call, ".trainer:Trainer.train_step")
def validation_leaves_a_unit_gathered(trainer: Any) -> None:
    blocks = list(trainer.model_parts[0].layers.values())
    for block in blocks:
        block.set_reshard_after_forward(False)
    _validate(trainer)
    for block in blocks:
        block.set_reshard_after_forward(True)


@fault(
    breaks="the embedding's backward gathers a block ahead whose backward is over, each time after validation",
    bug="of the family of H02 pytorch/torchtitan #4143: parameters are gathered where nobody needs them",
    case="fsdp_2",
    caught_by="reshard traffic",
    named="traffic of no plan",
)
@partial(op.before_call, ".trainer:Trainer.train_step")
def validation_hides_a_unit_gathered_for_nobody(trainer: Any) -> None:
    (model,) = trainer.model_parts
    *_, last = model.layers.values()
    model.tok_embeddings.set_modules_to_backward_prefetch([last])
    _validate(trainer)
