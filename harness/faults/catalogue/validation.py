"""Mistakes around validation: what a pass that trains nothing leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.faults import Fired, fault, replace


def _after_each_step(act: Callable[[Any], None]) -> None:
    from harness.trainers.llama3 import trainer

    def make(original: Any) -> Any:
        def followed(self: Any) -> Any:
            metrics = original(self)
            act(self)
            return metrics

        return followed

    replace(trainer.Trainer, "train_step", make)


def _validate(trainer: Any) -> None:
    """One pass without gradients in eval mode, as trainers do it."""
    import torch

    (model,) = trainer.model_parts
    model.eval()
    with torch.no_grad():
        model(torch.zeros(trainer.case.local_batch, trainer.case.training.seq_len, dtype=torch.int64))


def _reshard(trainer: Any) -> None:
    from torch.distributed.fsdp import FSDPModule

    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@fault(
    breaks="the averaged weights that are swapped in for validation are not swapped out again",
    bug="of the family of S05 pytorch/torchtitan #3675: weights are not those that the trainer believes",
    case="fsdp_2",
    caught_by="update",
    named="weights are changed between steps 2 and 3",
)
def validation_leaves_averaged_weights(fired: Fired) -> None:
    import torch

    average: dict[Any, Any] = {}

    def validate(trainer: Any) -> None:
        for parameter in trainer.model_parts[0].parameters():
            kept = average.setdefault(parameter, parameter.detach().clone())
            kept.lerp_(parameter.detach(), 0.5)
            with torch.no_grad():
                parameter.copy_(kept)
        _validate(trainer)
        _reshard(trainer)
        trainer.model_parts[0].train()
        fired()

    _after_each_step(validate)


@fault(
    breaks="validation keeps all units gathered and leaves them so, which the next step then does not gather",
    bug="of the family of H02 pytorch/torchtitan #4143: parameters stay gathered",
    case="fsdp_2",
    caught_by="reshard traffic",
    named="evaluation left layers.0",
)
def validation_leaves_a_unit_gathered(fired: Fired) -> None:
    def validate(trainer: Any) -> None:
        layers = trainer.model_parts[0].layers
        blocks = list(layers.values() if hasattr(layers, "values") else layers)
        for block in blocks:
            block.set_reshard_after_forward(False)
        _validate(trainer)
        for block in blocks:
            block.set_reshard_after_forward(True)
        trainer.model_parts[0].train()
        fired()

    _after_each_step(validate)
