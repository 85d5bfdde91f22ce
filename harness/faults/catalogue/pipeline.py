"""Mistakes in running a pipeline: the schedule, the number of microbatches, what scales a microbatch's loss."""

from __future__ import annotations

from dataclasses import replace as changed
from typing import Any

from harness.faults import Fired, fault, replace


@fault(
    breaks="every pipeline runs GPipe, whatever schedule is requested",
    bug="of the family of P07: a schedule that is looked up by another name; numbers are the same, memory is not",
    case="pp_2",
    caught_by="schedule",
    named="schedule GPipe ran, 1F1B is requested",
)
def gpipe_whatever_is_asked(fired: Fired) -> None:
    from harness.trainers.llama3 import pipeline

    def make(original: Any) -> Any:
        def always_gpipe(_: str) -> Any:
            fired()
            return original("GPipe")

        return always_gpipe

    replace(pipeline, "get_schedule_class", make)


@fault(
    breaks="the batch is cut into as many microbatches as there are stages, not into as many as requested",
    bug="P07 pytorch/torchtitan #781: the default number of microbatches was pp",
    case="pp_2",
    caught_by="schedule samples",
    named="2 microbatches went through the pipeline, 4 are requested",
)
def as_many_microbatches_as_stages(fired: Fired) -> None:
    from harness.trainers.llama3 import pipeline

    def make(original: Any) -> Any:
        def fewer(parts: Any, loss: Any, case: Any, *rest: Any) -> Any:
            fired()
            return original(
                parts, loss, changed(case, features=changed(case.features, microbatches=case.dims.pp)), *rest
            )

        return fewer

    replace(pipeline, "build_schedule", make)


@fault(
    breaks="each pass of the schedule divides all gradients by the number of microbatches, those of earlier passes again",
    bug="P01 pytorch/torchtitan #1732: scale_grads=True together with gradient accumulation",
    case="pp_2_accum",
    caught_by="gradients grad_norm",
    named="microbatches contribute with weights 0.0625",
)
def gradients_scaled_in_every_pass(fired: Fired) -> None:
    from torch.distributed.pipelining.schedules import Schedule1F1B

    def make(original: Any) -> Any:
        def scaling(self: Any, *args: Any, **options: Any) -> None:
            fired()
            original(self, *args, **(options | {"scale_grads": True}))

        return scaling

    replace(Schedule1F1B, "__init__", make)


@fault(
    breaks="the gradient that each stage sends back is halved, so the further from the loss, the smaller",
    bug="P02 deepspeedai/DeepSpeed #8154: every stage divides by the accumulation steps again",
    case="pp_3",
    caught_by="gradients grad_norm",
    named="gradients are off by stage, times 0.25 in stage 0, 0.5 in stage 1, 1 in stage 2",
)
def each_stage_halves_its_gradient(fired: Fired) -> None:
    from torch.distributed.pipelining.stage import PipelineStage

    def make(original: Any) -> Any:
        def halved(self: Any, *args: Any, **options: Any) -> Any:
            output = original(self, *args, **options)
            if not self.is_last:
                fired()
                output.register_hook(lambda gradient: gradient / 2)
            return output

        return halved

    replace(PipelineStage, "forward_maybe_with_nosync", make)
