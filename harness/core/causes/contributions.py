"""Hypotheses that gradients are sums of whole gradients: the reference's own, the step before's, those of tp peers.

How often each counts is fitted in the first step in which gradients are wrong, where parameters are still right. The
reference is trained again with these weights; the checks judge all steps. Parts of gradients that count are in
piece_weights.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.core.causes.assume import assume_optimizer, assume_reference
from harness.core.causes.differences import (
    expected_gradient,
    first_wrong_step,
    observed_gradients,
    pairs_with_wrong_gradient,
    ranks_holding,
    step_choices,
)
from harness.core.causes.factors import FactorByStep, factor_text, times_text, token_factors
from harness.core.causes.hypothesis import Broken, Hypothesis
from harness.core.causes.pieces import replace_slices
from harness.core.causes.reported import assume_reports, reports_of
from harness.core.causes.words import Arrays, Pair, from_step_text, in_parameters_text, shorten_names, sort_fqns
from harness.core.evidence.text import number_text
from harness.core.judge.assembly import gradient_misfits
from harness.core.judge.assumed import AssumedOptimizer
from harness.core.judge.contents import view_of_slice
from harness.core.judge.norms import norm_of_slices
from harness.core.judge.result import Cause
from harness.core.judge.tolerance import NoBound, clip_coefficient
from harness.core.judge.trial import Trial
from harness.core.plan.grid import tied_axis
from harness.reference.distance import best_fitting_factor

if TYPE_CHECKING:
    from harness.reference.counterfactual import Batch

EXACT_RESIDUAL = 1e-9  # of a gradient's length, that a sum leaves in float64
NOISY_RESIDUAL = 0.1  # of a gradient's length, that a sum leaves where there is noise
MOST_SINGLE_FACTORS = 4  # factors that are fitted each by itself, where noise leaves something of each
TIED_FQN = "tok_embeddings.weight"  # the output's weight as well, where embeddings are tied
SCALED_KIND = "gradients scaled"
GradientChange = Callable[[int, Arrays], Arrays]
"""(step, whole gradients by fqn) -> the gradients that are assumed."""
LossReport = Callable[[int, int, float], float]
"""(rank, step, the loss that was seen) -> the loss that the rank reports."""
AssumeInSteps = Callable[[Sequence[int]], Callable[[Trial], Trial]]
"""(steps in which something is so) -> what is assumed."""
GradientSource = Callable[[Trial, int, str, int], "np.ndarray | None"]
"""(trial, rank, fqn, step) -> the rank's slice of a gradient that may be counted. None if there is none."""


@dataclass(frozen=True)
class Interpretation:
    """The meaning of fitted weights: the cause, and the rule that gives the gradients of every step."""

    cause: Cause
    """The cause, without the steps and the parameters."""
    fqns: Sequence[str]
    """The parameters in whose gradients it is so."""
    assume: AssumeInSteps
    """The assumption, by the steps in which it is so."""
    fitted_count: int = 1
    """How many numbers were fitted."""
    loss_report: LossReport | None = None
    """What ranks may report then."""
    shown_steps: Sequence[int] = ()
    """The steps in which it shows by itself; empty where that is not known."""
    least_steps: int = 1
    """In how many steps it must be so: two where a number was fitted in the first, for the second is the test."""
    cause_in_fewer_steps: Cause | None = None
    """The cause in fewer steps, which says less; None if it is none then."""

    def hypotheses(self, trial: Trial, step: int) -> Iterator[Hypothesis]:
        """Yield the hypotheses that this is so from a step on, in that step alone, and in `shown_steps` if known.

        A choice with too few steps has the cause in fewer steps, or is left out if there is none. If every reported
        loss is the one that follows, the hypothesis assumes that as well.
        """
        where = ""
        parameters: tuple[tuple[str, object], ...] = ()
        if len(self.fqns) < len(trial.plan.shapes):
            where = f" {in_parameters_text(trial, self.fqns)}"
            parameters = (("parameters", tuple(self.fqns)),)
        number = self.loss_report
        reported = reports_of(trial, "reported_loss") if self.loss_report else None
        choices = [*step_choices(trial, step)]
        if self.shown_steps:
            choices.append((f" in steps {', '.join(map(str, self.shown_steps))}", [*self.shown_steps], 1))
        for when, steps, extra_choices in choices:
            cause = self.cause if len(steps) >= self.least_steps else self.cause_in_fewer_steps
            if cause is None:
                continue
            details = (*cause.details, *parameters, ("steps", tuple(steps)))
            cause = replace(cause, where=(where + when).strip(), details=details)
            hypothesis = Hypothesis(cause, self.assume(steps), self.fitted_count + extra_choices)
            if reported and number and {wrong_step for _, wrong_step in reported.wrong_keys} <= {*steps}:
                number_then = lambda rank, step: number(rank, step, reported.right_numbers[rank, step])  # noqa: E731
                if reported.matches_all(number_then):
                    assume = partial(assume_reports, reported=reported, number=number_then)
                    hypothesis = hypothesis.and_then(assume)
            yield hypothesis


def sums_of_whole_gradients(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Yield the hypotheses that gradients are sums of whole gradients of the reference, each counted a number of times.

    Nothing if gradients are right, and so is the norm. With noise a wrong norm alone is enough: noise may hide a small
    factor.
    """
    step = first_wrong_step(trial) if "gradients" in broken else None
    if "grad_norm" in broken and not (step or "gradients" in broken or trial.case.has_derived_bounds):
        step = trial.first_step  # noise hides it of each
    if step is None:
        return
    fits = [*_fit_factors(trial, step)]
    scaled = itertools.chain.from_iterable(_interpret_as_scaled(trial, factors, step) for factors in fits)
    for reading in (*scaled, *_interpret_as_not_zeroed(trial, step), *_interpret_as_mixed_over_tp(trial, step)):
        yield from reading.hypotheses(trial, step)
    for factors in fits:
        if len(factors) != len(trial.plan.shapes):
            continue
        common = _single_factor(factors)
        if common and not trial.case.has_derived_bounds and step < trial.case.steps[-1]:
            yield _scaled_loss_hypothesis(trial, step, common)
        if common and common > 0 and "update" in broken and step == trial.first_step and trial.case.training.max_norm:
            yield _late_unscaling_hypothesis(trial, common)


def change_in_steps(change: GradientChange) -> AssumeInSteps:
    """Return a function of steps that returns an assumption: the reference's gradients are changed in these steps."""
    return lambda steps: partial(
        assume_reference, gradients=lambda step, gradients: change(step, gradients) if step in steps else gradients
    )


# ---- what is summed


def _previous_gradient(trial: Trial, rank: int, fqn: str, step: int) -> np.ndarray | None:
    """Return the rank's slice of the reference's gradient of the step before. None if there is none.

    Precondition: step > 1.
    """
    return expected_gradient(trial, rank, fqn, step - 1)


def _sum_over_tp(trial: Trial, rank: int, fqn: str, step: int) -> np.ndarray | None:
    """Return the sum of the gradients that the ranks of a rank's tp group should have.

    None if all have the same slice, if their shapes differ, or if one has none.
    """
    peers = trial.plan.peers(rank, "tp")
    gradients = []
    for peer in peers:
        gradient = expected_gradient(trial, peer, fqn, step)
        if gradient is not None:
            gradients.append(gradient)
    slices_differ = len({trial.gradient_slice_of(peer, fqn) for peer in peers}) > 1
    shapes = {gradient.shape for gradient in gradients}
    return np.sum(gradients, axis=0) if slices_differ and len(shapes) == 1 and len(gradients) == len(peers) else None


def _fit_weights(
    trial: Trial, step: int, source: GradientSource, counted_once: GradientSource | None = None
) -> dict[Pair, float]:
    """Return, by (rank, fqn) of each wrong gradient of a step, the factor by which a source counts in it.

    counted_once: a source that counts once in addition. Empty if some wrong gradient is no such sum, or if no gradient
    is wrong.
    """
    weights = {}
    tolerated = EXACT_RESIDUAL if trial.case.has_derived_bounds else NOISY_RESIDUAL
    for rank, fqn in pairs_with_wrong_gradient(trial, step):
        observed = observed_gradients(trial, rank, step)[fqn]
        summand = source(trial, rank, fqn, step)
        once = counted_once(trial, rank, fqn, step) if counted_once else np.zeros_like(observed)
        if summand is None or once is None:
            return {}
        if not observed.shape == summand.shape == once.shape or not np.any(summand):
            return {}
        factor = best_fitting_factor(observed - once, summand)
        size = max(np.linalg.norm(observed), np.linalg.norm(summand))
        if not np.linalg.norm(observed - once - factor * summand) <= tolerated * size:
            return {}
        weights[rank, fqn] = factor
    return weights


def gradients_are_scaled(trial: Trial, step: int) -> bool:
    """Return whether every wrong gradient of a step is a multiple of the expected one. False in recipes with noise."""
    return trial.case.has_derived_bounds and bool(_fit_weights(trial, step, expected_gradient))


def common_factor(trial: Trial, step: int) -> float | None:
    """Return the factor by which all wrong gradients of a step are multiples of the expected ones.

    None if they have no common factor, and in recipes with noise.
    """
    return _single_factor(_fit_weights(trial, step, expected_gradient)) if trial.case.has_derived_bounds else None


# ---- its own, another number of times


def _fit_factors(trial: Trial, step: int) -> Iterator[dict[str, float]]:
    """Yield fitted factors of gradients in a step, by fqn.

    In float64 those of the wrong gradients, if all holders of a parameter have the same. In recipes with noise: one for
    all parameters, one for the wrong ones, and one for each of these where they are few. Nothing if none fits.
    """
    if trial.case.has_derived_bounds:
        weights = _fit_weights(trial, step, expected_gradient)
        weights_by_fqn = {}
        for fqn in dict.fromkeys(fqn for _, fqn in weights):
            weights_by_fqn[fqn] = [weights.get((rank, fqn), 1.0) for rank in ranks_holding(trial, fqn)]
        if weights and all(
            np.allclose(of_holders, of_holders[0], rtol=1e-7, atol=1e-12) for of_holders in weights_by_fqn.values()
        ):
            yield {fqn: float(np.median(of_holders)) for fqn, of_holders in weights_by_fqn.items()}
        return
    try:
        all_misfits = gradient_misfits(trial, step)[0]
    except NoBound:
        return
    wrong = [misfit for misfit in all_misfits if not misfit.is_within_bound]
    all_fqns = trial.plan.shapes
    if not wrong:
        yield dict.fromkeys(all_fqns, norm_of_slices(trial, step) / trial.reference_step(step).grad_norm)
        return
    wrong_fqns = sort_fqns(trial, (misfit.fqn for misfit in wrong))
    weights_of_fits = [misfit.scale_bound**-2.0 for misfit in wrong]
    mean = float(np.average([misfit.scale for misfit in wrong], weights=weights_of_fits))
    if any(abs(misfit.scale / mean - 1) <= misfit.scale_bound for misfit in wrong):
        yield dict.fromkeys(all_fqns, mean)
    if len(wrong_fqns) < len(all_fqns):
        yield dict.fromkeys(wrong_fqns, mean)
    if 1 < len(wrong_fqns) <= MOST_SINGLE_FACTORS:
        yield {misfit.fqn: misfit.scale for misfit in wrong}


def _single_factor(factors: Mapping[Any, float]) -> float | None:
    """Return the factor that all of them are, within rounding. None if they differ, or if there are none."""
    numbers = [*factors.values()]
    same = numbers and np.allclose(numbers, numbers[0], rtol=1e-7, atol=1e-12)
    return float(np.median(numbers)) if same else None


def _interpret_as_scaled(trial: Trial, factors: Mapping[str, float], step: int) -> Iterator[Interpretation]:
    """Yield the interpretations of fitted factors: first as numbers of tokens that change by step, then as constant.

    factors: by fqn, as fitted in `step`. Where they differ, each parameter has its own.
    """
    factor = _single_factor(factors)
    everywhere = len(factors) == len(trial.plan.shapes)
    tokens = token_factors(trial, step, factor) if factor and everywhere and trial.case.has_derived_bounds else ()
    changing: list[tuple[str, FactorByStep]] = []
    for hint, by_step in tokens:
        changing.append((hint, partial(_relative_factor, by_step, factor or 1.0)))
    fitted_values = ("factor", factor) if factor is not None else ("factors", tuple(sorted({*factors.values()})))
    for text, by_step in (*changing, (_factor_name(trial, factors), lambda step: 1.0)):
        is_changing = (text, by_step) in changing
        hint = text.removeprefix(": ")
        number = None
        if everywhere and factor:
            number = lambda rank, step, right, by_step=by_step: factor * by_step(step) * right  # noqa: E731
        observed = _scaled_text(factor)
        shown_hint = hint
        if is_changing:  # the factor is another one in each step
            observed = f"gradients are {hint}"
            shown_hint = f"{times_text(factor or 1.0)} what they should be in step {step}"
        cause = Cause(SCALED_KIND, observed, hint=shown_hint, details=(fitted_values, ("named", hint)))
        only = _steps_with_zero_gradients(trial, factors) if factor == 0 else ()
        change = change_in_steps(partial(_scale_gradients, factors, by_step))
        fitted = 1 + (factor is None)
        # a number of the case is not fitted: all entries confirm it in one step, and not why it is so
        of_the_case = bool(hint) and factor is not None and not is_changing
        alone = replace(cause, hint="", details=(fitted_values, ("named", ""))) if of_the_case else None
        least = 1 if factor == 0 else 2
        yield Interpretation(
            cause, [*factors], change, fitted, number, only, least_steps=least, cause_in_fewer_steps=alone
        )


def _steps_with_zero_gradients(trial: Trial, fqns: Collection[str]) -> tuple[int, ...]:
    """Return the steps in which the gradients of these parameters are zero on all ranks.

    Empty unless there are several.
    """
    steps = []
    for step in trial.case.steps:
        if not any(np.any(gradient) for gradient in _gradients_in_step(trial, fqns, step)):
            steps.append(step)
    return tuple(steps) if len(steps) > 1 else ()


def _gradients_in_step(trial: Trial, fqns: Collection[str], step: int) -> Iterator[np.ndarray]:
    """Yield the gradients of these parameters that ranks had in a step."""
    for rank in trial.ranks:
        for fqn, gradient in observed_gradients(trial, rank, step).items():
            if fqn in fqns:
                yield gradient


def _relative_factor(by_step: FactorByStep, factor: float, step: int) -> float:
    """Return the factor of a step divided by `factor`, the one that was fitted."""
    return by_step(step) / factor


def _scale_gradients(factors: Mapping[str, float], by_step: FactorByStep, step: int, gradients: Arrays) -> Arrays:
    """Return the gradients by fqn, each times its own factor (1 if it has none) and the step's, in the same dtype."""
    scaled = {}
    for fqn, gradient in gradients.items():
        scaled[fqn] = (gradient * (factors.get(fqn, 1.0) * by_step(step))).astype(gradient.dtype)
    return scaled


def _scaled_text(factor: float | None) -> str:
    """Return a text of how many times as large as expected gradients are. None stands for several factors."""
    if factor is None:
        return "gradients are scaled by different factors"
    return f"gradients are {times_text(factor)} what they should be" if abs(factor) > 1e-12 else "gradients are zero"


def _factor_name(trial: Trial, factors: Mapping[str, float]) -> str:
    """Return a text of the numbers of the case that a factor may be; of several, of the parameters that have each.

    Empty if no number fits, and for a single factor in recipes with noise, which cannot show it.
    """
    factor = _single_factor(factors)
    if factor is None:
        numbers = {fqn: number_text(own_factor, 4) for fqn, own_factor in factors.items()}
        texts = []
        for number in sorted({*numbers.values()})[:MOST_SINGLE_FACTORS]:
            fqns = [fqn for fqn in numbers if numbers[fqn] == number]
            texts.append(f"{number} ({shorten_names(fqns, 1)})")
        return ", ".join(texts)
    one_rank_has_both = trial.case.model.tied_embeddings and not tied_axis(trial.case)
    if one_rank_has_both and [*factors] == [TIED_FQN] and math.isclose(factor, 2, rel_tol=1e-6):
        return "it counts for the embedding and again for the output, which share it"
    return factor_text(trial, factor, len(factors) == len(trial.plan.shapes)) if trial.case.has_derived_bounds else ""


def _scaled_loss_hypothesis(trial: Trial, since: int, factor: float) -> Hypothesis:
    """Return the hypothesis that the loss is scaled before backward from a step on.

    The factor is rounded to three digits. With noise it differs from a factor after backward, because the roundings
    within backward are others.
    """
    factor = float(f"{factor:.3g}")

    def batch(step: int, usual: Batch) -> Batch:
        counts = np.full(usual.labels.shape, factor if step >= since else 1.0)
        return replace(usual, counts=counts if usual.counts is None else counts * usual.counts)

    hint = "the loss is scaled before backward"
    where = from_step_text(trial, since) if since > trial.first_step else ""
    cause = Cause(SCALED_KIND, _scaled_text(factor), where, hint=hint, details=(("factor", factor),))
    return Hypothesis(cause, partial(assume_reference, batch=batch), 2)


def _late_unscaling_hypothesis(trial: Trial, factor: float) -> Hypothesis:
    """Return the hypothesis that gradients are clipped while too large by a loss scale, and divided by it afterwards.

    A factor that is nearly an integer is rounded to it.
    """
    factor = float(round(factor)) if abs(factor - round(factor)) < 1e-4 * factor else factor
    limit = trial.case.training.max_norm
    norms = {step: norm_of_slices(trial, step) for step in trial.case.steps}

    def unscaled_gradients(step: int, gradients: Arrays, norm: float, parameters: object) -> Arrays:
        """Return the reference's gradients, clipped by the scaled norm and divided by the factor."""
        scaled = {}
        for fqn, gradient in gradients.items():
            scaled[fqn] = (clip_coefficient(norm, limit) / factor * gradient).astype(gradient.dtype)
        return scaled

    def unscaled_gradient(rank: int, step: int, fqn: str, gradient: np.ndarray) -> np.ndarray:
        return clip_coefficient(norms[step], limit) / factor * gradient

    text = f"gradients are clipped while {times_text(factor)} too large, and divided by that afterwards"
    times = partial(_scale_gradients, dict.fromkeys(trial.plan.shapes, factor), lambda step: 1.0)
    assume = partial(
        assume_optimizer, assumed=AssumedOptimizer(given=unscaled_gradient), gradients=times, given=unscaled_gradients
    )
    return Hypothesis(Cause(SCALED_KIND, text, details=(("factor", factor),)), assume)


# ---- what was there before


def _interpret_as_not_zeroed(trial: Trial, step: int) -> Iterator[Interpretation]:
    """Yield the interpretations that gradients also hold those of the step before, of all or of the wrong parameters.

    Each is tried with what clipping left of them, and with what there was before. Nothing for step 1, or if they are no
    such sum.
    """
    weights = _fit_weights(trial, step, _previous_gradient, counted_once=expected_gradient) if step > 1 else {}
    if not weights or (trial.case.has_derived_bounds and not _single_factor(weights)):
        return
    all_fqns = tuple(trial.plan.shapes)
    wrong_fqns = tuple(sort_fqns(trial, (fqn for _, fqn in weights)))
    limits = dict.fromkeys((trial.case.training.max_norm, None))
    for fqns, limit in itertools.product(dict.fromkeys((all_fqns, wrong_fqns)), limits):
        hint = f"those of step {step} hold step {step - 1}'s as well"
        cause = Cause("gradients not zeroed", "gradients are not zeroed", hint=hint)
        change = partial(accumulating_change, fqns=fqns, limit=limit)
        assume = lambda steps, change=change: partial(assume_reference, gradients=change(steps))  # noqa: E731
        yield Interpretation(cause, fqns, assume, 1 + (fqns != all_fqns))


def accumulating_change(steps: Sequence[int], fqns: Sequence[str], limit: float | None) -> GradientChange:
    """Return a change that adds, in these steps, the gradients of the step before to those of these parameters.

    It has a state: it is called once for each step, in order. limit: the norm to which earlier gradients were clipped
    in place; None if they were not.
    """
    earlier: Arrays = {}

    def gradients(step: int, own: Arrays) -> Arrays:
        """Return the step's gradients, with earlier ones added in `steps`, and keep them for the next step."""
        total = own
        if step in steps:
            total = {**own, **{fqn: own[fqn] + earlier[fqn] for fqn in fqns if fqn in own}}
        coefficient = clip_coefficient(norm_of_gradients(total), limit)
        earlier.update({fqn: (coefficient * gradient).astype(gradient.dtype) for fqn, gradient in total.items()})
        return total

    return gradients


def norm_of_gradients(gradients: Arrays) -> float:
    """Return the 2-norm of all gradients together, computed in float64."""
    squares = (float(np.sum(np.square(gradient, dtype=np.float64))) for gradient in gradients.values())
    return math.sqrt(math.fsum(squares))


# ---- what tp peers have


def _interpret_as_mixed_over_tp(trial: Trial, step: int) -> Iterator[Interpretation]:
    """Yield the interpretation that each tp rank has a multiple of the sum of its group's gradients, of other slices.

    Nothing if the wrong gradients are no such sum, or in recipes with noise.
    """
    weights = _fit_weights(trial, step, _sum_over_tp) if trial.case.has_derived_bounds else {}
    fqns = sort_fqns(trial, (fqn for _, fqn in weights))
    factor = _single_factor(weights)
    if factor:
        names = {1.0: "the sum", 1 / trial.case.dims.tp: "the mean"}
        times = names.get(round(factor, 9), f"{times_text(factor)} the sum")
        text = f"gradients are also reduced over tp, whose ranks hold different slices: each has {times} of all"
        change = change_in_steps(partial(_mix_slices, trial, fqns, factor))
        assume = lambda steps: lambda trial: _with_gradients_moved_again(change(steps)(trial))  # noqa: E731
        least = 1 if round(factor, 9) in (1.0, round(1 / trial.case.dims.tp, 9)) else 2
        yield Interpretation(
            Cause("slices mixed", text, details=(("factor", factor),)), fqns, assume, least_steps=least
        )


def _mix_slices(trial: Trial, fqns: Sequence[str], factor: float, step: int, gradients: Arrays) -> Arrays:
    """Return the gradients by fqn, with a rank's slice of `fqns` replaced by `factor` times the sum over its tp group."""

    def mixed_slice(rank: int, fqn: str) -> np.ndarray:
        """Return the sum of the slices of a rank's tp group, times the factor."""
        slices = [trial.gradient_slice_of(peer, fqn) for peer in trial.plan.peers(rank, "tp")]
        return np.asarray(
            factor * np.sum([view_of_slice(gradients[fqn], part) for part in slices if part is not None], axis=0)
        )

    return replace_slices(trial, gradients, fqns, sorted(trial.ranks), mixed_slice)


def _with_gradients_moved_again(trial: Trial) -> Trial:
    """Return the trial with a plan that lets each rank move the bytes of its gradients once more outside of passes."""
    outside_bytes = {}
    for rank, evidence in trial.ranks.items():
        gradients = evidence.steps[0].gradients.values() if evidence.steps else []
        gradient_bytes = sum(gradient.nbytes for gradient in gradients)
        outside_bytes[rank] = trial.plan.outside_bytes[rank] + gradient_bytes
    return replace(trial, plan=replace(trial.plan, outside_bytes=outside_bytes))


# ---- the part of the embedding alone, of a weight that the output shares


def lacks_the_outputs_part(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Yield the hypothesis that the gradient of a tied weight has the embedding's part alone, without the output's.

    Nothing unless that weight's gradient is the only wrong one.
    """
    step = first_wrong_step(trial) if "gradients" in broken and trial.case.model.tied_embeddings else None
    if step is not None and {fqn for _, fqn in pairs_with_wrong_gradient(trial, step)} == {TIED_FQN}:
        from harness.reference.spellings import detach_output_weight

        text = f"the gradient of the tied weight lacks the output's part: {TIED_FQN} has only the embedding's"
        cause = Cause("tied weight without the output's part", text)
        yield Hypothesis(cause, partial(assume_reference, altered=detach_output_weight))
