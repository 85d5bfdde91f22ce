"""The optimizer does something else than the recipe says: another rate, decay, average or number, or no step at all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from harness.checks import update
from harness.checks.reported_rate import CLOSE
from harness.diagnosis import assume
from harness.diagnosis.algorithms import (
    by_recipes,
    first_clip,
    first_moves,
    other_algorithms,
    other_numbers,
    parameters_before,
)
from harness.diagnosis.differences import OF_GRADIENTS, loss_off, wrong_pairs
from harness.diagnosis.hypothesis import Broken, Fact, Hypothesis
from harness.diagnosis.replicas import optimizer_of_ranks, replicas_differ
from harness.diagnosis.words import Arrays, in_order, of_first, where_text
from harness.evidence.text import number_text
from harness.judge.assumed import AssumedOptimizer
from harness.judge.contents import take
from harness.judge.result import Cause
from harness.judge.tolerance import clip_coefficient
from harness.judge.trial import Trial
from harness.plan.stages import parameters_of_stage
from harness.reference.config import TrainingConfig
from harness.reference.distance import best_fit

LARGEST_DECAY = 0.2  # of a weight in a step; what takes more of it is no weight decay


def wrong_optimizer(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    if "update" in broken:
        for propose in (_shown_rate, other_numbers, other_algorithms, _not_stepped, _rates_and_decays):
            yield from propose(trial)


def not_finite(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """What the optimizer made NaN of numbers. All numbers after that follow."""
    first = [(rank, step) for rank, step, _ in trial.steps() if step.step == trial.first_step]
    bad = [(rank, fqn) for rank, step in first for fqn, v in step.parameters.items() if not np.isfinite(v).all()]
    finite = all(np.isfinite(gradient).all() for _, step in first for gradient in step.gradients.values())
    if bad and finite and "update" in broken:
        text = f"parameters are NaN or infinite after step {trial.first_step} {where_text(trial, bad)}"
        cause = Cause("not finite", f"{text}, gradients were finite")
        before = loss_off(trial, trial.first_step) or wrong_pairs(trial, trial.first_step)  # what the optimizer leaves
        yield Fact(
            cause,
            tuple(check for check in broken if check in ("update", "finite") or (check in OF_GRADIENTS and not before)),
        )


# ---- the recipe's numbers


def _shown_rate(trial: Trial) -> Iterator[Hypothesis]:
    """The rate that was read from the optimizer, against the schedule."""
    usual = {step.step: step.lr for step in trial.reference.steps}
    shown = {(rank, step.step): step.lr for rank, step, _ in trial.steps() if step.lr is not None}
    wrong = {at: lr for at, lr in shown.items() if not math.isclose(lr, usual[at[1]], rel_tol=1e-12)}
    if not wrong:
        return
    first = min(step for _, step in wrong)
    rate = next(lr for (_, step), lr in wrong.items() if step == first)
    seen = {rank: number_text(lr) for (rank, step), lr in wrong.items() if step == first}
    shown_rate, ranks, others = of_first(trial, seen)
    like = [str(step) for step, lr in usual.items() if math.isclose(lr, rate, rel_tol=1e-12)]
    rule = schedule_of(trial, wrong, shown)
    hidden = _requested_rates_reported(trial, usual)
    notes = [f"the schedule's of step {' or '.join(like)}"] if like and not rule else []
    notes += ["reported as requested"] if hidden else []
    noted = f" ({'; '.join(notes)})" if notes else ""
    differ = replicas_differ(trial, lambda rank, fqn: [shown.get((rank, step)) for step in trial.case.steps])
    reports = {"reported_rate": lambda rank, step: usual[step] if hidden else shown.get((rank, step), usual[step])}
    for which, fqns in _parts(trial):
        rates = partial(_rate_of, fqns, shown, usual)
        of_ranks = partial(_rates_of_ranks, trial, rates)
        text = f"learning rate of step {first}{which}{ranks} is {shown_rate}{others}{noted}"
        instead = partial(optimizer_of_ranks, assumed=AssumedOptimizer(rate=rates), of_ranks=of_ranks, differ=differ)
        hypothesis = Hypothesis(
            Cause("learning rate", text, "", number_text(usual[first]), rule), instead, 1 + bool(which)
        )
        yield hypothesis.and_then(lambda other: other.assuming(reports=reports))


def _parts(trial: Trial) -> Iterator[tuple[str, frozenset[str]]]:
    """All parameters; and where ranks have several stages, those of each one's first, second and so on, which have
    optimizers and schedules of their own."""
    yield "", frozenset(trial.plan.shapes)
    several = trial.case.stages_per_rank
    for place in range(several) if several > 1 else ():
        chosen = sorted({stages[place] for stages in trial.plan.stages.values()})
        fqns = (fqn for stage in chosen for fqn in parameters_of_stage(trial.case, stage))
        yield f" in stages {' and '.join(map(str, chosen))}", frozenset(fqns)


def _rate_of(
    fqns: frozenset[str],
    shown: Mapping[tuple[int, int], float],
    usual: Mapping[int, float],
    rank: int,
    step: int,
    fqn: str,
) -> float:
    return shown.get((rank, step), usual[step]) if fqn in fqns else usual[step]


def _rates_of_ranks(trial: Trial, rates: Callable[[int, int, str], float], ranks: Sequence[int]) -> dict[str, Any]:
    """Of one copy of the model: all of it by the first one's, and each rank's slices then moved by its own. A move is the rate
    times what does not depend on it."""
    rate = partial(rates, ranks[0])
    if all(
        rates(r, step, fqn) == rate(step, fqn) for r in ranks for step in trial.case.steps for fqn in trial.plan.shapes
    ):
        return {"rate": rate}

    def times(rank: int, step: int, fqn: str) -> float:
        return rates(rank, step, fqn) / (rate(step, fqn) or 1.0)  # of no move nothing can be made

    return {"rate": rate, **_slices_moved(trial, ranks, times)}


def _slices_moved(trial: Trial, ranks: Sequence[int], times: Callable[[int, int, str], float]) -> dict[str, Any]:
    """Each of these ranks' slices of a model by so many times the right move. times(rank, step, fqn)"""
    limit, before = trial.case.training.max_norm, Arrays()

    def given(step: int, gradients: Arrays, norm: float, parameters: Arrays) -> Arrays:
        before.update({fqn: value.copy() for fqn, value in parameters.items()})
        return {fqn: clip_coefficient(norm, limit) * gradient for fqn, gradient in gradients.items()}

    def left(step: int, parameters: Arrays) -> Arrays:
        after = {fqn: value.copy() for fqn, value in parameters.items()}
        for rank, fqn in ((one, fqn) for one in ranks for fqn in trial.holdings[one]):
            if part := trial.slice_of(rank, fqn):
                by = times(rank, step, fqn)
                take(after[fqn], part)[...] = by * take(parameters[fqn], part) + (1 - by) * take(before[fqn], part)
        return after

    return {"given": given, "left": left}


def _requested_rates_reported(trial: Trial, usual: Mapping[int, float]) -> bool:
    """Whatever the optimizer took: its ranks report the schedule's."""
    shown = [(step.reported_lr, usual[step.step]) for _, step, _ in trial.steps() if step.reported_lr is not None]
    return bool(shown) and all(math.isclose(*both, rel_tol=CLOSE) for both in shown)


# ---- some parameters, or all, from some step on


def _not_stepped(trial: Trial) -> Iterator[Hypothesis]:
    """What has a gradient or decays, and does not move: from a step on, or in one step alone."""
    moved: dict[tuple[int, int, str], bool] = {}
    before, limit = parameters_before(trial), trial.case.training.max_norm
    for rank, step, wanted in trial.steps():
        for fqn, after in step.parameters.items() if wanted.lr else ():
            held = before[rank, step.step].get(fqn)
            if after.size and held is not None:
                moved[step.step, rank, fqn] = not np.array_equal(after, held)
    if all(moved.values()):
        return
    first = min(step for (step, _, _), moves in moved.items() if not moves)
    pairs = sorted((rank, fqn) for (step, rank, fqn), moves in moved.items() if step == first and not moves)
    where = where_text(trial, pairs).removeprefix("in ").replace("every parameter", "any parameter")
    norms = {step: update.observed_norm(trial, step) for step in trial.case.steps}

    def still(step: int, fqn: str, *ranks: int) -> bool:
        """All that these hold of it, as far as that is known."""
        return {moved[step, rank, fqn] for rank in ranks if (step, rank, fqn) in moved} == {False}

    def given(rank: int, step: int, fqn: str, gradient: np.ndarray) -> np.ndarray | None:
        return None if still(step, fqn, rank) else clip_coefficient(norms[step], limit) * gradient

    def of_ranks(ranks: Sequence[int]) -> dict[str, Any]:
        slices = _slices_moved(trial, ranks, lambda rank, step, fqn: float(not still(step, fqn, rank)))

        def whole(step: int, *of: Any) -> Arrays:
            return {fqn: g for fqn, g in slices["given"](step, *of).items() if not still(step, fqn, *ranks)}

        return {**slices, "given": whole}

    differ = replicas_differ(trial, lambda rank, fqn: [still(step, fqn, rank) for step in trial.case.steps])
    cause = Cause("not stepped", f"the optimizer does not move {where} in step {first}")
    assumed = AssumedOptimizer(given)
    yield Hypothesis(cause, partial(optimizer_of_ranks, assumed=assumed, of_ranks=of_ranks, differ=differ))


def _rates_and_decays(trial: Trial) -> Iterator[Hypothesis]:
    """In the first step: which parameters moved otherwise, and by what multiple of the rate or by what decay that is so."""
    wrong = first_moves(trial, first_clip(trial), explained=False)
    if not wrong or any(trial.start_of(rank)[fqn].shape != _started(trial, rank, fqn).shape for rank, fqn in wrong):
        return
    fqns, where = in_order(trial, (fqn for _, fqn in wrong)), where_text(trial, wrong).removeprefix("in ")
    if (factor := _common([_rate_factor(trial, *pair) for pair in wrong])) is not None:
        yield from _another_rate(trial, fqns, where, factor)
    rate = trial.reference_step(trial.first_step).lr
    decay = _common([_decay(trial, *pair) for pair in wrong])
    if decay is not None:
        near = partial(math.isclose, decay, abs_tol=1e-9)
        decay = next(filter(near, (0.0, float(f"{decay:.6g}"))), decay)
        if 0 <= decay * rate < LARGEST_DECAY:
            yield from _another_decay(trial, fqns, where, decay)


def _another_rate(trial: Trial, fqns: list[str], where: str, factor: float) -> Iterator[Hypothesis]:
    """Where it makes up for the schedule, without it; and by that factor in every step."""
    usual, peak = {step.step: step.lr for step in trial.reference.steps}, trial.case.training.lr
    requested = usual[trial.first_step]
    rate, times = factor * requested, f"{number_text(factor)} times"
    text = f"the learning rate of {where} is {number_text(rate)} in step {trial.first_step}"
    if math.isclose(rate, peak):
        constant = Cause("learning rate", f"{text}, the peak, as without a schedule", "", number_text(requested))
        yield Hypothesis(constant, partial(_by_rates, fqns, dict.fromkeys(usual, peak), usual))
    cause, fitted = Cause("learning rate", text, "", number_text(requested)), 1
    if len(fqns) == len(trial.plan.shapes):
        every = f"every optimizer step is {times} what it should be, as with {times} the learning rate"
        cause, fitted = Cause("learning rate", every), 3  # whatever number of the recipe gives the same says more
    yield Hypothesis(cause, partial(_by_rates, fqns, {step: factor * lr for step, lr in usual.items()}, usual), fitted)


def _by_rates(fqns: list[str], rates: Mapping[int, float], usual: Mapping[int, float], trial: Trial) -> Trial:
    """The optimizer goes on showing the usual ones, also where it moves every parameter by others."""

    def rate(step: int, fqn: str) -> float:
        return (rates if fqn in fqns else usual)[step]

    other = assume.another_optimizer(trial, AssumedOptimizer(rate=lambda rank, step, fqn: rate(step, fqn)), rate=rate)
    steps = tuple(replace(step, lr=usual[step.step]) for step in other.reference.steps)
    return replace(other, reference=replace(other.reference, steps=steps))


def _another_decay(trial: Trial, fqns: list[str], where: str, decay: float) -> Iterator[Hypothesis]:
    requested, matrices = trial.case.training.weight_decay, trial.case.training.decay == "matrices"
    vectors = {fqn for fqn in trial.plan.shapes if len(trial.case.model.parameter_shapes()[fqn]) == 1}
    of = "" if len(fqns) == len(trial.plan.shapes) else f" of {where}"
    if matrices and set(fqns) == vectors and math.isclose(decay, requested):
        text, expected = "weight decay is applied to norm weights as well", "matrices only"
    elif not matrices and set(fqns) == vectors and not decay:
        text, expected = "weight decay is applied to matrices only", "all parameters"
    else:
        text, expected = (
            f"weight decay{of} is {number_text(decay)}",
            number_text(update.recipe_of(trial, fqns[0]).weight_decay),
        )
        divided = math.isclose(decay * trial.case.training.lr, requested)
        text += ", the requested one divided by the learning rate" * divided
        text = text if decay else f"weight decay is not applied{of.replace(' of ', ' to ', 1)}"
    usual = {fqn: update.recipe_of(trial, fqn) for fqn in trial.plan.shapes}

    def chosen(by_step: Callable[[int], float], step: int, fqn: str) -> TrainingConfig:
        return replace(usual[fqn], weight_decay=by_step(step)) if fqn in fqns else usual[fqn]

    rates = {step.step: step.lr for step in trial.reference.steps}
    if math.isclose(decay * rates[trial.first_step], requested):
        plain = Cause("weight decay", f"weight decay{of} is not multiplied by the learning rate")
        yield Hypothesis(plain, partial(by_recipes, partial(chosen, lambda step: requested / rates[step])))
    yield Hypothesis(
        Cause("weight decay", text, "", expected), partial(by_recipes, partial(chosen, lambda step: decay))
    )


def _started(trial: Trial, rank: int, fqn: str) -> np.ndarray:
    """What the seed's run begins with, of this rank."""
    return next(tensor.value for tensor in trial.ranks[rank].parameters if tensor.fqn == fqn)


def _move(trial: Trial, rank: int, fqn: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of the first step: the right move, the one that was seen, and what was there before."""
    evidence, before = trial.ranks[rank], trial.stepped_part(rank, fqn, trial.start_of(rank)[fqn])
    tensor = next(tensor for tensor in evidence.parameters if tensor.fqn == fqn)
    wanted, _ = update.expected_after_first_step(trial, evidence, tensor, clip=first_clip(trial))
    return wanted - before, trial.stepped_part(rank, fqn, evidence.steps[0].parameters[fqn]) - before, before


def _rate_factor(trial: Trial, rank: int, fqn: str) -> float | None:
    wanted, seen, _ = _move(trial, rank, fqn)
    return _multiple(seen, wanted)


def _decay(trial: Trial, rank: int, fqn: str) -> float | None:
    """What the move has besides the gradient's part, over the rate and the parameter itself."""
    recipe, rate = replace(update.recipe_of(trial, fqn), weight_decay=0.0), trial.reference_step(trial.first_step).lr
    undecayed = trial.assuming(AssumedOptimizer(recipe=lambda step, fqn: recipe))
    wanted, seen, before = _move(undecayed, rank, fqn)
    factor = _multiple(wanted - seen, before)
    return factor / rate if factor is not None and rate else None


def _multiple(seen: np.ndarray, of: np.ndarray) -> float | None:
    """The number by which one is the other; None if there is none."""
    factor = best_fit(seen, of)
    return factor if np.any(of) and np.allclose(seen, factor * of, rtol=0.0, atol=1e-12) else None


def _common(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    same = len(known) == len(values) and np.allclose(known, known[0])
    return float(np.median(known)) if same else None


# ---- which rule gives the rates that were seen


Rate = Callable[[int], float]
"""By step, counted from 1."""


def schedule_of(trial: Trial, wrong: Mapping[tuple[int, int], float], shown: Mapping[tuple[int, int], float]) -> str:
    """In words, the rules for all rates that ranks with wrong ones have; empty where there is none. By rank and step. Of one
    wrong rate none is said, unless there are right ones before and behind it."""
    steps, ranks = {step for _, step in wrong}, {rank for rank, _ in wrong}
    known = {at: lr for at, lr in shown.items() if at[0] in ranks}
    taken = {step for _, step in known}
    if len(steps) == 1 and not min(taken) < min(steps) < max(taken):
        return ""
    found: dict[str, str] = {}
    for text, rate in _rules(trial.case.training):
        if all(math.isclose(rate(step), lr) for (_, step), lr in known.items()):
            found.setdefault(text.partition(" by ")[0], text)  # of those that it may advance by, the least
    return ", or ".join(found.values())


def _shifted(steps: int) -> Iterator[tuple[str, Callable[[int], int]]]:
    """By step, the one whose rate it has."""
    for by, text in (
        (-1, "every step takes the rate of the step before"),
        (1, "every step takes the rate of the next step"),
    ):
        yield text, lambda step, by=by: step + by  # type: ignore[misc]
    for by in range(2, 9):
        yield f"each step advances the schedule by {by}", lambda step, by=by: 1 + by * (step - 1)  # type: ignore[misc]
    for late in range(2, steps):
        text = f"each step from step {late} on takes the rate of the step before"
        yield text, lambda step, late=late: step - (step >= late)  # type: ignore[misc]


def _rules(training: TrainingConfig) -> Iterator[tuple[str, Rate]]:
    from harness.reference.train import learning_rate

    if training.rates is not None:
        return
    peak, warmup, steps, last = training.lr, training.warmup_steps, training.steps, training.final_lr_fraction

    def rising(step: int, falls: Callable[[float], float]) -> float:
        """falls(how far behind the warm-up, 0 to 1) -> of the peak."""
        return peak * (step / warmup if step <= warmup else falls((step - warmup) / (steps - warmup)))

    def cosine(done: float) -> float:
        return last + (1 - last) * (1 + math.cos(math.pi * done)) / 2

    for text, at in _shifted(steps):
        yield text, lambda step, at=at: learning_rate(at(step), training)  # type: ignore[misc]
    yield "as without a schedule", lambda step: peak
    yield "constant after the warm-up", lambda step: rising(step, lambda done: 1.0)
    line = "linear decay after the warm-up, not cosine"
    yield line, lambda step: rising(step, lambda done: 1 - (1 - last) * done)
    for text, behind in (
        ("the cosine counts the steps of the warm-up as well", 0),
        ("the cosine takes all steps of the run, starting after the warm-up", warmup),
    ):
        yield text, lambda step, behind=behind: rising(step, lambda _: cosine((step - behind) / steps))  # type: ignore[misc]
    both = "the cosine also multiplies the warm-up"
    yield both, lambda step: peak * min(1.0, step / max(1, warmup)) * cosine(step / steps)
    numbers: dict[str, tuple[float, ...]] = {
        "warmup_steps": (0, warmup - 1, warmup + 1, 2 * warmup, warmup // 2),
        "final_lr_fraction": (0.0, 0.01, 0.1, 0.5),
        "steps": (steps - 1, steps + 1, 2 * steps, steps // 2),
        "lr": tuple(peak * by for by in (0.1, 0.5, 2.0, 10.0)),
    }
    for name, value in ((name, value) for name, values in numbers.items() for value in values):
        if value >= 0 and value != (requested := getattr(training, name)):
            changes: dict[str, Any] = {name: value}
            rate = partial(learning_rate, training=replace(training, **changes))
            yield f"as with {name} {number_text(value)}, not {number_text(requested)}", rate
