"""Ranks that train copies of one model apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from literal_recording import GATHER, SUM, hsdp, outside, summary

from harness.core.evidence.records import OwnGroup
from harness.core.evidence.summary import Summary
from harness.core.evidence.summary_parts import Outside, Use
from harness.core.judge.result import Verdict
from harness.core.judge.separate_models import connected_rank_sets, find_separate_models
from harness.recording.judged.anomalies import find_anomalies
from harness.recording.judged.stored_recording import Recording
from harness.recording.pages.recording_page import anomaly_rows, recording_text

HELD = {"parameters": 1000}


def over_replicas(rank: int, *moved: Outside, first: int | None = None, **changes: Any) -> Summary:
    """fully_shard over the axis of replicas: [0,2] and [1,3] shard a model each, on other samples."""
    group = "0,2" if rank % 2 == 0 else "1,3"
    contents = {0: rank // 2 if first is None else first, 3: 10 + rank}
    plain: dict[str, Any] = {"shown": 2, "model": 7, "memory": HELD, "contents": contents, "slices": 100 + rank}
    return summary(rank, uses=(Use(group, *GATHER), *changes.pop("uses", ())), outside=moved, **plain | changes)


def test_two_models_that_a_wrong_mesh_makes_of_one_are_named_with_their_ranks() -> None:
    ranks = {rank: over_replicas(rank, outside("0-3", 1, 8, "1-3")) for rank in range(4)}
    ((label, text),) = anomaly_rows(Recording(Path("run"), ranks))
    assert label == "SEPARATE MODELS"
    assert text.startswith("nothing reduces gradients between [0,2] and [1,3]: no collective joins them")
    assert text.endswith("ranks 0-1 held the same before the first step, and other bytes after step 3")


def test_beside_a_layout_they_are_said_first_and_once() -> None:
    ranks = {rank: over_replicas(rank, parts=("M",)) for rank in range(4)}
    first, second, *rest = recording_text(
        Recording(Path("run"), ranks), ["FAIL layout dp_replicate 2", "  traffic"]
    ).splitlines()
    assert first == "FAIL layout dp_replicate 2" and second.startswith("  SEPARATE MODELS nothing reduces gradients")
    assert not any("SEPARATE" in line for line in rest)


def test_replicas_that_a_sum_in_backward_joins_are_one_model() -> None:
    """Even where they hold other bytes, which is said as that."""
    joined = [over_replicas(rank, uses=(Use("0,1" if rank < 2 else "2,3", *SUM),)) for rank in range(4)]
    assert find_separate_models(joined) is None
    assert find_separate_models([hsdp(rank, shown=2, contents={0: rank % 2, 3: rank % 2}) for rank in range(4)]) is None


def test_gradients_that_a_trainer_reduces_itself_after_backward_join_too_and_a_loss_does_not() -> None:
    def reduced(size: int) -> list[Summary]:
        return [over_replicas(rank, outside("0,1" if rank < 2 else "2,3", 1, size, "1-3")) for rank in range(4)]

    assert find_separate_models(reduced(900)) is None
    assert find_separate_models(reduced(8)) is not None


def test_models_that_were_never_the_same_are_not_one_and_those_that_stay_the_same_are() -> None:
    """An ensemble of other seeds; and whatever keeps ranks equal."""
    assert find_separate_models([over_replicas(rank, first=rank) for rank in range(4)]) is None
    alike = [over_replicas(rank, contents={0: rank // 2, 3: rank // 2}) for rank in range(4)]
    assert find_separate_models(alike) is None


def test_a_job_that_nobody_wrapped_trains_as_many_models_as_it_has_ranks() -> None:
    alone = [summary(rank, shown=2, memory=HELD, contents={0: 5, 3: rank}) for rank in range(4)]
    found = find_separate_models(alone)
    assert found is not None and found.sets == ((0,), (1,), (2,), (3,))


def test_where_a_rank_left_nothing_nobody_knows_what_it_joined() -> None:
    assert find_separate_models([over_replicas(rank) for rank in range(3)]) is None
    assert find_separate_models([*map(over_replicas, range(3)), over_replicas(3, shown=0)]) is None


def test_ranks_that_only_a_group_of_the_trainers_own_may_join_and_that_become_unlike_are_reported_and_not_judged() -> (
    None
):
    own = OwnGroup(kind="ProcessGroupGloo", made="train.py:1", step=0, place=0, size=2, issued=0)
    ranks = [summary(rank, 2, shown=2, memory=HELD, contents={0: 5, 3: rank}, own_groups=(own,)) for rank in range(2)]
    (row,) = find_anomalies(Recording(Path("run"), {one.rank: one for one in ranks}))
    assert (row.verdict, row.ranks, row.step) == (Verdict.UNKNOWN, (0, 1), 3)
    alike = [summary(rank, 2, shown=2, memory=HELD, contents={0: 5, 3: 6}, own_groups=(own,)) for rank in range(2)]
    assert find_anomalies(Recording(Path("run"), {one.rank: one for one in alike})) == []
    assert connected_rank_sets(ranks) == connected_rank_sets(alike) == ()
