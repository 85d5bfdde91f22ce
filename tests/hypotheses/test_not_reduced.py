"""Gradients that hold only what some ranks received: over which axes, of which microbatches. Literal evidence, no ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from caused import causes_of
from diagnosed import LAST, NORM, accumulating, kinds, proven, reference_gradient
from literal import EIGHT, sum_of_samples, tiny_case, trial_of, with_collectives, with_every_rank, with_step_1_gradients

from harness.core.case.dims import ParallelDims
from harness.core.causes.engine import failing_checks
from harness.core.causes.hypothesis import Hypothesis
from harness.core.checks import judge
from harness.core.judge.places import representative_of_shares
from harness.core.judge.trial import Trial
from harness.core.plan.grid import coordinate_of_rank
from harness.hypotheses.piece_weights import sums_of_pieces

HSDP = trial_of(tiny_case("hsdp_2x2"))
HSDP_TP = trial_of(tiny_case(ParallelDims(dp_replicate=2, dp_shard=2, tp=2)))
FSDP_2_CP_2 = trial_of(tiny_case(ParallelDims(dp_shard=2, cp=2), EIGHT))
FOUR = trial_of(tiny_case("ddp_2", replace(EIGHT, global_batch=12), accumulation=3))


def own_only(
    trial: Trial,
    missing: Sequence[str],
    microbatches: Sequence[int] = (),
    counted: float = 1.0,
    fqns: Sequence[str] = (),
) -> Trial:
    """Samples of these microbatches (all) count so often where a rank with the same place along these axes received them."""
    size = trial.case.training.global_batch // trial.case.dims.dp
    shares = representative_of_shares(trial)

    def place(rank: int) -> list[int]:
        return [coordinate_of_rank(trial.case.dims, rank)[axis] for axis in missing]

    def weight(rank: int, number: int) -> float:
        own = place(shares[number // size]) == place(rank)
        chosen = not microbatches or number % size // trial.case.local_batch + 1 in microbatches
        return (counted if own else 0.0) if chosen else 1.0

    def gradient(rank: int, fqn: str) -> np.ndarray:
        weights = {id_: weight(rank, n) for n, id_ in enumerate(trial.reference.samples[0])}
        return reference_gradient(trial, fqn) if fqns and fqn not in fqns else sum_of_samples(trial, fqn, weights)

    return with_step_1_gradients(trial, gradient)


def silent(trial: Trial, *ops: str) -> Trial:
    """These collectives did not run in backward."""
    return with_every_rank(
        trial,
        lambda t, rank: with_collectives(t, rank, lambda c: [] if c.phase == "backward" and c.op in ops else [c]),
    )


def proposed(trial: Trial) -> list[Hypothesis]:
    found = sums_of_pieces(trial, failing_checks(judge(trial)))
    return [one for one in found if one.cause.kind == "gradients not reduced"]


@pytest.mark.slow("the engine tries its hypotheses on each; the first runs it in the same way", after=2)
@pytest.mark.parametrize(
    ("trial", "missing", "ops"),
    [
        (HSDP, ("dp_replicate",), ()),
        (HSDP, ("dp_shard",), ()),
        (HSDP, ("dp_shard", "dp_replicate"), ()),
        (HSDP, ("dp_replicate",), ("all_reduce",)),
        (HSDP, ("dp_shard",), ("reduce_scatter",)),
        (HSDP, ("dp_shard", "dp_replicate"), ("reduce_scatter", "all_reduce")),
        (HSDP_TP, ("dp_replicate",), ()),
        (FSDP_2_CP_2, ("dp_shard",), ()),
    ],
)
@pytest.mark.parametrize("counted", [1.0, 2.0, 0.5])
def test_gradients_that_are_not_reduced_are_named_with_the_axes(
    trial: Trial, missing: tuple[str, ...], ops: tuple[str, ...], counted: float
) -> None:
    kind, details = proven(silent(own_only(trial, missing, counted=counted), *ops))
    assert kind == "gradients not reduced" and details["axes"] == missing and details["microbatches"] == ()
    assert details["factor"] == pytest.approx(counted, rel=1e-6)


@pytest.mark.parametrize(
    ("ops", "missing", "unreduced"),
    [
        (("all_reduce",), ("dp_replicate",), {"dp_replicate"}),
        (("reduce_scatter", "all_reduce"), ("dp_shard", "dp_replicate"), {"dp_shard", "dp_replicate"}),
        ((), ("dp_replicate",), set()),
    ],
)
def test_reductions_that_did_not_run_are_not_expected_to_move_anything(
    ops: tuple[str, ...], missing: tuple[str, ...], unreduced: set[str]
) -> None:
    quiet = silent(own_only(HSDP, missing), *ops)
    always, once = proposed(quiet)
    assert [dict(one.cause.details)["steps"] for one in (always, once)] == [(1, 2, 3), (1,)]
    for one, steps in ((always, (1, 2, 3)), (once, (1,))):
        assert one.assume is not None and one.assume(quiet).plan.unreduced == {*itertools.product(unreduced, steps)}


PAIRS = ((0, 1), (2, 3))


@pytest.mark.parametrize("counted", [2.0, 1.0])
def test_replicas_that_are_averaged_in_groups_of_no_axis_are_named_with_these(counted: float) -> None:
    """counted: a mean over the pair, or a sum that is divided by all four."""
    trial, pair = trial_of(tiny_case(ParallelDims(dp_replicate=4))), {rank: group for group in PAIRS for rank in group}
    shares = [*representative_of_shares(trial)]
    size = len(trial.reference.samples[0]) // len(shares)

    def gradient(rank: int, fqn: str) -> np.ndarray:
        ids = enumerate(trial.reference.samples[0])
        weights = {id_: counted * (shares[number // size] in pair[rank]) for number, id_ in ids}
        return sum_of_samples(trial, fqn, weights)

    def over_the_pair(of: Trial, rank: int) -> Trial:
        return with_collectives(
            of, rank, lambda c: [replace(c, ranks=pair[rank]) if c.phase == "backward" and c.op == "all_reduce" else c]
        )

    wrong = with_every_rank(with_step_1_gradients(trial, gradient), over_the_pair)
    first = proposed(wrong)[0]
    details = dict(first.cause.details)
    assert (details["axes"], details["groups"], details["factor"]) == (("dp_replicate",), PAIRS, counted)
    assert first.assume is not None and first.assume(wrong).plan.groups["dp_replicate"] == PAIRS
    cause = causes_of(wrong)[0]
    assert cause.kind == "gradients not reduced" and {"gradients", "traffic"} <= {*cause.explains}
    apart = with_collectives(
        with_collectives(wrong, 2, lambda c: []), 3, lambda c: []
    )  # no groups of all ranks are known
    assert not [one for one in proposed(apart) if dict(one.cause.details).get("groups")]


@pytest.mark.parametrize(
    ("trial", "microbatches"), [(accumulating(), (1,)), (accumulating(), (2,)), (FOUR, (1, 3)), (FOUR, (2,))]
)
def test_microbatches_that_are_not_reduced_are_named(trial: Trial, microbatches: tuple[int, ...]) -> None:
    kind, details = proven(own_only(trial, ["dp_replicate"], microbatches, counted=2.0))
    assert (kind, details["microbatches"]) == ("gradients not reduced", microbatches)
    assert details["axes"] == ("dp_replicate",)


def test_a_reduction_that_is_dropped_in_every_microbatch_is_not_one_that_lacks_some() -> None:
    assert proven(own_only(accumulating(), ["dp_replicate"]))[1]["microbatches"] == ()


@pytest.mark.parametrize("fqns", [(LAST,), (NORM, LAST)])
def test_few_parameters_that_no_reduction_reaches_are_named(fqns: tuple[str, ...]) -> None:
    kind, details = proven(own_only(HSDP, ["dp_replicate"], fqns=fqns))
    assert (kind, details["parameters"]) == ("gradients not reduced", fqns)


def test_shares_that_do_not_count_are_no_missing_reduction() -> None:
    assert len(proposed(own_only(HSDP, ["dp_replicate"]))) == 2
    assert proposed(own_only(HSDP, ["dp_replicate"], counted=0.0)) == []
    assert kinds(own_only(HSDP, ["dp_replicate"], counted=0.0)) != ("gradients not reduced",)


def test_a_rank_whose_own_share_counts_twice_has_weights_of_no_rule() -> None:
    """Each rank's own samples count twice, and all others once."""
    ids = {rank: [i for i in range(8) if i // 4 == rank] for rank in (0, 1)}
    trial = trial_of(tiny_case("ddp_2"))
    wrong = with_step_1_gradients(trial, lambda rank, fqn: sum_of_samples(trial, fqn, dict.fromkeys(ids[rank], 2.0)))
    kind, details = proven(wrong)
    assert (kind, details["least weight"], details["largest weight"]) == ("unequal contributions", 1.0, 2.0)
