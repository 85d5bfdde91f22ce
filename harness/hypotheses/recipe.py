"""Another recipe than the requested one leads from these gradients to these weights: which?

The fields of TrainingConfig span the space: one field is changed, then two. A field's values are its default, common ones,
twice and half, the value that fits the first step, that of another field, another choice. Beside it stand what the optimizer
shows, a table of algorithms, and a table of ways to clip. The optimizer is replayed by each; the checks judge everything.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import Any

import numpy as np

from harness.core.causes import assume
from harness.core.causes.assume import replicas_differ, train_apart
from harness.core.causes.differences import replicas_agree
from harness.core.causes.hypothesis import Broken, Hypothesis
from harness.core.causes.reported import READ, unplanned_gradients
from harness.core.causes.words import Arrays, in_parameters, on_ranks, steps_words, where_text
from harness.core.checks import update
from harness.core.evidence.records import RankEvidence
from harness.core.evidence.text import number_text
from harness.core.judge.assumed import AssumedOptimizer
from harness.core.judge.contents import take
from harness.core.judge.held_values import stepped_part
from harness.core.judge.result import Cause
from harness.core.judge.tolerance import clip_coefficient, update_bound
from harness.core.judge.trial import Trial
from harness.core.plan.grid import coordinate
from harness.core.plan.slices import parameter_shapes
from harness.hypotheses.ways import (
    By,
    Way,
    algorithms,
    amsgrad,
    before_each,
    by_other_gradients,
    clippings,
    other_rates,
    plainest,
    slices_apart,
)
from harness.reference.config import CHOICES, TrainingConfig, unused
from harness.reference.config import rule_of as stepped_by
from harness.reference.distance import best_fit

LARGEST_DECAY = 0.2  # of a weight in a step; what takes more of it is no weight decay
HALF = 2  # so many choices more is what explains the first step alone
FEWER = 5  # values of a field that are tried together with those of another
FIXED = {"seed", "dtype", "global_batch", "seq_len", "data", "compute_dtype", "quantize", "tf32", "variable_length"} | {
    *("document_mask", "masked_samples", "all_valid", "last_batch", "optimizer")
}
"""Fields that change more than what optimizers make of gradients."""
COMMON: dict[str, tuple[float, ...]] = {
    "beta1": (0.9, 0.95, 0.8, 0.0, 0.5, 0.85, 0.98, 0.99),
    "beta2": (0.999, 0.99, 0.95, 0.98, 0.9, 0.995, 0.9999),
    "momentum": (0.9, 0.95, 0.0, 0.8, 0.99),
    "eps": (1e-8, 1e-6, 1e-5, 1e-3, 1e-4, 1e-7, 1e-10, 1e-12, 1e-15, 1e-16),
    "weight_decay": (0.01, 0.0),
    "warmup_steps": (0,),
    "final_lr_fraction": (1.0, 0.0, 0.01, 0.5),
    "max_norm": (0.1, 0.5, 2.0, 5.0, 10.0),
}
SCHEDULE = {"lr", "warmup_steps", "final_lr_fraction", "steps", "rates"}
KINDS = dict.fromkeys(SCHEDULE, "learning rate") | dict.fromkeys(("weight_decay", "decay"), "weight decay")


class Agreement(Enum):
    """How far the check `update` agrees with a way."""

    IN_ALL_STEPS = "in all steps"
    IN_THE_FIRST = "in the first step alone: it may be one of two mistakes"
    NONE = "refuted"


def wrong_recipe(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """What is seen, else what a replay agrees with. Two fields are tried where nothing simpler explains all."""
    if "update" not in broken:
        return
    wrong, norms = _wrong(trial), update.clipped_norms(trial)
    seen = [*_shown_rates(trial), *_not_stepped(trial), *_only_decayed(trial), *amsgrad(trial)]
    yield from (Hypothesis(way.cause, partial(_assuming, way), way.fitted) for way in seen)
    agreement = partial(_agreement, _wrong_first(trial, wrong), norms, trial.first_step in wrong.values())
    unknown = not replicas_agree(trial, trial.first_step) or unplanned_gradients(trial)
    if not wrong or unknown or any(agreement(way) is Agreement.IN_ALL_STEPS for way in seen):
        return
    explained, fields = False, partial(_fields, trial, wrong, norms)
    others = (
        algorithms(trial, norms, wrong),
        slices_apart(trial),
        other_rates(trial, norms, wrong),
        clippings(trial, norms),
    )
    for way in itertools.chain(fields(1), *others, by_other_gradients(trial, norms, wrong)):
        how_far = agreement(way)
        if how_far is Agreement.IN_ALL_STEPS:
            explained = True
            yield Hypothesis(way.cause, partial(_assuming, way), way.fitted)
        elif how_far is Agreement.IN_THE_FIRST:
            alone = _at_first(trial, way, norms)
            yield Hypothesis(alone.cause, partial(_assuming, way), way.fitted + HALF)
            if agreement(alone) is Agreement.IN_ALL_STEPS:
                yield Hypothesis(alone.cause, partial(_assuming, alone), way.fitted + 1)
    for way in () if explained else fields(2):
        if agreement(way) is Agreement.IN_ALL_STEPS:
            yield Hypothesis(way.cause, partial(_assuming, way), way.fitted)


def _assuming(way: Way, trial: Trial) -> Trial:
    """Assume that optimizers did so. The check `update` judges whether they did, from weights seen to weights seen. The
    reference is trained from the weights seen, and shows what follows from them."""
    replicas = {rank: coordinate(trial.case.dims, rank)["dp_replicate"] for rank in sorted(trial.ranks)}
    if way.by and replicas_differ(trial, partial(_of_all_steps, trial, way.by)):
        copies = [[r for r in replicas if replicas[r] == copy] for copy in range(trial.case.dims.dp_replicate)]
        left = [{"left": partial(_left, trial, ranks)} for ranks in copies]
        other = train_apart(trial, "dp_replicate", otherwise=left).assuming(way.assumed)
    else:
        other = assume.another_optimizer(trial, way.assumed, left=partial(_left, trial, [*replicas]))
    for check, number in way.reports:
        shown = [(READ[check](step), number(rank, step.step) or 0.0) for rank, step, _ in trial.steps()]
        if all(seen is None or math.isclose(seen, known, rel_tol=1e-6) for seen, known in shown):
            return other.assuming(reports={check: number})
    return other


def _of_all_steps(trial: Trial, by: By, rank: int, fqn: str) -> list[bytes]:
    return [np.asarray(by(rank, step, fqn)).tobytes() for step in trial.case.steps]


def _left(trial: Trial, ranks: Sequence[int], step: int, parameters: Arrays) -> Arrays:
    """The weights that these ranks' optimizers left, whole."""
    whole = {fqn: value.copy() for fqn, value in parameters.items()}
    records = ((rank, one) for rank in ranks for one in trial.ranks[rank].steps if one.step == step)
    for rank, fqn, held in ((rank, fqn, held) for rank, one in records for fqn, held in one.parameters.items()):
        if fqn in whole and (part := trial.slice_of(rank, fqn)):
            target = take(whole[fqn].reshape(trial.plan.shapes[fqn]), part)
            if target.size == held.size:
                target[...] = held.reshape(target.shape)
    return whole


# ---- the optimizer, replayed


def _wrong(trial: Trial) -> dict[str, int]:
    """Parameters that are wrong on some rank, and since which step."""
    found = [one for one in update.mistakes(trial, update.clipped_norms(trial)) if one.kind == "parameter"]
    return {str(one.name): one.step or 0 for one in sorted(found, key=lambda one: -(one.step or 0))}


def _wrong_first(trial: Trial, wrong: Mapping[str, int]) -> Trial:
    """Return the trial with what is wrong early and small before all else: there most ways are refuted."""

    def ordered(evidence: RankEvidence) -> RankEvidence:
        tensors = sorted(evidence.parameters, key=lambda one: (wrong.get(one.fqn, math.inf), one.value.size))
        held = evidence.resumed
        known = {one.fqn: held.parameters[one.fqn] for one in tensors if one.fqn in held.parameters} if held else {}
        return replace(evidence, parameters=tuple(tensors), resumed=held and replace(held, parameters=known))

    ranks = {rank: ordered(evidence) for rank, evidence in trial.ranks.items()}
    return replace(trial, run=replace(trial.run, ranks=ranks))


def _agreement(trial: Trial, norms: dict[int, float], halves: bool, way: Way) -> Agreement:
    """Return how far a replay by this way has what ranks have. halves: whether the first step alone may be explained."""
    part = trial.assuming(way.assumed)
    vars(part)["holdings"] = trial.holdings  # the same evidence: they need not be looked for again
    mistakes = update.mistakes(part, norms)
    first = next(mistakes, None)
    if first is None and update.all_seen(part):
        return Agreement.IN_ALL_STEPS
    if not halves or (first is not None and first.step == part.first_step):
        return Agreement.NONE
    if any(mistake.step == part.first_step for mistake in mistakes):
        return Agreement.NONE
    return Agreement.IN_THE_FIRST


def _at_first(trial: Trial, way: Way, norms: Mapping[int, float]) -> Way:
    """The same in the first step alone."""
    first, one, limit = trial.first_step, way.assumed, trial.case.training.max_norm
    recipe, rate, given = one.recipe, one.rate, one.given
    planned = {step.step: step.lr for step in trial.reference.steps}
    alone = AssumedOptimizer(
        recipe=recipe and (lambda s, f: recipe(s, f) if s == first else update.recipe_of(trial, f)),
        rate=rate and (lambda r, s, f: rate(r, s, f) if s == first else planned[s]),
        given=given and (lambda r, s, f, g: given(r, s, f, g) if s == first else clip_coefficient(norms[s], limit) * g),
    )
    cause = replace(
        way.cause, observed=f"in step {first} {way.cause.observed}", details=(*way.cause.details, ("step", first))
    )
    return replace(way, cause=cause, assumed=replace(one, **{k: v for k, v in vars(alone).items() if v}), reports=())


# ---- fields of the recipe


def _fields(trial: Trial, wrong: Mapping[str, int], norms: dict[int, float], count: int) -> Iterator[Way]:
    """Yield changed fields of all parameters, and of those that are wrong."""
    requested, every = trial.case.training, frozenset(trial.plan.shapes)
    fitted = _fitted(trial, wrong, norms)
    usual = {fqn: update.recipe_of(trial, fqn) for fqn in trial.plan.shapes}
    for fqns in dict.fromkeys((every, every & {*wrong})):
        for changes, other in _changes(requested, count, fitted):
            if other.max_norm != requested.max_norm and clip_coefficient(max(norms.values()), other.max_norm) == 1:
                continue  # the same as no clipping, which is a separate way
            text = " and ".join(f"{name} {_text(value)}" for name, value in changes.items())
            wanted = " and ".join(_text(getattr(requested, name)) for name in changes)
            swapped = count > 1 and [*changes.values()] == [getattr(requested, name) for name in [*changes][::-1]]
            where, kind = in_parameters(trial, fqns) * (fqns != every), next(KINDS.get(name, name) for name in changes)
            hint, details = "the two are swapped" if swapped else "", tuple(changes.items())
            cause = Cause(kind, f"updates are as with {text}", where, wanted, hint, details=details)
            own = usual | _recipes(trial, other, fqns)
            rates = _rates(trial, other) if SCHEDULE & {*changes} else None
            yield Way(cause, _by_recipe(trial, other, fqns, norms, own, rates), 1 + count + (fqns != every))


def _text(value: object) -> str:
    return number_text(value) if isinstance(value, float) else str(value)


def _changes(
    requested: TrainingConfig, count: int, fitted: Mapping[str, float]
) -> Iterator[tuple[dict[str, Any], TrainingConfig]]:
    """What such a recipe itself refuses is left out."""
    values = _values(requested, fitted)
    for names in itertools.combinations(values, count):
        several = [*itertools.product(*(values[name][: FEWER if count > 1 else None] for name in names))]
        several += [tuple(getattr(requested, name) for name in names[::-1])] if count > 1 else []
        for chosen in dict.fromkeys(several):
            with suppress(ValueError, TypeError):
                changes = dict(zip(names, chosen, strict=True))
                yield changes, replace(requested, **changes)


def _values(requested: TrainingConfig, fitted: Mapping[str, float]) -> dict[str, list[Any]]:
    """Return, by field, the values that it may have by mistake."""
    left_out = FIXED | unused(requested)
    now = {one.name: getattr(requested, one.name) for one in dataclasses.fields(requested) if one.name not in left_out}
    floats, found = [value for value in now.values() if isinstance(value, float)], {}
    for field in (field for field in dataclasses.fields(requested) if field.name in now):
        name, value = field.name, now[field.name]
        values = [fitted.get(name, value), field.default, *CHOICES.get(name, ()), *COMMON.get(name, ())]
        if isinstance(value, bool):
            values.append(not value)
        elif isinstance(value, int):
            values += [value - 1, value + 1, 2 * value, value // 2]
            values += [value + now.get("warmup_steps", 0)] * (name == "steps")
        elif isinstance(value, float):
            values += [2 * value, value / 2, 10 * value, value / 10, *floats]
        found[name] = [one for one in dict.fromkeys(values) if one != value]
    return found


def _fitted(trial: Trial, wrong: Mapping[str, int], norms: Mapping[int, float]) -> dict[str, float]:
    """The rate and the decay that the first step of the largest wrong parameter has, if it is wrong by one of them alone."""
    held = [(rank, tensor) for rank, evidence in sorted(trial.ranks.items()) for tensor in evidence.parameters]
    held = [(rank, tensor) for rank, tensor in held if wrong.get(tensor.fqn) == trial.first_step]
    rate, training = trial.reference_step(trial.first_step).lr, trial.case.training
    if not held or not rate:
        return {}
    rank, tensor = max(held, key=lambda one: one[1].value.size)
    left, start = (by.get(tensor.fqn) for by in (trial.ranks[rank].steps[0].parameters, trial.start_of(rank)))
    if left is None or start is None or left.shape != start.shape:
        return {}
    seen, before = (stepped_part(trial, rank, tensor.fqn, value) for value in (left, start))
    clip = clip_coefficient(norms[trial.first_step], training.max_norm)
    usual = update.recipe_of(trial, tensor.fqn)
    plain = trial.assuming(AssumedOptimizer(recipe=lambda step, fqn: replace(usual, weight_decay=0.0)))
    moved, undecayed = (
        update.expected_after_first_step(one, trial.ranks[rank], tensor, clip=clip)[0] for one in (trial, plain)
    )
    numbers = {"lr": training.lr * best_fit(seen - before, moved - before)}
    taken = best_fit(undecayed - seen, before)
    numbers |= {"weight_decay": taken / rate} if taken < LARGEST_DECAY else {}
    return {name: plainest(number) for name, number in numbers.items()}


def _recipes(trial: Trial, other: TrainingConfig, fqns: Collection[str]) -> dict[str, TrainingConfig]:
    """Return, by parameter, another recipe as it is for that one: without weight decay for vectors if only matrices decay."""
    if other.decay != "matrices":
        return dict.fromkeys(fqns, other)
    undecayed = replace(other, weight_decay=0.0)
    shapes = parameter_shapes(trial.case.model)
    return {fqn: undecayed if len(shapes.get(fqn, ())) == 1 else other for fqn in fqns}


def _rates(trial: Trial, other: TrainingConfig) -> dict[int, float] | None:
    """Return, by step, the learning rate of another recipe, changed as the reference's was; None if it is the same."""
    planned = {step.step: step.lr for step in trial.reference.steps}
    usual, now = ({step: _rate(step, training) for step in planned} for training in (trial.case.training, other))
    if usual == now:
        return None
    return {step: lr * now[step] / usual[step] if usual[step] else now[step] for step, lr in planned.items()}


def _by_recipe(
    trial: Trial,
    other: TrainingConfig,
    fqns: Collection[str],
    norms: Mapping[int, float],
    recipes: Mapping[str, TrainingConfig],
    rates: Mapping[int, float] | None,
) -> AssumedOptimizer:
    """Return the optimizer that trains these parameters by another recipe. recipes: of every parameter."""
    requested = trial.case.training
    planned = {step.step: step.lr for step in trial.reference.steps}

    def given(rank: int, step: int, fqn: str, gradient: np.ndarray) -> np.ndarray:
        return clip_coefficient(norms[step], (other if fqn in fqns else requested).max_norm) * gradient

    return AssumedOptimizer(
        recipe=lambda step, fqn: recipes[fqn],
        rate=(lambda rank, step, fqn: (rates if fqn in fqns else planned)[step]) if rates else None,
        given=given if other.max_norm != requested.max_norm else None,
    )


def _rate(step: int, training: TrainingConfig) -> float:
    """Imports torch, which judging does not need."""
    from harness.reference.train import learning_rate

    return learning_rate(step, training)


# ---- what is seen


def _shown_rates(trial: Trial) -> Iterator[Way]:
    """Yield rates that ranks report, for all parameters, then for those alone that were stepped by them."""
    usual = {step.step: step.lr for step in trial.reference.steps}
    shown = {(rank, step.step): step.lr for rank, step, _ in trial.steps() if step.lr is not None}
    wrong = {at: lr for at, lr in shown.items() if not math.isclose(lr, usual[at[1]], rel_tol=1e-12)}
    if not wrong:
        return
    first, odd = min(step for _, step in wrong), {rank for rank, _ in wrong}
    ranks = [rank for rank, step in wrong if step == first]
    rate = wrong[ranks[0], first]
    hint = rule_of(trial, {step for _, step in wrong}, {(at[1], lr) for at, lr in shown.items() if at[0] in odd})
    same = " or ".join(str(step) for step, lr in usual.items() if math.isclose(lr, rate, rel_tol=1e-12))
    hint = hint or f"the schedule's of step {same}" * bool(same)
    text = f"learning rate of step {first}{on_ranks(trial, ranks)} is {number_text(rate)}"
    details, others = (("step", first), ("rate", rate), ("ranks", tuple(ranks)), ("rule", hint)), frozenset[str]()
    for _ in range(2):
        taken = lambda r, s, f, of=others: usual[s] if f in of else shown.get((r, s), usual[s])  # noqa: E731
        where = in_parameters(trial, {*trial.plan.shapes} - others) * bool(others)
        cause = Cause("learning rate", text, where, number_text(usual[first]), hint, details=details)
        reports = ("reported_rate", lambda r, s: usual[s]), ("reported_rate", lambda r, s: shown.get((r, s), usual[s]))
        yield Way(cause, AssumedOptimizer(rate=taken), 1 + bool(others), taken, reports)
        others = frozenset(_wrong(trial.assuming(AssumedOptimizer(rate=taken))))
        if not others or others >= {*trial.plan.shapes}:
            return


def rule_of(trial: Trial, wrong: Collection[int], shown: Collection[tuple[int, float]]) -> str:
    """Return, in words, the schedules that give all these rates of steps; empty if there is none. One wrong step needs right
    ones before and behind it."""
    if len(wrong) == 1 and not min(shown)[0] < min(wrong) < max(shown)[0]:
        return ""
    for table in (_shifted(trial.case.training), *(_schedules(trial.case.training, count) for count in (1, 2))):
        fits = [text for text, rate in table if all(math.isclose(rate(step), lr) for step, lr in shown)]
        if found := {text.partition(" by ")[0]: text for text in fits[::-1]}:
            return " or ".join([*found.values()][::-1][:2])
    return ""


def _shifted(training: TrainingConfig) -> Iterator[tuple[str, Callable[[int], float]]]:
    """Each step has the rate of another."""
    late, by = "every step takes the rate of the step before", "each step advances the schedule by"
    table: dict[str, Callable[[int], int]] = {late: lambda step: step - 1}
    table["every step takes the rate of the next step"] = lambda step: step + 1
    table |= {f"{by} {times}": lambda step, times=times: 1 + times * (step - 1) for times in range(2, 9)}  # type: ignore[misc]
    table |= {f"from step {n} on, {late}": lambda step, n=n: step - (step >= n) for n in range(2, training.steps)}  # type: ignore[misc]
    yield from ((text, lambda step, at=at: _rate(at(step), training)) for text, at in table.items())


def _schedules(training: TrainingConfig, count: int) -> Iterator[tuple[str, Callable[[int], float]]]:
    for changes, other in _changes(training, count, {}):
        if {*changes} <= SCHEDULE:
            text = " and ".join(f"{name} {_text(value)}" for name, value in changes.items())
            yield f"as with {text}", partial(_rate, training=other)


def _not_stepped(trial: Trial) -> Iterator[Way]:
    """What has a gradient or decays, and does not move: from a step on, or in one step alone."""
    before, norms, limit = before_each(trial), update.clipped_norms(trial), trial.case.training.max_norm
    still = {
        (rank, step.step, fqn): np.array_equal(after, before[rank, step.step][fqn])
        for rank, step, wanted in trial.steps()
        for fqn, after in step.parameters.items()
        if wanted.lr and after.size and fqn in before[rank, step.step]
    }
    if not any(still.values()):
        return
    steps = sorted({step for (_, step, _), stays in still.items() if stays})
    pairs = {(rank, fqn) for (rank, _, fqn), stays in still.items() if stays}

    def given(rank: int, step: int, fqn: str, gradient: np.ndarray) -> np.ndarray | None:
        return None if still.get((rank, step, fqn)) else clip_coefficient(norms[step], limit) * gradient

    cause = Cause("not stepped", f"the optimizer has no effect in {steps_words(steps)}", where_text(trial, pairs))
    details = (("step", steps[0]), ("steps", tuple(steps)))
    yield Way(replace(cause, details=details), AssumedOptimizer(given), by=lambda *at: still.get(at, False))


def _only_decayed(trial: Trial) -> Iterator[Way]:
    """What Muon steps, and only decays: its update reached no rank that holds it."""
    before = before_each(trial)

    def decays(rank: int, step: int, fqn: str, after: np.ndarray) -> bool:
        recipe, held = update.recipe_of(trial, fqn, step), before[rank, step].get(fqn)
        if stepped_by(recipe, fqn) != "muon" or held is None or not after.size:
            return False
        decayed = held * (1 - trial.reference_step(step).lr * recipe.weight_decay)
        return bool((np.abs(after - decayed) <= update_bound(trial.case, np.abs(held))).all())

    lost = {
        (rank, step.step, fqn)
        for rank, step, _ in trial.steps()
        for fqn, after in step.parameters.items()
        if decays(rank, step.step, fqn, after)
    }
    if lost:
        steps, pairs = sorted({step for _, step, _ in lost}), {(rank, fqn) for rank, _, fqn in lost}
        text = f"Muon's update has no effect in {steps_words(steps)}: the matrices only decay"
        cause = Cause(
            "not stepped", text, where_text(trial, pairs), details=(("step", steps[0]), ("steps", tuple(steps)))
        )
        yield Way(cause, AssumedOptimizer(lost=lambda *at: at in lost), by=lambda *at: at in lost)
