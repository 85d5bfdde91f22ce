"""Idle time of a pipeline's ranks, from the order of their actions. Each action begins when its rank is free and what
it needs is there. Forward takes a stage's share of the matmuls, backward twice that, either half of it as long as
forward.

Left out: communication, which a schedule may hide or not, and that kernels are not equally fast.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from harness.core.case import schedule
from harness.core.case.case import Case
from harness.core.case.features import FEATURE_CHOICES
from harness.core.plan.stages import layers_of_stage

ACTION_TIMES = {"F": 1, "B": 2, "I": 1, "W": 1}


@dataclass(frozen=True)
class PipelineTime:
    """Time of one pass of a pipeline's schedule. The unit is the cost of a forward pass."""

    duration: float
    """Time of the whole pass."""
    busy: tuple[float, ...]
    """Time that each rank of the pipeline computes."""

    @property
    def bubble_ratio(self) -> float:
        """Return idle time as a part of the time that the busiest rank computes.

        For even stages under 1F1B and its interleaved form it is (pp - 1) / (stages a rank x microbatches).
        """
        return self.duration / max(self.busy) - 1

    @property
    def idle_ratio(self) -> float:
        """Return the part of all ranks' time in which they wait."""
        return 1 - sum(self.busy) / len(self.busy) / self.duration


def pipeline_time(case: Case, cost: Callable[[int], float] = lambda stage: 1.0) -> PipelineTime:
    """Return the time of one pass of the pipeline's schedule, for a case with pp.

    cost: the time of a forward pass of a stage.
    """
    numbers = (case.features.schedule, case.dims.pp, case.stages_per_rank, case.microbatches)
    waiting = [deque(schedule.schedule_actions(*numbers, index)) for index in range(case.dims.pp)]
    free = [0.0] * case.dims.pp
    busy = [0.0] * case.dims.pp
    done: dict[tuple[int, str, int], float] = {}
    while any(waiting):
        before = len(done)
        for index, actions in enumerate(waiting):
            while actions and (begin := _ready_time(case, actions[0], done)) is not None:
                action = actions.popleft()
                duration = ACTION_TIMES[action.kind] * cost(action.stage)
                free[index] = max(free[index], begin) + duration
                busy[index] += duration
                done[_result_key(action)] = free[index]
        assert len(done) > before, "a schedule in which no rank can go on"
    return PipelineTime(max(free), tuple(busy))


def _result_key(action: schedule.Action) -> tuple[int, str, int]:
    """Return (stage, kind, microbatch) of the result that an action leaves for others; "B" for I, the first half of
    backward.

    Whether backward is whole or its first half, the stage before has what it waits for.
    """
    return action.stage, "B" if action.kind == "I" else action.kind, action.microbatch


def _ready_time(case: Case, action: schedule.Action, done: dict[tuple[int, str, int], float]) -> float | None:
    """Return the earliest time at which all that an action needs is there; 0 if it needs nothing. None if a result is
    missing.

    done: end of each action that was placed, by `_result_key`.
    """
    stage, kind, number = action
    needs = []
    if kind == "F" and stage > 0:
        needs.append((stage - 1, "F", number))
    if kind == "W":
        needs.append((stage, "B", number))
    if kind in ("B", "I"):
        needs.append((stage, "F", number))
        if stage < case.n_stages - 1:
            needs.append((stage + 1, "B", number))
    if any(need not in done for need in needs):
        return None
    return max((done[need] for need in needs), default=0.0)


def matmul_operations(case: Case, stage: int) -> float:
    """Return the additions and multiplications of a token's forward pass in a stage, those of all tp ranks together.

    Attention counts half of all pairs, as the mask leaves, and the last stage the output as well.
    """
    model = case.model
    attention = 2 * model.dim * case.training.seq_len * len(layers_of_stage(case, stage))
    output = 2 * model.dim * model.vocab_size if stage == case.n_stages - 1 else 0
    return linear_operations(case, stage) + attention + output


def linear_operations(case: Case, stage: int) -> float:
    """Return the additions and multiplications of the linear layers of a stage's blocks, for a token's forward pass."""
    model = case.model
    kv = model.n_kv_heads * model.head_dim
    return len(layers_of_stage(case, stage)) * 2 * model.dim * (2 * model.dim + 2 * kv + 3 * model.ffn_dim)


def times_of_schedules(case: Case) -> Iterator[tuple[str, PipelineTime]]:
    """Yield each schedule that takes this case's microbatches, with its time for even stages. Those that do not are
    left out.

    A rank has one stage, or two where the schedule needs several.
    """
    for name in FEATURE_CHOICES["schedule"]:
        features = replace(case.features, schedule=str(name), stages_per_rank=None)
        other = replace(case, features=features)
        if not schedule.why_schedule_refused(str(name), case.dims.pp, other.stages_per_rank, case.microbatches):
            yield str(name), pipeline_time(other)
