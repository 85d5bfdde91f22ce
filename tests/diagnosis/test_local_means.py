"""A loss that is divided by a count of one's own: who may do so, what is said of it, what each rank then reports. Literal
weights, no ranks."""

# ruff: noqa: E501 - what is shown is asserted as it is shown

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from diagnosed import dims
from literal import ADAMW, tiny_case, trial_of, with_step
from weighed import SIXTEEN, every_axis, fit_of, weights_of, with_labels

from harness.diagnosis.contributions import Counting, _averaged_locally, _units
from harness.diagnosis.mixture import Piece, Pieces
from harness.report.cause_text import cause_line
from harness.spec.dims import ParallelDims


def said(found: list[Counting]) -> list[tuple[str, str, int]]:
    return [(one.cause.kind, cause_line(one.cause), one.fitted) for one in found]


# ---- who


@pytest.mark.parametrize(
    ("layout", "accumulation", "found"),
    [
        (ParallelDims(), 1, [("sample", (), 1, "samples")]),
        (ParallelDims(), 2, [("microbatch", (), 4, "microbatches"), ("sample", (), 1, "samples")]),
        (dims(2), 1, [("rank", ("dp_replicate",), 4, "dp_replicate"), ("sample", ("dp_replicate",), 1, "samples")]),
        (ParallelDims(cp=2), 1, [("cp rank", ("cp",), 8, "cp"), ("sample", (), 1, "samples")]),
        (
            ParallelDims(cp=2),
            2,
            [
                ("cp rank", ("cp",), 8, "cp"),
                ("microbatch of each rank", ("cp",), 4, "microbatches"),
                ("microbatch", (), 4, "microbatches"),
                ("sample", (), 1, "samples"),
            ],
        ),
        (
            dims(shard=2),
            2,
            [
                ("rank", ("dp_shard",), 4, "dp_shard"),
                ("microbatch of each rank", ("dp_shard",), 2, "microbatches"),
                ("microbatch", (), 2, "microbatches"),
                ("sample", ("dp_shard",), 1, "samples"),
            ],
        ),
        (
            dims(2, 2),
            1,
            [
                ("rank", ("dp_shard", "dp_replicate"), 2, "dp_shard and dp_replicate"),
                ("replica", ("dp_replicate",), 2, "dp_replicate"),
                ("place in a replica", ("dp_shard",), 2, "dp_shard"),
                ("sample", ("dp_shard", "dp_replicate"), 1, "samples"),
            ],
        ),
        (
            ParallelDims(dp_shard=2, cp=2),
            1,
            [
                ("dp rank", ("dp_shard",), 4, "dp_shard"),
                ("cp rank", ("cp",), 4, "cp"),
                ("dp and cp rank", ("dp_shard", "cp"), 4, "dp_shard and cp"),
                ("sample", ("dp_shard",), 1, "samples"),
            ],
        ),
    ],
    ids=str,
)
def test_who_may_divide_by_tokens_of_its_own_is_told_by_the_layout(
    layout: ParallelDims, accumulation: int, found: list[tuple[str, tuple[str, ...], int, str]]
) -> None:
    trial = trial_of(tiny_case(layout, replace(ADAMW, seq_len=8), accumulation=accumulation))
    assert [(unit.name, unit.axes, unit.samples, unit.summed) for unit in _units(trial)] == found


# ---- what is said

UNITS: dict[str, Callable[[Piece], object]] = {
    "dp rank": lambda piece: piece.rank,
    "replica": lambda piece: piece.rank // 4,
    "place in a replica": lambda piece: piece.rank // 2 % 2,
    "cp rank": lambda piece: piece.place,
    "dp and cp rank": lambda piece: (piece.rank, piece.place),
    "microbatch of each rank": lambda piece: (piece.rank, piece.place, piece.row // 2),
    "microbatch": lambda piece: piece.row // 2,
    "sample": lambda piece: (piece.rank, piece.row),
}


@pytest.mark.parametrize(
    ("unit", "count", "summed"),
    [
        ("dp rank", 4, "dp_shard and dp_replicate"),
        ("replica", 2, "dp_replicate"),
        ("place in a replica", 2, "dp_shard"),
        ("cp rank", 2, "cp"),
        ("dp and cp rank", 8, "dp_shard and dp_replicate and cp"),
        ("microbatch of each rank", 16, "microbatches"),
        ("microbatch", 2, "microbatches"),
        ("sample", 16, "samples"),
    ],
)
def test_a_mean_of_one_s_own_is_told_with_what_else_its_gradients_lack(unit: str, count: int, summed: str) -> None:
    trial = every_axis()
    weights = weights_of(trial, UNITS[unit])
    local = f"the loss is averaged per {unit}: each divides by its own number of valid tokens"
    not_summed = f"the number of valid tokens is not summed over {summed}: each {unit} divides by its own"
    for factor, told, fitted in (
        (1.0, f"{local}, not by the global one", 1),
        (float(count), not_summed, 1),
        (3.0, f"{local}, and gradients are 3 times that", 2),
        (-1.0, f"{local}, and gradients are -1 times that: the sign is wrong", 2),
    ):
        (found,) = _averaged_locally(fit_of(trial, factor * weights))
        assert said([found]) == [("averaged locally", told, fitted)]
        for step in trial.case.steps:
            counted = Pieces(trial).tokens(step) > 0
            expected = factor * weights_of(trial, UNITS[unit], step)
            assert np.allclose(found.weights(step)[counted], expected[counted], rtol=1e-12)


@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_a_factor_that_noise_hides_is_assumed_to_be_the_number_that_it_is(factor: float) -> None:
    trial = every_axis()
    weights = weights_of(trial, UNITS["dp rank"])
    (found,) = _averaged_locally(fit_of(trial, 1.01 * factor * weights, close=0.02))
    counted = Pieces(trial).tokens(1) > 0
    assert found.fitted == 1 and np.allclose(found.weights(1)[counted], factor * weights[counted], rtol=1e-12)


def test_means_over_equally_many_tokens_are_none_of_one_s_own() -> None:
    trial = every_axis()
    even = with_labels(trial, np.ones_like(trial.reference.labels))
    assert not list(_averaged_locally(fit_of(even, np.full(32, 2.0))))


def test_units_that_only_a_later_step_tells_apart_are_proposed_one_by_one() -> None:
    trial = trial_of(tiny_case(dims(shard=2), SIXTEEN, accumulation=4))
    labels = np.ones_like(trial.reference.labels)
    one_by_one = with_labels(trial, np.where(np.arange(48)[:, None] == 16, -100, labels))
    names = ("rank", "microbatch of each rank", "microbatch", "sample")
    assert [cause_line(one.cause) for one in _averaged_locally(fit_of(one_by_one, np.ones(16)))] == [
        f"the loss is averaged per {name}: each divides by its own number of valid tokens, not by the global one"
        for name in names
    ]


@pytest.mark.parametrize(
    ("times", "told"),
    [
        (
            1,
            "the loss is averaged per rank or sample: each divides by its own number of valid tokens, not by the global one",
        ),
        (8, "the number of valid tokens is not summed over dp_shard: each rank or sample divides by its own"),
        (3, "the loss is averaged per rank or sample: each divides by its own number of valid tokens, and gradients are 3 times that"),
    ],
)  # fmt: skip
def test_units_that_are_one_are_named_together(times: float, told: str) -> None:
    trial = trial_of(tiny_case(dims(shard=8)))
    found = _averaged_locally(fit_of(trial, times * weights_of(trial, UNITS["dp rank"])))
    assert [cause_line(one.cause) for one in found] == [told]


def test_weights_that_are_nobody_s_means_are_proposed_as_none() -> None:
    trial = every_axis()
    weights = weights_of(trial, UNITS["sample"])
    weights[np.flatnonzero(Pieces(trial).tokens(1))[-1]] *= 1.5
    assert not list(_averaged_locally(fit_of(trial, weights)))


# ---- microbatches that are lost beside it


@pytest.mark.parametrize("unit", ["dp rank", "microbatch of each rank", "sample"])
@pytest.mark.parametrize(
    ("lost", "which"),
    [((0,), "microbatch 1 of 4 does not"), ((0, 2), "microbatches 1, 3 of 4 do not")],
)
def test_microbatches_lost_beside_a_mean_of_one_s_own_are_named_too(
    lost: tuple[int, ...], which: str, unit: str
) -> None:
    trial = trial_of(tiny_case(dims(shard=2), replace(SIXTEEN, global_batch=16), accumulation=4))
    kept = np.array([piece.row // 2 not in lost for piece in Pieces(trial).all])
    weights = weights_of(trial, UNITS[unit])
    name = "rank" if unit == "dp rank" else unit
    local = f"the loss is averaged per {name}: each divides by its own number of valid tokens"
    text = f"{which} contribute to the gradient; {local}"
    (found,) = _averaged_locally(fit_of(trial, kept * weights))
    assert said([found]) == [("unequal contributions, averaged locally", text, 2)]
    counted = Pieces(trial).tokens(2) > 0
    expected = kept * weights_of(trial, UNITS[unit], 2)
    assert np.allclose(found.weights(2)[counted], expected[counted], rtol=1e-12)
    assert not list(_averaged_locally(fit_of(trial, 3 * kept * weights))), "a factor beside it is one mistake too many"


def test_a_microbatch_without_valid_tokens_is_not_lost() -> None:
    trial = trial_of(tiny_case(dims(shard=2), SIXTEEN, accumulation=4))
    first = np.arange(48) % 8 < 2  # the first of eight samples that each of two ranks receives in four microbatches
    silent = with_labels(trial, np.where(first[:, None], -100, trial.reference.labels))
    weights = weights_of(silent, UNITS["dp rank"])
    found = fit_of(silent, np.where(np.array([piece.row < 2 for piece in Pieces(silent).all]), 0.0, weights))
    assert found.lost == []
    assert [cause_line(one.cause) for one in _averaged_locally(found)] == [
        "the loss is averaged per rank: each divides by its own number of valid tokens, not by the global one"
    ]


def test_where_all_is_lost_nothing_is_averaged() -> None:
    trial = every_axis()
    found = fit_of(trial, np.zeros(32))
    assert found.lost == [0, 1] and not list(_averaged_locally(found))


# ---- what each rank then reports


@pytest.mark.parametrize(
    ("unit", "together"),
    [
        ("dp rank", [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ("replica", [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("place in a replica", [(0, 1, 4, 5), (2, 3, 6, 7)]),
        ("cp rank", [(0, 2, 4, 6), (1, 3, 5, 7)]),
        ("dp and cp rank", [(rank,) for rank in range(8)]),
    ],
)
def test_ranks_that_divide_by_a_count_of_their_own_may_report_what_they_divide(
    unit: str, together: list[tuple[int, ...]]
) -> None:
    trial = every_axis()
    weights, count = weights_of(trial, UNITS[unit]), len(together)
    for factor, divided in ((1.0, count), (count, 1), (3.0, count)):
        (found,) = _averaged_locally(fit_of(trial, factor * weights))
        assert found.mean is not None
        for step in trial.case.steps:
            seen = {r: e.steps[step - 1].microbatches for r, e in trial.ranks.items()}
            total = sum(part.loss_sum for parts in seen.values() for part in parts)
            for ranks in together:
                own = sum(part.valid_tokens for rank in ranks for part in seen[rank])
                for rank in ranks:
                    assert np.isclose(found.mean(rank, step), total / (divided * own), rtol=1e-12, atol=0)


@pytest.mark.parametrize("unit", ["microbatch of each rank", "microbatch", "sample"])
def test_what_a_rank_reports_that_divides_by_many_counts_is_not_known(unit: str) -> None:
    trial = every_axis()
    (found,) = _averaged_locally(fit_of(trial, weights_of(trial, UNITS[unit])))
    assert found.mean is None


def test_tp_peers_who_compute_the_same_count_once_in_what_they_report() -> None:
    trial = trial_of(tiny_case(dims(shard=2, tp=2)))
    (found,) = _averaged_locally(fit_of(trial, weights_of(trial, UNITS["dp rank"])))
    assert found.mean is not None
    seen = {rank: trial.ranks[rank].steps[1].microbatches[0] for rank in (0, 2)}
    total = sum(part.loss_sum for part in seen.values())
    for rank, peer in ((0, 0), (1, 0), (2, 2), (3, 2)):
        assert np.isclose(found.mean(rank, 2), total / (2 * seen[peer].valid_tokens), rtol=1e-12, atol=0)


@pytest.mark.parametrize(("counts", "divisors"), [((0, 0), (1, 1)), ((1, 0), (2, 1)), ((3, 1), (6, 2))])
def test_no_token_of_one_s_own_is_taken_for_one(counts: tuple[int, int], divisors: tuple[int, int]) -> None:
    trial = trial_of(tiny_case("ddp_2"))
    total = sum(trial.ranks[rank].steps[0].microbatches[0].loss_sum for rank in (0, 1))
    for rank, count in enumerate(counts):
        part = replace(trial.ranks[rank].steps[0].microbatches[0], valid_tokens=count)
        trial = with_step(trial, rank, 1, microbatches=(part,))
    (found,) = _averaged_locally(fit_of(trial, weights_of(trial, UNITS["dp rank"])))
    assert found.mean is not None
    assert [found.mean(rank, 1) for rank in (0, 1)] == pytest.approx(
        [total / divisor for divisor in divisors], rel=1e-12
    )
