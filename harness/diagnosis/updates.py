"""Gradients are right, what the optimizer made of them is not: clipping, learning rate, decay, averages, or no step at all.

Suspects are tried by judging the same evidence by the law `update` under a recipe that has the mistake.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from harness.checks import update
from harness.diagnosis.differences import wrong_pairs
from harness.diagnosis.factors import times_text
from harness.diagnosis.words import Broken, finding_line, in_parameters, on_ranks, some
from harness.evidence.records import RankEvidence, StepEvidence, TensorEvidence
from harness.judge.result import Diagnosis, Verdict, one_cause
from harness.judge.tolerance import clip_coefficient
from harness.judge.trial import Trial
from harness.reference.config import TrainingConfig

Pair = tuple[int, str]  # rank, fqn


def wrong_update(trial: Trial, broken: Broken) -> Diagnosis | None:
    if "update" not in broken:
        return None
    explanations: tuple[Callable[[Trial], str | None], ...] = (
        _not_finite, _wrong_lr, _nothing_moves, _not_clipped, _enlarged, _clipped_by_another_norm, _another_decay,
        _another_recipe, _fed_otherwise, _amsgrad, _another_rate, _another_rate_for_some,
    )  # fmt: skip
    line = finding_line("update", broken["update"])
    for explain in explanations:
        cause = explain(trial)
        if cause:
            return one_cause(cause, (line,))
    right = "" if "gradients" in broken else ", the gradients are right"
    cause = f"the optimizer step is wrong{right}: first at {broken['update'].findings[0].where}"
    return one_cause(cause, (*_carried_over(trial), line))


def changed_afterwards(trial: Trial, broken: Broken) -> Diagnosis | None:
    """What the optimizer left is not what the next step began with. Gradients that are wrong before that have another cause,
    later ones follow from it."""
    changes = update.changed(trial)
    step = next(iter(changes), None)
    if "update" not in broken or step is None or any(wrong_pairs(trial, s) for s in trial.case.steps if s <= step):
        return None
    text = f"weights are changed {update.until(trial, step)}, when the optimizer is done"
    cause = f"{text}: {_as_if(trial, step, changes[step])}{_where(trial, changes[step])}"
    return one_cause(cause, (finding_line("update", broken["update"]),))


def _as_if(trial: Trial, step: int, pairs: list[Pair]) -> str:
    """What was done to all of them, if it is something that is easily told."""
    records = {rank: next(s for s in trial.ranks[rank].steps if s.step == step) for rank, _ in pairs}
    both = [(records[rank].parameters[fqn], (records[rank].changed or {})[fqn]) for rank, fqn in pairs]
    if any(now.size != left.size or now.dtype != left.dtype for left, now in both):
        return "to another shape or dtype, "
    both = [(left.reshape(-1).astype(np.float64), now.reshape(-1).astype(np.float64)) for left, now in both]
    if not any(now.any() for _, now in both):
        return "to 0, "
    for dtype, bits in (("bfloat16", 8), ("float16", 11), ("float32", 24)):
        if all(_is_rounded(left, now, bits) for left, now in both):
            return f"rounded to {dtype}, "
    return ""


def _is_rounded(left: np.ndarray, now: np.ndarray, bits: int) -> bool:
    """To this many significant bits."""
    significant = np.frexp(now)[0] * 2.0**bits
    return bool(
        (significant == np.round(significant)).all() and (np.abs(now - left) <= np.abs(left) * 2.0**-bits).all()
    )


def _carried_over(trial: Trial) -> Iterator[tuple[str, str]]:
    """Averages start at the first step: what it gets right and later steps do not is about them."""
    clip = clip_coefficient(update.observed_norm(trial, trial.first_step), trial.case.training.max_norm)
    if all(
        update.explained_by_clip(trial, e, tensor, clip=clip) for e in trial.ranks.values() for tensor in e.parameters
    ):
        yield (
            "why",
            f"step {trial.first_step} is right everywhere: look at what is carried from step to step"
            " (beta1, beta2, state, schedule)",
        )


def _pairs(trial: Trial, holds: Callable[[RankEvidence, StepEvidence, str, np.ndarray], bool]) -> list[Pair]:
    """(rank, fqn) of which something holds in the first step, in the model's order; `before` is what it starts from."""
    return [
        (rank, tensor.fqn)
        for rank, evidence in sorted(trial.ranks.items())
        for tensor in evidence.parameters
        if tensor.fqn in evidence.steps[0].parameters and tensor.value.size
        if holds(evidence, evidence.steps[0], tensor.fqn, trial.start_of(rank)[tensor.fqn])
    ]


def _where(trial: Trial, pairs: list[Pair]) -> str:
    names = {fqn for _, fqn in pairs}
    fqns = [fqn for fqn in trial.plan.shapes if fqn in names]
    return in_parameters(trial, fqns) + on_ranks(trial, [rank for rank, _ in pairs])


def _not_finite(trial: Trial) -> str | None:
    bad = _pairs(trial, lambda e, step, fqn, before: not np.isfinite(step.parameters[fqn]).all())
    after = f"after step {trial.first_step}"
    return f"parameters are NaN or infinite {after} {_where(trial, bad)}, gradients were finite" if bad else None


def _nothing_moves(trial: Trial) -> str | None:
    """A learning rate above 0 moves what has a gradient or decays."""
    still = _pairs(trial, lambda e, step, fqn, before: np.array_equal(step.parameters[fqn], before))
    if still and trial.reference_step(trial.first_step).lr:
        return f"the optimizer does not move {_subject(trial, still)} in step {trial.first_step}"
    steps = sorted({step.step for _, step, _ in trial.steps()})
    for before, step in zip(steps, steps[1:], strict=False):
        still = [pair for pair in _pairs(trial, lambda *_: True) if _same_after(trial, *pair, before)]
        if still and trial.reference_step(step).lr:
            return f"the optimizer does not move {_subject(trial, still)} in step {step}"
    return None


def _same_after(trial: Trial, rank: int, fqn: str, step: int) -> bool:
    """Whether the step after `step` left a parameter as it was."""
    after = {s.step: s.parameters.get(fqn) for s in trial.ranks[rank].steps}
    one, other = after.get(step), after.get(step + 1)
    return one is not None and other is not None and np.array_equal(one, other)


def _wrong_lr(trial: Trial) -> str | None:
    """The rate that was read from the optimizer, against the schedule."""
    rates = {step.step: step.lr for step in trial.reference.steps}
    for _, step, wanted in trial.steps():
        if step.lr is not None and not math.isclose(step.lr, wanted.lr, rel_tol=1e-12):
            odd = [r for r, e in trial.ranks.items() for s in e.steps if s.step == step.step and s.lr == step.lr]
            like = [str(other) for other, rate in rates.items() if math.isclose(rate, step.lr, rel_tol=1e-12)]
            hint = f", the schedule's of step {' or '.join(like)}" if like else ""
            seen = f"learning rate of step {step.step} is {step.lr:.6g}{hint}"
            return f"{seen}{on_ranks(trial, odd)}, requested {wanted.lr:.6g}"
    return None


def _subject(trial: Trial, pairs: list[Pair]) -> str:
    return _where(trial, pairs).removeprefix("in ").replace("every parameter", "any parameter")


# ---- clipping


def _not_clipped(trial: Trial) -> str | None:
    clip = clip_coefficient(update.observed_norm(trial, trial.first_step), trial.case.training.max_norm)
    pairs = _explained(trial, clip, dict.fromkeys(trial.ranks, 1.0))
    if not pairs:
        return None
    fqns, ranks = list(dict.fromkeys(fqn for _, fqn in pairs)), {rank for rank, _ in pairs}
    if len(fqns) == len(trial.plan.shapes) and len(ranks) == len(trial.ranks):
        return f"gradients are not clipped (coefficient {clip:.4g})"
    return f"clipping is not applied to {some(fqns)}{on_ranks(trial, ranks)} (coefficient {clip:.4g})"


def _enlarged(trial: Trial) -> str | None:
    """max(1, c) where min(1, c) is meant."""
    limit, norm = trial.case.training.max_norm, update.observed_norm(trial, trial.first_step)
    clip = 1.0 if limit is None else limit / (norm + 1e-6)
    if clip <= 1 or not _explained(trial, 1.0, dict.fromkeys(trial.ranks, clip)):
        return None
    return (
        f"clipping enlarges gradients: it multiplies by {clip:.4g}, as the norm {norm:.4g} is below max_norm {limit:g}"
    )


def _norm_counting_again(trial: Trial, axis: str) -> float:
    """The global norm of the first step if parameters that are alike along an axis count once for every rank of it."""
    total, counted = [], set()
    for rank, evidence in sorted(trial.ranks.items()):
        for fqn, gradient in evidence.steps[0].gradients.items():
            part, degree = trial.slice_of(rank, fqn), len(trial.plan.group_of(rank, axis))
            if (fqn, part) not in counted:
                counted.add((fqn, part))
                alike = all(trial.slice_of(peer, fqn) == part for peer in trial.plan.group_of(rank, axis))
                total.append(float(np.sum(gradient * gradient)) * (degree if alike else 1))
    return math.sqrt(math.fsum(total))


def _clipped_by_another_norm(trial: Trial) -> str | None:
    """Each rank's own norm, the one it reports, or another limit than the recipe's."""
    limit, right = trial.case.training.max_norm, update.observed_norm(trial, trial.first_step)
    suspects = {
        "the norm of its own shards": {rank: own_norm(e.steps[0]) for rank, e in trial.ranks.items()},
    }
    for axis in trial.plan.groups:
        again = _norm_counting_again(trial, axis)
        if not math.isclose(again, right, rel_tol=1e-9):
            suspects[f"a norm with each replica along {axis} counted again"] = dict.fromkeys(trial.ranks, again)
    suspects |= {
        "the norm it reports": {rank: e.steps[0].grad_norm or 0.0 for rank, e in trial.ranks.items()},
    }
    for whose, norms in suspects.items():
        clips = {rank: clip_coefficient(norm, limit) for rank, norm in norms.items()}
        if _explained(trial, clip_coefficient(right, limit), clips):
            rank = next(rank for rank in clips if not math.isclose(norms[rank], right, rel_tol=1e-9))
            seen = f"{norms[rank]:.6g} on rank {rank}, expected {right:.6g}"
            return f"each rank clips by {whose}, not by the global norm: {seen}"
    return None


def own_norm(step: StepEvidence) -> float:
    return math.sqrt(math.fsum(float(np.sum(g * g)) for g in step.gradients.values()))


def _explained(trial: Trial, right: float, clips: dict[int, float]) -> list[Pair]:
    """Where the first step is what the optimizer makes of the gradient times clips[rank], and not of it times `right`."""
    return [
        (rank, tensor.fqn)
        for rank, evidence in sorted(trial.ranks.items())
        for tensor in evidence.parameters
        if tensor.value.size and update.explained_by_clip(trial, evidence, tensor, clip=clips[rank])
        if not update.explained_by_clip(trial, evidence, tensor, clip=right)
    ]


# ---- other recipes


def _another_decay(trial: Trial) -> str | None:
    """The other choice of what decays."""
    asked = trial.case.training.decay
    other = replace(trial.case.training, decay="all" if asked == "matrices" else "matrices")
    if not _would_pass(replace(trial, case=replace(trial.case, training=other))):
        return None
    if asked == "matrices":
        return "weight decay is applied to norm weights as well, requested matrices only"
    return "weight decay is applied to matrices only, requested all parameters"


def _another_recipe(trial: Trial) -> str | None:
    for name, training in _suspects(trial.case.training):
        if _would_pass(replace(trial, case=replace(trial.case, training=training))):
            seen, asked = getattr(training, name), getattr(trial.case.training, name)
            words = {"weight_decay": "weight decay", "max_norm": "the gradient norm's limit"}.get(name, name)
            if name == "weight_decay" and not seen:
                return f"weight decay is not applied, requested {asked}"
            return (
                f"{words} is {seen:g} in the optimizer, requested {asked:g}"
                if asked
                else f"{words} {seen:g} is applied"
            )
    return None


def _suspects(training: TrainingConfig) -> Iterator[tuple[str, TrainingConfig]]:
    """One number of the recipe as it is by mistake: not set, the library's default, or another common value."""
    values: dict[str, tuple[float, ...]] = {
        "weight_decay": (0.0, 0.01, 0.1, 2 * training.weight_decay, training.weight_decay / 2)
    }
    if training.optimizer == "adamw":
        values |= {"beta2": (0.999, 0.95, 0.99, 0.98, training.beta1), "beta1": (0.9, 0.95, training.beta2, 0.0)}
        values |= {"eps": (1e-8, 1e-5, 1e-6, 1e-10, 1e-12, 1e-15)}
    if training.max_norm is not None:
        values |= {"max_norm": (1.0, 0.1, 0.5, 2.0, 5.0)}
    for name, others in values.items():
        for value in others:
            if value != getattr(training, name):
                change: dict[str, Any] = {name: value}
                yield name, replace(training, **change)


def _fed_otherwise(trial: Trial) -> str | None:
    """The optimizer receives something else than clipped gradients."""
    training = trial.case.training
    limit, no_decay = training.max_norm, replace(training, weight_decay=0.0)

    def decaying(norm: float, fqn: str, gradient: np.ndarray, before: np.ndarray) -> np.ndarray:
        return clip_coefficient(norm, limit) * gradient + update.recipe_of(trial, fqn).weight_decay * before

    def barely_clipped(norm: float, fqn: str, gradient: np.ndarray, before: np.ndarray) -> np.ndarray:
        return gradient if limit is None or norm <= limit else limit / norm * gradient

    if _would_pass(_feeding(trial, decaying, no_decay)):
        return "weight decay is added to the gradients (L2, as Adam does), requested decoupled (AdamW)"
    if _would_pass(_feeding(trial, barely_clipped, training)):
        return "clipping multiplies by max_norm / norm, requested max_norm / (norm + 1e-6), as torch does"
    return None


Feed = Callable[[float, str, np.ndarray, np.ndarray], np.ndarray]  # norm, fqn, gradient, parameter before the step


def _feeding(trial: Trial, feed: Feed, training: TrainingConfig) -> Trial:
    """The same evidence, as if what the optimizer receives were the gradients seen, and nothing clipped them."""
    ranks = {}
    for rank, evidence in trial.ranks.items():
        before, steps = trial.start_of(rank), []
        for step in evidence.steps:
            norm = update.observed_norm(trial, step.step)
            received = {fqn: feed(norm, fqn, gradient, before[fqn]) for fqn, gradient in step.gradients.items()}
            steps.append(replace(step, gradients=received))
            before = step.parameters
        ranks[rank] = replace(evidence, steps=tuple(steps))
    case = replace(trial.case, training=replace(training, max_norm=None))
    return replace(trial, case=case, run=replace(trial.run, ranks=ranks))


def _amsgrad(trial: Trial) -> str | None:
    """It keeps, and divides by, the largest second moment so far."""
    states = [state for e in trial.ranks.values() for state in e.steps[-1].optimizer_state.values()]
    if not any("max_exp_avg_sq" in state for state in states):
        return None
    return "the optimizer is AMSGrad (it keeps max_exp_avg_sq and divides by that), requested AdamW without it"


def _would_pass(trial: Trial) -> bool:
    return update.check(trial).verdict is Verdict.PASS


def _another_rate(trial: Trial) -> str | None:
    """Moves of the first step that are the right ones times a constant, although the optimizer shows the right rate."""
    factor = _move_factor(trial)
    if factor is None or math.isclose(factor, 1.0, rel_tol=1e-9):
        return None
    steps = tuple(replace(step, lr=step.lr * factor) for step in trial.reference.steps)
    ranks = {rank: _with_rates_times(evidence, factor) for rank, evidence in trial.ranks.items()}
    scaled = replace(trial, reference=replace(trial.reference, steps=steps), run=replace(trial.run, ranks=ranks))
    if not _would_pass(scaled):
        return None
    return (
        f"every optimizer step is {times_text(factor)} what it should be, as by {times_text(factor)} the learning rate"
    )


def _another_rate_for_some(trial: Trial) -> str | None:
    """A group of parameters that follows no schedule, or another one: moves of the first step are the right ones times a
    number."""
    clip = clip_coefficient(update.observed_norm(trial, trial.first_step), trial.case.training.max_norm)
    factors = {
        (rank, tensor.fqn): _factor_of_move(trial, evidence, tensor, clip)
        for rank, evidence in sorted(trial.ranks.items())
        for tensor in evidence.parameters
        if tensor.value.size and not update.explained_by_clip(trial, evidence, tensor, clip=clip)
    }
    known = [factor for factor in factors.values() if factor is not None]
    if not known or len(known) < len(factors) or not np.allclose(known, known[0], rtol=1e-6):
        return None
    asked, peak = trial.reference_step(trial.first_step).lr, trial.case.training.lr
    hint = ", the peak's, as without a schedule" if math.isclose(known[0] * asked, peak, rel_tol=1e-6) else ""
    what = _where(trial, list(factors)).removeprefix("in ")
    return (
        f"the learning rate of {what} is {known[0] * asked:.6g} in step {trial.first_step}{hint}, requested {asked:.6g}"
    )


def _factor_of_move(trial: Trial, evidence: RankEvidence, tensor: TensorEvidence, clip: float) -> float | None:
    """What the right move of the first step is to be multiplied by to give the one seen; None if there is no such number."""
    before = trial.start_of(evidence.rank)[tensor.fqn]
    wanted = update.expected_after_first_step(trial, evidence, tensor, clip=clip)[0] - before
    seen = evidence.steps[0].parameters[tensor.fqn] - before
    if not np.any(wanted):
        return None
    factor = float(np.sum(seen * wanted) / np.sum(wanted * wanted))
    return factor if np.max(np.abs(seen - factor * wanted)) <= 1e-9 * np.max(np.abs(seen)) else None


def _with_rates_times(evidence: RankEvidence, factor: float) -> RankEvidence:
    steps = (replace(step, lr=None if step.lr is None else step.lr * factor) for step in evidence.steps)
    return replace(evidence, steps=tuple(steps))


def _move_factor(trial: Trial) -> float | None:
    """Length of rank 0's move in the first step over that of the reference's, along the latter."""
    evidence, along, length = trial.ranks[min(trial.ranks)], 0.0, 0.0
    for tensor in evidence.parameters:
        part = trial.slice_of(evidence.rank, tensor.fqn)
        if part is not None:
            before, after = trial.start_of(evidence.rank)[tensor.fqn], trial.reference_step(trial.first_step).parameters
            wanted = after[tensor.fqn][tuple(slice(*i) for i in part)] - before
            along += float(np.sum((evidence.steps[0].parameters[tensor.fqn] - before) * wanted))
            length += float(np.sum(wanted * wanted))
    return along / length if length else None
