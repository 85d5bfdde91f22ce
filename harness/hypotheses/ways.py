"""Variants of the requested optimizer, as two tables: other algorithms, and other ways to clip."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from harness.core.causes.reported import (
    NamedNumber,
    NumberOfStep,
    details_text,
    norm_sources,
    parameter_groupings,
    recorded_norm,
    recorded_number,
    sources_of_other_steps,
)
from harness.core.causes.words import Arrays, in_parameters_text, on_ranks_text, where_text
from harness.core.checks import update
from harness.core.evidence.text import number_text
from harness.core.judge.assumed import AssumedOptimizer
from harness.core.judge.held_values import optimizer_slice
from harness.core.judge.result import Cause
from harness.core.judge.tolerance import clip_coefficient
from harness.core.judge.trial import Trial
from harness.core.plan.frozen import has_frozen
from harness.reference.config import TrainingConfig

Norms = Mapping[int, float]
"""Step -> norm."""
Multiplier = Callable[[int, int, str], Any]
"""(rank, step, parameter) -> what gradients are multiplied by in place of clipping, or a rate."""


MOST_RATES = 4
"""Number of steps whose rate is fitted, at most."""


@dataclass(frozen=True)
class OptimizerVariant:
    """A variant of the optimizer that ranks may have used."""

    cause: Cause
    """The cause that is named if ranks used it."""
    assumed: AssumedOptimizer
    """What differs from the requested optimizer."""
    fitted: int = 1
    """How many numbers or choices were fitted."""
    multiplier: Multiplier | None = None
    """The multiplier or rate, which may differ between replicas."""
    reports: tuple[tuple[str, NumberOfStep], ...] = ()
    """(check, number) that ranks may then report. The first that all ranks report is assumed."""


def parameters_before_steps(trial: Trial) -> dict[tuple[int, int], Arrays]:
    """Return the parameters of each rank before each step, as (rank, step) -> fqn -> the rank's values."""
    parameters_before: dict[tuple[int, int], Arrays] = {}
    for rank, evidence in trial.ranks.items():
        parameters = trial.initial_parameters(rank)
        for step in evidence.steps:
            parameters_before[rank, step.step] = parameters
            parameters = step.parameters
    return parameters_before


# ---- algorithms


def algorithm_variants(trial: Trial, norms: Norms, wrong: Collection[str]) -> Iterator[OptimizerVariant]:
    """Yield variants with another algorithm: other decay, older gradients, no bias correction, momentum.

    In several of them the optimizer is given a sum of clipped gradients, weighted by how many steps ago each was. Only
    variants that fit the requested optimizer are yielded; with resumed cases those of decay alone. wrong: fqns that are
    wrong.
    """
    adamw = trial.case.training.optimizer == "adamw"
    sgd = trial.case.training.optimizer == "sgd"
    is_start = not trial.case.resume
    decay = trial.case.training.weight_decay
    history = partial(_history_variant, trial, norms)
    if decay:
        yield from _decay_variants(trial, wrong)
    if decay and has_frozen(trial.case):
        cause = Cause("weight decay", "frozen parameters are decayed", details=(("frozen", True),))
        yield OptimizerVariant(cause, AssumedOptimizer(decays_frozen=True))
    if adamw and decay:
        text = "weight decay is added to the gradients"
        cause = Cause("weight decay in the gradients", text, "", "decoupled (AdamW)")
        yield history(cause, lambda ago: float(ago == 0), decayed=True)
    if is_start:
        text = "each optimizer step uses the gradients of the step before, the first uses none"
        yield history(Cause("one step late", text), lambda ago: float(ago == 1))
    if adamw and is_start:
        uncorrected = AssumedOptimizer(counter=lambda step, fqn: 10**9 + step)  # when nothing is left to correct
        yield OptimizerVariant(
            Cause("bias correction", "bias correction of the averages is missing", "", "Adam's"), uncorrected
        )
        yield from _counter_variants(trial)
    if not is_start or not sgd:
        return
    for momentum, nesterov in itertools.product((0.9, 0.95, 0.99, 0.8, 0.5), (0, 1)):
        details = (("momentum", momentum), ("nesterov", bool(nesterov)))
        text = f"SGD has {'Nesterov ' if nesterov else ''}momentum {momentum}"
        share_of_step = partial(_share_by_momentum, momentum, nesterov)
        yield history(Cause("momentum", text, "", "none", details=details), share_of_step, decayed=True, copies=1)


def _share_by_momentum(momentum: float, nesterov: int, ago: int) -> float:
    """Return the weight in an update of the gradient of `ago` steps before, by SGD's momentum. nesterov: 0 or 1."""
    return momentum ** (ago + nesterov) + nesterov * (ago == 0)


def amsgrad_variants(trial: Trial) -> Iterator[OptimizerVariant]:
    """Yield AMSGrad if some rank's optimizer keeps the state that only AMSGrad has. Else nothing."""
    states_of_ranks = (evidence.steps[-1].optimizer_state.values() for evidence in trial.ranks.values())
    if any("max_exp_avg_sq" in state for state in itertools.chain.from_iterable(states_of_ranks)):
        cause = Cause("amsgrad", "the optimizer divides by max_exp_avg_sq, as AMSGrad does", "", "AdamW without it")
        yield OptimizerVariant(cause, AssumedOptimizer(amsgrad=True, copies=1))


def _decay_variants(trial: Trial, wrong: Collection[str]) -> Iterator[OptimizerVariant]:
    """Yield variants with other multiples of the recipe's weight decay: for all parameters, then for those that are wrong."""
    training = trial.case.training
    every_fqn = frozenset(trial.plan.shapes)
    rates = {step.step: step.lr for step in trial.reference.steps}
    multiples_by_text = {
        "weight decay is not multiplied by the learning rate": {step: 1 / (lr or 1.0) for step, lr in rates.items()},
        "weight decay is multiplied by the peak rate, not by the step's": {
            step: training.lr / (lr or 1.0) for step, lr in rates.items()
        },
        "weights are decayed twice in each step": {step: 2 - lr * training.weight_decay for step, lr in rates.items()},
    }
    fqn_choices = dict.fromkeys((every_fqn, every_fqn & {*wrong}))
    for fqns, (text, multiples) in itertools.product(fqn_choices, multiples_by_text.items()):
        recipes = {fqn: update.recipe_of_parameter(trial, fqn) for fqn in trial.plan.shapes}
        where = in_parameters_text(trial, fqns) if fqns != every_fqn else ""
        recipe_of = partial(_recipe_with_decay, recipes, multiples, fqns)
        yield OptimizerVariant(
            Cause("weight decay", text, where), AssumedOptimizer(recipe=recipe_of), 1 + (fqns != every_fqn)
        )


def rate_variants(trial: Trial, norms: Norms, wrong: Collection[str]) -> Iterator[OptimizerVariant]:
    """Yield variants that step the wrong parameters by other learning rates: a restarted schedule, then fitted rates."""
    yield from _restarted_schedule_variants(trial, wrong)
    yield from _fitted_rate_variants(trial, norms, wrong)


def _restarted_schedule_variants(trial: Trial, wrong: Collection[str]) -> Iterator[OptimizerVariant]:
    """Yield one variant: after resuming, the wrong parameters have the rates of as many steps after the beginning.

    Nothing for a case that does not resume with its schedule, or if no parameter is wrong.
    """
    if not trial.saved or trial.case.model_of is not None or not wrong:
        return
    scheduled = {step.step: step.lr for step in trial.reference.steps}
    saved_step = trial.case.steps.start - 1
    step = saved_step + 1
    where = in_parameters_text(trial, wrong)
    text = f"the schedule restarts after resuming {where}: the learning rate of step {step} is that of step 1"
    cause = Cause("schedule starts anew", text, "", f"{scheduled[step]:g}", details=(("step", step), ("of_step", 1)))
    rate_of = lambda rank, number, fqn: scheduled[number - saved_step if fqn in wrong else number]  # noqa: E731
    yield OptimizerVariant(cause, AssumedOptimizer(rate=rate_of), 2)


def _fitted_rate_variants(trial: Trial, norms: Norms, wrong: Collection[str]) -> Iterator[OptimizerVariant]:
    """Yield one variant: the wrong parameters are stepped by other rates, fitted step by step, in MOST_RATES steps at
    most.

    Each rate is read off one entry of a step, and tested on all entries. Nothing if no rate can be fitted.
    """
    scheduled = {step.step: step.lr for step in trial.reference.steps}
    factors = dict[int, float]()
    rate_of = lambda rank, step, fqn: scheduled[step] * (factors.get(step, 1.0) if fqn in wrong else 1.0)  # noqa: E731
    while len(factors) < MOST_RATES:
        mistakes = update.update_findings(trial.with_assumption(AssumedOptimizer(rate=rate_of)), dict(norms))
        moves = [
            mistake
            for mistake in mistakes
            if mistake.quantity == update.OPTIMIZER_STEP and isinstance(mistake.observed, float)
        ]
        first = min(moves, key=lambda move: (move.step or 0, -abs(float(move.expected or 0))), default=None)  # type: ignore[arg-type]
        if first is None or not first.expected or first.step in factors:
            break
        ratio = first.observed / first.expected  # type: ignore[operator]
        factors[first.step or 0] = round_if_close(ratio, 1e-6)
    if factors:
        times = " and ".join(f"{number_text(factor)} times the rate in step {step}" for step, factor in factors.items())
        where = in_parameters_text(trial, wrong) if len(wrong) < len(trial.plan.shapes) else ""
        details = (("factors", tuple(factors.items())),)
        cause = Cause("learning rate", f"updates are as with {times}", where, details=details)
        yield OptimizerVariant(cause, AssumedOptimizer(rate=rate_of), 2 + len(factors))


def round_if_close(number: float, close: float = 1e-9) -> float:
    """Return the number rounded to 6 digits if it is that close, else the number itself; 0.0 below 1e-12. close: relative."""
    plain = 0.0 if abs(number) < 1e-12 else float(f"{number:.6g}")
    return plain if math.isclose(plain, number, rel_tol=close, abs_tol=1e-12) else number


def _counter_variants(trial: Trial) -> Iterator[OptimizerVariant]:
    """Yield variants in which AdamW counts steps that it did not make, or the passes of an accumulation."""
    numbers: dict[str, tuple[int, int]] = {f"begins {offset} too high": (1, offset) for offset in (1, 2)}
    if trial.case.passes > 1:
        numbers["counts microbatches"] = (trial.case.passes, 0)
    for description, (factor, added) in numbers.items():
        text = f"AdamW's step counter, by which it corrects its averages, {description}"
        cause = Cause("bias correction", text, "", "1 in the first step", details=(("counter", description),))
        assumed = AssumedOptimizer(counter=lambda step, fqn, factor=factor, added=added: factor * step + added)  # type: ignore[misc]
        yield OptimizerVariant(cause, assumed)


def _recipe_with_decay(
    recipes: Mapping[str, TrainingConfig], multiples: Mapping[int, float], fqns: Collection[str], step: int, fqn: str
) -> TrainingConfig:
    """Return the recipe of a parameter in a step, with this step's multiple of its weight decay if it is one of `fqns`."""
    factor = multiples[step] if fqn in fqns else 1
    return replace(recipes[fqn], weight_decay=recipes[fqn].weight_decay * factor)


def slice_variants(trial: Trial) -> Iterator[OptimizerVariant]:
    """Yield variants in which Muon orthogonalises a rank's slice of a matrix by itself, or scales the rate by the
    slice's shape.

    Nothing for other optimizers, or if no matrix is cut.
    """
    axes_by_cut: dict[str, tuple[str, ...]] = {}
    if trial.case.dims.tp > 1:
        axes_by_cut["tp"] = ("tp",)
    if trial.plan.shard_degree > 1:
        axes_by_cut[trial.plan.shard_axis] = ("dp_shard", "cp", "dp_shard_cp")
    if trial.case.training.optimizer != "muon" or not axes_by_cut:
        return
    cause = Cause("scaled by slices", "Muon's rate is scaled by the shape of a rank's slice", "", "of the whole matrix")
    yield OptimizerVariant(cause, AssumedOptimizer(scales_slices=True))
    for count in range(1, len(axes_by_cut) + 1):
        for axes in itertools.combinations(axes_by_cut, count):
            axes_text = " and ".join(axes)
            alone = tuple(itertools.chain(*(axes_by_cut[axis] for axis in axes)))
            text = f"Muon orthogonalises the slice of each rank along {axes_text} by itself"
            cause = Cause("orthogonalised in parts", text, "", "the whole matrix", details=(("axes", axes),))
            yield OptimizerVariant(cause, AssumedOptimizer(alone=alone), count)
            scaled = replace(cause, observed=f"{text}, and scales the rate by its shape")
            yield OptimizerVariant(scaled, AssumedOptimizer(alone=alone, scales_slices=True), count + 1)


def _history_variant(
    trial: Trial,
    norms: Norms,
    cause: Cause,
    share_of_step: Callable[[int], float],
    decayed: bool = False,
    copies: int = 0,
) -> OptimizerVariant:
    """Return the variant whose optimizer is given a weighted sum of this step's and earlier clipped gradients.

    share_of_step: number of steps ago -> weight. decayed: weights times weight decay are added to the gradients, and to
    nothing else. copies: how many copies of the sum the optimizer keeps.
    """
    limit = trial.case.training.max_norm
    before = parameters_before_steps(trial)
    gradients_by_step = {(rank, step.step): step.gradients for rank, step, _ in trial.steps_with_reference()}
    recipes = {fqn: update.recipe_of_parameter(trial, fqn) for fqn in trial.plan.shapes}
    undecayed = {fqn: replace(recipe, weight_decay=0.0) for fqn, recipe in recipes.items()}

    def sum_step_gradients(rank: int, step: int, fqn: str, gradient: np.ndarray) -> np.ndarray | None:
        """Return the weighted sum of the rank's clipped gradients up to this step.

        None if one of them is not on record.
        """
        total = np.zeros_like(gradient)
        for number in range(trial.first_step, step + 1):
            if fqn not in gradients_by_step[rank, number] or fqn not in before[rank, number]:
                return None
            step_gradient = clip_coefficient(norms[number], limit) * gradients_by_step[rank, number][fqn].astype(
                np.float64
            )
            step_gradient += (
                decayed * recipes[fqn].weight_decay * optimizer_slice(trial, rank, fqn, before[rank, number][fqn])
            )
            total += share_of_step(step - number) * step_gradient
        return total

    recipe = (lambda step, fqn: undecayed[fqn]) if decayed else None
    return OptimizerVariant(cause, AssumedOptimizer(sum_step_gradients, recipe=recipe, copies=copies))


# ---- clipping


def clipping_variants(trial: Trial, norms: Norms) -> Iterator[OptimizerVariant]:
    """Yield variants that clip in another way: by another norm, by value, for some parameters only, or not at all.

    Nothing if the recipe does not clip.
    """
    limit = trial.case.training.max_norm
    if limit is None:
        return
    yield from _norm_variants(trial, limit)
    for name, parts in parameter_groupings(trial).items():
        norms_by_fqn = {}
        for fqns, step in itertools.product(parts, trial.case.steps):
            for fqn in fqns:
                norms_by_fqn[fqn, step] = recorded_norm(trial, 0, step, fqns=fqns)
        text = f"gradients are clipped by a norm of each of the {name}"
        details = (("norms of", name),)
        cause = Cause("clipped by another norm", text, "", "one norm of all", details=details)
        multiplier = lambda rank, step, fqn, own=norms_by_fqn: clip_coefficient(own[fqn, step], limit)  # noqa: E731
        yield _clipped_variant(cause, multiplier)
    yield from _unclipped_variants(trial, limit, norms)
    if small_step := next((step for step in trial.case.steps if norms[step] < limit), None):
        factor = limit / (norms[small_step] + 1e-6)
        text = f"clipping multiplies by {factor:.4g} in step {small_step}"
        expected = f"1, of a norm of {norms[small_step]:.4g}"
        cause = Cause(
            "clipping enlarges gradients", text, "", expected, details=(("step", small_step), ("factor", factor))
        )
        yield _clipped_variant(cause, lambda rank, step, fqn: limit / (norms[step] + 1e-6))
    cause = Cause("clipped without 1e-6", "clipping multiplies by max_norm / norm", "", "max_norm / (norm + 1e-6)")
    yield _clipped_variant(cause, lambda rank, step, fqn: limit / max(norms[step], limit))
    gradients_by_step = {(rank, step.step): step.gradients for rank, step in trial.own_steps()}
    for bound in dict.fromkeys((limit, 1.0)):
        text = f"gradients are clipped entry by entry, to {bound:g}"
        cause = Cause("clipped by value", text, details=(("value", bound),))
        yield _clipped_variant(cause, partial(_multiplier_by_value, gradients_by_step, bound))


def _multiplier_by_value(
    gradients_by_step: Mapping[tuple[int, int], Arrays], bound: float, rank: int, step: int, fqn: str
) -> Any:
    """Return for each entry of a gradient the factor after which none is larger than the bound, an array of its shape."""
    return bound / np.maximum(np.abs(gradients_by_step[rank, step][fqn]), np.float64(bound))


def _clipped_variant(
    cause: Cause, multiplier: Multiplier, fitted: int = 1, norm: NumberOfStep | None = None
) -> OptimizerVariant:
    """Return the variant that multiplies gradients by this in place of clipping. norm: the gradient norm that ranks
    may report."""
    assumed = AssumedOptimizer(lambda rank, step, fqn, gradient: multiplier(rank, step, fqn) * gradient)
    return OptimizerVariant(cause, assumed, fitted, multiplier, (("grad_norm", norm),) if norm else ())


def _norm_variants(trial: Trial, limit: float) -> Iterator[OptimizerVariant]:
    """Yield variants that clip by a norm on record which differs from the global norm.

    Norms of equal values are one variant. The norm that ranks report is a choice more. limit: the recipe's max_norm.
    """
    expected_norm = functools.cache(partial(recorded_number, trial, "grad_norm"))
    steps_and_ranks = [*itertools.product(trial.case.steps, sorted(trial.ranks))]
    reported_norms = {(rank, step.step): step.grad_norm for rank, step in trial.own_steps()}
    seen_values = set()
    late_details = (("as that of 1 step", "before"), ("in the first step", "its own"))
    previous: NamedNumber = late_details, lambda rank, step: expected_norm(rank, step - 1) or expected_norm(rank, step)
    reported: NamedNumber = (("as", "reported"),), lambda rank, step: reported_norms.get((rank, step))
    for details, number in (*norm_sources(trial), *sources_of_other_steps(trial, expected_norm), previous, reported):
        norm = functools.cache(lambda rank, step, number=number: number(rank, step) or 0.0)
        differing = []
        for step, rank in steps_and_ranks:
            if not math.isclose(norm(rank, step), expected_norm(rank, step) or 0.0):
                differing.append((step, rank))
        values = tuple(round(norm(rank, step), 12) for step, rank in steps_and_ranks)
        if not differing or values in seen_values:
            continue
        seen_values.add(values)
        step, rank = differing[0]
        same_ranks = []
        for other_step, other_rank in steps_and_ranks:
            if other_step == step and math.isclose(norm(other_rank, step), norm(rank, step)):
                same_ranks.append(other_rank)
        observed = f"{norm(rank, step):.6g}{on_ranks_text(trial, same_ranks)} in step {step}"
        text = f"gradients are clipped by a norm {details_text(details)}: {observed}"
        expected = f"the global norm, {expected_norm(rank, step):.6g}"
        cause = Cause("clipped by another norm", text, "", expected, details=details)
        multiplier = lambda rank, step, fqn, norm=norm: clip_coefficient(norm(rank, step), limit)  # noqa: E731
        yield _clipped_variant(cause, multiplier, 1 + (number is reported[1]), norm)


def _unclipped_variants(trial: Trial, limit: float, norms: Norms) -> Iterator[OptimizerVariant]:
    """Yield variants without clipping for all parameters, or for those whose first step is that of the unclipped
    gradient.

    If that is every parameter, there is one variant; if it is none, nothing is yielded. Else there are two: the others
    are clipped by the norm of all, or by their own. limit: of the norm. norms: by step.
    """
    clip = clip_coefficient(norms[trial.first_step], limit)
    pairs = []
    for rank, evidence in trial.ranks.items():
        for tensor in evidence.parameters:
            if not tensor.value.size or not update.is_explained_by_clip(trial, evidence, tensor, clip=1.0):
                continue
            if not update.is_explained_by_clip(trial, evidence, tensor, clip=clip):
                pairs.append((rank, tensor.fqn))
    where = where_text(trial, pairs)
    others = {*trial.plan.shapes} - {fqn for _, fqn in pairs}
    text = f"gradients are not clipped (coefficient {clip:.4g} in step {trial.first_step})"
    cause = Cause("clipping left out", text, where, details=(("coefficient", clip),))
    if where == "in every parameter":
        yield _clipped_variant(replace(cause, where=""), lambda rank, step, fqn: 1.0, 0)
        return
    norms_of_others = {step: recorded_norm(trial, 0, step, fqns=others) for step in trial.case.steps}
    if not pairs:
        return
    choices: tuple[tuple[Norms, str], ...] = (
        (norms, ""),
        (norms_of_others, "the others are clipped by their own norm"),
    )
    for norms_used, hint in choices:
        multiplier = partial(_multiplier_of_others, pairs, norms_used, limit)
        norm = lambda rank, step, norms_used=norms_used: norms_used[step]  # noqa: E731
        yield _clipped_variant(replace(cause, hint=hint), multiplier, norm=norm)


def _multiplier_of_others(
    unclipped: Collection[tuple[int, str]], norms: Norms, limit: float, rank: int, step: int, fqn: str
) -> float:
    """Return the coefficient of clipping; 1 for a (rank, fqn) that is not clipped."""
    return 1.0 if (rank, fqn) in unclipped else clip_coefficient(norms[step], limit)


# ---- whose gradient an update is of


def other_gradient_variants(trial: Trial, norms: Norms, wrong: Collection[str]) -> Iterator[OptimizerVariant]:
    """Yield one variant: each wrong parameter is moved by the gradient of one other parameter of its shape.

    Nothing unless exactly one such gradient fits each wrong parameter.
    """
    sources: dict[str, str] = {}
    for fqn in wrong:
        others = [other for other in trial.plan.shapes if other != fqn]
        same_shape = [other for other in others if trial.plan.shapes[other] == trial.plan.shapes[fqn]]
        matching = [candidate for candidate in same_shape if _is_moved(trial, fqn, candidate, norms)]
        if len(matching) != 1:  # of two that fit neither is it
            return
        sources[fqn] = matching[0]
    if not sources:
        return
    fqn, other = next(iter(sources.items()))
    text = f"the optimizer moves {fqn} by the gradient of {other}"
    if len(sources) > 1:
        text += f", and {len(sources) - 1} more by others'"
    details = (("parameters", tuple(sources)), ("sources", tuple(sources.values())))
    yield OptimizerVariant(
        Cause("another tensor", text, details=details), _optimizer_by_sources(trial, sources, norms), 2
    )


def _is_moved(trial: Trial, fqn: str, source: str, norms: Norms) -> bool:
    """Return whether the check `update` agrees that a parameter is moved by the gradient of `source`."""
    return update.passes(
        _with_parameter_only(trial, fqn).with_assumption(_optimizer_by_sources(trial, {fqn: source}, norms)), {**norms}
    )


def _optimizer_by_sources(trial: Trial, sources: Mapping[str, str], norms: Norms) -> AssumedOptimizer:
    """Return the optimizer that moves parameters by the clipped gradients of others. sources: fqn -> whose gradient.

    A parameter without a source, or with one of another shape, is moved by its own.
    """
    gradients_by_step = {(rank, step.step): step.gradients for rank, step in trial.own_steps()}

    def clip_source_gradient(rank: int, step: int, fqn: str, gradient: np.ndarray) -> np.ndarray:
        """Return the clipped gradient of the parameter's source; its own if there is none of its shape."""
        source_gradient = gradients_by_step[rank, step].get(sources.get(fqn, fqn), gradient)
        source_gradient = source_gradient if source_gradient.shape == gradient.shape else gradient
        return clip_coefficient(norms[step], trial.case.training.max_norm) * source_gradient.astype(np.float64)

    return AssumedOptimizer(given=clip_source_gradient)


def _with_parameter_only(trial: Trial, fqn: str) -> Trial:
    """Return the trial in which ranks have the evidence of this parameter alone."""
    ranks = {}
    for rank, evidence in trial.ranks.items():
        resumed = evidence.resumed
        tensors = tuple(tensor for tensor in evidence.parameters if tensor.fqn == fqn)
        if resumed is not None:
            parameters = {name: value for name, value in resumed.parameters.items() if name == fqn}
            resumed = replace(resumed, parameters=parameters)
        ranks[rank] = replace(evidence, parameters=tensors, resumed=resumed)
    return replace(trial, run=replace(trial.run, ranks=ranks))
