"""What differs between two recordings, as far as sketches show it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from literal_numbers import ALIKE, FQNS, RIGHT, STEPS, first_cause, numbers, rank, sums_of, told

from harness.recording.judged.judge_same_training import compare_numbers
from harness.recording.judged.judge_sketched import Numbers, sum_sketches
from harness.recording.sketches import AFTER_PASS, BUCKETS, BY_ROWS, GRADIENT, WEIGHTS, RankSketches, Sketch


def changed(of_kind: str, change: Callable[[int, str], np.ndarray]) -> Numbers:
    return numbers(lambda step, kind, fqn, sums: change(step, fqn) if kind == of_kind and step else sums)


def gradient_of(step: int, fqn: str) -> np.ndarray:
    return sums_of(step, GRADIENT, fqn)


@pytest.mark.parametrize(
    ("change", "kind", "details"),
    [
        (lambda step, fqn: gradient_of(step, fqn) / (2 + 2 * (fqn in ALIKE)), "gradients scaled", {"factors": (0.25, 0.5)}),
        (lambda step, fqn: np.full(BUCKETS, np.nan), "not finite", {"step": 1}),
        (lambda step, fqn: gradient_of(step, ALIKE.get(fqn, fqn)), "another tensor", {"parameters": (*ALIKE,)}),
    ],
)  # fmt: skip
def test_what_wrong_gradients_are(change: Callable[[int, str], np.ndarray], kind: str, details: dict[str, Any]) -> None:
    found, data = told(changed(GRADIENT, change))
    assert (found, {name: data[name] for name in details}) == (kind, details)


def test_rounding_of_a_float64_job_is_told_by_its_size() -> None:
    one = numbers(dtypes=dict.fromkeys(FQNS, "float64"))
    drawn = np.random.default_rng(5)
    other = changed(GRADIENT, lambda step, fqn: gradient_of(step, fqn) * (1 + 1e-8 * drawn.standard_normal(BUCKETS)))
    cause = first_cause(one, other)
    assert cause is not None and cause.kind == "rounded"


@pytest.mark.parametrize(("of_kind", "kind"), [(WEIGHTS, "weight decay"), ("exp_avg", "weight decay in the gradients")])
def test_a_part_of_the_weights_in_what_a_step_makes_is_weight_decay(of_kind: str, kind: str) -> None:
    def decayed(step: int, fqn: str) -> np.ndarray:
        return sums_of(step, of_kind, fqn) + (-0.01 if of_kind == WEIGHTS else 0.01) * sums_of(step - 1, WEIGHTS, fqn)

    found, details = told(changed(of_kind, decayed))
    assert (found, abs(details["times"])) == (kind, pytest.approx(0.01))


def test_an_optimizer_that_moves_nothing_is_not_stepped() -> None:
    assert told(changed(WEIGHTS, lambda step, fqn: sums_of(0, WEIGHTS, fqn)))[0] == "not stepped"


PARTS = [{fqn: 0.5 * sums_of(20 + number, GRADIENT, fqn) for fqn in FQNS} for number in range(4)]
"""What each pass of the first recording adds to the gradient of step 1."""


def passes_of(parts: list[dict[str, np.ndarray]]) -> Numbers:
    """One process that accumulates over four passes of a sample each."""
    one, found = rank(), list[Sketch]()
    for sketch in one.sketches:
        if (sketch.step, sketch.kind) == (1, GRADIENT):
            sums = np.cumsum([part[sketch.fqn] for part in parts], axis=0)
            found += [replace(sketch, kind=f"{AFTER_PASS}{number}", sums=of) for number, of in enumerate(sums[:-1], 1)]
            sketch = replace(sketch, sums=sums[-1])
        found.append(sketch)
    return sum_sketches([replace(one, sketches=tuple(found), passes={step: ROWS[step] for step in STEPS})])


def reduced_of(weights: Sequence[float], parts: list[dict[str, np.ndarray]], ranks: int) -> Numbers:
    """Ranks that are fed equal shares of the samples, one a microbatch, and have the reduced gradient."""

    def of(number: int) -> RankSketches:
        whole, share = rank(number, ranks), 4 // ranks
        sums = {fqn: sum(w * part[fqn] for w, part in zip(weights, parts, strict=True)) for fqn in FQNS}
        own = [replace(s, sums=sums[s.fqn]) if (s.step, s.kind) == (1, GRADIENT) else s for s in whole.sketches]
        fed = {step: rows[share * number : share * (number + 1)] for step, rows in ROWS.items()}
        return replace(whole, sketches=tuple(own), passes=fed)

    return sum_sketches([of(number) for number in range(ranks)])


ROWS = {step: tuple((10 * step + row,) for row in range(4)) for step in STEPS}


def test_a_rank_without_labels_is_one_of_those_that_a_mean_is_taken_of() -> None:
    empty = {fqn: np.zeros(BUCKETS) for fqn in FQNS}
    one, both = passes_of([*PARTS[:3], empty]), reduced_of((0.6, 0.6, 1.5, 9.0), [*PARTS[:3], empty], ranks=4)
    cause = first_cause(one, both)
    assert cause is not None and (cause.kind, dict(cause.details)["units"]) == ("averaged locally", "rank")


@pytest.mark.parametrize(
    ("weights", "kind", "units"),
    [
        ((0, 1, 0, 1), "unequal contributions", "microbatch"),
        ((0, 0, 1, 1), "unequal contributions", "rank"),
        ((0.75, 0.75, 1.5, 1.5), "averaged locally", "rank"),
        ((2, 2, 1, 1), "unequal contributions", "rank"),
        ((1, 0.8, 1.2, 1), "unequal contributions", "microbatch of each rank"),
    ],
)
def test_passes_that_count_unequally_are_told_by_whose_they_are(weights: list[float], kind: str, units: str) -> None:
    one, both = passes_of(PARTS), reduced_of(weights, PARTS, ranks=2)
    cause = first_cause(one, both)
    assert cause is not None
    assert (cause.kind, dict(cause.details)["units"]) == (kind, units)


AVERAGED = "AdamW(betas (0.9, 0.95))"


def clipped(by: dict[str, float]) -> Numbers:
    """AdamW's averages of gradients, which clipping multiplies by these numbers, by the beginning of names."""

    def change(step: int, kind: str, fqn: str, sums: np.ndarray) -> np.ndarray:
        factor = next(of for name, of in by.items() if fqn.startswith(name))
        return 0.1 * factor * sums_of(1, GRADIENT, fqn) if (step, kind) == (1, "exp_avg") else sums

    return numbers(change, optimizers=(AVERAGED,))


@pytest.mark.parametrize(
    ("by", "kind", "parameters"),
    [
        ({"": 0.3}, "clipped by another norm", 4),
        ({"": 1.0}, "clipping left out", 4),
        ({"layers.1": 1.0, "": 0.4}, "clipping left out", 1),
        ({"layers.1": 0.2, "output": 0.3, "": 0.4}, "clipped by another norm", 2),
        ({"": 20.0}, "clipping enlarges gradients", 4),
    ],
)
def test_averages_of_gradients_show_what_clipping_did(by: dict[str, float], kind: str, parameters: int) -> None:
    one, other = clipped({"": 0.4}), clipped(by)
    cause = first_cause(one, other)
    assert cause is not None
    details = dict(cause.details)
    assert (cause.kind, details["expected"], len(details["factors"])) == (kind, pytest.approx(0.4), parameters)


@pytest.mark.parametrize(
    ("gone", "kind"), [(("output",), "incomplete"), (("layers.1.up",), "layers lost"), (("layers.0.up",), "incomplete")]
)
def test_parameters_that_no_rank_trains_are_the_cause(gone: tuple[str, ...], kind: str) -> None:
    whole = numbers(lambda step, of, fqn, sums: 0.5 * sums if of == GRADIENT else sums)
    kept = {key: one for key, one in whole.whole.items() if key[2] not in gone}
    other = replace(whole, whole=kept, shapes={fqn: of for fqn, of in whole.shapes.items() if fqn not in gone})
    cause = first_cause(RIGHT, other)
    assert cause is not None and cause.kind == kind
    missing = replace(other, world=2)
    cause = first_cause(RIGHT, missing)
    assert cause is not None and cause.kind == "gradients scaled"


def test_a_parameter_that_is_trained_besides_explains_what_nothing_else_does() -> None:
    other = changed(GRADIENT, lambda step, fqn: gradient_of(step, fqn) + (step > 1) * gradient_of(step + 5, fqn))
    frozen = sum_sketches(
        [
            replace(
                one := rank(),
                shapes={fqn: one.shapes[fqn] for fqn in FQNS[1:]},
                sketches=tuple(sketch for sketch in one.sketches if sketch.fqn != FQNS[0]),
            )
        ]
    )
    cause = first_cause(frozen, other)
    assert cause is not None
    assert (cause.kind, dict(cause.details)["parameters"]) == ("trained besides", FQNS[:1])
    assert told(other)[0] == "not explained"


def test_parameters_that_no_optimizer_was_seen_to_step_on_are_told_where_the_second_step_is_wrong() -> None:
    other = changed(GRADIENT, lambda step, fqn: gradient_of(step, fqn) + (step > 1) * gradient_of(step + 5, fqn))
    unseen = replace(other, whole={key: one for key, one in other.whole.items() if key[1] != WEIGHTS or not key[0]})
    cause = first_cause(RIGHT, unseen)
    assert cause is not None and "no optimizer" in cause.hint


def test_blocks_of_rows_show_which_rows_of_a_gradient_are_wrong() -> None:
    def by_rows(times: float) -> Numbers:
        one, found = rank(), list[Sketch]()
        for sketch in one.sketches:
            parts = {
                at: (times if at == "4:8" and sketch.fqn == "output" else 1) * 0.5 * sketch.sums
                for at in ("0:4", "4:8")
            }
            if sketch.kind == GRADIENT:
                found += [
                    replace(sketch, kind=f"{BY_ROWS}{at}", slice_text=at, sums=sums) for at, sums in parts.items()
                ]
                sketch = replace(sketch, sums=sum(parts.values()))
            found.append(sketch)
        return sum_sketches([replace(one, sketches=tuple(found))])

    one, other = by_rows(1), by_rows(3)
    (result,) = (result for result in compare_numbers(one, other).results if result.check == "gradients")
    assert {finding.note.partition(",")[0] for finding in result.findings} == {"in rows 4:8"}


def test_later_stages_of_a_pipeline_say_nothing_of_samples() -> None:
    late = {step: (tuple(10 * (step + 1) + row for row in range(4)),) for step in STEPS}
    hidden = {step: ((900 + step,),) for step in STEPS}
    both = sum_sketches([rank(0, 2, passes=late, tokens=dict.fromkeys(STEPS, 8)), rank(1, 2, passes=hidden, tokens={})])
    cause = first_cause(RIGHT, both)
    assert cause is not None and (cause.kind, dict(cause.details)["of_step"]) == ("data position", 2)
