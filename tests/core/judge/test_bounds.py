"""Every bound by hand: on a path of three steps and one parameter of three entries, whose numbers are small and whole."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from literal import ADAMW, SGD, TINY, tiny_case

from harness.core.case.case import Case
from harness.core.judge.finding import Bound
from harness.core.judge.tolerance import (
    FIT_FACTOR,
    Bounds,
    NoBound,
    ParameterBounds,
    bounds_of_recipe,
    clip_coefficient,
    derived_bounds,
    measured_bounds,
    relative_difference,
    relative_rounding,
    update_bound,
)
from harness.reference.record import Noise, ReferenceRun, ReferenceStep

U = 2.0**-53
FORWARD = 8 * math.sqrt((7 * 1 + 1) * 8 * 4) * U  # 7 matmuls in one layer and the output; 8 samples of 4 tokens
BOTH = 8 * math.sqrt((21 * 1 + 3) * 8 * 4) * U
GRADIENTS = ([3.0, -4.0, 0.0], [5.0, 2.0, -1.0], [1.0, 1.0, 2.0])
PARAMETERS = ([1.0, 1.0, 1.0], [1.0, 3.0, 3.0], [9.0, 9.0, 9.0])
SECOND = ([4.0, 9.0, 0.0], [16.0, 25.0, 0.25], [1.0, 1.0, 1.0])
LOSSES, NORMS, RATES = (2.0, 4.0, 8.0), (5.0, math.sqrt(30), 0.5), (0.1, 0.2, 0.3)


def path(gradients: Any = GRADIENTS, losses: Any = LOSSES) -> ReferenceRun:
    def whole(values: Any) -> dict[str, np.ndarray]:
        return {"w": np.array(values)}

    steps = tuple(
        ReferenceStep(n + 1, losses[n], NORMS[n], RATES[n], 10, whole(gradients[n]), whole(PARAMETERS[n]), state)
        for n, state in enumerate({"w": {"exp_avg_sq": np.array(second)}} for second in SECOND)
    )
    return ReferenceRun({}, steps, (), (), np.zeros(0), np.zeros(0))


def case(**recipe: Any) -> Case:
    return tiny_case("single", replace(SGD if recipe.pop("sgd", False) else ADAMW, **recipe))


# ---- the exact tier


@pytest.mark.parametrize(
    ("changes", "longest"),
    [({"vocab_size": 1000}, 1000), ({"ffn_dim": 2000}, 2000), ({"dim": 3000}, 3000), ({}, 32)],
)
def test_gamma_grows_with_the_longest_sum_and_the_number_of_products(changes: dict[str, int], longest: int) -> None:
    for layers in (1, 5):
        model = replace(TINY, n_layers=layers, **changes)
        one = tiny_case("single", ADAMW, model=model)
        assert relative_rounding(one, 7) == pytest.approx(
            8 * math.sqrt((7 * layers + 1) * longest) * U, rel=1e-12, abs=0
        )
        assert relative_rounding(one, 21) == pytest.approx(
            8 * math.sqrt((21 * layers + 3) * longest) * U, rel=1e-12, abs=0
        )


def expected(moved: list[list[float]]) -> Bounds:
    """moved: by how much each entry's noise lets it move in steps 1 and 2."""
    loss, gradient = {1: FORWARD}, {1: BOTH}
    distances = (math.dist(PARAMETERS[0], PARAMETERS[1]), math.dist(PARAMETERS[1], PARAMETERS[2]))
    assert distances[0] == math.sqrt(8)
    changes = (max(2, 6, 1) / 4, max(4, 1, 3) / 5)  # of the gradients, over the largest entry of those before
    for n in (0, 1):
        shift = sum(abs(g) * m for g, m in zip(GRADIENTS[n + 1], moved[n], strict=True)) / LOSSES[n + 1]
        loss[n + 2] = loss[n + 1] + shift
        gradient[n + 2] = gradient[n + 1] + changes[n] / distances[n] * math.hypot(*moved[n])
    return Bounds(loss, gradient, gradient)


def close(seen: Bounds, wanted: Bounds) -> bool:
    return all(
        getattr(seen, what) == pytest.approx(getattr(wanted, what), rel=1e-12, abs=0)
        for what in ("loss", "gradient", "grad_norm")
    )


RMS = (math.sqrt((9 + 16) / 2), math.sqrt((25 + 4 + 1) / 3))  # of the entries that are not zero


@pytest.mark.parametrize("max_norm", [None, 2.0])
def test_the_noise_of_sgd_is_that_of_a_typical_entry_times_the_rate(max_norm: float | None) -> None:
    clips = [1.0 if max_norm is None else max_norm / (norm + 1e-6) for norm in NORMS]
    moved = [[RATES[n] * BOTH * clips[n] * RMS[n]] * 3 for n in (0, 1)]
    assert close(derived_bounds(case(sgd=True, max_norm=max_norm), path()), expected(moved))


@pytest.mark.parametrize("max_norm", [None, 2.0])
def test_adamw_divides_that_noise_by_the_root_of_the_second_moment(max_norm: float | None) -> None:
    clips = [1.0 if max_norm is None else max_norm / (norm + 1e-6) for norm in NORMS]
    recipe = case(max_norm=max_norm, beta2=0.5, eps=0.5)
    moved = [
        [
            RATES[n] * BOTH * clips[n] * RMS[n] / (math.sqrt(v / (1 - 0.5 ** (n + 1))) + 0.5) if v else 0.0
            for v in SECOND[n]
        ]
        for n in (0, 1)
    ]
    seen = derived_bounds(recipe, path())
    assert close(seen, expected(moved))
    assert bounds_of_recipe(recipe, path()) == seen and seen.how == ""
    assert seen.finding_bound(1.5e-9) == Bound(1.5e-9)


def test_a_path_without_a_number_gives_no_bound_and_a_zero_gradient_changes_by_all_of_the_next() -> None:
    told = "the reference's own path has a NaN"
    for gradients, losses in (
        (GRADIENTS, (2.0, math.nan, 8.0)),
        ((GRADIENTS[0], [math.nan] * 3, GRADIENTS[2]), LOSSES),
    ):
        with pytest.raises(NoBound, match=told):
            derived_bounds(case(sgd=True), path(gradients, losses))
    late = derived_bounds(case(sgd=True), path(([0.0] * 3, *GRADIENTS[1:]), LOSSES))
    assert all(map(math.isfinite, (*late.loss.values(), *late.gradient.values())))


TOO_BLUNT = (
    r"rounding alone explains .* by step 3, and mistakes start at 1e-08; what helps: `steps: 1` .*`--dtype float32`"
)


def test_a_bound_that_reaches_the_smallest_mistake_is_none() -> None:
    steep = (GRADIENTS[0], [5e7, 2.0, -1.0], GRADIENTS[2])
    with pytest.raises(
        NoBound,
        match=TOO_BLUNT,
    ):
        derived_bounds(case(sgd=True), path(steep))
    with pytest.raises(NoBound, match="rounding alone explains"):  # the loss alone: a gradient of no curvature
        derived_bounds(case(sgd=True), path((GRADIENTS[0],) * 3, (2.0, 1e-9, 1e-9)))


def test_a_recipe_that_a_larger_eps_makes_sharp_is_told_which() -> None:
    steep = (GRADIENTS[0], [5e5, 2.0, -1.0], GRADIENTS[2])
    state = [{"w": {"exp_avg_sq": np.array([1e-20, 9.0, 0.0])}}] * 3
    run = path(steep)
    steps = tuple(replace(step, optimizer_state=second) for step, second in zip(run.steps, state, strict=True))
    with pytest.raises(NoBound, match=r"a larger `eps: 1e-0\d` \(AdamW divides noise by sqrt\(v\) \+ eps, now 1e-12\)"):
        derived_bounds(case(eps=1e-12), replace(run, steps=steps))


def test_a_gradient_whose_bound_alone_reaches_it_is_none() -> None:
    steep = (GRADIENTS[0], [5e7, 2.0, -1.0], GRADIENTS[2])
    with pytest.raises(NoBound, match="rounding alone explains"):
        derived_bounds(case(sgd=True), path(steep, (2.0, 1e15, 1e15)))


def test_a_parameter_that_never_has_a_gradient_changes_no_bound() -> None:
    run = path()

    def with_one_more(step: ReferenceStep) -> ReferenceStep:
        state = step.optimizer_state | {"v": {"exp_avg_sq": np.ones(2)}}
        grown = {what: getattr(step, what) | {"v": np.zeros(2)} for what in ("gradients", "parameters")}
        return replace(step, optimizer_state=state, **grown)

    more = replace(run, steps=tuple(map(with_one_more, run.steps)))
    for recipe in (case(sgd=True), case(beta2=0.5)):
        assert derived_bounds(recipe, more) == derived_bounds(recipe, run)


def test_entries_and_parameters_that_stand_still_have_no_noise() -> None:
    still = path(([1.0, 0.0, 0.0],) * 3)
    steps = tuple(replace(step, parameters={"w": np.zeros(3)}) for step in still.steps)
    seen = derived_bounds(case(sgd=True), replace(still, steps=steps))
    assert seen.gradient == dict.fromkeys((1, 2, 3), BOTH)


# ---- the measured tier

NOISE = Noise(16, loss=(1e-3, 2e-3), grad_norm=(3e-3, 4e-3), gradient=(5e-3, 6e-3))


def test_a_measured_bound_is_four_times_the_spread() -> None:
    wanted = Bounds(
        {1: 4e-3, 2: 8e-3},
        {1: 2e-2, 2: 2.4e-2},
        {1: 1.2e-2, 2: 1.6e-2},
        "the spread of 16 repeats of the reference",
    )
    assert measured_bounds(case(dtype="float32"), NOISE) == wanted
    assert bounds_of_recipe(case(dtype="float32"), path(), NOISE) == wanted
    assert wanted.finding_bound(0.25) == Bound(0.25, "4 x the spread of 16 repeats of the reference")


def test_a_whole_parameter_has_a_bound_for_its_factor_and_a_sharper_one_for_its_distance_in_step_1() -> None:
    noise = replace(NOISE, distance={"w": (1e-3, 2e-3)}, fit={"w": (3e-3, 4e-3)})
    wanted = {"w": ParameterBounds({1: 2 * 1e-3, 2: 4 * 2e-3}, {1: 5 * 3e-3, 2: 5 * 4e-3})}
    assert measured_bounds(case(dtype="float32"), noise).by_parameter == wanted
    assert measured_bounds(case(dtype="float32"), NOISE).by_parameter == {}
    assert (
        measured_bounds(case(dtype="float32"), noise).finding_bound(0.25, FIT_FACTOR).how.startswith("5 x the spread")
    )


def test_where_products_jump_no_distance_has_the_sharper_bound() -> None:
    noise = replace(NOISE, distance={"w": (1e-3, 2e-3)}, fit={"w": (0.0, 0.0)})
    found = measured_bounds(case(dtype="float32", quantize="float8_rowwise"), noise).by_parameter["w"]
    assert found == ParameterBounds({1: 4 * 1e-3, 2: 4 * 2e-3}, {1: 5 * 2.0**-23, 2: 5 * 2.0**-23})


@pytest.mark.parametrize(
    ("recipe", "unit"),
    [
        ({"dtype": "float32"}, 2.0**-23),
        ({"dtype": "bfloat16"}, 2.0**-23),  # losses are told in float32
        ({"quantize": "float8_rowwise"}, 2.0**-52),
    ],
)
def test_no_measured_bound_is_less_than_four_units_of_the_last_place(recipe: dict[str, Any], unit: float) -> None:
    quiet = Noise(16, (0.0, 1.0), (0.0, 1.0), (0.0, 1.0))
    wanted = {1: 4 * unit, 2: 4.0}
    seen = measured_bounds(case(**recipe), quiet)
    assert (seen.loss, seen.gradient, seen.grad_norm) == (wanted, wanted, wanted)


def test_noise_that_is_no_number_or_was_never_measured_gives_no_bound() -> None:
    for what in ("loss", "grad_norm", "gradient"):
        with pytest.raises(NoBound, match="a repeat of the reference has a NaN"):
            measured_bounds(case(dtype="float32"), replace(NOISE, **{what: (1e-3, math.nan)}))
    for what in ("distance", "fit"):
        with pytest.raises(NoBound, match="a repeat of the reference has a NaN"):
            measured_bounds(case(dtype="float32"), replace(NOISE, **{what: {"w": (1e-3, math.nan)}}))
    told = "the noise of this recipe's reference was never measured; `harness golden --accept -k tiny` measures it"
    with pytest.raises(NoBound, match=told):
        bounds_of_recipe(case(dtype="float32"), path(), None)


# ---- what all of them use


def test_clipping_multiplies_by_the_limit_over_the_norm_and_never_enlarges() -> None:
    assert clip_coefficient(5.0, None) == 1.0
    assert clip_coefficient(0.5, 1.0) == 1.0
    assert clip_coefficient(4.0, 2.0) == 2.0 / (4.0 + 1e-6)


@pytest.mark.parametrize(
    ("observed", "wanted", "scale", "distance"),
    [
        ([1.0, 2.0], [1.0, 4.0], None, 0.5),
        ([1.0, -2.0], [1.0, 2.0], None, 2.0),
        ([1.0, 2.0], [1.0, 4.0], 8.0, 0.25),
        ([1.0, 2.0], [1.0], None, math.inf),
        ([], [], None, 0.0),
        ([math.nan, 1.0], [math.nan, 1.0], None, math.inf),
        ([0.0], [0.0], None, 0.0),
        ([1e-300], [0.0], None, math.inf),
    ],
)
def test_a_distance_is_relative_to_the_largest_entry(
    observed: list[float], wanted: list[float], scale: float | None, distance: float
) -> None:
    assert relative_difference(np.array(observed), np.array(wanted), scale) == distance


def test_an_update_may_be_off_by_the_roundings_of_an_entry_and_of_the_norm() -> None:
    elements = sum(math.prod(shape) for shape in TINY.parameter_shapes().values())
    assert elements == 236
    wanted = (64 + 8 * math.sqrt(elements)) * U * np.array([1.0, 3.0])
    assert np.allclose(update_bound(case(), np.array([1.0, 3.0])), wanted, rtol=1e-12, atol=0)
    coarse = update_bound(case(dtype="float32"), np.array([1.0]))
    assert np.allclose(coarse, (64 + 8 * math.sqrt(elements)) * 2.0**-24, rtol=1e-12)
