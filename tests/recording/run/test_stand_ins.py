"""Of ranks that are alike one is read: the verdicts are those of reading all, and a rank that is unlike the others is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from literal import LAYOUTS, tiny_case, trial_of

from harness.core.case.dims import ParallelDims
from harness.core.evidence.recording import RankRecord, RecordedStep
from harness.core.evidence.records import RankEvidence
from harness.core.evidence.step import Activity
from harness.core.evidence.summary import summary_of
from harness.core.judge.result import Verdict
from harness.recording.judged.recorded_layout import judge_records
from harness.recording.judged.stand_ins import find_representatives
from harness.recording.judged.stored_recording import Recording

HSDP = LAYOUTS["hsdp_2x2"]
Changed = Callable[[RankEvidence], RankEvidence]


def records_of(dims: ParallelDims) -> dict[int, RankRecord]:
    """Of correct ranks, as the recorder leaves them: nothing of what they computed."""
    found = {}
    for rank, evidence in trial_of(tiny_case(dims)).ranks.items():
        steps = tuple(
            replace(s, parameters={}, gradients={}, optimizer_state={}, activity=Activity()) for s in evidence.steps
        )
        steps = tuple(replace(s, microbatches=(), reported_loss=None, grad_norm=None) for s in steps)
        bare = replace(evidence, steps=steps, held=None)
        recorded = tuple(RecordedStep(s.step, {}) for s in steps)
        found[rank] = RankRecord(bare, recorded, ended="ok", steps_seen=len(steps))
    return found


def judged(records: dict[int, RankRecord], dims: ParallelDims) -> tuple[dict[str, Verdict], list[int]]:
    """The verdicts, and the ranks that were read."""
    read = []

    def load(rank: int) -> RankRecord:
        read.append(rank)
        return records[rank]

    recording = Recording(Path("r"), {rank: summary_of(one) for rank, one in records.items()}, requested=len(records))
    results, _ = judge_records(recording, dims, load)
    return {one.check: one.verdict for one in results}, read


@pytest.mark.parametrize("dims", [HSDP, ParallelDims(dp_shard=4), ParallelDims(dp_replicate=4)])
def test_of_ranks_that_are_alike_one_is_read_and_every_check_that_passes_with_all_passes(dims: ParallelDims) -> None:
    records = records_of(dims)
    found, read = judged(records, dims)
    assert len(read) < len(records)
    assert {name for name, verdict in found.items() if verdict is Verdict.FAIL} == set()
    for check in ("completed", "collective_order", "process_groups", "placements", "traffic"):
        assert found[check] is Verdict.PASS


def test_ranks_stand_for_each_other_by_their_place_in_the_layout_and_not_by_their_number() -> None:
    summaries = {rank: summary_of(one) for rank, one in records_of(HSDP).items()}
    assert set(find_representatives(summaries, HSDP).values()) == {0}
    other = find_representatives(
        summaries, ParallelDims(dp_shard=4)
    )  # there each group but the world's is a part of a line
    assert set(other.values()) == {0, 1, 2, 3}


def without_shards(evidence: RankEvidence) -> RankEvidence:
    first, *others = evidence.parameters
    return replace(evidence, parameters=(replace(first, mesh=None, placements=()), *others))


def in_no_group(evidence: RankEvidence) -> RankEvidence:
    return replace(evidence, groups=())


def with_a_collective_less(evidence: RankEvidence) -> RankEvidence:
    return replace(evidence, collectives=evidence.collectives[:-1])


def with_twice_the_memory(evidence: RankEvidence) -> RankEvidence:
    steps = tuple(
        replace(step, memory={kind: 2 * held for kind, held in step.memory.items()}) for step in evidence.steps
    )
    return replace(evidence, steps=steps)


@pytest.mark.parametrize("odd", [0, 1, 3])
@pytest.mark.parametrize(
    ("change", "check"),
    [
        (without_shards, "placements"),
        (in_no_group, "process_groups"),
        (with_a_collective_less, "collective_order"),
        (with_twice_the_memory, "memory"),
    ],
)
def test_one_rank_that_is_unlike_the_others_fails_its_check(change: Changed, check: str, odd: int) -> None:
    records = records_of(HSDP)
    records[odd] = replace(records[odd], evidence=change(records[odd].evidence))
    found, read = judged(records, HSDP)
    assert odd in read and found[check] is Verdict.FAIL


def test_a_rank_that_left_nothing_is_not_stood_for() -> None:
    records = records_of(HSDP)
    del records[2]
    found, _ = judged(records, HSDP)
    assert found["completed"] is Verdict.UNKNOWN and found["placements"] is Verdict.UNKNOWN
