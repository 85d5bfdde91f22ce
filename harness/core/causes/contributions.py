"""Gradients are sums of what the reference has whole: its own gradient, that of the step before, those of tp peers.

How often each counts is fitted in the first step in which gradients are wrong, where parameters are still right. The reference
is trained again with these weights; the checks judge all steps. What counts of a gradient only in part is in piece_weights.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.core.causes.assume import another_optimizer, another_reference
from harness.core.causes.differences import (
    expected_gradient,
    first_wrong_step,
    holders_of,
    seen_gradients,
    spans,
    wrong_pairs,
)
from harness.core.causes.factors import ByStep, factor_text, times_text, token_factors
from harness.core.causes.hypothesis import Broken, Hypothesis
from harness.core.causes.pieces import with_slices
from harness.core.causes.reported import assuming_reports, reported_of
from harness.core.causes.words import Arrays, Pair, from_step, in_order, in_parameters, some
from harness.core.evidence.text import number_text
from harness.core.judge.assembly import misfits
from harness.core.judge.assumed import AssumedOptimizer
from harness.core.judge.contents import take
from harness.core.judge.norms import norm_of
from harness.core.judge.result import Cause
from harness.core.judge.tolerance import NoBound, clip_coefficient
from harness.core.judge.trial import Trial
from harness.core.plan.grid import tied_axis
from harness.reference.distance import best_fit

if TYPE_CHECKING:
    from harness.reference.counterfactual import Batch

SHARP = 1e-9  # of a gradient's length, that a sum leaves in float64
ROUGH = 0.1  # of a gradient's length, that a sum leaves where there is noise
FEW = 4  # factors that are fitted each by itself, where noise leaves something of each
TIED = "tok_embeddings.weight"  # the output's weight as well, where embeddings are tied
KIND = "gradients scaled"
Change = Callable[[int, Arrays], Arrays]
Number = Callable[[int, int, float], float]
"""(rank, step, the loss that was seen) -> the loss that the rank reports."""
Assume = Callable[[Sequence[int]], Callable[[Trial], Trial]]
"""(steps in which something is so) -> what is assumed."""
Source = Callable[[Trial, int, str, int], "np.ndarray | None"]


@dataclass(frozen=True)
class Reading:
    """Meaning of weights: the cause, and the rule that gives them in every step."""

    cause: Cause
    """The cause, without the steps and the parameters."""
    fqns: Sequence[str]
    """The parameters in whose gradients it is so."""
    assume: Assume
    """The assumption, by the steps in which it is so."""
    fitted: int = 1
    """How many numbers were fitted."""
    number: Number | None = None
    """What ranks may report then."""
    only: Sequence[int] = ()
    """The steps in which it shows by itself; empty where that is not known."""
    least: int = 1
    """In how many steps it must be so: two where a number was fitted in the first, for the second is the test."""
    alone: Cause | None = None
    """The cause in fewer steps, which says less; None if it is none then."""

    def hypotheses(self, trial: Trial, step: int) -> Iterator[Hypothesis]:
        """Yield the hypotheses that this is so from a step on, and in that step alone.

        Where the loss that ranks report follows from it, the hypothesis assumes that as well.
        """
        where = ""
        parameters: tuple[tuple[str, object], ...] = ()
        if len(self.fqns) < len(trial.plan.shapes):
            where = f" {in_parameters(trial, self.fqns)}"
            parameters = (("parameters", tuple(self.fqns)),)
        number = self.number
        reported = reported_of(trial, "reported_loss") if self.number else None
        choices = [*spans(trial, step)]
        if self.only:
            choices.append((f" in steps {', '.join(map(str, self.only))}", [*self.only], 1))
        for when, steps, extra_choices in choices:
            cause = self.cause if len(steps) >= self.least else self.alone
            if cause is None:
                continue
            details = (*cause.details, *parameters, ("steps", tuple(steps)))
            cause = replace(cause, where=(where + when).strip(), details=details)
            hypothesis = Hypothesis(cause, self.assume(steps), self.fitted + extra_choices)
            if reported and number and {wrong_step for _, wrong_step in reported.odd} <= {*steps}:
                number_then = lambda rank, step: number(rank, step, reported.right[rank, step])  # noqa: E731
                if reported.is_all(number_then):
                    assume = partial(assuming_reports, reported=reported, number=number_then)
                    hypothesis = hypothesis.and_then(assume)
            yield hypothesis


def sums_of_whole_gradients(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Yield that gradients are sums of whole gradients of the reference, each counted a number of times."""
    step = first_wrong_step(trial) if "gradients" in broken else None
    if "grad_norm" in broken and not (step or "gradients" in broken or trial.case.exact):
        step = trial.first_step  # noise hides it of each
    if step is None:
        return
    fits = [*_factors(trial, step)]
    scaled = itertools.chain.from_iterable(_scaled(trial, factors, step) for factors in fits)
    for reading in (*scaled, *_not_zeroed(trial, step), *_mixed_over_tp(trial, step)):
        yield from reading.hypotheses(trial, step)
    for factors in fits:
        if len(factors) != len(trial.plan.shapes):
            continue
        common = _common(factors)
        if common and not trial.case.exact and step < trial.case.steps[-1]:
            yield _in_the_loss(trial, step, common)
        if common and common > 0 and "update" in broken and step == trial.first_step and trial.case.training.max_norm:
            yield _unscaled_late(trial, common)


def in_steps(change: Change) -> Assume:
    """Assume that gradients are changed so."""
    return lambda steps: partial(
        another_reference, gradients=lambda step, gradients: change(step, gradients) if step in steps else gradients
    )


# ---- what is summed


def _before(trial: Trial, rank: int, fqn: str, step: int) -> np.ndarray | None:
    """Return the rank's slice of the reference's gradient of the step before."""
    return expected_gradient(trial, rank, fqn, step - 1)


def _over_tp(trial: Trial, rank: int, fqn: str, step: int) -> np.ndarray | None:
    """Return the sum of what its tp group should have; None where these are no different slices of one shape."""
    peers = trial.plan.peers(rank, "tp")
    gradients = []
    for peer in peers:
        gradient = expected_gradient(trial, peer, fqn, step)
        if gradient is not None:
            gradients.append(gradient)
    slices_differ = len({trial.gradient_slice_of(peer, fqn) for peer in peers}) > 1
    shapes = {gradient.shape for gradient in gradients}
    return np.sum(gradients, axis=0) if slices_differ and len(shapes) == 1 and len(gradients) == len(peers) else None


def _weights(trial: Trial, step: int, source: Source, counted_once: Source | None = None) -> dict[Pair, float]:
    """Return how often a source counts in each wrong gradient of a step, beside one that counts once. Empty if a gradient is
    no such sum."""
    weights = {}
    tolerated = SHARP if trial.case.exact else ROUGH
    for rank, fqn in wrong_pairs(trial, step):
        observed = seen_gradients(trial, rank, step)[fqn]
        summand = source(trial, rank, fqn, step)
        once = counted_once(trial, rank, fqn, step) if counted_once else np.zeros_like(observed)
        if summand is None or once is None:
            return {}
        if not observed.shape == summand.shape == once.shape or not np.any(summand):
            return {}
        factor = best_fit(observed - once, summand)
        size = max(np.linalg.norm(observed), np.linalg.norm(summand))
        if not np.linalg.norm(observed - once - factor * summand) <= tolerated * size:
            return {}
        weights[rank, fqn] = factor
    return weights


def scaled_alike(trial: Trial, step: int) -> bool:
    """Return whether every wrong gradient is a multiple of what it should be."""
    return trial.case.exact and bool(_weights(trial, step, expected_gradient))


def common_factor(trial: Trial, step: int) -> float | None:
    """Return how often all wrong gradients of a step are what they should be; None where that is no one number."""
    return _common(_weights(trial, step, expected_gradient)) if trial.case.exact else None


# ---- its own, another number of times


def _factors(trial: Trial, step: int) -> Iterator[dict[str, float]]:
    """Yield factors by parameter.

    In float64 those that fit, if all holders have the same. In recipes with noise one of all parameters, one of those that
    are wrong, and one of each of these where they are few.
    """
    if trial.case.exact:
        weights = _weights(trial, step, expected_gradient)
        weights_by_fqn = {}
        for fqn in dict.fromkeys(fqn for _, fqn in weights):
            weights_by_fqn[fqn] = [weights.get((rank, fqn), 1.0) for rank in holders_of(trial, fqn)]
        if weights and all(
            np.allclose(of_holders, of_holders[0], rtol=1e-7, atol=1e-12) for of_holders in weights_by_fqn.values()
        ):
            yield {fqn: float(np.median(of_holders)) for fqn, of_holders in weights_by_fqn.items()}
        return
    try:
        all_misfits = misfits(trial, step)[0]
    except NoBound:
        return
    wrong = [misfit for misfit in all_misfits if not misfit.within]
    all_fqns = trial.plan.shapes
    if not wrong:
        yield dict.fromkeys(all_fqns, norm_of(trial, step) / trial.reference_step(step).grad_norm)
        return
    wrong_fqns = in_order(trial, (misfit.fqn for misfit in wrong))
    weights_of_fits = [misfit.fit_bound**-2.0 for misfit in wrong]
    mean = float(np.average([misfit.fit for misfit in wrong], weights=weights_of_fits))
    if any(abs(misfit.fit / mean - 1) <= misfit.fit_bound for misfit in wrong):
        yield dict.fromkeys(all_fqns, mean)
    if len(wrong_fqns) < len(all_fqns):
        yield dict.fromkeys(wrong_fqns, mean)
    if 1 < len(wrong_fqns) <= FEW:
        yield {misfit.fqn: misfit.fit for misfit in wrong}


def _common(factors: Mapping[Any, float]) -> float | None:
    """Return the factor that all of them are, within rounding. None if they differ, or if there is none."""
    numbers = [*factors.values()]
    same = numbers and np.allclose(numbers, numbers[0], rtol=1e-7, atol=1e-12)
    return float(np.median(numbers)) if same else None


def _scaled(trial: Trial, factors: Mapping[str, float], step: int) -> Iterator[Reading]:
    """Yield one factor, which may be another in each step, as numbers of tokens are; or one of each parameter."""
    factor = _common(factors)
    everywhere = len(factors) == len(trial.plan.shapes)
    tokens = token_factors(trial, step, factor) if factor and everywhere and trial.case.exact else ()
    changing: list[tuple[str, ByStep]] = []
    for hint, by_step in tokens:
        changing.append((hint, partial(_relative, by_step, factor or 1.0)))
    fitted_values = ("factor", factor) if factor is not None else ("factors", tuple(sorted({*factors.values()})))
    for text, by_step in (*changing, (_name(trial, factors), lambda step: 1.0)):
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
        cause = Cause(KIND, observed, hint=shown_hint, details=(fitted_values, ("named", hint)))
        only = _zero_steps(trial, factors) if factor == 0 else ()
        change = in_steps(partial(_times, factors, by_step))
        fitted = 1 + (factor is None)
        # a number of the case is not fitted: all entries confirm it in one step, and not why it is so
        of_the_case = bool(hint) and factor is not None and not is_changing
        alone = replace(cause, hint="", details=(fitted_values, ("named", ""))) if of_the_case else None
        least = 1 if factor == 0 else 2
        yield Reading(cause, [*factors], change, fitted, number, only, least=least, alone=alone)


def _zero_steps(trial: Trial, fqns: Collection[str]) -> tuple[int, ...]:
    """Return the steps in which these gradients are zero on all ranks, where these are several."""
    steps = []
    for step in trial.case.steps:
        if not any(np.any(gradient) for gradient in _seen(trial, fqns, step)):
            steps.append(step)
    return tuple(steps) if len(steps) > 1 else ()


def _seen(trial: Trial, fqns: Collection[str], step: int) -> Iterator[np.ndarray]:
    """Yield the gradients of these parameters that ranks had in a step."""
    for rank in trial.ranks:
        for fqn, gradient in seen_gradients(trial, rank, step).items():
            if fqn in fqns:
                yield gradient


def _relative(by_step: ByStep, factor: float, step: int) -> float:
    """Return the factor of a step, relative to the one that was fitted."""
    return by_step(step) / factor


def _times(factors: Mapping[str, float], by_step: ByStep, step: int, gradients: Arrays) -> Arrays:
    """Return the gradients, each times its factor and the one of the step."""
    scaled = {}
    for fqn, gradient in gradients.items():
        scaled[fqn] = (gradient * (factors.get(fqn, 1.0) * by_step(step))).astype(gradient.dtype)
    return scaled


def _scaled_text(factor: float | None) -> str:
    """Return how many times as large as expected gradients are, in words. None: by several factors."""
    if factor is None:
        return "gradients are scaled by different factors"
    return f"gradients are {times_text(factor)} what they should be" if abs(factor) > 1e-12 else "gradients are zero"


def _name(trial: Trial, factors: Mapping[str, float]) -> str:
    """Return which number of the case a factor is, which noise does not show; and of several, which parameters have each."""
    factor = _common(factors)
    if factor is None:
        numbers = {fqn: number_text(own_factor, 4) for fqn, own_factor in factors.items()}
        texts = []
        for number in sorted({*numbers.values()})[:FEW]:
            fqns = [fqn for fqn in numbers if numbers[fqn] == number]
            texts.append(f"{number} ({some(fqns, 1)})")
        return ", ".join(texts)
    one_rank_has_both = trial.case.model.tied_embeddings and not tied_axis(trial.case)
    if one_rank_has_both and [*factors] == [TIED] and math.isclose(factor, 2, rel_tol=1e-6):
        return "it counts for the embedding and again for the output, which share it"
    return factor_text(trial, factor, len(factors) == len(trial.plan.shapes)) if trial.case.exact else ""


def _in_the_loss(trial: Trial, since: int, factor: float) -> Hypothesis:
    """Return that a factor is within backward, whose rounding is not that of a factor after it: the roundest number."""
    factor = float(f"{factor:.3g}")

    def batch(step: int, usual: Batch) -> Batch:
        counts = np.full(usual.labels.shape, factor if step >= since else 1.0)
        return replace(usual, counts=counts if usual.counts is None else counts * usual.counts)

    hint = "the loss is scaled before backward"
    where = from_step(trial, since) if since > trial.first_step else ""
    cause = Cause(KIND, _scaled_text(factor), where, hint=hint, details=(("factor", factor),))
    return Hypothesis(cause, partial(another_reference, batch=batch), 2)


def _unscaled_late(trial: Trial, factor: float) -> Hypothesis:
    """Return that a loss scale is taken out of gradients after clipping has seen them."""
    factor = float(round(factor)) if abs(factor - round(factor)) < 1e-4 * factor else factor
    limit = trial.case.training.max_norm
    norms = {step: norm_of(trial, step) for step in trial.case.steps}

    def unscaled_gradients(step: int, gradients: Arrays, norm: float, parameters: object) -> Arrays:
        scaled = {}
        for fqn, gradient in gradients.items():
            scaled[fqn] = (clip_coefficient(norm, limit) / factor * gradient).astype(gradient.dtype)
        return scaled

    def unscaled_gradient(rank: int, step: int, fqn: str, gradient: np.ndarray) -> np.ndarray:
        return clip_coefficient(norms[step], limit) / factor * gradient

    text = f"gradients are clipped while {times_text(factor)} too large, and divided by that afterwards"
    times = partial(_times, dict.fromkeys(trial.plan.shapes, factor), lambda step: 1.0)
    assume = partial(
        another_optimizer, assumed=AssumedOptimizer(given=unscaled_gradient), gradients=times, given=unscaled_gradients
    )
    return Hypothesis(Cause(KIND, text, details=(("factor", factor),)), assume)


# ---- what was there before


def _not_zeroed(trial: Trial, step: int) -> Iterator[Reading]:
    """Yield that gradients hold those of the step before as well, of all parameters or of the wrong ones alone."""
    weights = _weights(trial, step, _before, counted_once=expected_gradient) if step > 1 else {}
    if not weights or (trial.case.exact and not _common(weights)):
        return
    all_fqns = tuple(trial.plan.shapes)
    wrong_fqns = tuple(in_order(trial, (fqn for _, fqn in weights)))
    limits = dict.fromkeys((trial.case.training.max_norm, None))
    for fqns, limit in itertools.product(dict.fromkeys((all_fqns, wrong_fqns)), limits):
        hint = f"those of step {step} hold step {step - 1}'s as well"
        cause = Cause("gradients not zeroed", "gradients are not zeroed", hint=hint)
        change = partial(adding, fqns=fqns, limit=limit)
        assume = lambda steps, change=change: partial(another_reference, gradients=change(steps))  # noqa: E731
        yield Reading(cause, fqns, assume, 1 + (fqns != all_fqns))


def adding(steps: Sequence[int], fqns: Sequence[str], limit: float | None) -> Change:
    """Return a change that adds what there was before, in these steps and parameters.

    limit: the norm to which that was clipped in place.
    """
    earlier: Arrays = {}

    def gradients(step: int, own: Arrays) -> Arrays:
        total = own
        if step in steps:
            total = {**own, **{fqn: own[fqn] + earlier[fqn] for fqn in fqns if fqn in own}}
        coefficient = clip_coefficient(norm_of_all(total), limit)
        earlier.update({fqn: (coefficient * gradient).astype(gradient.dtype) for fqn, gradient in total.items()})
        return total

    return gradients


def norm_of_all(gradients: Arrays) -> float:
    """Return the norm of all gradients together, in float64."""
    squares = (float(np.sum(np.square(gradient, dtype=np.float64))) for gradient in gradients.values())
    return math.sqrt(math.fsum(squares))


# ---- what tp peers have


def _mixed_over_tp(trial: Trial, step: int) -> Iterator[Reading]:
    """Yield one multiple of the sum of what tp peers should have, each of another slice."""
    weights = _weights(trial, step, _over_tp) if trial.case.exact else {}
    fqns = in_order(trial, (fqn for _, fqn in weights))
    factor = _common(weights)
    if factor:
        names = {1.0: "the sum", 1 / trial.case.dims.tp: "the mean"}
        times = names.get(round(factor, 9), f"{times_text(factor)} the sum")
        text = f"gradients are also reduced over tp, whose ranks hold different slices: each has {times} of all"
        change = in_steps(partial(_mixing, trial, fqns, factor))
        assume = lambda steps: lambda trial: _moved_besides(change(steps)(trial))  # noqa: E731
        least = 1 if round(factor, 9) in (1.0, round(1 / trial.case.dims.tp, 9)) else 2
        yield Reading(Cause("slices mixed", text, details=(("factor", factor),)), fqns, assume, least=least)


def _mixing(trial: Trial, fqns: Sequence[str], factor: float, step: int, gradients: Arrays) -> Arrays:
    """Return the gradients, each rank's slice replaced by the sum over its tp group times the factor."""

    def mixed_slice(rank: int, fqn: str) -> np.ndarray:
        slices = [trial.gradient_slice_of(peer, fqn) for peer in trial.plan.peers(rank, "tp")]
        return np.asarray(factor * np.sum([take(gradients[fqn], part) for part in slices if part is not None], axis=0))

    return with_slices(trial, gradients, fqns, sorted(trial.ranks), mixed_slice)


def _moved_besides(trial: Trial) -> Trial:
    """Assume that all gradients move once more, when backward is over."""
    outside_bytes = {}
    for rank, evidence in trial.ranks.items():
        gradients = evidence.steps[0].gradients.values() if evidence.steps else []
        gradient_bytes = sum(gradient.nbytes for gradient in gradients)
        outside_bytes[rank] = trial.plan.outside_bytes[rank] + gradient_bytes
    return replace(trial, plan=replace(trial.plan, outside_bytes=outside_bytes))


# ---- the part of the embedding alone, of a weight that the output shares


def lacks_the_outputs_part(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Yield that the gradient of a tied weight has the embedding's part alone."""
    step = first_wrong_step(trial) if "gradients" in broken and trial.case.model.tied_embeddings else None
    if step is not None and {fqn for _, fqn in wrong_pairs(trial, step)} == {TIED}:
        from harness.reference.spellings import output_detached

        text = f"the gradient of the tied weight lacks the output's part: {TIED} has only the embedding's"
        cause = Cause("tied weight without the output's part", text)
        yield Hypothesis(cause, partial(another_reference, altered=output_detached))
