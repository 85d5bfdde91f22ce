"""Two recordings of one training, as numbers: which check fails, where, and what the cause is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from literal_numbers import FQNS, RIGHT, SHAPES, STEPS, Change, first_cause, numbers, of, rank, sums_of, told

from harness.core.judge.result import Result, Verdict
from harness.recording.judged.judge_same_training import (
    CHECKS,
    SameTraining,
    compare_numbers,
    why_no_common,
    why_no_noise,
)
from harness.recording.judged.judge_sketched import Key, Numbers, sum_sketches
from harness.recording.judged.same_training import count_resumed_steps
from harness.recording.pages.same_training import same_training_text
from harness.recording.sketches import BUCKETS, GRADIENT, WEIGHTS, RankSketches, load_sketches, save_sketches


def verdicts(other: Numbers, noise: Numbers | None = None) -> dict[str, Verdict]:
    return {result.check: result.verdict for result in compare_numbers(RIGHT, other, noise).results}


def test_equal_numbers_pass_every_check_that_has_an_object() -> None:
    found = verdicts(numbers())
    assert [*found] == [*CHECKS]
    assert {check for check, verdict in found.items() if verdict is not Verdict.PASS} == {"grad_norm"}
    assert found["grad_norm"] is Verdict.NOT_APPLICABLE
    assert first_cause(RIGHT, RIGHT) is None


PADDED = numbers(
    passes={step: (tuple(1000 + 10 * step + row for row in range(4)),) for step in STEPS},
    bare={1000 + 10 * step + row: 10 * step + row for step in STEPS for row in range(4)},
    tokens=dict.fromkeys(STEPS, 8),
)
TWICE = numbers(
    passes={step: ((10 * step, 10 * step, 10 * step + 1, 10 * step + 1),) for step in STEPS},
    tokens=dict.fromkeys(STEPS, 8),
)
UNEVEN = numbers(
    passes={step: (tuple(10 * step + n for n in (0, 0, 1, 1, 1)),) for step in STEPS}, tokens=dict.fromkeys(STEPS, 8)
)
ONE_OF_FOUR = numbers(passes={step: ((10 * step,),) for step in STEPS}, tokens=dict.fromkeys(STEPS, 8))
ONE_TWICE = numbers(passes={step: ((10 * step,), (10 * step,)) for step in STEPS}, tokens=dict.fromkeys(STEPS, 8))
NEXT = {step: (tuple(10 * (step + 1) + row for row in range(4)),) for step in STEPS}
OF_NEXT_STEP = numbers(passes=NEXT, tokens=dict.fromkeys(STEPS, 8))


def test_a_job_of_which_no_step_of_an_optimizer_was_seen_has_no_other_recipe() -> None:
    assert verdicts(numbers(optimizers=()))["recipe"] is Verdict.UNKNOWN


def test_ranks_that_differ_in_a_model_whose_names_are_all_others_are_not_judged_and_the_first_line_counts_none() -> (
    None
):
    def own(step: int, kind: str, fqn: str, sums: np.ndarray) -> np.ndarray:
        return sums + sums_of(step + 7, kind, fqn) if step and kind in (GRADIENT, WEIGHTS) else sums

    def renamed(of: RankSketches, names: Mapping[str, str]) -> RankSketches:
        sketches = tuple(replace(one, fqn=names.get(one.fqn, one.fqn)) for one in of.sketches)
        told = {
            what: {names.get(fqn, fqn): value for fqn, value in getattr(of, what).items()}
            for what in ("shapes", "dtypes")
        }
        return replace(of, sketches=sketches, plain=tuple(names.get(fqn, fqn) for fqn in of.plain), **told)

    every = {fqn: f"own.{fqn}" for fqn in FQNS}
    pair = [rank(0, 2, passes={}), rank(1, 2, own)]
    other = sum_sketches([renamed(one, every) for one in pair])
    found = compare_numbers(RIGHT, other)
    judged = {result.check: result.verdict for result in found.results}
    assert {check for check, verdict in judged.items() if verdict is Verdict.PASS} == {"samples", "recipe"}
    assert (found.verdict, first_cause(RIGHT, other)) == (Verdict.UNKNOWN, None)
    assert not why_no_common(RIGHT, numbers())
    whole = SameTraining(Path("a"), Path("b"), found, None, len(FQNS), 0, len(STEPS), why_no_common(RIGHT, other))
    assert same_training_text(whole).splitlines()[0] == "UNKNOWN    b against a: 3 steps, 0 of 4 parameters"
    of_one = sum_sketches([renamed(one, {"output": "own.output"}) for one in pair])
    assert (
        compare_numbers(RIGHT, of_one).verdict is Verdict.FAIL
    )  # ranks differ in parameters that have their names in both


def test_another_eps_is_a_setting_that_is_named() -> None:
    one, other = (
        numbers(optimizers=(f"AdamW(betas (0.9, 0.95), eps {eps}, amsgrad False)",)) for eps in (1e-08, 1e-05)
    )
    cause = first_cause(one, other)
    assert cause is not None and cause.finding is not None
    assert (cause.kind, cause.finding.expected, cause.finding.observed) == ("eps", "1e-08", "1e-05")


def test_a_scale_of_the_loss_is_told_before_the_samples_of_steps_that_it_left_out() -> None:
    one = numbers(scales=dict.fromkeys(STEPS, 8.0))
    other = replace(OF_NEXT_STEP, scales={1: (64.0,), 2: (8.0,)})
    cause = first_cause(one, other)
    assert cause is not None and cause.explains == ("recipe",)
    assert (cause.kind, dict(cause.details)) == ("another recipe", {"step": 1, "scales": (64.0,)})
    apart = replace(one, scales={**one.scales, 2: (4.0, 8.0)})
    told_apart = first_cause(one, apart)
    assert told_apart is not None and dict(told_apart.details) == {"step": 2, "scales": (4.0, 8.0)}
    assert first_cause(one, replace(one, scales={})) is None


def test_rows_that_are_padded_in_one_recording_alone_are_the_same() -> None:
    assert verdicts(PADDED)["samples"] is Verdict.PASS
    assert verdicts(replace(PADDED, bare={}))["samples"] is Verdict.FAIL


WRONG_FROM_2 = of(GRADIENT, 0.5, since=2)


def of_peers(first: tuple[int, ...], second: tuple[int, ...], change: Change = WRONG_FROM_2) -> Numbers:
    """Two tp ranks that are fed these rows in step 2, and all rows of the other steps."""
    every = {step: (tuple(10 * step + row for row in range(4)),) for step in STEPS}
    fed = [{**every, 2: (tuple(20 + row for row in rows),)} for rows in (first, second)]
    tokens = dict.fromkeys(STEPS, 7)
    return sum_sketches([rank(at, 2, change, passes=of, tokens=tokens, tp=(0, 1)) for at, of in enumerate(fed)])


def test_tp_peers_that_are_fed_different_rows_of_the_batch_are_a_finding_of_samples() -> None:
    kind, details = told(of_peers((0, 1), (2, 3)))
    assert (kind, details["check"], details["ranks"], details["step"]) == ("peers differ", "samples", (0, 1), 2)
    result = compare_numbers(RIGHT, of_peers((0, 1), (2, 3))).results[1]
    assert [(one.ranks, one.axis, one.step) for one in result.findings if one.axis] == [((0, 1), "tp", 2)]


@pytest.mark.parametrize(
    "other",
    [
        of_peers((0, 1), (2, 3), of(GRADIENT, 1.0)),  # gradients are right: the model exchanges the rows
        of_peers((0, 1), (2, 3), of(GRADIENT, 0.5)),  # wrong from step 1 on, where peers are fed the same
        of_peers((0, 1, 2, 3), (0, 1, 2, 3)),
        of_peers((0, 1, 2, 3), (50, 51)),  # rows of no batch, as where those of one rank are broadcast
        replace(of_peers((0, 1), (2, 3)), tp=()),  # nothing says who is a tp peer of whom
    ],
)
def test_rows_that_differ_among_tp_peers_are_no_finding_where_a_right_job_may_feed_them(other: Numbers) -> None:
    assert not [one for one in compare_numbers(RIGHT, other).results[1].findings if one.axis == "tp"]


@pytest.mark.parametrize(
    ("other", "kind", "details"),
    [
        (numbers(of(GRADIENT, 0.5)), "gradients scaled", {"check": "gradients", "factor": 0.5, "step": 1}),
        (numbers(of(GRADIENT, 4.0, since=2)), "gradients scaled", {"factor": 4.0, "step": 2}),
        (numbers(of(GRADIENT, 0.0, "output")), "gradients scaled", {"factor": 0.0, "parameters": ("output",)}),
        (numbers(of("exp_avg", 3.0)), "not explained", {"check": "optimizer_state", "step": 1}),
        (numbers(of(WEIGHTS, 1.5, "layers.0.up")), "not explained", {"check": "update", "parameters": ("layers.0.up",)}),
        (numbers(of(WEIGHTS, 2.0, since=0)), "other initial weights", {"parameters": FQNS}),
        (numbers(rates=dict.fromkeys(STEPS, 0.2)), "learning rate", {"check": "recipe"}),
        (numbers(optimizers=("SGD(momentum 0)",)), "another recipe", {"check": "recipe"}),
        (numbers(optimizers=("AdamW(betas (0.9, 0.999))",)), "beta2", {"check": "recipe"}),
        (TWICE, "same samples", {"step": 1}),
        (UNEVEN, "samples dealt otherwise", {"step": 1}),
        (OF_NEXT_STEP, "data position", {"step": 1, "of_step": 2}),
        (ONE_OF_FOUR, "samples lost", {"step": 1}),
        (ONE_TWICE, "microbatches repeated", {"ranks": (0,)}),
    ],
)  # fmt: skip
def test_what_differs_first_is_the_cause(other: Numbers, kind: str, details: dict[str, Any]) -> None:
    found, data = told(other)
    assert found == kind
    assert {name: data[name] for name in details} == details


def test_rows_are_not_missing_where_a_rank_left_nothing_or_did_not_finish_the_step() -> None:
    last = STEPS[-1]
    halves = [{step: (tuple(10 * step + row for row in rows),) for step in STEPS} for rows in ((0, 1), (2, 3))]
    first, second = (rank(number, 2, passes=halves[number], tokens=dict.fromkeys(STEPS, 3)) for number in (0, 1))
    assert samples_of(first, second).verdict is Verdict.PASS
    assert samples_of(first).verdict is Verdict.UNKNOWN

    begun = {**halves[1], last: ((10 * last + 2,),)}
    steps = tuple(one for one in second.sketches if one.step < last)
    raised = replace(second, passes=begun, rates=dict.fromkeys(STEPS[:-1], 0.1), sketches=steps)
    found = samples_of(first, raised)
    assert (found.verdict, found.note) == (
        Verdict.UNKNOWN,
        f"not every rank that was fed samples of step {last} finished it",
    )
    others = samples_of(first, replace(raised, passes={**begun, 1: ((98, 99),)}))
    assert (others.verdict, [one.step for one in others.findings]) == (Verdict.FAIL, [1])


def samples_of(*ranks: RankSketches) -> Result:
    return next(one for one in compare_numbers(RIGHT, sum_sketches(ranks)).results if one.check == "samples")


def test_a_gradient_of_the_step_before_and_one_that_was_not_zeroed_are_told_apart() -> None:
    def late(step: int, kind: str, fqn: str, sums: np.ndarray) -> np.ndarray:
        return sums_of(step - 1, kind, fqn) if kind == GRADIENT and step > 1 else sums

    def kept(step: int, kind: str, fqn: str, sums: np.ndarray) -> np.ndarray:
        return sums + 0.4 * sums_of(step - 1, kind, fqn) if kind == GRADIENT and step > 1 else sums

    kind, details = told(numbers(late))
    assert (kind, details["step"], details["factor"]) == ("another tensor", 2, pytest.approx(1))
    kind, details = told(numbers(kept))
    assert (kind, details["factor"]) == ("gradients not zeroed", pytest.approx(0.4))


def test_ranks_that_keep_their_own_gradients_are_named_where_their_mean_is_right() -> None:
    def own(sign: float) -> Change:
        def change(step: int, kind: str, fqn: str, sums: np.ndarray) -> np.ndarray:
            return sums + sign * sums_of(step + 7, kind, fqn) if kind == GRADIENT else sums

        return change

    other = sum_sketches([rank(0, 2, own(1.0), passes={}), rank(1, 2, own(-1.0))])
    kind, details = told(other)
    assert (kind, details["ranks"]) == ("gradients not reduced", (0, 1))
    third = sum_sketches([rank(0, 2, own(1.0), passes={}), rank(1, 2, own(0.5))])
    assert told(third)[0] == "not explained"


@pytest.mark.parametrize(("kind", "check"), [(GRADIENT, "gradients"), (WEIGHTS, "update")])
def test_a_parameter_that_is_left_out_from_step_1_on_is_found_there(kind: str, check: str) -> None:
    gone = {key: one for key, one in RIGHT.whole.items() if key[1:] != (kind, "output") or not key[0]}
    found, details = told(replace(RIGHT, whole=gone))
    assert (details["check"], details["step"], details["parameters"]) == (check, 1, ("output",))
    nothing = {key: one for key, one in RIGHT.whole.items() if key[1] != kind or not key[0]}
    assert verdicts(replace(RIGHT, whole=nothing))[check] is Verdict.UNKNOWN


def test_tp_ranks_are_fed_what_their_peers_are() -> None:
    assert verdicts(sum_sketches([rank(0, 2), rank(1, 2)]))["samples"] is Verdict.PASS


def test_slices_of_ranks_are_added_once_and_must_make_up_the_whole() -> None:
    def half(number: int, rows: slice) -> RankSketches:
        whole = rank(number, 2)
        place = f"{rows.start}:{rows.stop}|0:4"
        own = [
            replace(one, slice_text=place, elements=4 * (rows.stop - rows.start), sums=one.sums / 2)
            if one.fqn == "output"
            else one
            for one in whole.sketches
        ]
        return replace(whole, sketches=tuple(own), plain=())

    both = sum_sketches([half(0, slice(0, 8)), half(1, slice(8, 16))])
    assert verdicts(both)["gradients"] is Verdict.PASS
    for wrong in ([half(0, slice(0, 8))], [half(0, slice(0, 8)), half(1, slice(4, 12))]):
        found = sum_sketches(wrong)
        assert verdicts(found)["gradients"] is Verdict.UNKNOWN
        assert {key[2] for key in found.unknown} == {"output"}


def test_tensors_that_nothing_says_to_be_cut_are_unknown_and_not_wrong() -> None:
    def other_start(step: int, kind: str, fqn: str, sums: np.ndarray) -> np.ndarray:
        return 2 * sums if fqn == "output" else sums

    found = sum_sketches([rank(0, 2), rank(1, 2, other_start)])
    assert {key[2] for key in found.unknown} == {"output"}
    assert set(verdicts(found).values()) <= {Verdict.PASS, Verdict.UNKNOWN, Verdict.NOT_APPLICABLE}
    assert verdicts(numbers(shapes=SHAPES | {"output": (8, 4)}))["gradients"] is Verdict.UNKNOWN


def test_a_rank_that_left_nothing_leaves_the_verdict_open() -> None:
    assert {*verdicts(sum_sketches([rank(0, 2)])).values()} >= {Verdict.UNKNOWN}
    nothing = replace(RIGHT, whole={key: one for key, one in RIGHT.whole.items() if key[1] != GRADIENT})
    assert verdicts(nothing)["gradients"] is Verdict.UNKNOWN


def test_clipping_is_judged_by_the_norm_of_all_gradients() -> None:
    def norms(numbers: Numbers, factor: float = 1.0) -> Mapping[int, dict[int, float]]:
        def squares(step: int) -> float:
            return sum(one.squares for key, one in numbers.whole.items() if key[:2] == (step, GRADIENT))

        return {step: {0: factor * squares(step) ** 0.5} for step in STEPS}

    trusted = replace(RIGHT, norms=norms(RIGHT))
    found = {r.check: r for r in compare_numbers(trusted, replace(RIGHT, norms=norms(RIGHT))).results}
    assert found["grad_norm"].verdict is Verdict.PASS
    wrong = replace(RIGHT, norms=norms(RIGHT, 0.7))
    cause = first_cause(trusted, wrong)
    assert cause is not None and (cause.kind, cause.explains) == ("clipped by another norm", ("grad_norm",))
    assert {r.check: r.verdict for r in compare_numbers(wrong, trusted).results}["grad_norm"] is Verdict.UNKNOWN


def noisy(size: float) -> Numbers:
    def change(step: int, kind: str, fqn: str, sums: np.ndarray) -> np.ndarray:
        return sums * (1 + size * np.random.default_rng(step).standard_normal(BUCKETS))

    return replace(numbers(change), noise="bfloat16")


def test_the_bound_is_the_noise_that_was_recorded() -> None:
    off = numbers(of(GRADIENT, 1.02))
    assert verdicts(off, noisy(1e-2))["gradients"] is Verdict.PASS
    assert verdicts(off, noisy(1e-4))["gradients"] is Verdict.FAIL


def test_noise_of_another_training_is_refused() -> None:
    assert why_no_noise(RIGHT, noisy(1e-2)) == ""
    assert "altered" in why_no_noise(RIGHT, RIGHT)
    others = {step: {0: ((5,),)} for step in STEPS}
    tokens = dict.fromkeys(STEPS, (1,))
    assert "not the same training" in why_no_noise(RIGHT, replace(noisy(1e-2), passes=others, tokens=tokens))
    assert "was not seen" in why_no_noise(RIGHT, replace(noisy(1e-2), passes={}, tokens={}))


def test_a_number_that_is_not_finite_is_no_small_distance() -> None:
    key: Key = (2, GRADIENT, "output")
    broken = {**RIGHT.whole, key: replace(RIGHT.whole[key], sums=np.full(BUCKETS, np.nan))}
    assert verdicts(replace(RIGHT, whole=broken))["gradients"] is Verdict.FAIL


def with_nan(numbers: Numbers, *keys: Key) -> Numbers:
    broken = {key: replace(numbers.whole[key], sums=np.full(BUCKETS, np.nan)) for key in keys}
    return replace(numbers, whole={**numbers.whole, **broken})


def test_a_norm_may_be_off_as_far_as_torch_rounds_it() -> None:
    def norms(factor: float) -> Numbers:
        squares = {step: sum(w.squares for k, w in RIGHT.whole.items() if k[:2] == (step, GRADIENT)) for step in STEPS}
        return replace(RIGHT, norms={step: {0: factor * of**0.5} for step, of in squares.items()})

    def verdict(one: Numbers, other: Numbers) -> Verdict:
        return {r.check: r.verdict for r in compare_numbers(one, other).results}["grad_norm"]

    rounded = replace(norms(0.995), norms_off=dict.fromkeys(STEPS, 0.005))
    assert verdict(norms(1.0), rounded) is verdict(rounded, norms(1.0)) is Verdict.PASS
    assert verdict(norms(1.0), norms(0.995)) is Verdict.FAIL
    assert verdict(norms(1.0), replace(rounded, norms=norms(0.98).norms)) is Verdict.FAIL


def test_weights_that_are_finite_again_are_read_so(tmp_path: Path) -> None:
    def odd(step: int, kind: str, fqn: str, sums: np.ndarray) -> np.ndarray:
        return sums * np.nan if (step, kind) == (2, WEIGHTS) else sums

    save_sketches(tmp_path / "one.sketches", rank(change=odd))
    read = load_sketches(tmp_path / "one.sketches")
    assert read is not None
    bad = {one.step for one in read.sketches if not np.isfinite(one.sums).all()}
    assert bad == {2}


def test_weights_that_were_changed_after_a_save_do_not_judge_what_is_loaded() -> None:
    one, other = count_resumed_steps(replace(RIGHT, changed={3: ("output",)}), RIGHT, 2)
    found = {r.check: r.verdict for r in compare_numbers(one, other).results}
    assert found["initial_weights"] is Verdict.UNKNOWN


def test_nothing_is_judged_by_numbers_of_the_first_recording_that_are_not_finite() -> None:
    one = with_nan(RIGHT, *RIGHT.whole)
    found = compare_numbers(one, one)
    assert found.verdict is Verdict.UNKNOWN and first_cause(one, one) is None
    first = with_nan(RIGHT, (2, GRADIENT, "output"))
    by_check = {result.check: result.verdict for result in compare_numbers(first, RIGHT).results}
    assert by_check["gradients"] is Verdict.UNKNOWN and by_check["update"] is Verdict.PASS


def test_noise_that_is_not_finite_makes_no_bound() -> None:
    assert why_no_noise(RIGHT, with_nan(noisy(1e-2), (3, GRADIENT, "output")))
    key: Key = (3, GRADIENT, "output")
    assert not why_no_noise(with_nan(RIGHT, key), with_nan(noisy(1e-2), key))


def test_a_norm_of_gradients_that_are_not_all_known_is_not_judged() -> None:
    norm = {
        step: {0: sum(w.squares for k, w in RIGHT.whole.items() if k[:2] == (step, GRADIENT)) ** 0.5} for step in STEPS
    }
    one = replace(with_nan(RIGHT, (2, GRADIENT, "output")), norms=norm)
    results = compare_numbers(one, replace(RIGHT, norms=norm)).results
    assert {r.check: r.verdict for r in results}["grad_norm"] is Verdict.UNKNOWN


def test_two_models_that_are_dead_are_not_the_same_training() -> None:
    dead = numbers(of(GRADIENT, 0.0))
    assert {r.check: r.verdict for r in compare_numbers(dead, dead).results}["gradients"] is Verdict.UNKNOWN
    one_dead = numbers(of(GRADIENT, 0.0, "output"))
    assert {r.check: r.verdict for r in compare_numbers(one_dead, one_dead).results}["gradients"] is Verdict.PASS


def test_noise_below_what_the_forward_pass_rounds_is_refused() -> None:
    one = replace(RIGHT, computes_in="bfloat16")
    assert "bfloat16" in why_no_noise(one, replace(noisy(1e-2), noise="own"))
    assert why_no_noise(one, noisy(1e-2)) == ""
    assert why_no_noise(RIGHT, replace(noisy(1e-2), noise="own")) == ""


@pytest.mark.parametrize("pairs", [((0, 2), (1, 3)), ((0, 1), (2, 3))])
def test_gradients_that_are_reduced_over_some_ranks_alone_are_told_so(pairs: tuple[tuple[int, ...], ...]) -> None:
    def of(number: int) -> RankSketches:
        sign = 1.0 if number in pairs[0] else -1.0
        return rank(number, 4, lambda step, kind, fqn, sums: sums * (1 + 0.5 * sign * (kind == GRADIENT)))

    other = sum_sketches([of(number) for number in range(4)])
    cause = first_cause(RIGHT, other)
    assert cause is not None and cause.kind == "gradients not reduced"
    assert dict(cause.details)["alike"] == pairs
