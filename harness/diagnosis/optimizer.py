"""The optimizer does something else than the recipe says: another rate, decay, average or number, or no step at all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from harness.checks import update
from harness.diagnosis import assume
from harness.diagnosis.algorithms import by_recipes, other_algorithms, other_numbers
from harness.diagnosis.consequences import OF_GRADIENTS
from harness.diagnosis.differences import loss_off, wrong_pairs
from harness.diagnosis.hypothesis import Broken, Fact, Hypothesis
from harness.diagnosis.replicas import ranks_of_replica, replicas_differ, train_apart
from harness.diagnosis.schedules import schedule_of
from harness.diagnosis.words import in_parameters, on_ranks
from harness.judge.assumed import AssumedOptimizer
from harness.judge.result import Cause
from harness.judge.tolerance import clip_coefficient
from harness.judge.trial import Trial
from harness.reference.config import TrainingConfig

LARGEST_DECAY = 0.1  # of a weight in a step; what takes more of it is no weight decay
FEW = ("norm.weight", "attention.wq.weight", "output.weight", "tok_embeddings.weight")  # of each kind one


def wrong_optimizer(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    if "update" not in broken:
        return
    yield from _shown_rate(trial)
    yield from other_numbers(trial)
    yield from other_algorithms(trial)
    yield from _not_stepped(trial)
    yield from _rates_and_decays(trial)


def not_finite(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """What the optimizer made NaN of numbers. All numbers after that follow."""
    first = trial.first_step
    bad = [
        (rank, fqn)
        for rank, evidence in sorted(trial.ranks.items())
        for fqn, value in (evidence.steps[0].parameters.items() if evidence.steps else ())
        if not np.isfinite(value).all()
    ]
    finite = all(
        np.isfinite(g).all() for e in trial.ranks.values() for step in e.steps[:1] for g in step.gradients.values()
    )
    if bad and finite and "update" in broken:
        fqns = [fqn for fqn in trial.plan.shapes if fqn in {fqn for _, fqn in bad}]
        where = in_parameters(trial, fqns) + on_ranks(trial, [rank for rank, _ in bad])
        text = f"parameters are NaN or infinite after step {first} {where}, gradients were finite"
        yield Fact(Cause("not finite", text), _after_the_first_step(trial, broken))


def _after_the_first_step(trial: Trial, broken: Broken) -> tuple[str, ...]:
    """Losses and gradients of the first step come before what the optimizer leaves."""
    before = bool(loss_off(trial, trial.first_step) or wrong_pairs(trial, trial.first_step))
    return tuple(name for name in broken if name in OF_GRADIENTS and (name == "update" or not before))


# ---- the recipe's numbers


def _shown_rate(trial: Trial) -> Iterator[Hypothesis]:
    """The rate that was read from the optimizer, against the schedule."""
    wrong = [
        (rank, step.step, step.lr, wanted.lr)
        for rank, step, wanted in trial.steps()
        if step.lr is not None and not math.isclose(step.lr, wanted.lr, rel_tol=1e-12)
    ]
    if not wrong:
        return
    first = min(step for _, step, _, _ in wrong)
    ranks = [rank for rank, step, _, _ in wrong if step == first]
    _, _, rate, wanted = next(one for one in wrong if one[1] == first)
    like = [str(s.step) for s in trial.reference.steps if math.isclose(s.lr, rate, rel_tol=1e-12)]
    hint = f", the schedule's of step {' or '.join(like)}" if like else ""
    rule = schedule_of(trial, {(rank, step): lr for rank, step, lr, _ in wrong})
    text = f"learning rate of step {first} is {rate:.6g}{rule or hint}"
    cause = Cause("learning rate", text + on_ranks(trial, ranks), "", f"{wanted:.6g}")
    shown = {(rank, step.step): wanted.lr if step.lr is None else step.lr for rank, step, wanted in trial.steps()}
    usual = {step.step: step.lr for step in trial.reference.steps}

    def rate_of(rank: int) -> Callable[[int, str], float]:
        return lambda step, fqn: shown.get((rank, step), usual[step])

    def assuming(trial: Trial) -> Trial:
        assumed = AssumedOptimizer(rate=lambda rank, step, fqn: shown[rank, step])
        if not replicas_differ(trial, lambda rank, fqn: [shown[rank, step] for step in trial.case.steps]):
            return assume.another_optimizer(trial, assumed, rate=rate_of(min(trial.ranks)))
        firsts = [ranks_of_replica(trial, n)[0] for n in range(trial.case.dims.dp_replicate)]
        return replace(
            train_apart(trial, "dp_replicate", otherwise=[{"rate": rate_of(r)} for r in firsts]), assumed=assumed
        )

    yield Hypothesis(cause, assuming)


# ---- some parameters, or all, from some step on


def _not_stepped(trial: Trial) -> Iterator[Hypothesis]:
    """What has a gradient or decays, and does not move: from a step on, or in one step alone."""
    still: dict[int, set[tuple[int, str]]] = {}
    rates = {step.step: step.lr for step in trial.reference.steps}
    for rank, evidence in trial.ranks.items():
        before = trial.start_of(rank)
        for step in evidence.steps:
            moves = rates.get(step.step, 0.0)
            for fqn, after in step.parameters.items() if moves else ():
                if after.size and fqn in before and np.array_equal(after, before[fqn]):
                    still.setdefault(step.step, set()).add((rank, fqn))
            before = step.parameters
    if not still:
        return
    first, pairs = min(still.items())
    fqns = [fqn for fqn in trial.plan.shapes if fqn in {fqn for _, fqn in pairs}]
    where = (in_parameters(trial, fqns) + on_ranks(trial, [rank for rank, _ in pairs])).removeprefix("in ")
    cause = Cause(
        "not stepped",
        f"the optimizer does not move {where.replace('every parameter', 'any parameter')} in step {first}",
    )
    norms = {step: update.observed_norm(trial, step) for step in trial.case.steps}
    limit = trial.case.training.max_norm

    def given(rank: int, step: int, fqn: str, gradient: np.ndarray) -> np.ndarray | None:
        return None if (rank, fqn) in still.get(step, ()) else clip_coefficient(norms[step], limit) * gradient

    def whole(step: int, gradients: dict[str, np.ndarray], norm: float, parameters: object) -> dict[str, np.ndarray]:
        left = {fqn for _, fqn in still.get(step, ())}
        return {fqn: clip_coefficient(norm, limit) * g for fqn, g in gradients.items() if fqn not in left}

    assumed = AssumedOptimizer(given=given)
    yield Hypothesis(cause, lambda trial: assume.another_optimizer(trial, assumed, given=whole))


def _rates_and_decays(trial: Trial) -> Iterator[Hypothesis]:
    """In the first step: which parameters moved otherwise, and by what multiple of the rate or by what decay that is so."""
    wrong = _moved_otherwise(trial)
    if not wrong:
        return
    fqns = [fqn for fqn in trial.plan.shapes if fqn in {fqn for _, fqn in wrong}]
    where = in_parameters(trial, fqns).removeprefix("in ") + on_ranks(trial, [rank for rank, _ in wrong])
    if (factor := _common([_rate_factor(trial, *pair) for pair in wrong])) is not None:
        yield from _another_rate(trial, fqns, where, factor)
    rate = trial.reference_step(trial.first_step).lr
    decay = _common([_decay(trial, *pair) for pair in wrong])
    if decay is not None and abs(decay) * rate < LARGEST_DECAY:
        yield _another_decay(trial, fqns, where, 0.0 if abs(decay) < 1e-9 else float(f"{decay:.6g}"))


def _another_rate(trial: Trial, fqns: list[str], where: str, factor: float) -> Iterator[Hypothesis]:
    """By that factor in every step; or, where it makes up for the schedule, without it."""
    usual, peak = {step.step: step.lr for step in trial.reference.steps}, trial.case.training.lr
    rate = factor * usual[trial.first_step]
    constant = math.isclose(rate, peak, rel_tol=1e-6)
    step = trial.first_step
    text = (
        f"the learning rate of {where} is {rate:.6g} in step {step}" + ", the peak's, as without a schedule" * constant
    )
    if len(fqns) == len(trial.plan.shapes):
        times = f"{factor:.6g} times"
        text = f"every optimizer step is {times} what it should be, as by {times} the learning rate"
    for unscheduled in (True, False) if constant else (False,):
        rates = {step: peak if unscheduled else factor * lr for step, lr in usual.items()}

        def chosen(step: int, fqn: str, rates: dict[int, float] = rates) -> float:
            return rates[step] if fqn in fqns else usual[step]

        expected = f"{usual[step]:.6g}" if len(fqns) < len(trial.plan.shapes) else ""
        yield Hypothesis(
            Cause("learning rate", text, "", expected),
            partial(_by_rate, chosen),
        )


def _by_rate(rate: Callable[[int, str], float], trial: Trial) -> Trial:
    assumed = AssumedOptimizer(rate=lambda rank, step, fqn: rate(step, fqn))
    return assume.another_optimizer(trial, assumed, rate=rate)


def _another_decay(trial: Trial, fqns: list[str], where: str, decay: float) -> Hypothesis:
    asked, matrices = trial.case.training.weight_decay, trial.case.training.decay == "matrices"
    vectors = {fqn for fqn in trial.plan.shapes if len(trial.case.model.parameter_shapes()[fqn]) == 1}
    if matrices and set(fqns) == vectors and math.isclose(decay, asked):
        text, expected = "weight decay is applied to norm weights as well", "matrices only"
    elif not matrices and set(fqns) == vectors and not decay:
        text, expected = "weight decay is applied to matrices only", "all parameters"
    else:
        of = "" if len(fqns) == len(trial.plan.shapes) else f" of {where}"
        text, expected = f"weight decay{of} is {decay:g}", f"{update.recipe_of(trial, fqns[0]).weight_decay:g}"
        text = text if decay else f"weight decay is not applied{of.replace(' of ', ' to ', 1)}"
    usual = {fqn: update.recipe_of(trial, fqn) for fqn in trial.plan.shapes}

    def chosen(fqn: str) -> TrainingConfig:
        return replace(usual[fqn], weight_decay=decay) if fqn in fqns else usual[fqn]

    return Hypothesis(Cause("weight decay", text, "", expected), partial(by_recipes, chosen))


def _moved_otherwise(trial: Trial) -> list[tuple[int, str]]:
    clip = clip_coefficient(update.observed_norm(trial, trial.first_step), trial.case.training.max_norm)
    return [
        (rank, tensor.fqn)
        for rank, evidence in sorted(trial.ranks.items())
        for tensor in evidence.parameters
        if (left := evidence.steps[0].parameters.get(tensor.fqn)) is not None
        if tensor.value.size and left.shape == tensor.value.shape
        if not update.explained_by_clip(trial, evidence, tensor, clip=clip)
    ]


def _move(trial: Trial, rank: int, fqn: str, *, decays: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of the first step: the right move, with its decay or without; the one that was seen; and what was there before."""
    evidence, before = trial.ranks[rank], trial.start_of(rank)[fqn].astype(np.float64)
    clip = clip_coefficient(update.observed_norm(trial, trial.first_step), trial.case.training.max_norm)
    tensor = next(tensor for tensor in evidence.parameters if tensor.fqn == fqn)
    recipe = update.recipe_of(trial, fqn)
    recipe = recipe if decays else replace(recipe, weight_decay=0.0)
    other = replace(trial, assumed=AssumedOptimizer(recipe=lambda fqn: recipe))
    wanted = update.expected_after_first_step(other, evidence, tensor, clip=clip)[0] - before
    return wanted, evidence.steps[0].parameters[fqn] - before, before


def _rate_factor(trial: Trial, rank: int, fqn: str) -> float | None:
    wanted, seen, _ = _move(trial, rank, fqn, decays=True)
    return _multiple(seen, wanted)


def _decay(trial: Trial, rank: int, fqn: str) -> float | None:
    """What the move has besides the gradient's part, over the rate and the parameter itself."""
    wanted, seen, before = _move(trial, rank, fqn, decays=False)
    scale = trial.reference_step(trial.first_step).lr
    if float(np.max(np.abs(seen - wanted), initial=0.0)) <= 1e-12 * float(np.max(np.abs(before), initial=1.0)):
        return 0.0
    factor = _multiple(wanted - seen, before)
    return None if factor is None or not scale else factor / scale


def _multiple(seen: np.ndarray, of: np.ndarray) -> float | None:
    """The number by which one is the other; None if there is none."""
    if not np.any(of):
        return None
    factor = float(np.sum(seen * of) / np.sum(of * of))
    return factor if np.max(np.abs(seen - factor * of)) <= 1e-8 * np.max(np.abs(seen), initial=1e-300) else None


def _common(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    same = len(known) == len(values) and np.allclose(known, known[0], rtol=1e-6, atol=1e-9)
    return float(np.median(known)) if same else None
