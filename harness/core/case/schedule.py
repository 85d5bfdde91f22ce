"""The actions of every pipeline schedule, by arithmetic alone: which rank computes which stage of which microbatch, in
order.

An action is written as torch writes it: stage, kind, microbatch: 0F2 is the forward pass of microbatch 2 on stage 0.
Kinds are F, forward; B, whole backward; and its halves I and W. The previous stage waits for I, the gradient of the
input, but not for W, the gradient of the weights. A rank's stages are its chunks; its pp index counts from the first
stage's rank.

GPipe (Huang et al. 2019) runs all forwards, then all backwards. 1F1B (Narayanan et al. 2019) lets each rank run as many
forwards ahead as there are ranks behind it, then alternates. Interleaved1F1B (Narayanan et al. 2021) does so with
several chunks, going through them in rounds of microbatches; LoopedBFS (Lamy-Poirier 2023) finishes a chunk before the
next. InterleavedZeroBubble is ZB1P, ZBVZeroBubble section 6 of Qi et al. 2024; DualPipeV halves DeepSeek's DualPipe
(2024).
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple

V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
ZERO_BUBBLE = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


class Action(NamedTuple):
    """kind: F forward, B backward, I backward to the input alone, W to the weights alone. Written as torch writes it: 1F3."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Slots = Iterable[tuple[str, int]]
"""Pairs of an action's kind and its chunk, in order; the microbatch follows from counting. Chunk -1, of a W: whichever
is due."""


def stages_at_pp_index(schedule: str, pp: int, chunks: int, index: int) -> tuple[int, ...]:
    """Return the stages at a pp index, ascending: each round of `pp` stages goes over the ranks, every second one
    backwards if V-shaped."""
    back = schedule in V_SHAPED
    return tuple(
        round_number * pp + (pp - 1 - index if back and round_number % 2 else index) for round_number in range(chunks)
    )


def why_schedule_refused(schedule: str, pp: int, chunks: int, microbatches: int) -> str | None:
    """Return why a schedule does not take these numbers, in one sentence. None if it does.

    chunks: stages on each rank. microbatches: those of one pass of the schedule.
    """
    if schedule in ("GPipe", "1F1B") and chunks != 1:
        return f"schedule {schedule} has one stage a rank, requested stages_per_rank {chunks}"
    if schedule in V_SHAPED and chunks != 2:
        return f"schedule {schedule} is a V of two stages a rank, requested stages_per_rank {chunks}"
    if schedule == "1F1B" and microbatches < pp:
        return f"schedule 1F1B needs at least as many microbatches as stages: {microbatches} < pp {pp}"
    if schedule == "DualPipeV" and microbatches < 2 * pp:
        return f"schedule DualPipeV needs at least as many microbatches as stages: {microbatches} < 2 x pp {pp}"
    rounds = count_rounds(pp, microbatches)
    if schedule in ("Interleaved1F1B", "InterleavedZeroBubble") and microbatches % rounds:
        return (
            f"schedule {schedule} goes through microbatches in {rounds} equal rounds"
            f" (microbatches // pp = {microbatches} // {pp}), which do not divide {microbatches}"
        )
    return None


def count_rounds(pp: int, microbatches: int) -> int:
    """Return the number of rounds of about pp microbatches, in which the interleaved schedules visit the chunks."""
    return max(1, microbatches // pp)


@functools.lru_cache(maxsize=256)
def schedule_actions(schedule: str, pp: int, chunks: int, microbatches: int, index: int) -> tuple[Action, ...]:
    """Return the actions of the rank at a pp index in one pass of the schedule, in order.

    `refusal` must be None for these numbers.
    """
    stages = stages_at_pp_index(schedule, pp, chunks, index)
    behind = pp - 1 - index
    size = microbatches // count_rounds(pp, microbatches)
    if schedule == "GPipe":
        return _number_slots([("F", 0)] * microbatches + [("B", 0)] * microbatches, stages)
    if schedule == "LoopedBFS":
        return tuple(_looped_bfs_actions(stages, microbatches))
    if schedule == "1F1B":
        return _number_slots(_alternating_slots(_forward_chunks(1, 1, microbatches), behind), stages)
    if schedule == "Interleaved1F1B":
        ahead = (chunks - 1) * size + 2 * behind
        return _number_slots(_alternating_slots(_forward_chunks(chunks, size, microbatches), ahead), stages)
    if schedule == "InterleavedZeroBubble":
        ahead = (chunks - 1) * size + behind
        return _number_slots(_zb1p_slots(_forward_chunks(chunks, size, microbatches), ahead, late=index), stages)
    if schedule == "ZBVZeroBubble":
        full = max(2 * pp - 1, microbatches)  # made for a full pipeline, then what there is not is left out
        made = _number_slots(_zbv_slots(pp, index, full), stages)
        return tuple(action for action in made if action.microbatch < microbatches)
    assert schedule == "DualPipeV", schedule
    return _number_slots(_dual_pipe_v_slots(pp, index, microbatches), stages)


def _number_slots(slots: Slots, stages: tuple[int, ...]) -> tuple[Action, ...]:
    """Return the actions of slots, each with its microbatch.

    Each chunk takes its microbatches in order. A W finishes the earliest I (of its chunk) that still lacks one.
    """
    counted: Counter[tuple[str, int]] = Counter()
    unfinished: deque[tuple[int, int]] = deque()
    actions_done = []
    for kind, chunk in slots:
        if kind == "W":
            owed = next(due for due in unfinished if chunk in (due[0], -1))
            unfinished.remove(owed)
            chunk, number = owed
        else:
            direction = "F" if kind == "F" else "B"
            number = counted[direction, chunk]
            counted[direction, chunk] += 1
        if kind == "I":
            unfinished.append((chunk, number))
        actions_done.append(Action(stages[chunk], kind, number))
    return tuple(actions_done)


def _forward_chunks(chunks: int, size: int, microbatches: int) -> list[int]:
    """Return the chunk of every forward, in order. Backwards go through the chunks the other way round."""
    order: list[int] = []
    for _ in range(microbatches // size):
        for chunk in range(chunks):
            order += [chunk] * size
    return order


def _alternating_slots(order: list[int], ahead: int) -> Iterator[tuple[str, int]]:
    """Yield `ahead` forwards, then one forward and one backward in turn, then the remaining backwards.

    order: the chunk of each forward. Backwards take the chunks in the opposite numbering.
    """
    last = max(order)
    for number in range(ahead + len(order)):
        if number < len(order):
            yield "F", order[number]
        if number >= ahead and number - ahead < len(order):
            yield "B", last - order[number - ahead]


def _zb1p_slots(order: list[int], ahead: int, late: int) -> Iterator[tuple[str, int]]:
    """Yield the slots of 1F1B with halved backwards. The W of an I follows `late` backwards later.

    So they fill the bubble at the end.
    """
    ahead = min(ahead, len(order))
    done = 0
    for kind, chunk in _alternating_slots(order, ahead):
        yield ("I" if kind == "B" else kind), chunk
        done += kind == "B"
        if kind == "B" and done > late:
            yield "W", -1
    yield from [("W", -1)] * min(late, done)


def _zbv_slots(pp: int, index: int, microbatches: int) -> list[tuple[str, int]]:
    """Return the slots of ZBVZeroBubble at a pp index: fill, steady and drain. It needs at least 2 pp - 1 microbatches."""
    behind = pp - index
    fill = [("F", 0)] * (2 * behind - 1) + [("F", 1), ("F", 0)] * index + [("F", 1), ("I", 1), ("W", 1)] * behind
    remaining_forwards = microbatches - (2 * pp - 1 - index)  # forwards of the way down that are still to come
    steady: list[tuple[str, int]] = []
    for number in range(microbatches - pp):
        if number < remaining_forwards:
            steady.append(("F", 0))
        steady += [("I", 0), ("W", 0), ("F", 1), ("I", 1), ("W", 1)]
    drain = [("I", 0), ("I", 1)] * index + [("I", 0), ("W", 0)] * behind + [("W", 1)] * index + [("W", 0)] * index
    return fill + steady + drain


def _dual_pipe_v_slots(pp: int, index: int, microbatches: int) -> list[tuple[str, int]]:
    """Return the slots of DualPipeV at a pp index: fill, steady and drain. It needs at least 2 pp microbatches."""
    behind = pp - 1 - index
    fill = [("F", 0)] * (2 * behind) + [("F", 0), ("F", 1)] * (index + 1) + [("I", 1), ("W", -1), ("F", 1)] * behind
    steady = [("F", 0), ("B", 1), ("F", 1), ("B", 0)] * (microbatches - 2 * pp + index + 1)
    steady += [("B", 1), ("F", 1), ("B", 0)] * behind
    turns = itertools.islice(itertools.cycle((1, 0)), 2 * (index + 1))
    drain = [("B" if number <= index else "I", chunk) for number, chunk in enumerate(turns)]
    return fill + steady + drain + [("W", -1), ("I", 0)] * behind + [("W", -1)] * (index + 1)


def _looped_bfs_actions(stages: tuple[int, ...], microbatches: int) -> Iterator[Action]:
    """Yield actions breadth first: all microbatches of a chunk; backwards in just the opposite order."""
    for stage in stages:
        yield from (Action(stage, "F", number) for number in range(microbatches))
    for stage in reversed(stages):
        yield from (Action(stage, "B", number) for number in reversed(range(microbatches)))


MOST_ACTIVE_STAGES = 3  # stages of a rank that torch's looped schedules keep gathered at a time


def count_gathers(order: Iterable[Action], *, looped: bool, freed: bool) -> Counter[tuple[int, str]]:
    """Return how often FSDP2 gathers the parameters of a stage in one pass, by stage and phase; for up to 3 stages a rank.

    Looped schedules gather each stage before its first action, outside of forward. Forward gathers what is not there and
    frees it again if `freed` (reshard_after_forward always). Backward gathers what is not there and keeps it, since
    torch's stages turn off resharding after backward until the pass is over. So the next forward need not gather. The halves
    of a backward: I gathers; W has all it needs. On the first stage, which has no input to differentiate, W does it all.
    """
    order = list(order)
    counts = Counter({(action.stage, "pipeline"): 1 for action in order} if looped else {})
    gathered = {action.stage for action in order} if looped else set()
    for stage, kind, _ in order:
        if (kind == "I" and stage == 0) or (kind == "W" and stage > 0):
            continue
        if stage not in gathered:
            counts[stage, "forward" if kind == "F" else "backward"] += 1
        gathered.add(stage)
        if kind == "F" and freed:
            gathered.remove(stage)
    return counts
