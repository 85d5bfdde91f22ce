"""Which tensor on record a wrong gradient is: runs that were really trained so are named with it, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from diagnosed import DDP_2
from literal import tiny_case, trial_of, with_step_1_gradients
from noisy import noise_of
from torch import nn
from trained import MODEL, RECIPE, Ran, _ran, case_of, reference  # noqa: F401

from harness.core.causes import diagnose
from harness.core.checks import judge
from harness.core.judge.contents import to_bfloat16
from harness.core.judge.result import Cause
from harness.core.judge.trial import Trial
from harness.hypotheses.whose import TensorOnRecord, find_match, find_transforms
from harness.reference.spellings import replace_forward

WQ, W1, W2, W3 = (f"layers.0.{name}.weight" for name in ("attention.wq", *(f"feed_forward.w{n}" for n in (1, 2, 3))))
NORM, LAST_NORM = "layers.0.ffn_norm.weight", "norm.weight"
Arrays = dict[str, np.ndarray]
Change = Callable[[Arrays, Arrays], Arrays]
"""Of the gradients of a step and of those of the step before, the wrong ones."""


def random(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(3).standard_normal(shape)


def halves(value: np.ndarray) -> np.ndarray:
    """Each of two ranks has the slice of the other."""
    return np.roll(value, len(value) // 2, axis=0)


def heads(value: np.ndarray) -> np.ndarray:
    return value.reshape(4, -1, value.shape[1])[[2, 0, 3, 1]].reshape(value.shape)


def rows(value: np.ndarray, by: float) -> np.ndarray:
    """Three rows of it, which one rank holds, so often."""
    changed = value.copy()
    changed[2:5] *= by
    return changed


def named(trial: Trial) -> Cause | None:
    """The one cause that is another tensor, proven."""
    found = diagnose(trial, judge(trial))
    assert found is not None and not any(label == "not tried" for label, _ in found.evidence), found
    causes = [cause for cause in found.causes if cause.kind == "another tensor"]
    assert len(causes) < 2
    return causes[0] if causes else None


def says(cause: Cause | None, **details: Any) -> None:
    """Its details, which are those of a right gradient of this step where they are not given."""
    assert cause is not None
    usual = {"of": "gradient", "back": 0, "change": "", "factor": 1.0, "added": False, "step": 1}
    known = {key: value for key, value in cause.details if key in {*usual, *details}}
    assert known == usual | details


# ---- trained in earnest


class Otherwise:
    """Gradients that are changed from a step on, by those of the step before."""

    def __init__(self, change: Change, since: int) -> None:
        self.change, self.since, self.before = change, since, Arrays()

    def __call__(self, step: int, own: Arrays) -> Arrays:
        changed = own | self.change(own, self.before) if step >= self.since else own
        self.before = own
        return changed


@pytest.mark.slow("many of a kind; the first run in the same way", after=6)
@pytest.mark.parametrize(
    ("change", "since", "details"),
    [
        (lambda own, before: {W1: before[W1], NORM: before[NORM]}, 2, {"back": 1, "parameters": (W1, NORM)}),
        (lambda own, before: before, 2, {"back": 1, "parameters": tuple(MODEL.parameter_shapes())}),
        (lambda own, before: {W1: own[W2]}, 1, {"source": W2, "parameters": (W1,), "ranks": (0, 1)}),
        (lambda own, before: {W1: own[W3], W3: own[W1]}, 1, {"source": W3, "parameters": (W1, W3)}),
        (lambda own, before: {W1: own[W3]}, 3, {"source": W3}),
        (lambda own, before: {W1: -0.25 * own[W3]}, 1, {"source": W3, "factor": -0.25}),
        (lambda own, before: {W1: own[W1] + own[W3]}, 1, {"source": W3, "added": True}),
        (lambda own, before: {W1: own[W1] + 0.5 * before[W1]}, 2, {"back": 1, "factor": 0.5, "added": True}),
        (lambda own, before: {W1: halves(own[W1])}, 1, {"source": W1, "another rank's": True}),
        (lambda own, before: {fqn: halves(value) for fqn, value in own.items()}, 1, {"another rank's": True}),
        (lambda own, before: {W1: np.roll(own[W1], 1, axis=0)}, 1, {"change": "rows moved by 1"}),
        (lambda own, before: {W1: np.roll(own[W1], 2, axis=1)}, 2, {"change": "columns moved by 2"}),
        (lambda own, before: {NORM: np.roll(own[NORM], 1)}, 1, {"change": "entries moved by 1"}),
        (lambda own, before: {WQ: heads(own[WQ])}, 1, {"change": "rows in another order"}),
        (lambda own, before: {WQ: own[WQ].T}, 1, {"change": "transposed"}),
        (lambda own, before: {W1: to_bfloat16(own[W1])}, 1, {"change": "rounded to bfloat16"}),
        (lambda own, before: {f: to_bfloat16(g) for f, g in own.items()}, 1, {"change": "rounded to bfloat16"}),
        (lambda own, before: {W1: own[W1].astype(np.float16)}, 1, {"change": "rounded to float16"}),
        (lambda own, before: {W1: rows(own[W1], 0)}, 1, {"factor": 0.0, "ranks": (0,)}),
        (lambda own, before: {W1: rows(own[W1], 3)}, 1, {"factor": 3.0, "ranks": (0,)}),
        (lambda own, before: {WQ: 2 * own[WQ], W2: before[W2]}, 2, {"back": 1, "parameters": (W2,)}),
    ],
)
@pytest.mark.parametrize("rounding", [0.0, 1e-15])
def test_what_a_gradient_is_explains_all_numbers(
    ran: Ran, change: Change, since: int, details: dict[str, Any], rounding: float
) -> None:
    """rounding: by which ranks, which add up in another order, are off before that."""
    blur = np.random.default_rng(1)

    def off(own: Arrays) -> Arrays:
        return {fqn: value * (1 + rounding * blur.uniform(-1, 1, value.shape)) for fqn, value in own.items()}

    def as_seen(own: Arrays, before: Arrays) -> Arrays:
        return {fqn: np.asarray(value, np.float64) for fqn, value in change(off(own), off(before)).items()}

    trial = ran(case_of(), gradients=Otherwise(as_seen, since))
    found = diagnose(trial, judge(trial))
    assert found is not None and found.kinds == ("another tensor",)
    says(found.causes[0], step=since, **details)
    assert {"loss", "gradients"} <= {*found.causes[0].explains} or since == RECIPE.steps


def test_gradients_that_stay_those_of_one_step_are_told_from_those_that_come_a_step_late(ran: Ran) -> None:
    kept: Arrays = {}

    def change(step: int, own: Arrays) -> Arrays:
        kept.setdefault(W1, own[W1])
        return own | kept

    trial = ran(case_of(), gradients=change)
    says(named(trial), step=2, back=1, stay=True)


def test_weights_in_place_of_a_gradient_are_those_that_the_step_begins_with(ran: Ran) -> None:
    held = [reference(case_of()).weights]
    trial = ran(
        case_of(),
        gradients=lambda step, own: own | {W1: held[-1][W1]},
        left=lambda step, parameters: (held.append(parameters), parameters)[1],
    )
    says(named(trial), of="weight", source=W1)


def other_activation(model: nn.Module, step: int) -> None:
    gate = model.get_submodule("layers.0.feed_forward.w1")
    replace_forward(gate, lambda before, *args, **named: before(*args, **named).tanh())


def test_another_model_has_gradients_that_are_nobodys(ran: Ran) -> None:
    assert named(ran(case_of(), altered=other_activation)) is None


# ---- some ranks alone: replicas train apart. In closed form

OfRank = Callable[[int, Arrays], Mapping[str, np.ndarray]]


def seen_by(layout: str, change: OfRank, *, noise: float = 0.0) -> Trial:
    """noise: of a recipe that reduces in bfloat16, in which all gradients are off."""
    features = {"reduce_dtype": "bfloat16"} if noise else {}
    trial, draw = trial_of(tiny_case(layout, RECIPE, model=MODEL, **features)), np.random.default_rng(7)
    right = trial.reference.steps[0].gradients
    off = {fqn: 1 + noise * draw.uniform(-1, 1, value.shape) for fqn, value in right.items()}
    if noise:
        sizes = {"loss": 1e-4, "grad_norm": 1e-2, "gradient": noise, "distance": noise, "fit": noise}
        assert trial.golden is not None
        of_case = {trial.case.noise_key: noise_of(trial.case, **sizes)}
        trial = replace(trial, golden=replace(trial.golden, noise=of_case))
    return with_step_1_gradients(trial, lambda rank, fqn: (right | change(rank, right))[fqn] * off[fqn])


ONE_RANK: list[tuple[str, OfRank, dict[str, Any]]] = [
    ("ddp_2", lambda rank, own: {W1: own[W3]} if rank else {}, {"source": W3, "ranks": (1,)}),
    ("ddp_2", lambda rank, own: {W1: own[W1].T} if rank else {}, {"change": "transposed", "ranks": (1,)}),
    ("ddp_2", lambda rank, own: {W1: np.roll(own[W1], 1, 0)} if rank else {}, {"change": "rows moved by 1"}),
    ("ddp_2", lambda rank, own: {W1: rows(own[W1], 0)} if rank else {}, {"factor": 0.0, "ranks": (1,)}),
    ("ddp_2", lambda rank, own: {W1: own[W3] if rank else own[W2]}, {"source": W2, "ranks": (0,)}),
    ("hsdp_2x2", lambda rank, own: {W1: own[W3]} if rank == 3 else {}, {"source": W3, "ranks": (3,)}),
    ("hsdp_2x2", lambda rank, own: {W1: own[W1].T} if rank > 1 else {}, {"change": "transposed", "ranks": (2, 3)}),
    ("tp_2", lambda rank, own: {W2: np.roll(own[W2], 8, 1)}, {"another rank's": True}),
    ("fsdp_2", lambda rank, own: {W1: own[W1] + halves(own[W1])}, {"added": True, "another rank's": True}),
]


@pytest.mark.slow("the engine tries its hypotheses on each; the first runs it in the same way", after=1)
@pytest.mark.parametrize("noise", [0.0, 3e-3])
@pytest.mark.parametrize(("layout", "change", "details"), ONE_RANK)
def test_a_tensor_that_some_ranks_have_is_named_with_them_or_in_noise_located(
    layout: str, change: OfRank, details: dict[str, Any], noise: float
) -> None:
    cause = named(seen_by(layout, change, noise=noise))
    if cause is not None or not noise:
        says(cause, **details)


NOBODYS: list[tuple[str, OfRank]] = [
    ("ddp_2", lambda rank, own: {W1: random(own[W1].shape)}),
    ("ddp_2", lambda rank, own: {fqn: random(value.shape) for fqn, value in own.items()}),
    ("fsdp_2", lambda rank, own: {W1: np.full_like(own[W1], 0.01)}),
    ("fsdp_2", lambda rank, own: {W1: 1e-300 * random(own[W1].shape)}),
    ("fsdp_2", lambda rank, own: {W1: abs(own[W1])}),
    ("fsdp_2", lambda rank, own: {W1: np.sort(own[W1].ravel()).reshape(own[W1].shape)}),
    ("fsdp_2", lambda rank, own: {W1: own[W1] + np.diag([0, 0, 0, 1.0] + [0] * 12)}),
    ("fsdp_2", lambda rank, own: {W1: own[W1] + own[W2] + own[W3]}),
    ("fsdp_2", lambda rank, own: {W1: own[W3], W2: random(own[W2].shape)}),
    ("fsdp_2", lambda rank, own: {W1: np.full_like(own[W1], np.nan)}),
    ("tp_2", lambda rank, own: {NORM: own[LAST_NORM]} if rank else {}),
]


@pytest.mark.slow("the engine tries its hypotheses on each; the first runs it in the same way", after=3)
@pytest.mark.parametrize("noise", [0.0, 3e-3])
@pytest.mark.parametrize(("layout", "change"), NOBODYS)
def test_what_is_nobodys_or_not_on_all_that_hold_it_is_not_named(layout: str, change: OfRank, noise: float) -> None:
    assert named(seen_by(layout, change, noise=noise)) is None


def test_a_bit_that_differs_fails_no_check() -> None:
    trial = seen_by("fsdp_2", lambda rank, own: {W1: np.nextafter(own[W1], 1)})
    assert diagnose(trial, judge(trial)) is None


# ---- one tensor

SOURCE, OTHER = TensorOnRecord("gradient", W2, ()), TensorOnRecord("gradient", W3, ())


def test_of_two_that_are_equal_a_tensor_is_neither() -> None:
    right, theirs = random((4, 4)), np.cos(random((4, 4)))
    one = find_match(2 * theirs, right, [(SOURCE, theirs)])
    assert one is not None and (one.source, one.factor) == (SOURCE, 2.0)
    assert find_match(2 * theirs, right, [(SOURCE, theirs), (OTHER, theirs)]) is None
    assert find_match(right + theirs, right, [(SOURCE, theirs), (OTHER, theirs)]) is None


@pytest.mark.parametrize(
    ("size", "close", "known"), [(4, 1e-9, True), (3, 1e-9, False), (12, 1e-2, False), (16, 1e-2, True)]
)
def test_the_less_closely_a_tensor_is_known_the_larger_it_has_to_be(size: int, close: float, known: bool) -> None:
    theirs = random((size,))
    assert (find_match(theirs, np.cos(theirs), [(SOURCE, theirs)], close) is not None) is known


def test_the_type_in_which_all_is_computed_is_no_rounding() -> None:
    right, theirs = random((4, 4)), np.cos(random((4, 4)))
    of_rank = theirs.astype(np.float32)
    assert [name for name, _ in find_transforms(of_rank, theirs)] == ["rounded to float32"]
    assert [*find_transforms(of_rank, theirs, close=1e-6)] == []
    one = find_match(of_rank, right, [(SOURCE, theirs)], close=1e-6)
    assert one is not None and (one.source, one.change, one.factor) == (SOURCE, "", 1.0)


@pytest.mark.parametrize("value", [np.zeros((4, 4)), np.ones((4, 4)), np.full((4, 4), np.inf), np.empty((0, 4))])
def test_constants_and_what_is_not_finite_are_nobodys(value: np.ndarray) -> None:
    assert find_match(value, random(value.shape), [(SOURCE, value)]) is None


def test_a_right_run_has_no_such_cause() -> None:
    assert diagnose(DDP_2, judge(DDP_2)) is None
