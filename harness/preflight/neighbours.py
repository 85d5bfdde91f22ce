"""What the other stages of a pipeline would have said of shapes.

torch's stages vote whether each was told the shapes between them; alone, a stage's own vote is that of all.
"""

from __future__ import annotations

from typing import Any


def vote_alone() -> None:
    """For torch 2.13 and newer, whose stages vote."""
    from torch.distributed.pipelining import schedules, stage

    modes = getattr(stage, "InferenceMode", None)
    original = getattr(schedules._PipelineSchedule, "_warmup_p2p", None)
    if modes is None or original is None:
        return

    def voted(schedule: Any, stages: Any, has_backward: bool, p2p_done: bool) -> None:
        original(schedule, stages, has_backward, p2p_done)
        for each in stages:
            told = not modes.needs_dynamic(each._user_meta, has_backward)
            each._inference_mode = modes.STATIC if told else modes.DYNAMIC

    schedules._PipelineSchedule._warmup_p2p = voted
