"""In which other orders, and in which other ways, samples of a data set may have been dealt out. By hand, no ranks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from literal import ADAMW, with_step
from trained import Ran, _ran, case_of  # noqa: F401

from harness.diagnosis.unknown_rows import ORDERS, _other_deals, begun_elsewhere
from harness.reference.data import build_dataset, sample_order
from harness.spec.dims import ParallelDims

SEED = ADAMW.seed


def deals(*shares: int, **degrees: int) -> dict[str, Any]:
    """Of twelve samples."""
    case = SimpleNamespace(training=ADAMW, dims=ParallelDims(**degrees))
    trial: Any = SimpleNamespace(case=case, one_rank_per_share=lambda: list(shares))
    return dict(_other_deals(trial, 12))


@pytest.mark.parametrize(
    ("shares", "degrees", "strides"),
    [
        ((0, 1), {"dp_shard": 2}, ()),
        ((0, 2), {"dp_shard": 2, "tp": 2}, ("4th of the shuffled samples (one share per rank of the world)",)),
        (
            (0, 2, 4),
            {"dp_shard": 3, "tp": 2},
            ("second of the shuffled samples", "6th of the shuffled samples (one share per rank of the world)"),
        ),
        (
            (0, 6),
            {"dp_replicate": 2, "cp": 3, "tp": 2},
            (
                "third of the shuffled samples",
                "4th of the shuffled samples",
                "6th of the shuffled samples",
                "12th of the shuffled samples (one share per rank of the world)",
            ),
        ),
    ],
)
def test_ways_to_deal_are_the_simple_ones_first_then_other_strides_then_other_orders(
    shares: tuple[int, ...], degrees: dict[str, int], strides: tuple[str, ...]
) -> None:
    nth = {2: "second", 3: "third"}[len(shares)]
    later = range(SEED + 1, SEED + ORDERS)
    earlier = dict.fromkeys([*range(SEED - ORDERS, SEED), 0])
    assert [*deals(*shares, **degrees)] == [
        "samples in the data set's own order, not shuffled",
        "each dp rank reads a block of the shuffled samples, requested every n-th sample",
        *(f"each dp rank reads every {stride}, requested every {nth}" for stride in strides),
        *(
            f"samples of the data set in the order of seed {seed}, or of epoch {seed - SEED} (counted from 0)"
            for seed in later
        ),
        *(f"samples of the data set in the order of seed {seed}" for seed in earlier if seed != SEED or SEED == 0),
    ]


def test_what_a_share_is_by_each_way_to_deal() -> None:
    usual, next_one = (sample_order(ADAMW, 12, epoch) for epoch in (0, 1))
    own, block, stride, *others = deals(0, 2, dp_shard=2, tp=2).values()
    assert [own(share) for share in (0, 1)] == [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11]]
    assert [block(share) for share in (0, 1)] == [usual[:6], usual[6:]]
    assert [stride(share) for share in (0, 1)] == [usual[0::4], usual[1::4]]
    assert [others[0](share) for share in (0, 1)] == [next_one[0::2], next_one[1::2]]


def test_several_ranks_that_read_on_at_one_place_are_told_together(ran: Ran) -> None:
    trial = ran(case_of(ParallelDims(dp_shard=4)))
    data = build_dataset(trial.case.training, trial.case.model)
    order, own = sample_order(trial.case.training, len(data), 0), trial.case.training.global_batch // 4
    for rank in (1, 2):
        ids = order[rank::4][3 : 3 + own]
        (part,) = trial.ranks[rank].steps[0].microbatches
        rows = np.stack([data[index][0].numpy() for index in ids])
        trial = with_step(trial, rank, 1, microbatches=(replace(part, tokens=rows),))
    told = "continue{} at {} share's sample 3 (counted from 0), requested 0"
    assert begun_elsewhere(trial, 1, [1, 2]) == "ranks [1,2] " + told.format("", "their")
    assert begun_elsewhere(trial, 1, [1]) == "rank 1 " + told.format("s", "its")
    assert begun_elsewhere(trial, 1, [0, 1]) == ""
