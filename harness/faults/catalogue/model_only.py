"""Faults of a start from a checkpoint's weights alone: what should be new is restored, or the weights do not arrive."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from harness.faults import fault
from harness.faults import operators as op

LOAD_MODEL = ".checkpoint:load_model"
RESUME = ".trainer:Trainer.resume"
STARTS = "fsdp_2_weights_to_fsdp_2"
INTO_STAGES = "fsdp_2_weights_to_pp_2"


def _all_restored(original: Any, parts: Any, checkpoint: Path) -> None:
    """Restore the optimizer from the checkpoint too; the scheduler and the rates stay as new."""
    from harness.core.trainers.llama3.checkpoint import resume

    begun = [part.scheduler.state_dict() for part in parts]
    rates_of_parts = []
    for part in parts:
        rates_of_parts.append([group["lr"] for group in part.optimizer.param_groups])
    resume(parts, checkpoint)
    for part, state, rates in zip(parts, begun, rates_of_parts, strict=True):
        part.scheduler.load_state_dict(state)
        for group, rate in zip(part.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


optimizer_restored_although_new = fault(
    breaks="fine-tuning begins with the moments and the counter of the checkpoint's optimizer",
    bug="S18 EleutherAI/gpt-neox #429: optimizer states are loaded although finetune is set",
    case=STARTS,
    caught_by="resume update",
    named="optimizer state kept",
    does=op.instead(LOAD_MODEL, _all_restored),
)


@fault(
    breaks="fine-tuning goes on with the schedule of the checkpoint, and has no warm-up",
    bug="S20 deepspeedai/DeepSpeedExamples #114: with --finetune the learning rate's schedule is not reset",
    case=STARTS,
    caught_by="resume update",
    named="schedule goes on",
)
@partial(op.after_call, RESUME)
def schedule_goes_on_although_new(trainer: Any, folder: Path) -> None:
    """Step each scheduler as often as the checkpoint's training had."""
    for scheduler in trainer.schedulers:
        for _ in range(trainer.case.model_of):
            scheduler.step()


@fault(
    breaks="fine-tuning reads its data from where the checkpoint was",
    bug="of the family of S21: what counts is taken over from the base model's checkpoint",
    case=STARTS,
    caught_by="resume samples loss gradients",
    named="data position",
)
@partial(op.after_call, RESUME)
def data_goes_on_although_new(trainer: Any, folder: Path) -> None:
    """Move the data loader behind the samples that the checkpoint's training had."""
    trainer.microbatches.seek(trainer.case.model_of * trainer.case.training.global_batch)


@fault(
    breaks="the number of the checkpoint's step is taken over, so that fine-tuning ends that many steps too early",
    bug="S21 modelscope/ms-swift #9099: iterations are not reset where only the base model is loaded",
    case=STARTS,
    caught_by="completed",
    named="incomplete",
)
@partial(op.after_call, RESUME)
def step_counter_taken_over(trainer: Any, folder: Path) -> None:
    trainer.step = trainer.case.model_of


weights_of_a_start_not_loaded = fault(
    breaks="the checkpoint of a start from weights is never read, and training begins with the seed's weights",
    bug="of the family of S05, S14: what is requested of a checkpoint is not there afterwards",
    case=INTO_STAGES,
    caught_by="resume loss gradients",
    named="resumed elsewhere",
    does=op.skip_call(LOAD_MODEL),
)


def _masters_left(build: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the optimizer, whose first step begins with the parameters as they were when it was built."""
    import torch

    masters = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = build(model, *args, **kwargs)

    def as_built(*_: Any) -> None:
        """Put the parameters back to their copies, once."""
        with torch.no_grad():
            for parameter, master in zip(model.parameters(), masters, strict=True):
                parameter.copy_(master)
        hook.remove()

    hook = optimizer.register_step_pre_hook(as_built)
    return optimizer


masters_left_at_initial_weights = fault(
    breaks="the optimizer steps its own copies of the parameters, which were made before the weights were loaded",
    bug="S19 NVIDIA/Megatron-LM #174, databricks/megablocks #80: the first update brings the random weights back",
    case=STARTS,
    caught_by="update loss gradients",
    named="copies not loaded",
    does=op.instead(".recipe:build_optimizer", _masters_left),
)
