"""Which ranks of a layout are run alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.clusters.chosen import choose_ranks
from harness.clusters.request import Request
from harness.core.case.case import CaseError


def test_of_a_large_layout_whole_lines_the_ends_of_long_ones_and_all_corners_are_run() -> None:
    case = Request(dims="pp=16,dp_shard=32,tp=8", model="405B").build_case()
    assert dict(choose_ranks(case, seed=7).ranks_by_reason) == {
        "pp line": tuple(range(0, 4096, 256)),
        "dp_shard ends": (8, 248),
        "tp line": (1, 2, 3, 4, 5, 6, 7),
        "corners": (255, 3847, 4088, 4095),
        "drawn": choose_ranks(case, seed=7).ranks_by_reason["drawn"],
    }
    assert len(choose_ranks(case, seed=7).ranks) == 32


def test_other_seeds_draw_other_ranks() -> None:
    case = Request(dims="dp_shard=512", model="8B").build_case()
    assert choose_ranks(case, seed=1).ranks_by_reason["drawn"] != choose_ranks(case, seed=2).ranks_by_reason["drawn"]


def test_shards_that_get_less_than_the_one_before_are_run() -> None:
    case = Request(dims="dp_shard=512", model="8B").build_case()
    odd = replace(case, model=replace(case.model, vocab_size=128_000 + 3))
    ends = choose_ranks(odd).ranks_by_reason["dp_shard ends"]
    assert ends == (1, 509, 510, 511)  # 509 chunks of 251 rows, one of 244, then nothing


def test_of_a_small_world_all_ranks_are_run() -> None:
    assert choose_ranks(Request(dims="dp_shard=4,tp=2").build_case()).ranks == tuple(range(8))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"model": "9B"}, "--model '9B'"),
        ({"batch": 7}, "2 data ranks x 8 microbatches"),
        ({"dims": "dp=2"}, "'dp=2'"),
        ({"seq": 1}, "seq_len 1"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_runs(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(CaseError, match=said):
        Request(**({"dims": "pp=4,dp_shard=2,tp=2", "model": "8B"} | wrong)).build_case()  # type: ignore[arg-type]
