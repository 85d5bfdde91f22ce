"""Clipping otherwise than requested: what is named, and that it is proven. Literal evidence, no ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from diagnosed import LOW_CLIP, NORM, trained_as
from literal import tiny_case, trained_otherwise, trial_of, with_rank, with_step
from literal_reference import clip
from test_recipe import LITTLE, LOW, Arrays, given, kind, named, proposed

from harness.core.causes import diagnose
from harness.core.checks import judge
from harness.core.judge.norms import norm_of_slices
from harness.core.plan.slices import tp_dim
from harness.reference.config import TrainingConfig


@pytest.mark.parametrize("training", [LOW, LOW_CLIP])
def test_clipping_left_out(training: TrainingConfig) -> None:
    never = replace(training, max_norm=None)
    cause = named(trained_as(never, requested=training))
    assert (cause.kind, dict(cause.details)) == ("clipping left out", {"coefficient": pytest.approx(0.1537, rel=1e-3)})
    for layout, ranks in (("hsdp_2x2", (1, 3)), ("ddp_2", (1,))):
        trial, wrong = trial_of(tiny_case(layout, training)), trained_as(never, layout, training)
        for rank in ranks:
            trial = with_rank(trial, rank, steps=wrong.ranks[rank].steps)
        cause = named(trial)
        assert cause.kind == "clipping left out" and str([*ranks][0]) in cause.where


def length(of: Arrays, chosen: Callable[[str], bool] = lambda fqn: True) -> float:
    return math.hypot(*(float(entry) for fqn, g in of.items() if chosen(fqn) for entry in g.ravel()))


@pytest.mark.parametrize("own", [False, True])
def test_clipping_left_out_for_one_parameter_and_with_the_norm_of_the_others(own: bool) -> None:
    def by(step: int, fqn: str, of: Arrays, norm: float) -> float:
        return 1.0 if fqn == NORM else clip(length(of, lambda fqn: fqn != NORM) if own else norm, LOW_CLIP)

    cause = named(given(by, LOW_CLIP))
    assert cause.kind == "clipping left out" and "1 of 12" in cause.where and bool(cause.hint) == own


NORMS: dict[tuple[str, object], Callable[[Arrays], float]] = {
    ("of norm type", math.inf): lambda of: max(float(np.abs(g).max()) for g in of.values()),
    ("of norm type", 1.0): lambda of: sum(float(np.abs(g).sum()) for g in of.values()),
    ("added up over", "parameters"): lambda of: sum(length({fqn: g}) for fqn, g in of.items()),
    ("to the power of", 2): lambda of: length(of) ** 2,
    ("of", "norm weights"): lambda of: length(of, lambda fqn: "norm" in fqn),
    ("without", "norm weights"): lambda of: length(of, lambda fqn: "norm" not in fqn),
    ("of", "embedding and output"): lambda of: length(of, lambda fqn: fqn.startswith(("tok_", "output"))),
}


@pytest.mark.parametrize("detail", NORMS)
def test_gradients_clipped_by_another_norm_of_all_ranks(detail: tuple[str, object]) -> None:
    cause = named(given(lambda step, fqn, of, norm: clip(NORMS[detail](of), LITTLE), LITTLE))
    assert (cause.kind, cause.details) == ("clipped by another norm", (detail,))


@pytest.mark.parametrize(
    ("name", "of", "layout"),
    [
        ("parameters", lambda fqn: fqn, "fsdp_2"),
        ("layers", lambda fqn: ".".join(fqn.split(".")[:2]), "fsdp_2"),
        ("kinds of parameters", lambda fqn: "norm" in fqn, "fsdp_2"),
        ("placements over tp", tp_dim, "tp_2"),
    ],
)
def test_each_group_of_parameters_clipped_by_its_own_norm(name: str, of: Callable[[str], object], layout: str) -> None:
    def by(step: int, fqn: str, gradients: Arrays, norm: float) -> float:
        return clip(length({other: g for other, g in gradients.items() if of(other) == of(fqn)}), LOW_CLIP)

    cause = named(given(by, LOW_CLIP, layout))
    assert (cause.kind, cause.details) == ("clipped by another norm", (("norms of", name),))


@pytest.mark.slow("the engine tries its hypotheses on each; the first runs it in the same way", after=4)
@pytest.mark.parametrize(
    ("layout", "axes", "peers"),
    [
        ("fsdp_2", ("dp_shard",), lambda rank: (rank,)),
        ("hsdp_2x2", ("dp_shard",), lambda rank: (rank,)),
        ("fsdp_2_tp_2", ("tp",), lambda rank: (rank % 2, rank % 2 + 2)),
        ("fsdp_2_tp_2", ("dp_shard",), lambda rank: (rank // 2 * 2, rank // 2 * 2 + 1)),
        ("fsdp_2_tp_2", ("dp_shard", "tp"), lambda rank: (rank,)),
    ],
)
@pytest.mark.parametrize("reported", [False, True])
def test_ranks_clip_by_a_norm_that_is_not_reduced_and_may_report_it(
    layout: str, axes: tuple[str, ...], peers: Callable[[int], tuple[int, ...]], reported: bool
) -> None:
    trial = trial_of(tiny_case(layout, LITTLE))
    norms = {(r, s): norm_of_slices(trial, s, peers(r)) for r in trial.ranks for s in trial.case.steps}
    for rank in trial.ranks:

        def those(step: int, of: Arrays, norm: float, parameters: Arrays, rank: int = rank) -> Arrays:
            return {fqn: clip(norms[rank, step], LITTLE) * g for fqn, g in of.items()}

        trial = trained_otherwise(trial, [rank], given=those)
        for step in trial.case.steps if reported else ():
            trial = with_step(trial, rank, step, grad_norm=norms[rank, step])
    found = diagnose(trial, judge(trial))  # tp ranks then differ in what they hold alike, which nothing is assumed of
    assert found is not None and (len(found.causes) == 1 or "tp" in axes)
    cause = found.causes[0]
    assert (cause.kind, cause.details) == ("clipped by another norm", (("not reduced over", axes),))


@pytest.mark.parametrize(("layout", "axis", "again"), [("hsdp_2x2", "dp_replicate", ""), ("tp_2", "tp", "norm")])
def test_a_norm_that_counts_replicas(layout: str, axis: str, again: str) -> None:
    def by(step: int, fqn: str, gradients: Arrays, norm: float) -> float:
        return clip(math.hypot(length(gradients), length(gradients, lambda fqn: again in fqn)), LOW_CLIP)

    cause = named(given(by, LOW_CLIP, layout))
    assert (cause.kind, cause.details) == ("clipped by another norm", (("with replicas counted along", axis),))


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("reported", [False, True])
def test_gradients_clipped_by_the_norm_of_the_step_before(own: bool, reported: bool) -> None:
    norms: dict[int, float] = {}

    def by(step: int, fqn: str, gradients: Arrays, norm: float) -> float:
        norms[step] = norm
        return clip(norms.get(step - 1, norm if own else 0.0), LOW_CLIP)

    trial = given(by, LOW_CLIP)
    for rank, step, _ in [*trial.steps_with_reference()] if reported else []:
        trial = with_step(trial, rank, step.step, grad_norm=norms.get(step.step - 1, norms[1] if own else 0.0))
    cause = named(trial)
    assert cause.kind == "clipped by another norm" and len(cause.details) == 1 + own


def test_a_norm_that_ranks_report_may_be_what_they_clip_by() -> None:
    trial = given(lambda step, fqn, gradients, norm: clip(7.0 * step, LOW_CLIP), LOW_CLIP)
    for rank, step, _ in [*trial.steps_with_reference()]:
        trial = with_step(trial, rank, step.step, grad_norm=7.0 * step.step)
    assert named(trial).details == (("as", "reported"),)


@pytest.mark.parametrize(("limit", "step"), [(100.0, 1), (1.6, 2)])
def test_clipping_that_enlarges(limit: float, step: int) -> None:
    high = replace(LOW_CLIP, max_norm=limit)
    cause = named(given(lambda step, fqn, gradients, norm: limit / (norm + 1e-6), replace(high, optimizer="sgd")))
    assert (cause.kind, dict(cause.details)["step"]) == ("clipping enlarges gradients", step)


@pytest.mark.parametrize("limit", [0.25, 1.6])
def test_clipping_without_the_millionth_that_torch_adds(limit: float) -> None:
    recipe = replace(LOW_CLIP, max_norm=limit)
    assert kind(given(lambda step, fqn, of, norm: min(1.0, limit / norm), recipe)) == "clipped without 1e-6"


def test_gradients_clipped_entry_by_entry() -> None:
    by = lambda step, fqn, of, norm: np.clip(of[fqn], -0.01, 0.01) / of[fqn]  # noqa: E731
    assert named(given(by, LITTLE)).details == (("value", 0.01),)


def test_no_way_to_clip_is_tried_where_replicas_have_other_gradients() -> None:
    trial = trained_as(replace(LOW_CLIP, max_norm=None), "ddp_2", LOW_CLIP)
    assert "clipping left out" in proposed(trial)
    own = {fqn: 3 * g for fqn, g in trial.ranks[1].steps[0].gradients.items()}
    assert proposed(with_step(trial, 1, 1, gradients=own)) == {}
