"""A cause of two recordings is named where assuming it makes the first wrong check pass; else what is seen, else the place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from literal_numbers import FQNS, RIGHT, STEPS, Change, numbers, of, rank, sums_of

from harness.core.judge.result import Cause, Diagnosis
from harness.core.report.cause_text import diagnosis_line
from harness.recording import RING
from harness.recording.judged.judge_same_training import CHECKS, compare_numbers
from harness.recording.judged.judge_sketched import Key, Numbers, Whole, sum_sketches
from harness.recording.judged.same_training import count_resumed_steps
from harness.recording.judged.sketched import diagnose
from harness.recording.sketches import GRADIENT, WEIGHTS, RankSketches

AVERAGE, SQUARE = "exp_avg", "exp_avg_sq"


def diagnosis_of(baseline: Numbers, candidate: Numbers) -> Diagnosis:
    found = diagnose(baseline, candidate, compare_numbers(baseline, candidate))
    assert found is not None
    return found


def labels(found: Diagnosis) -> list[str]:
    return [label for label, _ in found.evidence]


def with_sketches(recording: Numbers, sketches: Mapping[Key, np.ndarray]) -> Numbers:
    changed = {key: Whole(sums, float(sums @ sums)) for key, sums in sketches.items()}
    return replace(recording, whole={**recording.whole, **changed})


# ---- what is assumed is judged


def test_what_is_proven_says_what_was_judged_and_what_is_seen_says_nothing_of_it() -> None:
    proven = diagnosis_of(RIGHT, numbers(of(GRADIENT, 0.5)))
    assert (proven.kinds, labels(proven)) == (("gradients scaled",), ["explains"])
    assert proven.causes[0].explains == ("gradients",)
    seen = diagnosis_of(RIGHT, numbers(of(GRADIENT, 0.0)))
    assert (diagnosis_line(seen), labels(seen)) == ("gradients are zero in every parameter", [])


def test_a_factor_is_no_cause_where_a_parameter_has_no_gradient_beside_it() -> None:
    half = numbers(of(GRADIENT, 0.5))
    lost = replace(half, whole={key: one for key, one in half.whole.items() if key != (1, GRADIENT, "output")})
    assert diagnosis_of(RIGHT, lost).kinds == ("not explained",)


def test_two_that_explain_as_much_stand_side_by_side() -> None:
    key, other = (1, GRADIENT, "layers.1.up"), (1, GRADIENT, "layers.0.up")
    baseline = with_sketches(RIGHT, {key: 2 * RIGHT.whole[other].sums})
    found = diagnosis_of(baseline, with_sketches(baseline, {key: RIGHT.whole[other].sums}))
    assert (found.kinds, labels(found)) == (("gradients scaled",), ["explains", "or else"])
    (also,) = [value for label, value in found.evidence if label == "or else"]
    assert isinstance(also, Cause) and also.kind == "another tensor"


@pytest.mark.parametrize("kept", [0.0, 1e-5])
def test_a_gradient_that_is_hardly_there_is_not_that_of_the_step_before(kept: float) -> None:
    found = diagnosis_of(RIGHT, numbers(of(GRADIENT, kept, "output", since=2)))
    assert (found.kinds, labels(found)) == (("gradients scaled",), ["explains"])
    assert dict(found.causes[0].details)["factor"] == pytest.approx(kept)


def test_both_numbers_are_told_where_gradients_of_the_step_before_stand_beside_a_part_of_the_right_ones() -> None:
    def kept(step: int, kind: str, fqn: str, sums: np.ndarray) -> np.ndarray:
        return 0.5 * sums + 0.4 * sums_of(step - 1, kind, fqn) if kind == GRADIENT and step > 1 else sums

    text = diagnosis_line(diagnosis_of(RIGHT, numbers(kept)))
    assert text.startswith(
        "gradients are not zeroed: those of step 2 are 0.5 times the right ones and 0.4 times step 1's"
    )


# ---- ranks that have copies of their own


def own(sign: float, size: float = 1.0, factor: float = 1.0) -> Change:
    def change(step: int, kind: str, fqn: str, sums: np.ndarray) -> np.ndarray:
        return factor * (sums + sign * size * sums_of(step + 7, kind, fqn)) if kind == GRADIENT else sums

    return change


@pytest.mark.parametrize(
    ("factor", "text"),
    [
        (1.0, "their mean is the first recording's"),
        (0.5, "their sum is the first recording's"),
        (0.7, "their mean is 0.7 times the first recording's"),
    ],
)
def test_what_the_mean_of_own_gradients_is_stands_beside_them(factor: float, text: str) -> None:
    found = diagnosis_of(RIGHT, sum_sketches([rank(0, 2, own(1.0, 1.0, factor)), rank(1, 2, own(-1.0, 1.0, factor))]))
    assert (found.kinds, found.causes[0].hint) == (("gradients not reduced",), text)


def test_copies_that_differ_by_less_than_the_bound_are_located() -> None:
    found = diagnosis_of(RIGHT, sum_sketches([rank(0, 2, own(1.0, 1e-4)), rank(1, 2, own(-1.0, 1e-4))]))
    assert found.kinds == ("not explained",) and "ranks [0,1] have different ones" in found.causes[0].hint


# ---- what an optimizer makes of gradients: averages follow from them, and so do averages of squares


def clipped(factor: float, of_squares: float) -> Numbers:
    """AdamW's averages of step 1, of gradients that clipping multiplied."""
    known: dict[Key, np.ndarray] = {}
    for fqn in FQNS:
        known[1, AVERAGE, fqn] = 0.1 * factor * sums_of(1, GRADIENT, fqn)
        known[1, SQUARE, fqn] = of_squares**2 * np.abs(sums_of(1, GRADIENT, fqn))
    return with_sketches(numbers(optimizers=("AdamW(betas (0.9, 0.95))",)), known)


def test_squares_have_to_follow_from_a_norm_that_gradients_are_said_to_be_clipped_by() -> None:
    assert diagnosis_of(clipped(0.4, 0.4), clipped(0.3, 0.3)).kinds == ("clipped by another norm",)
    assert diagnosis_of(clipped(0.4, 0.4), clipped(0.3, 0.4)).kinds == ("not explained",)


def resumed(betas: str, lost: float = 1.0) -> tuple[Numbers, Numbers]:
    """Two recordings of which the second goes on from step 1 of the first one, without what the optimizer had. lost: the part
    of the squares that is lost."""
    settings = (f"AdamW({betas})",)
    of_first: dict[Key, np.ndarray] = {}
    of_second: dict[Key, np.ndarray] = {}
    for fqn in FQNS:
        earlier, gradient = sums_of(1, GRADIENT, fqn), sums_of(2, GRADIENT, fqn)
        of_first |= {(1, AVERAGE, fqn): 0.1 * earlier, (1, SQUARE, fqn): 0.05 * np.abs(earlier)}
        of_second[1, AVERAGE, fqn] = 0.1 * gradient
        of_second[1, SQUARE, fqn] = 0.05 * np.abs(gradient) + 0.95 * (1 - lost) * 0.05 * np.abs(earlier)
        of_first[2, AVERAGE, fqn] = 0.1 * gradient + 0.9 * 0.1 * earlier
        of_first[2, SQUARE, fqn] = 0.05 * np.abs(gradient) + 0.95 * 0.05 * np.abs(earlier)
    baseline = with_sketches(numbers(optimizers=settings), of_first)
    second = with_sketches(sum_sketches([late()]), of_second)
    return count_resumed_steps(baseline, replace(second, optimizers=settings), 1)


def late() -> RankSketches:
    """What a job leaves that went on after step 1: steps 2 and 3, which it counts from 1."""
    whole = rank(passes={step: (tuple(10 * (step + 1) + row for row in range(4)),) for step in STEPS[:-1]})
    kept = [replace(one, step=one.step - 1) for one in whole.sketches if one.step]
    return replace(whole, sketches=tuple(one for one in kept if one.step or one.kind == "weights"))


def test_a_state_that_is_lost_is_proven_where_the_settings_say_how_much_of_it_remains() -> None:
    proven = diagnosis_of(*resumed("betas (0.9, 0.95)"))
    assert (proven.kinds, labels(proven)) == (("optimizer state lost",), ["explains"])
    for seen in (resumed("a schedule of betas"), resumed("betas (0.9, 0.95)", lost=0.5)):
        stated = diagnosis_of(*seen)
        assert (stated.kinds, labels(stated)) == (("optimizer state lost",), [])


def test_a_fact_about_another_check_than_the_first_wrong_one_is_no_cause() -> None:
    """Settings differ, and so do weights that the job went on from: the settings are first, and they are what is named."""
    of_loaded = {(1, WEIGHTS, fqn): RIGHT.whole[0, WEIGHTS, fqn].sums for fqn in FQNS}
    other_betas = replace(sum_sketches([late()]), optimizers=("AdamW(betas (0.9, 0.999))",))
    baseline, candidate = count_resumed_steps(RIGHT, other_betas, 1)
    found = diagnosis_of(baseline, with_sketches(candidate, of_loaded))
    assert (found.kinds, found.causes[0].explains) == (("beta2",), ("recipe",))


def test_causes_may_name_each_check_of_two_recordings() -> None:
    assert RING.comparing == CHECKS
