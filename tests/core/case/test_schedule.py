"""The arithmetic of schedules against torch's own generated orders, and what must hold of any schedule."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from harness.core.case.features import LOOPED
from harness.core.case.schedule import (
    ZERO_BUBBLE,
    Action,
    count_gathers,
    schedule_actions,
    stages_at_pp_index,
    why_schedule_refused,
)

SINGLE = ("GPipe", "1F1B")
GRID = [
    (schedule, pp, chunks, microbatches)
    for schedule in (*SINGLE, *LOOPED)
    for pp, chunks, microbatches in itertools.product((2, 3, 4), (1, 2, 3), (*range(1, 11), 12, 13, 16))
]
TAKEN = [numbers for numbers in GRID if why_schedule_refused(*numbers) is None]


class FakeStage(SimpleNamespace):
    """As much of a PipelineStage as making and running a schedule asks of it; it notes what it is told to do."""

    def forward_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> None:
        self.done.append(f"{self.stage_index}F{microbatch}")

    def backward_one_chunk(self, microbatch: int, **_: Any) -> None:
        self.done.append(f"{self.stage_index}B{microbatch}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("get_") or name in ("perform_reduce_grad", "scale_grads"):
            return lambda *_: []
        raise AttributeError(name)


def stage_of_torch(index: int, stages: int, pp: int, at: int) -> FakeStage:
    return FakeStage(
        stage_index=index, num_stages=stages, group_size=pp, group_rank=at, group=None, device="cpu", submod=None,
        is_first=index == 0, is_last=False, has_backward=True, done=[],
        stage_index_to_group_rank={stage: stage % pp for stage in range(stages)},
    )  # fmt: skip


def order_of_torch(schedule: str, pp: int, chunks: int, microbatches: int) -> dict[int, list[str]]:
    """By pp index: what torch's schedule of that name generates, or where it generates nothing, what it does.

    (What Schedule1F1B._get_pipeline_order says of the last stage in torch 2.13 is not what it does: 1F1 for 1F0.)
    """
    from torch.distributed.pipelining.schedules import get_schedule_class

    kind = get_schedule_class(schedule)
    if schedule in SINGLE:
        return {index: done_by_torch(kind, pp, microbatches, index) for index in range(pp)}
    stages = [stage_of_torch(stage, pp * chunks, pp, 0) for stage in stages_at_pp_index(schedule, pp, chunks, 0)]
    made = kind(stages, microbatches, loss_fn=lambda *_: None)
    return {index: list(plain_actions(steps)) for index, steps in made.pipeline_order.items()}


def done_by_torch(kind: Any, pp: int, microbatches: int, index: int) -> list[str]:
    stage = stage_of_torch(index, pp, pp, index)
    made = kind(stage, microbatches, loss_fn=lambda *_: None)
    made._initialize_stage = lambda *_: None
    made._step_microbatches([()] * microbatches, [{}] * microbatches)
    return stage.done


def plain_actions(steps: Any) -> Iterator[str]:
    for action in filter(None, steps):
        if action.computation_type.name == "OVERLAP_F_B":
            yield from plain_actions(action.sub_actions)
        elif action.computation_type.name != "REDUCE_GRAD":
            yield str(action)


@pytest.mark.parametrize("schedule", (*SINGLE, *LOOPED))
def test_every_schedule_is_what_torch_generates(schedule: str) -> None:
    for numbers in TAKEN:
        if numbers[0] == schedule:
            ours = {index: list(map(str, schedule_actions(*numbers, index))) for index in range(numbers[1])}
            assert ours == order_of_torch(*numbers), numbers


def test_what_is_refused_torch_refuses_too() -> None:
    for numbers in GRID:
        if why_schedule_refused(*numbers) is not None and (numbers[0] not in SINGLE or numbers[2] == 1):
            with pytest.raises(ValueError):
                order_of_torch(*numbers)


def test_every_microbatch_goes_once_forward_and_once_backward_through_every_stage() -> None:
    for numbers in TAKEN:
        schedule, pp, chunks, microbatches = numbers
        done = [action for index in range(pp) for action in schedule_actions(*numbers, index)]
        everything = set(itertools.product(range(pp * chunks), range(microbatches)))
        for kinds in ("F", "BI", "BW"):
            seen = [(action.stage, action.microbatch) for action in done if action.kind in kinds]
            assert len(seen) == len(everything) and set(seen) == everything, (numbers, kinds)
        assert schedule in ZERO_BUBBLE or not {"I", "W"} & {action.kind for action in done}


def test_no_schedule_waits_for_itself() -> None:
    for numbers in TAKEN:
        waiting = {index: list(schedule_actions(*numbers, index)) for index in range(numbers[1])}
        done: set[Action] = set()
        while any(waiting.values()):
            ready = [index for index, queue in waiting.items() if queue and can_run(queue[0], done, numbers)]
            assert ready, (numbers, {index: str(queue[0]) for index, queue in waiting.items() if queue})
            done |= {waiting[index].pop(0) for index in ready}


def can_run(action: Action, done: set[Action], numbers: tuple[str, int, int, int]) -> bool:
    stage, kind, microbatch = action
    forward = Action(stage, "F", microbatch) in done
    if kind == "F":
        return stage == 0 or Action(stage - 1, "F", microbatch) in done
    if kind == "W":
        return Action(stage, "I", microbatch) in done
    last = stage == numbers[1] * numbers[2] - 1
    return forward and (last or any(Action(stage + 1, back, microbatch) in done for back in "BI"))


def test_1f1b_in_full() -> None:
    shown = [" ".join(map(str, schedule_actions("1F1B", 3, 1, 4, index))) for index in range(3)]
    assert shown == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


def test_a_v_goes_down_and_back() -> None:
    assert [stages_at_pp_index("ZBVZeroBubble", 3, 2, index) for index in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert [stages_at_pp_index("Interleaved1F1B", 3, 2, index) for index in range(3)] == [(0, 3), (1, 4), (2, 5)]


@pytest.mark.parametrize(
    ("least", "too_little"),
    [
        (("GPipe", 4, 1, 1), ("GPipe", 4, 2, 1)),
        (("1F1B", 4, 1, 4), ("1F1B", 4, 1, 3)),
        (("1F1B", 4, 1, 4), ("1F1B", 4, 2, 4)),
        (("DualPipeV", 2, 2, 4), ("DualPipeV", 2, 2, 3)),
        (("ZBVZeroBubble", 2, 2, 1), ("ZBVZeroBubble", 2, 3, 1)),
        (("Interleaved1F1B", 2, 2, 6), ("Interleaved1F1B", 2, 2, 5)),
        (("InterleavedZeroBubble", 2, 2, 6), ("InterleavedZeroBubble", 2, 2, 5)),
    ],
)
def test_what_a_schedule_just_takes_and_just_does_not(least: tuple, too_little: tuple) -> None:
    assert why_schedule_refused(*least) is None
    assert why_schedule_refused(*too_little)
    assert why_schedule_refused("LoopedBFS", *too_little[1:]) is None


def test_refusals_say_the_arithmetic() -> None:
    assert why_schedule_refused("Interleaved1F1B", 2, 2, 5) == (
        "schedule Interleaved1F1B goes through microbatches in 2 equal rounds (microbatches // pp = 5 // 2),"
        " which do not divide 5"
    )
    assert (
        why_schedule_refused("1F1B", 4, 1, 3) == "schedule 1F1B needs at least as many microbatches as stages: 3 < pp 4"
    )


def test_fsdp_gathers_a_stage_once_a_pass_or_as_often_as_forward_freed_it() -> None:
    first = schedule_actions("1F1B", 2, 1, 4, 0)  # 0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3
    assert count_gathers(first, looped=False, freed=False) == {(0, "forward"): 1}
    assert count_gathers(first, looped=False, freed=True) == {(0, "forward"): 2, (0, "backward"): 3}
    looped = schedule_actions("LoopedBFS", 2, 2, 2, 1)
    assert count_gathers(looped, looped=True, freed=False) == {(1, "pipeline"): 1, (3, "pipeline"): 1}
