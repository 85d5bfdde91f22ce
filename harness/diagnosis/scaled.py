"""Gradients that are a multiple of the requested ones, all or a set of parameters, or hold those of the step before.

Factors are fitted in the first step in which gradients are wrong, where parameters are still right. The reference is trained
again with them; the checks judge all steps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from harness.checks.update import observed_norm
from harness.diagnosis.assume import another_optimizer, another_reference
from harness.diagnosis.differences import (
    common_factor,
    expected_gradient,
    factor_of,
    first_wrong_step,
    holders_of,
    seen_gradients,
    spans,
    wrong_pairs,
)
from harness.diagnosis.factors import factor_text, times_text, token_factors
from harness.diagnosis.hypothesis import Broken, Hypothesis
from harness.diagnosis.reports import assuming_reports, reported_of
from harness.diagnosis.words import Arrays, from_step, in_order, in_parameters, on_ranks, some
from harness.evidence.text import number_text
from harness.judge.assembly import Misfit, misfits
from harness.judge.assumed import AssumedOptimizer
from harness.judge.result import Cause, Lines
from harness.judge.tolerance import NoBound, clip_coefficient
from harness.judge.trial import Trial
from harness.plan.stages import parameters_of_stage
from harness.reference.distance import best_fit, relative_distance

if TYPE_CHECKING:
    from harness.reference.counterfactual import Batch

FEW = 4  # factors that are fitted each by itself, where noise leaves something of each
KIND = "gradients scaled"
TIED = "tok_embeddings.weight"  # the output's weight as well, where embeddings are tied
Scale = Callable[[int], Mapping[str, float | np.ndarray]]
"""By step, what each parameter is multiplied by; those that are not in it are as they were."""


@dataclass(frozen=True)
class Fit:
    """Of the first wrong step: the factor of each wrong parameter, and the ranks on which it is wrong."""

    step: int
    factors: dict[str, float]
    common: float | None
    ranks: tuple[int, ...]
    lines: Lines = ()


def scaled_gradients(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    if "gradients" in broken:
        step = first_wrong_step(trial)
        fits = () if step is None else (_exact_fit(trial, step),) if trial.case.exact else _noisy_fits(trial, step)
        for fit in fits:
            if fit is not None:
                yield from _with_one_factor(trial, fit, broken) if fit.common is not None else _with_several(trial, fit)
    elif "grad_norm" in broken and not trial.case.exact:
        yield from _longer(trial)


# ---- fits


def _exact_fit(trial: Trial, step: int) -> Fit | None:
    """None where something that is wrong is no multiple, or replicas have other ones."""
    wrong = wrong_pairs(trial, step)
    found = {(rank, fqn): factor_of(trial, rank, fqn, step) for rank, fqn in wrong}
    factors = {at: factor for at, factor in found.items() if factor is not None}
    if len(factors) < len(found):
        return None
    by_fqn = {fqn: _of_all_holders(trial, fqn, factors) for fqn in dict.fromkeys(fqn for _, fqn in wrong)}
    known = {fqn: factor for fqn, factor in by_fqn.items() if factor is not None}
    if len(known) < len(by_fqn):
        return None
    ranks = tuple(sorted({rank for rank, _ in wrong}))
    return Fit(step, known, common_factor(trial, wrong, step), ranks, _best_fits(factors, step))


def _of_all_holders(trial: Trial, fqn: str, factors: Mapping[tuple[int, str], float]) -> float | None:
    """None where its holders have not all the same."""
    numbers = [factors.get((rank, fqn), 1.0) for rank in holders_of(trial, fqn)]
    return float(np.median(numbers)) if len({round(number, 9) for number in numbers}) == 1 else None


def _best_fits(factors: Mapping[tuple[int, str], float], step: int) -> Lines:
    """The first parameter that is wrong, on two ranks: one number that a person can check."""
    first = next(iter(factors))[1]
    shown = [(rank, factor) for (rank, fqn), factor in factors.items() if fqn == first][:2]
    text = f"step {step}, {first}: {{:.4g}} times the reference's by best fit"
    return tuple(("gradients", f"rank {rank}, {text.format(factor)}") for rank, factor in shown)


def _noisy_fits(trial: Trial, step: int) -> Iterator[Fit]:
    """One factor of all parameters, one of those that are wrong, and one of each of these where they are few."""
    try:
        every = misfits(trial, step)[0]
    except NoBound:
        return
    wrong = [one for one in every if not one.within]
    if not wrong:
        return
    off = in_order(trial, (one.fqn for one in wrong))
    sure = np.array([one.fit_bound for one in wrong]) ** -2.0
    mean = float(np.average([one.fit for one in wrong], weights=sure))
    unlike = [one for one in every if abs(one.fit - mean) > one.fit_bound * abs(mean)]
    everyone, lines = tuple(sorted(trial.ranks)), _misfit_lines(wrong)
    if len(unlike) < len(wrong):
        yield Fit(step, dict.fromkeys(trial.plan.shapes, mean), mean, everyone, lines)
    if len(off) < len(trial.plan.shapes):
        yield Fit(step, dict.fromkeys(off, mean), mean, everyone, lines)
    if any(one in unlike for one in wrong) and len(off) <= FEW:
        yield Fit(step, {one.fqn: one.fit for one in wrong}, None, everyone, lines)


def _misfit_lines(wrong: list[Misfit]) -> Lines:
    """The worst ones: numbers that a person can check."""
    texts = (
        f"{one.fqn}: {number_text(one.fit, 4)} times the reference's by best fit (bound {one.fit_bound:.1e}),"
        f" off by {one.distance:.1e} of its norm (bound {one.distance_bound:.1e})"
        for one in sorted(wrong, key=lambda one: -one.excess)[:3]
    )
    return tuple(("gradients", text) for text in texts)


# ---- hypotheses


def _with_one_factor(trial: Trial, fit: Fit, broken: Broken) -> Iterator[Hypothesis]:
    factor = fit.common or 0.0
    everywhere = len(fit.factors) == len(trial.plan.shapes)
    if everywhere:
        for hint, by_step in token_factors(trial, fit.step, factor):
            yield _counted(trial, fit, broken, hint, by_step)
    name = factor_text(trial, factor, everywhere) if trial.case.exact else ""
    if trial.case.model.tied_embeddings and list(fit.factors) == [TIED] and math.isclose(factor, 2, rel_tol=1e-6):
        name = f": counted for the embedding and again for the output, which share it{name.replace(':', ', or', 1)}"
    if everywhere:
        yield _counted(trial, fit, broken, name, lambda step: factor)
    for when, scale, fitted in _spans(trial, fit):
        if not everywhere or when:
            text = _sentence(trial, fit, factor, since_then=not when) + when + name
            yield _hypothesis(text, scale, fit.lines, fitted)
    if everywhere and not trial.case.exact:
        yield _in_the_loss(trial, fit, _sentence(trial, fit, factor))
    clipped = "update" in broken and fit.step == trial.first_step and trial.case.training.max_norm
    if everywhere and clipped and factor > 0:
        whole = abs(factor - round(factor)) < 1e-4 * factor
        yield _unscaled_late(trial, fit, float(round(factor)) if whole else factor)


def _unscaled_late(trial: Trial, fit: Fit, factor: float) -> Hypothesis:
    """As with a loss scale that is taken out of gradients after clipping has seen them."""
    limit, norms = trial.case.training.max_norm, {step: observed_norm(trial, step) for step in trial.case.steps}

    def given(step: int, gradients: Arrays, norm: float, parameters: object) -> Arrays:
        return {fqn: (clip_coefficient(norm, limit) / factor * g).astype(g.dtype) for fqn, g in gradients.items()}

    def of_rank(rank: int, step: int, fqn: str, gradient: np.ndarray) -> np.ndarray:
        return clip_coefficient(norms[step], limit) / factor * gradient

    text = f"gradients are clipped when they are still {times_text(factor)} what they should be, and divided by that afterwards"
    times = _times(lambda step: dict.fromkeys(fit.factors, factor))
    assume = partial(another_optimizer, assumed=AssumedOptimizer(given=of_rank), gradients=times, given=given)
    return Hypothesis(Cause(KIND, text), assume, 1, fit.lines)


def _counted(trial: Trial, fit: Fit, broken: Broken, hint: str, by_step: Callable[[int], float]) -> Hypothesis:
    """All gradients by a number of the case; with the reported loss, where that is the same multiple."""

    def times(step: int) -> float:
        return by_step(step) if step >= fit.step else 1.0

    alone = any(by_step(step) != by_step(fit.step) for step in trial.case.steps if step >= fit.step)
    text = _sentence(trial, fit, by_step(fit.step), alone=alone) + hint
    usual = _hypothesis(text, lambda step: dict.fromkeys(fit.factors, times(step)), fit.lines)
    reported = reported_of(trial, "reported_loss") if "reported_loss" in broken else None
    shown = lambda rank, step: times(step) * reported.right[rank, step] if reported else None  # noqa: E731
    if reported is None or not reported.is_all(shown):
        return usual
    text = text.replace("gradients are", "gradients and the reported loss are")
    return replace(usual, cause=Cause(KIND, text)).and_then(partial(assuming_reports, reported=reported, number=shown))


def _sentence(trial: Trial, fit: Fit, factor: float, *, alone: bool = False, since_then: bool = True) -> str:
    """alone: the factor is that step's, and others have their own. since_then: later steps have it as well."""
    later, when = fit.step > trial.first_step, f"in step {fit.step}" if alone else from_step(trial, fit.step)
    since = f"are right in step {trial.first_step} and {when}" if later and since_then else "are"
    if abs(factor) < 1e-12:
        return f"gradients {since} zero {_where(trial, fit)}"
    times = times_text(factor) if trial.case.exact else f"{number_text(factor, 4)} times"
    return f"gradients {since} {times} what they should be {_where(trial, fit)}"


def _with_several(trial: Trial, fit: Fit) -> Iterator[Hypothesis]:
    """Each parameter is a multiple of what it should be, but not all the same one: some were scaled more often."""
    text = _by_stage(trial, fit.factors) or _by_kind(trial, fit)
    since = f"{from_step(trial, fit.step)} " if fit.step > trial.first_step else ""
    for when, scale, fitted in _spans(trial, fit):
        yield _hypothesis(text + when if when else since + text, scale, fit.lines, fitted + 1)


def _by_kind(trial: Trial, fit: Fit) -> str:
    factors = fit.factors
    if not trial.case.exact:
        shown = f"{number_text(min(factors.values()), 3)} to {number_text(max(factors.values()), 3)} times"
    else:
        kinds = sorted({round(factor, 9) for factor in factors.values()})
        members = {kind: [fqn for fqn, factor in factors.items() if round(factor, 9) == kind] for kind in kinds[:4]}
        shown = ", ".join(f"{number_text(kind, 4)} ({some(fqns, 1)})" for kind, fqns in members.items())
    return f"gradients are scaled by different factors {_where(trial, fit)}: {shown}"


def _by_stage(trial: Trial, factors: Mapping[str, float]) -> str:
    """Where each stage's gradients are another multiple; empty where they are not."""
    shown: dict[int, float] = {}
    for stage in range(trial.case.n_stages) if trial.case.dims.pp > 1 else ():
        kinds = {round(factors.get(fqn, 1.0), 9) for fqn in parameters_of_stage(trial.case, stage)}
        if len(kinds) > 1:
            return ""
        shown[stage] = kinds.pop()
    texts = ", ".join(f"{number_text(factor)} times in stage {stage}" for stage, factor in shown.items())
    return f"gradients are scaled by stage: {texts}" if shown else ""


def _spans(trial: Trial, fit: Fit) -> Iterator[tuple[str, Scale, int]]:
    """From the first wrong step on, which is said elsewhere, and in it alone."""
    for when, steps, more in spans(trial, fit.step):
        yield f",{when}" * more, lambda step, of=steps: fit.factors if step in of else {}, 1 + more  # type: ignore[misc]


def _hypothesis(text: str, scale: Scale, lines: Lines, fitted: int = 1) -> Hypothesis:
    return Hypothesis(Cause(KIND, text), partial(another_reference, gradients=_times(scale)), fitted, lines)


def _times(scale: Scale) -> Callable[[int, Arrays], Arrays]:
    def gradients(step: int, own: Arrays) -> Arrays:
        factors = scale(step)
        return {fqn: (g * factors[fqn]).astype(g.dtype) if fqn in factors else g for fqn, g in own.items()}

    return gradients


def _in_the_loss(trial: Trial, fit: Fit, text: str) -> Hypothesis:
    """A factor within backward is rounded otherwise than one that comes after it; each number in another way, so that the
    roundest is tried."""
    factor = float(f"{fit.common:.3g}")

    def batch(step: int, usual: Batch) -> Batch:
        counts = np.full(usual.labels.shape, factor if step >= fit.step else 1.0)
        return replace(usual, counts=counts if usual.counts is None else counts * usual.counts)

    cause = Cause(KIND, f"{text}, and rounded otherwise: the loss is scaled before backward")
    return Hypothesis(cause, partial(another_reference, batch=batch), 2, fit.lines)


def _longer(trial: Trial) -> Iterator[Hypothesis]:
    """By what factor all gradients are longer, where noise hides it of each."""
    first = trial.first_step
    ratio = observed_norm(trial, first) / trial.reference_step(first).grad_norm
    text = f"the gradient norm is {number_text(ratio, 3)} times the reference's, though no entry is beyond its noise"
    yield _hypothesis(text, lambda step: dict.fromkeys(trial.plan.shapes, ratio) if step >= first else {}, ())


def _where(trial: Trial, fit: Fit) -> str:
    return in_parameters(trial, fit.factors) + on_ranks(trial, fit.ranks)


# ---- with those of the step before


def gradients_not_zeroed(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    step = first_wrong_step(trial) if "gradients" in broken else None
    if step is None or step == 1 or not _holds_the_one_before(trial, step):
        return
    held = f"those of step {step} hold step {step - 1}'s as well"
    every, off = tuple(trial.plan.shapes), tuple(in_order(trial, (fqn for _, fqn in wrong_pairs(trial, step))))
    limits = dict.fromkeys((trial.case.training.max_norm, None))
    for fqns, most in itertools.product(dict.fromkeys((every, off)), limits):
        for _, steps, more in spans(trial, step):
            when = f"before step {step} alone" if more else "between steps"
            where = f" {in_parameters(trial, fqns)}" * (fqns != every)
            cause = Cause("gradients not zeroed", f"gradients are not zeroed {when}{where}: {held}")
            assume = partial(another_reference, gradients=adding(steps, fqns, most))
            yield Hypothesis(cause, assume, 1 + more + (fqns != every))


def adding(steps: Sequence[int], fqns: Sequence[str], limit: float | None) -> Callable[[int, Arrays], Arrays]:
    """In these steps and parameters what there was before as well. limit: the norm to which that was clipped in place."""
    left: Arrays = {}

    def gradients(step: int, own: Arrays) -> Arrays:
        total = {**own, **{fqn: own[fqn] + left[fqn] for fqn in fqns if fqn in own}} if step in steps else own
        norm = math.sqrt(sum(float(np.sum(np.square(g, dtype=np.float64))) for g in total.values()))
        left.update({fqn: (clip_coefficient(norm, limit) * g).astype(g.dtype) for fqn, g in total.items()})
        return total

    return gradients


def _holds_the_one_before(trial: Trial, step: int) -> bool:
    """Whether what is too much in a few wrong gradients is a multiple of those of the step before."""
    for rank, fqn in wrong_pairs(trial, step)[:4]:
        seen, own = seen_gradients(trial, rank, step)[fqn], expected_gradient(trial, rank, fqn, step)
        before = expected_gradient(trial, rank, fqn, step - 1)
        if own is None or before is None or seen.shape != own.shape or not np.any(before):
            return False
        rest = seen - own
        if relative_distance(rest, best_fit(rest, before) * before) > (1e-6 if trial.case.exact else 0.2):
            return False
    return bool(wrong_pairs(trial, step))
