"""How long ranks of a pipeline are idle, from the order of their actions. Each begins when its rank is free and what it
needs is there. Forward takes a stage's share of the matmuls, backward twice that, either half of it as long as forward.

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

TIMES = {"F": 1, "B": 2, "I": 1, "W": 1}


@dataclass(frozen=True)
class PipelineTime:
    """How long one pass takes, and how long each rank of the pipeline is busy in it."""

    length: float
    busy: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """Return idle time as a part of the time that the busiest rank computes. For even stages under 1F1B and its interleaved
        form it is (pp - 1) / (stages a rank x microbatches)."""
        return self.length / max(self.busy) - 1

    @property
    def idle(self) -> float:
        """The part of all ranks' time in which they wait."""
        return 1 - sum(self.busy) / len(self.busy) / self.length


def pipeline_time(case: Case, cost: Callable[[int], float] = lambda stage: 1.0) -> PipelineTime:
    """cost: of a forward pass of a stage."""
    numbers = case.features.schedule, case.dims.pp, case.stages_per_rank, case.microbatches
    waiting = [deque(schedule.actions(*numbers, index)) for index in range(case.dims.pp)]
    free, busy = [0.0] * case.dims.pp, [0.0] * case.dims.pp
    done: dict[tuple[int, str, int], float] = {}
    while any(waiting):
        before = len(done)
        for index, actions in enumerate(waiting):
            while actions and (begin := _ready(case, actions[0], done)) is not None:
                action, takes = actions[0], TIMES[actions[0].kind] * cost(actions[0].stage)
                actions.popleft()
                free[index] = max(free[index], begin) + takes
                busy[index] += takes
                done[_result(action)] = free[index]
        assert len(done) > before, "a schedule in which no rank can go on"
    return PipelineTime(max(free), tuple(busy))


def _result(action: schedule.Action) -> tuple[int, str, int]:
    """Whether backward is whole or its first half, the stage before has what it waits for."""
    return action.stage, "B" if action.kind == "I" else action.kind, action.microbatch


def _ready(case: Case, action: schedule.Action, done: dict[tuple[int, str, int], float]) -> float | None:
    """When all that an action needs is there; None if something is not."""
    stage, kind, number = action
    if kind == "F":
        needs = [(stage - 1, "F", number)] if stage > 0 else []
    elif kind == "W":
        needs = [(stage, "B", number)]
    else:
        needs = [(stage, "F", number), *([(stage + 1, "B", number)] if stage < case.n_stages - 1 else [])]
    times = [done.get(need) for need in needs]
    return None if None in times else max((time for time in times if time is not None), default=0.0)


def matmul_operations(case: Case, stage: int) -> float:
    """Return the additions and multiplications of a token's forward pass on all tp ranks; half of attention is masked."""
    model = case.model
    attention = 2 * model.dim * case.training.seq_len * len(layers_of_stage(case, stage))
    output = 2 * model.dim * model.vocab_size if stage == case.n_stages - 1 else 0
    return linear_operations(case, stage) + attention + output


def linear_operations(case: Case, stage: int) -> float:
    """Return those of the linear layers of its blocks."""
    model = case.model
    kv = model.n_kv_heads * model.head_dim
    return len(layers_of_stage(case, stage)) * 2 * model.dim * (2 * model.dim + 2 * kv + 3 * model.ffn_dim)


def other_schedules(case: Case) -> Iterator[tuple[str, PipelineTime]]:
    """Even stages under each schedule that takes these microbatches, two of them a rank where it needs several."""
    for name in FEATURE_CHOICES["schedule"]:
        features = replace(case.features, schedule=str(name), stages_per_rank=None)
        other = replace(case, features=features)
        if not schedule.refusal(str(name), case.dims.pp, other.stages_per_rank, case.microbatches):
            yield str(name), pipeline_time(other)
