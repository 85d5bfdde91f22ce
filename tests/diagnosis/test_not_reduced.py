"""Of gradients that hold only what some ranks received: what is proposed, with all that is said. Literal weights, no ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from diagnosed import LAST, NORM, broken
from literal import ADAMW, tiny_case, trial_of, with_collectives, with_every_rank
from weighed import every_axis, with_labels

from harness.diagnosis.hypothesis import Hypothesis
from harness.diagnosis.mixture import Mixture, Pieces
from harness.diagnosis.reductions import _moving_less, of_each_rank
from harness.judge.trial import Trial
from harness.plan.slices import numel
from harness.report.cause_text import cause_line
from harness.spec.dims import ParallelDims

FSDP_2_CP_2 = trial_of(tiny_case(ParallelDims(dp_shard=2, cp=2), replace(ADAMW, seq_len=8)))
HSDP = trial_of(tiny_case("hsdp_2x2"))
HSDP_TP = trial_of(tiny_case(ParallelDims(dp_replicate=2, dp_shard=2, tp=2)))
EVERY = every_axis()


def weights_of(
    trial: Trial, missing: Sequence[str], microbatches: Sequence[int] = (0,), counted: float = 1.0
) -> dict[int, np.ndarray]:
    """By rank: pieces of these microbatches count so often where they are of a rank with its place along these axes, and not
    at all elsewhere; all others count once."""
    sizes, axes = trial.case.dims, ("dp_replicate", "dp_shard", "cp", "tp")
    places = list(itertools.product(*(range(getattr(sizes, axis)) for axis in axes)))

    def of(rank: int) -> dict[str, int]:
        return dict(zip(axes, places[rank], strict=True))

    def weight(rank: int, piece: object) -> float:
        number = piece.row // trial.case.local_batch  # type: ignore[attr-defined]
        at = of(piece.rank) | {"cp": piece.place}  # type: ignore[attr-defined]
        own = all(at[axis] == of(rank)[axis] for axis in missing)
        return (counted if own else 0.0) if number in microbatches else 1.0

    return {rank: np.array([weight(rank, piece) for piece in Pieces(trial).all]) for rank in trial.ranks}


def found(
    trial: Trial,
    weights: dict[int, np.ndarray],
    checks: Sequence[str] = ("gradients",),
    *,
    fqns: Sequence[str] = (),
    step: int = 1,
    close: float = 1e-6,
) -> list[Hypothesis]:
    pieces = Pieces(trial)
    mixture = Mixture(step, tuple(fqns or trial.plan.shapes), pieces.all, weights, close)
    return list(of_each_rank(trial, pieces, mixture, broken(*checks)))


def silent(trial: Trial, *ops: str) -> Trial:
    """These collectives did not run in backward."""
    return with_every_rank(
        trial,
        lambda t, rank: with_collectives(t, rank, lambda c: [] if c.phase == "backward" and c.op in ops else [c]),
    )


def holding(*held: str) -> tuple[tuple[str, str], ...]:
    return tuple(("samples", f"rank {rank}'s gradient{text}") for rank, text in enumerate(held))


FIRST_OF_CP = "holds the tokens of cp rank 0 of 2 in the samples of ranks"
SECOND_OF_CP = "holds the tokens of cp rank 1 of 2 in the samples of ranks"


@pytest.mark.parametrize(
    ("trial", "missing", "held", "lines"),
    [
        (
            HSDP,
            ["dp_replicate"],
            "the samples of ranks [0,1]",
            holding(*[" holds the samples of ranks [0,1], expected [0-3]"] * 2),
        ),
        (
            HSDP,
            ["dp_shard"],
            "the samples of ranks [0,2]",
            holding(
                " holds the samples of ranks [0,2], expected [0-3]", " holds the samples of ranks [1,3], expected [0-3]"
            ),
        ),
        (
            HSDP,
            ["dp_shard", "dp_replicate"],
            "the samples of rank 0",
            holding(
                " holds the samples of ranks [0], expected [0-3]", " holds the samples of ranks [1], expected [0-3]"
            ),
        ),
        (
            HSDP_TP,
            ["dp_replicate"],
            "the samples of ranks [0,2]",
            holding(*[" holds the samples of ranks [0,2], expected [0,2,4,6]"] * 2),
        ),
        (
            FSDP_2_CP_2,
            ["dp_shard"],
            "the samples of rank 0",
            holding(*[" holds the samples of ranks [0], expected [0,2]"] * 2),
        ),
        (
            FSDP_2_CP_2,
            ["cp"],
            "the tokens of cp rank 0 of 2",
            holding(f" {FIRST_OF_CP} [0,2], expected all of [0,2]", f" {SECOND_OF_CP} [0,2], expected all of [0,2]"),
        ),
        (
            FSDP_2_CP_2,
            ["dp_shard", "cp"],
            "the tokens of cp rank 0 of 2 in the samples of rank 0",
            holding(f" {FIRST_OF_CP} [0], expected all of [0,2]", f" {SECOND_OF_CP} [0], expected all of [0,2]"),
        ),
    ],
)
def test_what_gradients_hold_that_are_not_reduced_is_told_by_the_axes(
    trial: Trial, missing: list[str], held: str, lines: tuple[tuple[str, str], ...]
) -> None:
    told = f"gradient reduction over {' and '.join(missing)} has no effect{{}}: rank 0's gradient holds only {held}, "
    told += "though collectives ran"
    proposed = found(trial, weights_of(trial, missing))
    assert {one.cause.kind for one in proposed} == {"gradients not reduced"}
    assert [(cause_line(one.cause), one.fitted, one.lines) for one in proposed] == [
        (told.format(""), 1, lines),
        (told.format(" in step 1 alone"), 2, lines),
    ]
    later = [(cause_line(one.cause), one.fitted) for one in found(trial, weights_of(trial, missing), step=2)]
    assert later == [(told.format(" from step 2 on"), 1), (told.format(" in step 2 alone"), 2)]


@pytest.mark.parametrize(
    ("trial", "missing", "ops", "told", "unreduced"),
    [
        (HSDP, ["dp_replicate"], ["all_reduce"], "no all_reduce ran over [0,2] [1,3]", ["dp_replicate"]),
        (HSDP, ["dp_shard"], ["reduce_scatter"], "no reduce_scatter ran over [0,1] [2,3]", ["dp_shard"]),
        (FSDP_2_CP_2, ["dp_shard"], ["reduce_scatter"], "no reduce_scatter ran over [0-3]", ["dp_shard_cp"]),
        (FSDP_2_CP_2, ["dp_shard", "cp"], ["reduce_scatter"], "no reduce_scatter ran over [0-3]", ["dp_shard_cp"]),
        (
            HSDP,
            ["dp_shard", "dp_replicate"],
            ["reduce_scatter", "all_reduce"],
            "no reduce_scatter ran over [0,1] [2,3], no all_reduce ran over [0,2] [1,3]",
            ["dp_shard", "dp_replicate"],
        ),
    ],
)
def test_reductions_that_did_not_run_are_told_and_are_not_expected_to_move_anything(
    trial: Trial, missing: list[str], ops: list[str], told: str, unreduced: list[str]
) -> None:
    quiet, weights = silent(trial, *ops), weights_of(trial, missing)
    always, once = found(quiet, weights)
    text = f"gradient reduction missing over {' and '.join(missing)}{{}}: {told}"
    assert [cause_line(always.cause), cause_line(once.cause)] == [text.format(""), text.format(" in step 1 alone")]
    assert always.assume is not None and once.assume is not None
    assert always.assume(quiet).plan.unreduced == {*itertools.product(unreduced, (1, 2, 3))}
    assert once.assume(quiet).plan.unreduced == {*itertools.product(unreduced, (1,))}
    (ran, _) = found(trial, weights)
    assert ran.assume is not None and ran.assume(trial).plan.unreduced == frozenset()


def test_microbatches_that_are_not_reduced_are_told_with_where() -> None:
    for numbers, text in (((0,), "microbatch 1"), ((1,), "microbatch 2")):
        weights = weights_of(EVERY, ["dp_shard"], numbers)
        for fqns, where in (((), ""), ((LAST, NORM), f" in 2 of 12 parameters ({NORM}, {LAST})")):
            always, once = found(EVERY, weights, fqns=fqns)
            told = f"gradients of {text} of 2 are not reduced over dp_shard{{}}{where}: each rank adds only its own"
            assert [cause_line(always.cause), cause_line(once.cause)] == [
                told.format(""),
                told.format(" in step 1 alone"),
            ]
            assert always.lines == holding(*[f" of {text} holds the samples of ranks [0,4], expected [0,2,4,6]"] * 2)
    three = trial_of(tiny_case("ddp_2", replace(ADAMW, global_batch=12), accumulation=3))
    (first, _) = found(three, weights_of(three, ["dp_replicate"], (0, 2)))
    text = "gradients of microbatches 1, 3 of 3 are not reduced over dp_replicate: each rank adds only its own"
    assert cause_line(first.cause) == text
    (first, _) = found(EVERY, weights_of(EVERY, ["dp_shard"], (0, 1)))
    assert cause_line(first.cause).startswith("gradient reduction over dp_shard has no effect: ")


def test_few_parameters_that_are_not_reduced_move_less_where_traffic_is_broken() -> None:
    told = (
        f"gradients are not reduced over dp_replicate{{}} in 1 of 12 parameters ({LAST}): rank 0's gradient holds only "
    )
    told += "the samples of ranks [0,1]"
    texts, weights = [told.format(""), told.format(" in step 1 alone")], weights_of(HSDP, ["dp_replicate"])
    for fqns, checks, times in (
        ([LAST], ["gradients"], 1),
        ([LAST], ["gradients", "traffic"], 2),
    ):
        assert [cause_line(one.cause) for one in found(HSDP, weights, checks, fqns=fqns)] == texts * times
    assert len(found(HSDP, weights, ["gradients", "traffic"])) == 2
    *_, less, _ = found(HSDP, weights, ["traffic"], fqns=[LAST])
    assert less.assume is not None
    assert less.assume(HSDP).plan.flows == _moving_less([LAST], HSDP).plan.flows != HSDP.plan.flows


def test_what_does_not_move_are_gradients_in_proportion() -> None:
    plan, less = HSDP.plan, _moving_less([LAST, NORM], HSDP).plan
    for before, after in ((plan.flows, less.flows), (plan.even_flows, less.even_flows)):
        assert after.keys() == before.keys()
        for rank, flows in before.items():
            sizes = {fqn: numel(part) for fqn, part in plan.slices[rank].items()}
            whole, left = sum(sizes.values()), sum(sizes.values()) - sizes[LAST] - sizes[NORM]
            assert {flow.role for flow in flows} == {"parameters", "gradients"}
            for one, other in zip(flows, after[rank], strict=True):
                moved = one.bytes * left // whole if one.role == "gradients" else one.bytes
                assert other == replace(one, bytes=moved)


@pytest.mark.parametrize(
    ("counted", "told"),
    [
        (1.0, ""),
        (1.0 + 1e-7, ""),
        (2.0, ""),  # nor is it divided, by both replicas
        (2.0 - 1e-7, ""),
        (0.5, "; each rank's own share counts 0.5 times: as if divided an extra time by dp_replicate or dp_shard (2)"),
        (3.0, "; each rank's own share counts 3 times"),
        (4.0 - 1e-7, "; each rank's own share counts 4 times: as if not divided by dp_replicate x dp_shard (4)"),
        (1.0 + 1e-5, "; each rank's own share counts 1.00001 times"),
        (0.0, None),
    ],
)
def test_how_often_a_share_counts_is_told_where_it_is_neither_once_nor_undivided(
    counted: float, told: str | None
) -> None:
    proposed = found(HSDP, weights_of(HSDP, ["dp_replicate"], counted=counted))
    text = (
        "gradient reduction over dp_replicate has no effect: rank 0's gradient holds only the samples of ranks [0,1], "
    )
    text += "though collectives ran"
    assert [cause_line(one.cause) for one in proposed][:1] == ([] if told is None else [f"{text}{told}"])


def test_weights_that_differ_in_one_piece_are_no_missing_reduction_but_where_it_has_no_valid_token() -> None:
    weights = weights_of(HSDP, ["dp_replicate"])
    weights[3] = weights[3] * np.where(np.arange(len(weights[3])) == 7, 1.5, 1.0)
    assert found(HSDP, weights) == []
    labels = np.array(HSDP.reference.labels)
    labels[HSDP.reference.samples[0][7]] = -100
    assert len(found(with_labels(HSDP, labels), weights)) == 2
    labels[HSDP.reference.samples[0][7], 0] = 1
    assert found(with_labels(HSDP, labels), weights) == []
    assert found(with_labels(HSDP, np.full_like(labels, -100)), weights) == []
