"""What ranks need, in the lines of a pre-flight."""

from __future__ import annotations

from literal import tiny_case
from test_alone_judged import alone

from harness.clusters.figures import layout_rows, rank_rows
from harness.clusters.launches import LoneRun
from harness.clusters.lone_rank import RankUsage
from harness.clusters.request import Request
from harness.core.plan.make_plan import make_plan

GB = 10**9


def test_of_the_ranks_that_ran_the_one_with_most_tensors_at_once_is_compared_with_the_gpu() -> None:
    trial = alone(tiny_case("hsdp_2x2"))
    used = {
        0: RankUsage(9.0, 3 * GB, 70 * GB, "backward", 20 * GB),
        3: RankUsage(8.0, 3 * GB, 95 * GB, "forward", 120 * GB),
    }
    rows = list(rank_rows(LoneRun(trial.run, (0, 3), 9.0, used), trial, "H100"))
    assert rows[2:] == [
        ("tensors", "3 has 95 GB at once, in forward, the most of them; of the 80 GB of H100: more than it has"),
        ("", "120 GB outside of steps, as while a model is built"),
    ]


def test_of_ranks_that_left_nothing_nothing_is_said() -> None:
    trial = alone(tiny_case("hsdp_2x2"), left=(0, 3))
    assert list(rank_rows(LoneRun(trial.run, (0, 3), 9.0), trial, "H100")) == []


def test_of_all_ranks_the_plan_says_what_is_needed_sent_idle_and_uneven() -> None:
    case = Request(dims="pp=4,dp_shard=8,tp=8", model="8B", microbatches=8).build_case()
    rows = dict(layout_rows(case, make_plan(case), "H200"))
    assert list(rows) == ["planned", "links", "bubble", "imbalance"]
    assert rows["planned"].endswith("for all that is not counted")
    assert "of the 141 GB of H200: leaves" in rows["planned"]
    assert [part.split()[0] for part in rows["links"].removeprefix("a rank sends a step, at most, ").split("; ")] == [
        "tp",
        "dp_shard",
        "pp",
    ]
    assert rows["bubble"].endswith("of what the busiest rank computes: 1F1B, 8 microbatches, 4 stages")
    assert rows["imbalance"].startswith("the most, above the mean: matmuls over pp +")
