"""Causes in which another recipe than the requested one leads from these gradients to these weights.

The fields of TrainingConfig span the space: one field is changed, then two. A field's values are its default, common
ones, twice and half, the value that fits the first step, that of another field, another choice. Beside it stand what
the optimizer shows, a table of algorithms, and a table of ways to clip. The optimizer is replayed by each; the checks
judge everything.
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
from harness.core.causes.assume import assume_separate_replicas, replicas_differ
from harness.core.causes.differences import replicas_agree
from harness.core.causes.hypothesis import Broken, Hypothesis
from harness.core.causes.reported import READERS, unplanned_gradients
from harness.core.causes.words import Arrays, in_parameters_text, on_ranks_text, steps_text, where_text
from harness.core.checks import update
from harness.core.evidence.records import RankEvidence
from harness.core.evidence.text import number_text
from harness.core.judge.assumed import AssumedOptimizer
from harness.core.judge.contents import view_of_slice
from harness.core.judge.held_values import optimizer_slice
from harness.core.judge.result import Cause
from harness.core.judge.tolerance import clip_coefficient, update_bound
from harness.core.judge.trial import Trial
from harness.core.plan.grid import coordinate_of_rank
from harness.core.plan.slices import parameter_shapes
from harness.hypotheses.ways import (
    Multiplier,
    OptimizerVariant,
    algorithm_variants,
    amsgrad_variants,
    clipping_variants,
    other_gradient_variants,
    parameters_before_steps,
    rate_variants,
    round_if_close,
    slice_variants,
)
from harness.reference.config import CHOICES, TrainingConfig, unused_fields
from harness.reference.config import rule_of as stepped_by
from harness.reference.distance import best_fitting_factor

LARGEST_DECAY = 0.2  # of a weight in a step; what takes more of it is no weight decay
FIRST_STEP_CHOICES = 2  # so many choices more is what explains the first step alone
FEWER_VALUES = 5  # values of a field that are tried together with those of another
EXCLUDED_FIELDS = {
    "seed",
    "dtype",
    "global_batch",
    "seq_len",
    "data",
    "compute_dtype",
    "quantize",
    "tf32",
    "variable_length",
} | {*("document_mask", "masked_samples", "all_valid", "last_batch", "optimizer")}
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
SCHEDULE_FIELDS = {"lr", "warmup_steps", "final_lr_fraction", "steps", "rates"}
KINDS = dict.fromkeys(SCHEDULE_FIELDS, "learning rate") | dict.fromkeys(("weight_decay", "decay"), "weight decay")


class Agreement(Enum):
    """Steps in which the check `update` agrees with a variant of the optimizer."""

    ALL_STEPS = "in all steps"
    FIRST_STEP = "in the first step alone: it may be one of two mistakes"
    REFUTED = "refuted"


def wrong_recipe(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Yield hypotheses on the optimizer that evidence shows directly, then those that a replay of the optimizer agrees
    with.

    Nothing if updates do not fail. No replay if a variant seen directly explains all, replicas disagree, or gradients
    are unplanned. A variant that agrees in the first step alone is yielded as well. Two fields are changed together
    only if nothing simpler explains all.
    """
    if "update" not in broken:
        return
    wrong = _first_wrong_steps(trial)
    norms = update.norms_for_clipping(trial)
    observed_ways = [
        *_reported_rate_variants(trial),
        *_unstepped_variants(trial),
        *_only_decayed_variants(trial),
        *amsgrad_variants(trial),
    ]
    for way in observed_ways:
        yield Hypothesis(way.cause, partial(_assume_variant, way), way.fitted)
    agreement = partial(
        _replay_agreement, _with_wrong_parameters_first(trial, wrong), norms, trial.first_step in wrong.values()
    )
    is_undecidable = not replicas_agree(trial, trial.first_step) or unplanned_gradients(trial)
    if not wrong or is_undecidable or any(agreement(way) is Agreement.ALL_STEPS for way in observed_ways):
        return
    is_explained = False
    fields = partial(_variants_by_fields, trial, wrong, norms)
    others = (
        algorithm_variants(trial, norms, wrong),
        slice_variants(trial),
        rate_variants(trial, norms, wrong),
        clipping_variants(trial, norms),
    )
    for way in itertools.chain(fields(1), *others, other_gradient_variants(trial, norms, wrong)):
        agreed = agreement(way)
        if agreed is Agreement.ALL_STEPS:
            is_explained = True
            yield Hypothesis(way.cause, partial(_assume_variant, way), way.fitted)
        elif agreed is Agreement.FIRST_STEP:
            first_step_alone = _in_first_step_only(trial, way, norms)
            yield Hypothesis(first_step_alone.cause, partial(_assume_variant, way), way.fitted + FIRST_STEP_CHOICES)
            if agreement(first_step_alone) is Agreement.ALL_STEPS:
                yield Hypothesis(first_step_alone.cause, partial(_assume_variant, first_step_alone), way.fitted + 1)
    if is_explained:
        return
    for way in fields(2):
        if agreement(way) is Agreement.ALL_STEPS:
            yield Hypothesis(way.cause, partial(_assume_variant, way), way.fitted)


def _assume_variant(way: OptimizerVariant, trial: Trial) -> Trial:
    """Return the trial under the assumption that optimizers were this variant.

    The check `update` judges whether they were, from observed weights to observed weights. The reference is trained
    from the observed weights, and shows what follows from them. The first number of `reports` that no rank contradicts
    is assumed to be reported.
    """
    replicas = {rank: coordinate_of_rank(trial.case.dims, rank)["dp_replicate"] for rank in sorted(trial.ranks)}
    if way.multiplier and replicas_differ(trial, partial(_bytes_of_all_steps, trial, way.multiplier)):
        changes_of_copies = []
        for copy in range(trial.case.dims.dp_replicate):
            ranks_of_copy = [rank for rank, replica in replicas.items() if replica == copy]
            changes_of_copies.append({"left": partial(_with_observed_weights, trial, ranks_of_copy)})
        assumed_trial = assume_separate_replicas(trial, "dp_replicate", otherwise=changes_of_copies).with_assumption(
            way.assumed
        )
    else:
        assumed_trial = assume.assume_optimizer(
            trial, way.assumed, left=partial(_with_observed_weights, trial, [*replicas])
        )
    for check, number in way.reports:
        pairs = [
            (READERS[check](step), number(rank, step.step) or 0.0) for rank, step, _ in trial.steps_with_reference()
        ]
        if all(reported is None or math.isclose(reported, assumed, rel_tol=1e-6) for reported, assumed in pairs):
            return assumed_trial.with_assumption(reports={check: number})
    return assumed_trial


def _bytes_of_all_steps(trial: Trial, scale: Multiplier, rank: int, fqn: str) -> list[bytes]:
    """Return the bytes of a multiplier in each step, to compare ranks by."""
    return [np.asarray(scale(rank, step, fqn)).tobytes() for step in trial.case.steps]


def _with_observed_weights(trial: Trial, ranks: Sequence[int], step: int, parameters: Arrays) -> Arrays:
    """Return copies of the whole parameters, with the weights that these ranks' optimizers left in a step where they
    are known."""
    whole = {fqn: value.copy() for fqn, value in parameters.items()}
    for rank in ranks:
        for record in trial.ranks[rank].steps:
            if record.step != step:
                continue
            for fqn, values in record.parameters.items():
                if fqn in whole and (part := trial.slice_of(rank, fqn)):
                    target = view_of_slice(whole[fqn].reshape(trial.plan.shapes[fqn]), part)
                    if target.size == values.size:
                        target[...] = values.reshape(target.shape)
    return whole


# ---- the optimizer, replayed


def _first_wrong_steps(trial: Trial) -> dict[str, int]:
    """Return fqn -> first step in which the parameter is wrong on some rank; empty if the check `update` finds none wrong."""
    mistakes = [
        mistake
        for mistake in update.update_findings(trial, update.norms_for_clipping(trial))
        if mistake.kind == "parameter"
    ]
    latest_first = sorted(mistakes, key=lambda mistake: -(mistake.step or 0))
    return {str(mistake.name): mistake.step or 0 for mistake in latest_first}


def _with_wrong_parameters_first(trial: Trial, wrong: Mapping[str, int]) -> Trial:
    """Return the trial with parameters that are wrong early, and small ones, before all others.

    Most variants are refuted by these, so the replay ends sooner.
    """

    def with_wrong_first(evidence: RankEvidence) -> RankEvidence:
        """Return the evidence of one rank with its parameters in the order of their first wrong step, and of their size."""
        tensors = sorted(evidence.parameters, key=lambda tensor: (wrong.get(tensor.fqn, math.inf), tensor.value.size))
        resumed = evidence.resumed
        if resumed:
            fqns = [tensor.fqn for tensor in tensors if tensor.fqn in resumed.parameters]
            resumed = replace(resumed, parameters={fqn: resumed.parameters[fqn] for fqn in fqns})
        return replace(evidence, parameters=tuple(tensors), resumed=resumed)

    ranks = {rank: with_wrong_first(evidence) for rank, evidence in trial.ranks.items()}
    return replace(trial, run=replace(trial.run, ranks=ranks))


def _replay_agreement(trial: Trial, norms: dict[int, float], halves: bool, way: OptimizerVariant) -> Agreement:
    """Return in which steps a replay by this variant has the weights that ranks have.

    norms: step -> norm to clip by. halves: whether an agreement in the first step alone counts.
    """
    assumed_trial = trial.with_assumption(way.assumed)
    vars(assumed_trial)["local_slices"] = trial.local_slices  # the same evidence: they need not be looked for again
    mistakes = update.update_findings(assumed_trial, norms)
    first = next(mistakes, None)
    if first is None and update.is_every_step_observed(assumed_trial):
        return Agreement.ALL_STEPS
    if not halves or (first is not None and first.step == assumed_trial.first_step):
        return Agreement.REFUTED
    if any(mistake.step == assumed_trial.first_step for mistake in mistakes):
        return Agreement.REFUTED
    return Agreement.FIRST_STEP


def _in_first_step_only(trial: Trial, way: OptimizerVariant, norms: Mapping[int, float]) -> OptimizerVariant:
    """Return the variant that does so in the first step alone, and as requested in all others."""
    first = trial.first_step
    assumed = way.assumed
    limit = trial.case.training.max_norm
    recipe = assumed.recipe
    rate = assumed.rate
    given = assumed.given
    planned = {step.step: step.lr for step in trial.reference.steps}
    first_step_only = AssumedOptimizer(
        recipe=recipe and (lambda s, f: recipe(s, f) if s == first else update.recipe_of_parameter(trial, f)),
        rate=rate and (lambda r, s, f: rate(r, s, f) if s == first else planned[s]),
        given=given and (lambda r, s, f, g: given(r, s, f, g) if s == first else clip_coefficient(norms[s], limit) * g),
    )
    observed = f"in step {first} {way.cause.observed}"
    cause = replace(way.cause, observed=observed, details=(*way.cause.details, ("step", first)))
    changes = {name: value for name, value in vars(first_step_only).items() if value}
    return replace(way, cause=cause, assumed=replace(assumed, **changes), reports=())


# ---- fields of the recipe


def _variants_by_fields(
    trial: Trial, wrong: Mapping[str, int], norms: dict[int, float], count: int
) -> Iterator[OptimizerVariant]:
    """Yield variants with so many changed fields of the recipe: of all parameters, then of those that are wrong.

    wrong: fqn -> first wrong step. norms: step -> norm to clip by.
    """
    requested = trial.case.training
    every_fqn = frozenset(trial.plan.shapes)
    fitted = _fitted_values(trial, wrong, norms)
    usual_recipes = {fqn: update.recipe_of_parameter(trial, fqn) for fqn in trial.plan.shapes}
    for fqns in dict.fromkeys((every_fqn, every_fqn & {*wrong})):
        for changes, changed in _changed_recipes(requested, count, fitted):
            if changed.max_norm != requested.max_norm and clip_coefficient(max(norms.values()), changed.max_norm) == 1:
                continue  # the same as no clipping, which is a separate way
            text = " and ".join(f"{name} {_value_text(value)}" for name, value in changes.items())
            requested_text = " and ".join(_value_text(getattr(requested, name)) for name in changes)
            is_swapped = count > 1 and [*changes.values()] == [getattr(requested, name) for name in [*changes][::-1]]
            where = in_parameters_text(trial, fqns) if fqns != every_fqn else ""
            kind = next(KINDS.get(name, name) for name in changes)
            hint = "the two are swapped" if is_swapped else ""
            details = tuple(changes.items())
            cause = Cause(kind, f"updates are as with {text}", where, requested_text, hint, details=details)
            recipes = usual_recipes | _recipe_by_parameter(trial, changed, fqns)
            rates = _changed_learning_rates(trial, changed) if SCHEDULE_FIELDS & {*changes} else None
            yield OptimizerVariant(
                cause,
                _optimizer_of_recipe(trial, changed, fqns, norms, recipes, rates),
                1 + count + (fqns != every_fqn),
            )


def _value_text(value: object) -> str:
    """Return a field's value as text; a float with few digits."""
    return number_text(value) if isinstance(value, float) else str(value)


def _changed_recipes(
    requested: TrainingConfig, count: int, fitted: Mapping[str, float]
) -> Iterator[tuple[dict[str, Any], TrainingConfig]]:
    """Yield (changed fields with their values, the recipe with them) for all combinations of so many fields.

    Recipes that TrainingConfig refuses are left out. Two fields are also exchanged with each other. fitted: field ->
    fitted value.
    """
    values = _possible_values(requested, fitted)
    value_limit = FEWER_VALUES if count > 1 else None
    for names in itertools.combinations(values, count):
        choices = [*itertools.product(*(values[name][:value_limit] for name in names))]
        if count > 1:
            choices.append(tuple(getattr(requested, name) for name in names[::-1]))
        for chosen_values in dict.fromkeys(choices):
            with suppress(ValueError, TypeError):
                changes = dict(zip(names, chosen_values, strict=True))
                yield changes, replace(requested, **changes)


def _possible_values(requested: TrainingConfig, fitted: Mapping[str, float]) -> dict[str, list[Any]]:
    """Return, by field, the values that it may have by mistake, likely ones first. The requested value is left out.

    Fields of EXCLUDED_FIELDS, and those that the recipe does not use, are left out.
    """
    left_out = EXCLUDED_FIELDS | unused_fields(requested)
    fields = [field for field in dataclasses.fields(requested) if field.name not in left_out]
    requested_values = {field.name: getattr(requested, field.name) for field in fields}
    floats = [value for value in requested_values.values() if isinstance(value, float)]
    values_by_field = {}
    for field in fields:
        name = field.name
        value = requested_values[name]
        values = [fitted.get(name, value), field.default, *CHOICES.get(name, ()), *COMMON.get(name, ())]
        if isinstance(value, bool):
            values.append(not value)
        elif isinstance(value, int):
            values += [value - 1, value + 1, 2 * value, value // 2]
            if name == "steps":
                values.append(value + requested_values.get("warmup_steps", 0))
        elif isinstance(value, float):
            values += [2 * value, value / 2, 10 * value, value / 10, *floats]
        values_by_field[name] = [choice for choice in dict.fromkeys(values) if choice != value]
    return values_by_field


def _fitted_values(trial: Trial, wrong: Mapping[str, int], norms: Mapping[int, float]) -> dict[str, float]:
    """Return the learning rate and the weight decay that fit the first step of the largest wrong parameter, by field.

    Each is fitted as if it alone were wrong. Empty if no parameter is wrong in the first step.
    """
    holders = []
    for rank, evidence in sorted(trial.ranks.items()):
        for tensor in evidence.parameters:
            if wrong.get(tensor.fqn) == trial.first_step:
                holders.append((rank, tensor))
    rate = trial.reference_step(trial.first_step).lr
    training = trial.case.training
    if not holders or not rate:
        return {}
    rank, tensor = max(holders, key=lambda holder: holder[1].value.size)
    after = trial.ranks[rank].steps[0].parameters.get(tensor.fqn)
    start = trial.initial_parameters(rank).get(tensor.fqn)
    if after is None or start is None or after.shape != start.shape:
        return {}
    observed = optimizer_slice(trial, rank, tensor.fqn, after)
    before = optimizer_slice(trial, rank, tensor.fqn, start)
    clip = clip_coefficient(norms[trial.first_step], training.max_norm)
    usual_recipe = update.recipe_of_parameter(trial, tensor.fqn)
    undecayed_trial = trial.with_assumption(
        AssumedOptimizer(recipe=lambda step, fqn: replace(usual_recipe, weight_decay=0.0))
    )
    moved = update.expected_after_first_step(trial, trial.ranks[rank], tensor, clip=clip)[0]
    undecayed = update.expected_after_first_step(undecayed_trial, trial.ranks[rank], tensor, clip=clip)[0]
    fitted = {"lr": training.lr * best_fitting_factor(observed - before, moved - before)}
    decayed_share = best_fitting_factor(undecayed - observed, before)
    if decayed_share < LARGEST_DECAY:
        fitted["weight_decay"] = decayed_share / rate
    return {name: round_if_close(number) for name, number in fitted.items()}


def _recipe_by_parameter(trial: Trial, changed: TrainingConfig, fqns: Collection[str]) -> dict[str, TrainingConfig]:
    """Return, by parameter, the recipe as it is for that parameter: vectors have no weight decay if only matrices decay."""
    if changed.decay != "matrices":
        return dict.fromkeys(fqns, changed)
    undecayed = replace(changed, weight_decay=0.0)
    shapes = parameter_shapes(trial.case.model)
    return {fqn: undecayed if len(shapes.get(fqn, ())) == 1 else changed for fqn in fqns}


def _changed_learning_rates(trial: Trial, changed: TrainingConfig) -> dict[int, float] | None:
    """Return step -> learning rate by the schedule of another recipe, times what the reference's differed from its
    schedule by.

    None if all are the requested ones.
    """
    planned = {step.step: step.lr for step in trial.reference.steps}
    usual_rates = {step: _scheduled_rate(step, trial.case.training) for step in planned}
    changed_rates = {step: _scheduled_rate(step, changed) for step in planned}
    if usual_rates == changed_rates:
        return None
    rates = {}
    for step, lr in planned.items():
        usual_rate = usual_rates[step]
        rates[step] = lr * changed_rates[step] / usual_rate if usual_rate else changed_rates[step]
    return rates


def _optimizer_of_recipe(
    trial: Trial,
    changed: TrainingConfig,
    fqns: Collection[str],
    norms: Mapping[int, float],
    recipes: Mapping[str, TrainingConfig],
    rates: Mapping[int, float] | None,
) -> AssumedOptimizer:
    """Return the optimizer that trains `fqns` by another recipe, and all others as requested.

    recipes: fqn -> its recipe, of every parameter. rates: step -> learning rate of `fqns`; None for the requested ones.
    """
    requested = trial.case.training
    planned = {step.step: step.lr for step in trial.reference.steps}

    def clip_by_recipe(rank: int, step: int, fqn: str, gradient: np.ndarray) -> np.ndarray:
        return clip_coefficient(norms[step], (changed if fqn in fqns else requested).max_norm) * gradient

    return AssumedOptimizer(
        recipe=lambda step, fqn: recipes[fqn],
        rate=(lambda rank, step, fqn: (rates if fqn in fqns else planned)[step]) if rates else None,
        given=clip_by_recipe if changed.max_norm != requested.max_norm else None,
    )


def _scheduled_rate(step: int, training: TrainingConfig) -> float:
    """Return the learning rate of a step by the schedule of this recipe. Imports torch, which judging does not need."""
    from harness.reference.train import learning_rate

    return learning_rate(step, training)


# ---- what is seen


def _reported_rate_variants(trial: Trial) -> Iterator[OptimizerVariant]:
    """Yield variants with the learning rates that ranks report, if some are not the schedule's. Else nothing.

    First for all parameters; then for those alone that were stepped by them, if others were stepped as scheduled.
    """
    scheduled = {step.step: step.lr for step in trial.reference.steps}
    shown = {(rank, step.step): step.lr for rank, step, _ in trial.steps_with_reference() if step.lr is not None}
    wrong = {
        (rank, step): lr for (rank, step), lr in shown.items() if not math.isclose(lr, scheduled[step], rel_tol=1e-12)
    }
    if not wrong:
        return
    first = min(step for _, step in wrong)
    reporting_ranks = {rank for rank, _ in wrong}
    ranks = [rank for rank, step in wrong if step == first]
    rate = wrong[ranks[0], first]
    shown_by_step = {(step, lr) for (rank, step), lr in shown.items() if rank in reporting_ranks}
    hint = matching_schedules_text(trial, {step for _, step in wrong}, shown_by_step)
    same_steps = " or ".join(str(step) for step, lr in scheduled.items() if math.isclose(lr, rate, rel_tol=1e-12))
    if not hint and same_steps:
        hint = f"the schedule's of step {same_steps}"
    text = f"learning rate of step {first}{on_ranks_text(trial, ranks)} is {number_text(rate)}"
    details = (("step", first), ("rate", rate), ("ranks", tuple(ranks)), ("rule", hint))
    stepped_usually = frozenset[str]()
    for _ in range(2):
        rate_of = partial(_reported_or_scheduled_rate, scheduled, shown, stepped_usually)
        where = in_parameters_text(trial, {*trial.plan.shapes} - stepped_usually) if stepped_usually else ""
        cause = Cause("learning rate", text, where, number_text(scheduled[first]), hint, details=details)
        reports = (
            ("reported_rate", lambda rank, step: scheduled[step]),
            ("reported_rate", lambda rank, step: shown.get((rank, step), scheduled[step])),
        )
        yield OptimizerVariant(cause, AssumedOptimizer(rate=rate_of), 1 + bool(stepped_usually), rate_of, reports)
        stepped_usually = frozenset(_first_wrong_steps(trial.with_assumption(AssumedOptimizer(rate=rate_of))))
        if not stepped_usually or stepped_usually >= {*trial.plan.shapes}:
            return


def _reported_or_scheduled_rate(
    scheduled: Mapping[int, float],
    shown: Mapping[tuple[int, int], float],
    stepped_usually: Collection[str],
    rank: int,
    step: int,
    fqn: str,
) -> float:
    """Return the learning rate that a rank reports for a step.

    The schedule's, if it reports none or `fqn` is stepped usually.
    """
    return scheduled[step] if fqn in stepped_usually else shown.get((rank, step), scheduled[step])


def matching_schedules_text(trial: Trial, wrong: Collection[int], shown: Collection[tuple[int, float]]) -> str:
    """Return, in words, the schedules that give all these rates of steps; empty if there is none.

    A single wrong step needs right steps before and behind it. shown: (step, learning rate).
    """
    if len(wrong) == 1 and not min(shown)[0] < min(wrong) < max(shown)[0]:
        return ""
    training = trial.case.training
    for schedules in (_shifted_schedules(training), _changed_schedules(training, 1), _changed_schedules(training, 2)):
        matching = []
        for text, rate in schedules:
            if all(math.isclose(rate(step), lr) for step, lr in shown):
                matching.append(text)
        if rules := {text.partition(" by ")[0]: text for text in matching[::-1]}:
            return " or ".join([*rules.values()][::-1][:2])
    return ""


def _shifted_schedules(training: TrainingConfig) -> Iterator[tuple[str, Callable[[int], float]]]:
    """Yield (rule in words, step -> learning rate) of schedules in which each step has the rate of another step."""
    one_late = "every step takes the rate of the step before"
    advances = "each step advances the schedule by"
    table: dict[str, Callable[[int], int]] = {one_late: lambda step: step - 1}
    table["every step takes the rate of the next step"] = lambda step: step + 1
    table |= {f"{advances} {times}": lambda step, times=times: 1 + times * (step - 1) for times in range(2, 9)}  # type: ignore[misc]
    table |= {f"from step {n} on, {one_late}": lambda step, n=n: step - (step >= n) for n in range(2, training.steps)}  # type: ignore[misc]
    for text, scheduled_step in table.items():
        yield text, partial(_rate_of_other_step, scheduled_step, training)


def _rate_of_other_step(scheduled_step: Callable[[int], int], training: TrainingConfig, step: int) -> float:
    return _scheduled_rate(scheduled_step(step), training)


def _changed_schedules(training: TrainingConfig, count: int) -> Iterator[tuple[str, Callable[[int], float]]]:
    """Yield (rule in words, step -> learning rate) of recipes with so many changed fields, all of the schedule."""
    for changes, changed in _changed_recipes(training, count, {}):
        if {*changes} <= SCHEDULE_FIELDS:
            text = " and ".join(f"{name} {_value_text(value)}" for name, value in changes.items())
            yield f"as with {text}", partial(_scheduled_rate, training=changed)


def _unstepped_variants(trial: Trial) -> Iterator[OptimizerVariant]:
    """Yield one variant: the optimizer does not move some parameters in some steps, as was seen. Else nothing.

    Steps whose learning rate is 0 do not count.
    """
    before = parameters_before_steps(trial)
    norms = update.norms_for_clipping(trial)
    limit = trial.case.training.max_norm
    stays_unchanged = {}
    for rank, step, expected in trial.steps_with_reference():
        for fqn, after in step.parameters.items():
            if expected.lr and after.size and fqn in before[rank, step.step]:
                stays_unchanged[rank, step.step, fqn] = np.array_equal(after, before[rank, step.step][fqn])
    if not any(stays_unchanged.values()):
        return
    steps = sorted({number for (_, number, _), is_unchanged in stays_unchanged.items() if is_unchanged})
    pairs = {(rank, fqn) for (rank, _, fqn), is_unchanged in stays_unchanged.items() if is_unchanged}

    def clip_if_changed(rank: int, step: int, fqn: str, gradient: np.ndarray) -> np.ndarray | None:
        return None if stays_unchanged.get((rank, step, fqn)) else clip_coefficient(norms[step], limit) * gradient

    cause = Cause("not stepped", f"the optimizer has no effect in {steps_text(steps)}", where_text(trial, pairs))
    details = (("step", steps[0]), ("steps", tuple(steps)))
    yield OptimizerVariant(
        replace(cause, details=details),
        AssumedOptimizer(clip_if_changed),
        multiplier=lambda *at: stays_unchanged.get(at, False),
    )


def _only_decayed_variants(trial: Trial) -> Iterator[OptimizerVariant]:
    """Yield one variant: matrices of Muon only decay in some steps, for their update reached no rank that holds them.

    Else nothing.
    """
    before = parameters_before_steps(trial)

    def only_decays(rank: int, step: int, fqn: str, after: np.ndarray) -> bool:
        """Return whether these are the weights before the step times its decay.

        False if Muon does not step the parameter.
        """
        recipe = update.recipe_of_parameter(trial, fqn, step)
        values = before[rank, step].get(fqn)
        if stepped_by(recipe, fqn) != "muon" or values is None or not after.size:
            return False
        decayed = values * (1 - trial.reference_step(step).lr * recipe.weight_decay)
        return bool((np.abs(after - decayed) <= update_bound(trial.case, np.abs(values))).all())

    lost_updates = set()
    for rank, step, _ in trial.steps_with_reference():
        for fqn, after in step.parameters.items():
            if only_decays(rank, step.step, fqn, after):
                lost_updates.add((rank, step.step, fqn))
    if lost_updates:
        steps = sorted({number for _, number, _ in lost_updates})
        pairs = {(rank, fqn) for rank, _, fqn in lost_updates}
        text = f"Muon's update has no effect in {steps_text(steps)}: the matrices only decay"
        details = (("step", steps[0]), ("steps", tuple(steps)))
        cause = Cause("not stepped", text, where_text(trial, pairs), details=details)
        yield OptimizerVariant(
            cause, AssumedOptimizer(lost=lambda *at: at in lost_updates), multiplier=lambda *at: at in lost_updates
        )
