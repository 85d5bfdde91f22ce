"""In recipes with noise: which parameters' gradients of the first step are off as a whole, and whether a factor explains it."""

from __future__ import annotations

from harness.diagnosis.differences import wrong_pairs
from harness.diagnosis.words import Broken, in_parameters, on_ranks
from harness.judge.assembly import Misfit, misfits
from harness.judge.result import Diagnosis, one_cause
from harness.judge.tolerance import Bounds, NoBound, measured_bounds
from harness.judge.trial import Trial


def wrong_parameters(trial: Trial, broken: Broken) -> Diagnosis | None:
    """A factor is named where what is left without it is within the noise. What is off otherwise is named only if no entry
    is beyond its own bound: then other rules have nothing to look at."""
    if "gradients" not in broken or trial.case.exact:
        return None
    try:
        wrong = [one for one in misfits(trial, trial.first_step)[0] if not one.within]
    except NoBound:
        return None
    if not wrong:
        return None
    for bounds, more in ((trial.bounds, ""), (_rounded_anew(trial), ", and rounded otherwise")):
        if bounds and (cause := _scaled(trial, wrong, bounds)):
            return one_cause(cause + more, _lines(wrong))
    return None if wrong_pairs(trial, trial.first_step) else one_cause(_off(trial, wrong), _lines(wrong))


def _rounded_anew(trial: Trial) -> Bounds | None:
    """Bounds for matmuls whose operands are rounded otherwise, as they are behind a factor within backward."""
    noise = trial.golden.noise.get(trial.case.golden_noise_key) if trial.golden else None
    return measured_bounds(trial.case, noise) if noise and noise.finite else None


def _scaled(trial: Trial, wrong: list[Misfit], bounds: Bounds) -> str | None:
    """The factor, or the factors, that explain all that is wrong: within these bounds nothing is left without them."""
    off = {(one.fqn, one.ranks) for one in wrong}
    scaled = [one for one in misfits(trial, trial.first_step, bounds)[0] if (one.fqn, one.ranks) in off]
    if not all(one.rest <= one.distance_bound for one in scaled) or not any(one.scaled for one in scaled):
        return None
    best, factors = min(scaled, key=lambda one: one.fit_bound), [one.fit for one in scaled]
    if all(abs(one.fit / best.fit - 1) <= one.fit_bound + best.fit_bound for one in scaled):
        return f"gradients are {best.fit:.3g} times what they should be {_where(trial, wrong)}"
    if not all(one.scaled for one in scaled):
        return None
    text = f"times {min(factors):.3g} to {max(factors):.3g}"
    return f"gradients are scaled by different factors {_where(trial, wrong)}: {text}"


def _off(trial: Trial, wrong: list[Misfit]) -> str:
    worst = max(wrong, key=lambda one: one.excess)
    text = f"by {worst.distance:.1e} of its length in {worst.fqn}, where noise explains {worst.distance_bound:.1e}"
    return f"gradients are off {_where(trial, wrong)}, and no factor explains it: {text}; no single entry stands out"


def _where(trial: Trial, wrong: list[Misfit]) -> str:
    names = {one.fqn for one in wrong}
    fqns = [fqn for fqn in trial.plan.shapes if fqn in names]
    holders = {rank for one in misfits(trial, trial.first_step)[0] if one.fqn in names for rank in one.ranks}
    ranks = {rank for one in wrong for rank in one.ranks}
    return in_parameters(trial, fqns) + ("" if ranks == holders else on_ranks(trial, ranks))


def _lines(wrong: list[Misfit]) -> tuple[tuple[str, str], ...]:
    """The worst ones: numbers that a person can check."""
    worst = sorted(wrong, key=lambda one: -one.excess)[:3]
    return tuple(
        (
            "gradients",
            f"{one.fqn}: {one.fit:.4g} times the reference's by best fit (bound {one.fit_bound:.1e}),"
            f" off by {one.distance:.1e} of its length (bound {one.distance_bound:.1e})",
        )
        for one in worst
    )
