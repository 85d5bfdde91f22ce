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

SHARP, ROUGH = 1e-9, 0.1  # of a gradient's length, that a sum leaves in float64, and where there is noise
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
    """What weights mean: the cause, and the rule that says them in every step."""

    cause: Cause
    fqns: Sequence[str]
    """The parameters in whose gradients it is so."""
    assume: Assume
    fitted: int = 1
    number: Number | None = None
    """What ranks may report then."""
    only: Sequence[int] = ()
    """The steps in which it shows by itself; empty where that is not known."""
    least: int = 1
    """In how many steps it must be so: two where a number was fitted in the first, for the second is the test."""
    alone: Cause | None = None
    """The cause in fewer steps, which says less; None if it is none then."""

    def hypotheses(self, trial: Trial, step: int) -> Iterator[Hypothesis]:
        """Suppose it from a step on, and in it alone; with the loss that ranks report, where that follows from it."""
        few = len(self.fqns) < len(trial.plan.shapes)
        where, details = f" {in_parameters(trial, self.fqns)}" * few, (("parameters", tuple(self.fqns)),) * few
        reported, number = reported_of(trial, "reported_loss") if self.number else None, self.number
        some = [(f" in steps {', '.join(map(str, self.only))}", [*self.only], 1)] * bool(self.only)
        for when, steps, more in (*spans(trial, step), *some):
            cause = self.cause if len(steps) >= self.least else self.alone
            if cause is None:
                continue
            more_details = (*cause.details, *details, ("steps", tuple(steps)))
            cause = replace(cause, where=(where + when).strip(), details=more_details)
            found = Hypothesis(cause, self.assume(steps), self.fitted + more)
            if reported and number and {at for _, at in reported.odd} <= {*steps}:
                then = lambda rank, at: number(rank, at, reported.right[rank, at])  # noqa: E731
                if reported.is_all(then):
                    found = found.and_then(partial(assuming_reports, reported=reported, number=then))
            yield found


def sums_of_whole_gradients(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    step = first_wrong_step(trial) if "gradients" in broken else None
    if "grad_norm" in broken and not (step or "gradients" in broken or trial.case.exact):
        step = trial.first_step  # noise hides it of each
    if step is None:
        return
    factors = [*_factors(trial, step)]
    scaled = itertools.chain.from_iterable(_scaled(trial, one, step) for one in factors)
    for reading in (*scaled, *_not_zeroed(trial, step), *_mixed_over_tp(trial, step)):
        yield from reading.hypotheses(trial, step)
    for common in (_common(one) for one in factors if len(one) == len(trial.plan.shapes)):
        if common and not trial.case.exact and step < trial.case.steps[-1]:
            yield _in_the_loss(trial, step, common)
        if common and common > 0 and "update" in broken and step == trial.first_step and trial.case.training.max_norm:
            yield _unscaled_late(trial, common)


def in_steps(change: Change) -> Assume:
    """Assume that gradients are changed so."""
    return lambda steps: partial(
        another_reference, gradients=lambda step, own: change(step, own) if step in steps else own
    )


# ---- what is summed


def _before(trial: Trial, rank: int, fqn: str, step: int) -> np.ndarray | None:
    return expected_gradient(trial, rank, fqn, step - 1)


def _over_tp(trial: Trial, rank: int, fqn: str, step: int) -> np.ndarray | None:
    """Return the sum of what its tp group should have; None where these are no different slices of one shape."""
    peers = trial.plan.peers(rank, "tp")
    parts = [part for peer in peers if (part := expected_gradient(trial, peer, fqn, step)) is not None]
    differ = len({trial.gradient_slice_of(peer, fqn) for peer in peers}) > 1
    return np.sum(parts, axis=0) if differ and len({p.shape for p in parts}) == 1 and len(parts) == len(peers) else None


def _weights(trial: Trial, step: int, source: Source, beside: Source | None = None) -> dict[Pair, float]:
    """Return how often a source counts in each wrong gradient of a step, beside one that counts once. Empty if a gradient is
    no such sum."""
    found, tolerated = {}, SHARP if trial.case.exact else ROUGH
    for rank, fqn in wrong_pairs(trial, step):
        rest, own = seen_gradients(trial, rank, step)[fqn], source(trial, rank, fqn, step)
        once = beside(trial, rank, fqn, step) if beside else np.zeros_like(rest)
        if own is None or once is None or not rest.shape == own.shape == once.shape or not np.any(own):
            return {}
        factor, size = best_fit(rest - once, own), max(np.linalg.norm(rest), np.linalg.norm(own))
        if not np.linalg.norm(rest - once - factor * own) <= tolerated * size:
            return {}
        found[rank, fqn] = factor
    return found


def scaled_alike(trial: Trial, step: int) -> bool:
    """Say whether every wrong gradient is a multiple of what it should be."""
    return trial.case.exact and bool(_weights(trial, step, expected_gradient))


def common_factor(trial: Trial, step: int) -> float | None:
    """Return how often all wrong gradients of a step are what they should be; None where that is no one number."""
    return _common(_weights(trial, step, expected_gradient)) if trial.case.exact else None


# ---- its own, another number of times


def _factors(trial: Trial, step: int) -> Iterator[dict[str, float]]:
    """Yield factors by parameter. In float64 those that fit, if all holders have the same. In recipes with noise one of all
    parameters, one of those that are wrong, and one of each of these where they are few."""
    if trial.case.exact:
        found = _weights(trial, step, expected_gradient)
        fqns = dict.fromkeys(fqn for _, fqn in found)
        of = {fqn: [found.get((rank, fqn), 1.0) for rank in holders_of(trial, fqn)] for fqn in fqns}
        if found and all(np.allclose(one, one[0], rtol=1e-7, atol=1e-12) for one in of.values()):
            yield {fqn: float(np.median(one)) for fqn, one in of.items()}
        return
    try:
        every = misfits(trial, step)[0]
    except NoBound:
        return
    wrong, whole = [one for one in every if not one.within], trial.plan.shapes
    if not wrong:
        yield dict.fromkeys(whole, norm_of(trial, step) / trial.reference_step(step).grad_norm)
        return
    off = in_order(trial, (one.fqn for one in wrong))
    mean = float(np.average([one.fit for one in wrong], weights=[one.fit_bound**-2.0 for one in wrong]))
    if any(abs(one.fit / mean - 1) <= one.fit_bound for one in wrong):
        yield dict.fromkeys(whole, mean)
    if len(off) < len(whole):
        yield dict.fromkeys(off, mean)
    if 1 < len(off) <= FEW:
        yield {one.fqn: one.fit for one in wrong}


def _common(factors: Mapping[Any, float]) -> float | None:
    numbers = [*factors.values()]
    same = numbers and np.allclose(numbers, numbers[0], rtol=1e-7, atol=1e-12)
    return float(np.median(numbers)) if same else None


def _scaled(trial: Trial, factors: Mapping[str, float], step: int) -> Iterator[Reading]:
    """Read one factor, which may be another in each step, as numbers of tokens are; or one of each parameter."""
    factor, everywhere = _common(factors), len(factors) == len(trial.plan.shapes)
    tokens = token_factors(trial, step, factor) if factor and everywhere and trial.case.exact else ()
    ways: list[tuple[str, ByStep]] = [(hint, partial(_relative, by, factor or 1.0)) for hint, by in tokens]
    details = ("factor", factor) if factor is not None else ("factors", tuple(sorted({*factors.values()})))
    for text, by in (*ways, (_name(trial, factors), lambda at: 1.0)):
        hint = text.removeprefix(": ")
        number = (lambda rank, at, right, by=by: factor * by(at) * right) if everywhere and factor else None
        said = _scaled_text(factor), hint
        if (text, by) in ways:  # the factor is another one in each step
            said = f"gradients are {hint}", f"{times_text(factor or 1.0)} what they should be in step {step}"
        cause = Cause(KIND, said[0], hint=said[1], details=(details, ("named", hint)))
        only = _zero_steps(trial, factors) if factor == 0 else ()
        change, fitted = in_steps(partial(_times, factors, by)), 1 + (factor is None)
        # a number of the case is not fitted: all entries confirm it in one step, and not why it is so
        of_the_case = bool(hint) and factor is not None and (text, by) not in ways
        alone = replace(cause, hint="", details=(details, ("named", ""))) if of_the_case else None
        yield Reading(cause, [*factors], change, fitted, number, only, least=1 if factor == 0 else 2, alone=alone)


def _zero_steps(trial: Trial, fqns: Collection[str]) -> tuple[int, ...]:
    """Return the steps in which these gradients are zero on all ranks, where these are several."""
    steps = [step for step in trial.case.steps if not any(np.any(g) for g in _seen(trial, fqns, step))]
    return tuple(steps) if len(steps) > 1 else ()


def _seen(trial: Trial, fqns: Collection[str], step: int) -> Iterator[np.ndarray]:
    return (g for rank in trial.ranks for fqn, g in seen_gradients(trial, rank, step).items() if fqn in fqns)


def _relative(by: ByStep, factor: float, step: int) -> float:
    return by(step) / factor


def _times(factors: Mapping[str, float], by: ByStep, step: int, own: Arrays) -> Arrays:
    return {fqn: (g * (factors.get(fqn, 1.0) * by(step))).astype(g.dtype) for fqn, g in own.items()}


def _scaled_text(factor: float | None) -> str:
    if factor is None:
        return "gradients are scaled by different factors"
    return f"gradients are {times_text(factor)} what they should be" if abs(factor) > 1e-12 else "gradients are zero"


def _name(trial: Trial, factors: Mapping[str, float]) -> str:
    """Return which number of the case a factor is, which noise does not show; and of several, which parameters have each."""
    if (factor := _common(factors)) is None:
        kinds = {fqn: number_text(one, 4) for fqn, one in factors.items()}
        of = {kind: [fqn for fqn in kinds if kinds[fqn] == kind] for kind in sorted({*kinds.values()})[:FEW]}
        return ", ".join(f"{kind} ({some(fqns, 1)})" for kind, fqns in of.items())
    whole = trial.case.model.tied_embeddings and not tied_axis(trial.case)
    if whole and [*factors] == [TIED] and math.isclose(factor, 2, rel_tol=1e-6):
        return "it counts for the embedding and again for the output, which share it"
    return factor_text(trial, factor, len(factors) == len(trial.plan.shapes)) if trial.case.exact else ""


def _in_the_loss(trial: Trial, since: int, factor: float) -> Hypothesis:
    """Suppose a factor within backward, whose rounding is not that of a factor after it: the roundest number."""
    factor = float(f"{factor:.3g}")

    def batch(step: int, usual: Batch) -> Batch:
        counts = np.full(usual.labels.shape, factor if step >= since else 1.0)
        return replace(usual, counts=counts if usual.counts is None else counts * usual.counts)

    hint, where = "the loss is scaled before backward", from_step(trial, since) if since > trial.first_step else ""
    cause = Cause(KIND, _scaled_text(factor), where, hint=hint, details=(("factor", factor),))
    return Hypothesis(cause, partial(another_reference, batch=batch), 2)


def _unscaled_late(trial: Trial, factor: float) -> Hypothesis:
    """Suppose a loss scale that is taken out of gradients after clipping has seen them."""
    factor = float(round(factor)) if abs(factor - round(factor)) < 1e-4 * factor else factor
    limit, norms = trial.case.training.max_norm, {step: norm_of(trial, step) for step in trial.case.steps}

    def given(step: int, gradients: Arrays, norm: float, parameters: object) -> Arrays:
        return {fqn: (clip_coefficient(norm, limit) / factor * g).astype(g.dtype) for fqn, g in gradients.items()}

    def of_rank(rank: int, step: int, fqn: str, gradient: np.ndarray) -> np.ndarray:
        return clip_coefficient(norms[step], limit) / factor * gradient

    text = f"gradients are clipped while {times_text(factor)} too large, and divided by that afterwards"
    times = partial(_times, dict.fromkeys(trial.plan.shapes, factor), lambda at: 1.0)
    assume = partial(another_optimizer, assumed=AssumedOptimizer(given=of_rank), gradients=times, given=given)
    return Hypothesis(Cause(KIND, text, details=(("factor", factor),)), assume)


# ---- what was there before


def _not_zeroed(trial: Trial, step: int) -> Iterator[Reading]:
    found = _weights(trial, step, _before, beside=expected_gradient) if step > 1 else {}
    if not found or (trial.case.exact and not _common(found)):
        return
    every, off = tuple(trial.plan.shapes), tuple(in_order(trial, (fqn for _, fqn in found)))
    limits = dict.fromkeys((trial.case.training.max_norm, None))
    for fqns, limit in itertools.product(dict.fromkeys((every, off)), limits):
        hint = f"those of step {step} hold step {step - 1}'s as well"
        cause = Cause("gradients not zeroed", "gradients are not zeroed", hint=hint)
        change = partial(adding, fqns=fqns, limit=limit)
        assume = lambda steps, change=change: partial(another_reference, gradients=change(steps))  # noqa: E731
        yield Reading(cause, fqns, assume, 1 + (fqns != every))


def adding(steps: Sequence[int], fqns: Sequence[str], limit: float | None) -> Change:
    """Add what there was before, in these steps and parameters. limit: the norm to which that was clipped in place."""
    left: Arrays = {}

    def gradients(step: int, own: Arrays) -> Arrays:
        total = {**own, **{fqn: own[fqn] + left[fqn] for fqn in fqns if fqn in own}} if step in steps else own
        by = clip_coefficient(norm_of_all(total), limit)
        left.update({fqn: (by * g).astype(g.dtype) for fqn, g in total.items()})
        return total

    return gradients


def norm_of_all(gradients: Arrays) -> float:
    return math.sqrt(math.fsum(float(np.sum(np.square(g, dtype=np.float64))) for g in gradients.values()))


# ---- what tp peers have


def _mixed_over_tp(trial: Trial, step: int) -> Iterator[Reading]:
    """Read one multiple of the sum of what tp peers should have, each of another slice."""
    found = _weights(trial, step, _over_tp) if trial.case.exact else {}
    fqns, factor = in_order(trial, (fqn for _, fqn in found)), _common(found)
    if factor:
        times = {1.0: "the sum", 1 / trial.case.dims.tp: "the mean"}.get(
            round(factor, 9), f"{times_text(factor)} the sum"
        )
        text = f"gradients are also reduced over tp, whose ranks hold different slices: each has {times} of all"
        change = in_steps(partial(_mixing, trial, fqns, factor))
        assume = lambda steps: lambda trial: _moved_besides(change(steps)(trial))  # noqa: E731
        least = 1 if round(factor, 9) in (1.0, round(1 / trial.case.dims.tp, 9)) else 2
        yield Reading(Cause("slices mixed", text, details=(("factor", factor),)), fqns, assume, least=least)


def _mixing(trial: Trial, fqns: Sequence[str], factor: float, step: int, own: Arrays) -> Arrays:
    def of(rank: int, fqn: str) -> np.ndarray:
        parts = [trial.gradient_slice_of(peer, fqn) for peer in trial.plan.peers(rank, "tp")]
        return np.asarray(factor * np.sum([take(own[fqn], one) for one in parts if one is not None], axis=0))

    return with_slices(trial, own, fqns, sorted(trial.ranks), of)


def _moved_besides(trial: Trial) -> Trial:
    """Assume that all gradients move once more, when backward is over."""
    records = {rank: evidence.steps[0].gradients.values() for rank, evidence in trial.ranks.items() if evidence.steps}
    besides = {rank: sum(gradient.nbytes for gradient in seen) for rank, seen in records.items()}
    most = {rank: trial.plan.outside_bytes[rank] + besides.get(rank, 0) for rank in trial.ranks}
    return replace(trial, plan=replace(trial.plan, outside_bytes=most))


# ---- the part of the embedding alone, of a weight that the output shares


def lacks_the_outputs_part(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    step = first_wrong_step(trial) if "gradients" in broken and trial.case.model.tied_embeddings else None
    if step is not None and {fqn for _, fqn in wrong_pairs(trial, step)} == {TIED}:
        from harness.reference.spellings import output_detached

        text = f"the gradient of the tied weight lacks the output's part: {TIED} has only the embedding's"
        cause = Cause("tied weight without the output's part", text)
        yield Hypothesis(cause, partial(another_reference, altered=output_detached))
