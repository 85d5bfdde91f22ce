"""What optimizers may do in place of what is requested: a table of algorithms, and a table of ways to clip."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from harness.core.causes.reported import Number, Source, groupings, norm_of, norms, of_other_steps, on_record, phrase
from harness.core.causes.words import Arrays, in_parameters, on_ranks, where_text
from harness.core.checks import update
from harness.core.evidence.text import number_text
from harness.core.judge.assumed import AssumedOptimizer
from harness.core.judge.held_values import stepped_part
from harness.core.judge.result import Cause
from harness.core.judge.tolerance import clip_coefficient
from harness.core.judge.trial import Trial
from harness.core.plan.frozen import has_frozen
from harness.reference.config import TrainingConfig

Norms = Mapping[int, float]
"""Step -> norm."""
By = Callable[[int, int, str], Any]
"""(rank, step, parameter) -> what gradients are multiplied by in place of clipping, or a rate."""


MOST_RATES = 4
"""Steps of which the rate is fitted."""


@dataclass(frozen=True)
class Way:
    """What optimizers may have done. fitted: of how many numbers or choices. by: what of it may differ between replicas.
    reports: what ranks may then report; the first one that they all do is assumed."""

    cause: Cause
    assumed: AssumedOptimizer
    fitted: int = 1
    by: By | None = None
    reports: tuple[tuple[str, Number], ...] = ()


def before_each(trial: Trial) -> dict[tuple[int, int], Arrays]:
    found: dict[tuple[int, int], Arrays] = {}
    for rank, evidence in trial.ranks.items():
        held = trial.start_of(rank)
        for step in evidence.steps:
            found[rank, step.step], held = held, step.parameters
    return found


# ---- algorithms


def algorithms(trial: Trial, norms: Norms, wrong: Collection[str]) -> Iterator[Way]:
    """What the optimizer is given may be a sum of clipped gradients, by how many steps ago each was."""
    adamw, sgd = (trial.case.training.optimizer == kind for kind in ("adamw", "sgd"))
    begins, decay = not trial.case.resume, trial.case.training.weight_decay
    history = partial(_of_history, trial, norms)
    if decay:
        yield from _decays(trial, wrong)
    if decay and has_frozen(trial.case):
        cause = Cause("weight decay", "frozen parameters are decayed", details=(("frozen", True),))
        yield Way(cause, AssumedOptimizer(decays_frozen=True))
    if adamw and decay:
        text = "weight decay is added to the gradients"
        cause = Cause("weight decay in the gradients", text, "", "decoupled (AdamW)")
        yield history(cause, lambda ago: float(ago == 0), decayed=True)
    if begins:
        text = "each optimizer step uses the gradients of the step before, the first uses none"
        yield history(Cause("one step late", text), lambda ago: float(ago == 1))
    if adamw and begins:
        late = AssumedOptimizer(counter=lambda step, fqn: 10**9 + step)  # when nothing is left to correct
        yield Way(Cause("bias correction", "bias correction of the averages is missing", "", "Adam's"), late)
        yield from _other_counters(trial)
    for by, nesterov in itertools.product((0.9, 0.95, 0.99, 0.8, 0.5), (0, 1)) if begins and sgd else ():
        details = (("momentum", by), ("nesterov", bool(nesterov)))
        text = f"SGD has {'Nesterov ' * nesterov}momentum {by}"
        share = lambda ago, by=by, more=nesterov: by ** (ago + more) + more * (ago == 0)  # noqa: E731
        yield history(Cause("momentum", text, "", "none", details=details), share, decayed=True, copies=1)


def amsgrad(trial: Trial) -> Iterator[Way]:
    states = (state for e in trial.ranks.values() for state in e.steps[-1].optimizer_state.values())
    if any("max_exp_avg_sq" in state for state in states):
        cause = Cause("amsgrad", "the optimizer divides by max_exp_avg_sq, as AMSGrad does", "", "AdamW without it")
        yield Way(cause, AssumedOptimizer(amsgrad=True, copies=1))


def _decays(trial: Trial, wrong: Collection[str]) -> Iterator[Way]:
    """All parameters decay by another multiple of the recipe's decay, or those that are wrong."""
    training, every = trial.case.training, frozenset(trial.plan.shapes)
    rates = {step.step: step.lr for step in trial.reference.steps}
    laws = {
        "weight decay is not multiplied by the learning rate": {step: 1 / (lr or 1.0) for step, lr in rates.items()},
        "weight decay is multiplied by the peak rate, not by the step's": {
            step: training.lr / (lr or 1.0) for step, lr in rates.items()
        },
        "weights are decayed twice in each step": {step: 2 - lr * training.weight_decay for step, lr in rates.items()},
    }
    for fqns, (text, times) in itertools.product(dict.fromkeys((every, every & {*wrong})), laws.items()):
        recipes = {fqn: update.recipe_of(trial, fqn) for fqn in trial.plan.shapes}
        where = in_parameters(trial, fqns) * (fqns != every)
        over = partial(_decayed_by, recipes, times, fqns)
        yield Way(Cause("weight decay", text, where), AssumedOptimizer(recipe=over), 1 + (fqns != every))


def other_rates(trial: Trial, norms: Norms, wrong: Collection[str]) -> Iterator[Way]:
    yield from _schedule_anew(trial, wrong)
    yield from _rates_by_step(trial, norms, wrong)


def _schedule_anew(trial: Trial, wrong: Collection[str]) -> Iterator[Way]:
    """After resuming, some parameters have the rates of as many steps after the beginning."""
    if not trial.saved or trial.case.model_of is not None or not wrong:
        return
    usual, saved = {step.step: step.lr for step in trial.reference.steps}, trial.case.steps.start - 1
    step, where = saved + 1, in_parameters(trial, wrong)
    text = f"the schedule restarts after resuming {where}: the learning rate of step {step} is that of step 1"
    cause = Cause("schedule starts anew", text, "", f"{usual[step]:g}", details=(("step", step), ("of_step", 1)))
    rate = lambda rank, at, fqn: usual[at - saved if fqn in wrong else at]  # noqa: E731
    yield Way(cause, AssumedOptimizer(rate=rate), 2)


def _rates_by_step(trial: Trial, norms: Norms, wrong: Collection[str]) -> Iterator[Way]:
    """Those that are wrong are stepped by other rates: each one that a step shows of one entry is tested on all."""
    usual, factors = {step.step: step.lr for step in trial.reference.steps}, dict[int, float]()
    rate = lambda rank, step, fqn: usual[step] * (factors.get(step, 1.0) if fqn in wrong else 1.0)  # noqa: E731
    while len(factors) < MOST_RATES:
        found = update.mistakes(trial.assuming(AssumedOptimizer(rate=rate)), dict(norms))
        moves = [one for one in found if one.quantity == update.MOVE and isinstance(one.observed, float)]
        first = min(moves, key=lambda one: (one.step or 0, -abs(float(one.expected or 0))), default=None)  # type: ignore[arg-type]
        if first is None or not first.expected or first.step in factors:
            break
        ratio = first.observed / first.expected  # type: ignore[operator]
        factors[first.step or 0] = plainest(ratio, 1e-6)
    if factors:
        times = " and ".join(f"{number_text(by)} times the rate in step {step}" for step, by in factors.items())
        where = in_parameters(trial, wrong) * (len(wrong) < len(trial.plan.shapes))
        cause = Cause(
            "learning rate", f"updates are as with {times}", where, details=(("factors", tuple(factors.items())),)
        )
        yield Way(cause, AssumedOptimizer(rate=rate), 2 + len(factors))


def plainest(number: float, close: float = 1e-9) -> float:
    """Return the plainest number that a fit cannot distinguish from it. close: relative."""
    plain = 0.0 if abs(number) < 1e-12 else float(f"{number:.6g}")
    return plain if math.isclose(plain, number, rel_tol=close, abs_tol=1e-12) else number


def _other_counters(trial: Trial) -> Iterator[Way]:
    """AdamW may count steps that it did not make, or the passes of an accumulation."""
    numbers: dict[str, tuple[int, int]] = {f"begins {by} too high": (1, by) for by in (1, 2)}
    numbers |= {"counts microbatches": (trial.case.passes, 0)} if trial.case.passes > 1 else {}
    for how, (times, more) in numbers.items():
        text = f"AdamW's step counter, by which it corrects its averages, {how}"
        cause = Cause("bias correction", text, "", "1 in the first step", details=(("counter", how),))
        yield Way(cause, AssumedOptimizer(counter=lambda step, fqn, times=times, more=more: times * step + more))  # type: ignore[misc]


def _decayed_by(
    recipes: Mapping[str, TrainingConfig], times: Mapping[int, float], fqns: Collection[str], step: int, fqn: str
) -> TrainingConfig:
    by = times[step] if fqn in fqns else 1
    return replace(recipes[fqn], weight_decay=recipes[fqn].weight_decay * by)


def slices_apart(trial: Trial) -> Iterator[Way]:
    """What Muon does to a whole matrix may be done to a rank's slice of it, and the rate be scaled by the slice's shape."""
    dims = trial.case.dims
    cuts: dict[str, tuple[str, ...]] = {"tp": ("tp",)} if dims.tp > 1 else {}
    cuts |= {trial.plan.shard_axis: ("dp_shard", "cp", "dp_shard_cp")} if trial.plan.shards > 1 else {}
    if trial.case.training.optimizer != "muon" or not cuts:
        return
    cause = Cause("scaled by slices", "Muon's rate is scaled by the shape of a rank's slice", "", "of the whole matrix")
    yield Way(cause, AssumedOptimizer(scales_slices=True))
    for count in range(1, len(cuts) + 1):
        for axes in itertools.combinations(cuts, count):
            over, alone = " and ".join(axes), tuple(itertools.chain(*(cuts[axis] for axis in axes)))
            text = f"Muon orthogonalises the slice of each rank along {over} by itself"
            cause = Cause("orthogonalised in parts", text, "", "the whole matrix", details=(("axes", axes),))
            yield Way(cause, AssumedOptimizer(alone=alone), count)
            scaled = replace(cause, observed=f"{text}, and scales the rate by its shape")
            yield Way(scaled, AssumedOptimizer(alone=alone, scales_slices=True), count + 1)


def _of_history(
    trial: Trial, norms: Norms, cause: Cause, share: Callable[[int], float], decayed: bool = False, copies: int = 0
) -> Way:
    """decayed: weights times weight decay are added to the gradients, and to nothing else. copies: of it that are kept."""
    limit, before = trial.case.training.max_norm, before_each(trial)
    seen = {(rank, step.step): step.gradients for rank, step, _ in trial.steps()}
    recipes = {fqn: update.recipe_of(trial, fqn) for fqn in trial.plan.shapes}
    undecayed = {fqn: replace(recipe, weight_decay=0.0) for fqn, recipe in recipes.items()}

    def given(rank: int, step: int, fqn: str, gradient: np.ndarray) -> np.ndarray | None:
        total = np.zeros_like(gradient)
        for now in range(trial.first_step, step + 1):
            if fqn not in seen[rank, now] or fqn not in before[rank, now]:
                return None
            own = clip_coefficient(norms[now], limit) * seen[rank, now][fqn].astype(np.float64)
            own += decayed * recipes[fqn].weight_decay * stepped_part(trial, rank, fqn, before[rank, now][fqn])
            total += share(step - now) * own
        return total

    recipe = (lambda step, fqn: undecayed[fqn]) if decayed else None
    return Way(cause, AssumedOptimizer(given, recipe=recipe, copies=copies))


# ---- clipping


def clippings(trial: Trial, norms: Norms) -> Iterator[Way]:
    limit = trial.case.training.max_norm
    if limit is None:
        return
    yield from _by_norms(trial, limit)
    for name, parts in groupings(trial).items():
        own = {(f, s): norm_of(trial, 0, s, fqns=fqns) for fqns in parts for s in trial.case.steps for f in fqns}
        text, details = f"gradients are clipped by a norm of each of the {name}", (("norms of", name),)
        cause = Cause("clipped by another norm", text, "", "one norm of all", details=details)
        yield _clipped(cause, lambda rank, step, fqn, own=own: clip_coefficient(own[fqn, step], limit))  # type: ignore[misc]
    yield from _left_out(trial, limit, norms)
    if low := next((step for step in trial.case.steps if norms[step] < limit), None):
        by = limit / (norms[low] + 1e-6)
        text = f"clipping multiplies by {by:.4g} in step {low}"
        less = f"1, of a norm of {norms[low]:.4g}"
        cause = Cause("clipping enlarges gradients", text, "", less, details=(("step", low), ("factor", by)))
        yield _clipped(cause, lambda rank, step, fqn: limit / (norms[step] + 1e-6))
    cause = Cause("clipped without 1e-6", "clipping multiplies by max_norm / norm", "", "max_norm / (norm + 1e-6)")
    yield _clipped(cause, lambda rank, step, fqn: limit / max(norms[step], limit))
    seen = {(rank, step.step): step.gradients for rank, step in trial.own_steps()}
    for most in dict.fromkeys((limit, 1.0)):
        text = f"gradients are clipped entry by entry, to {most:g}"
        cause = Cause("clipped by value", text, details=(("value", most),))
        yield _clipped(cause, lambda r, s, f, most=most: most / np.maximum(np.abs(seen[r, s][f]), np.float64(most)))  # type: ignore[misc]


def _clipped(cause: Cause, by: By, fitted: int = 1, norm: Number | None = None) -> Way:
    """Multiplied in place of clipping. norm: what ranks may report."""
    assumed = AssumedOptimizer(lambda *at: by(*at[:3]) * at[3])
    return Way(cause, assumed, fitted, by, (("grad_norm", norm),) if norm else ())


def _by_norms(trial: Trial, limit: float) -> Iterator[Way]:
    """Each norm on record that differs from what the rank's gradients have; the one that ranks report is a choice more."""
    right = functools.cache(partial(on_record, trial, "grad_norm"))
    places = [*itertools.product(trial.case.steps, sorted(trial.ranks))]
    shown, told = {(rank, step.step): step.grad_norm for rank, step in trial.own_steps()}, set()
    late = (("as that of 1 step", "before"), ("in the first step", "its own"))
    before: Source = late, lambda rank, step: right(rank, step - 1) or right(rank, step)
    reported: Source = (("as", "reported"),), lambda rank, step: shown.get((rank, step))
    for details, number in (*norms(trial), *of_other_steps(trial, right), before, reported):
        norm = functools.cache(lambda rank, step, number=number: number(rank, step) or 0.0)
        odd = [(s, r) for s, r in places if not math.isclose(norm(r, s), right(r, s) or 0.0)]
        values = tuple(round(norm(rank, step), 12) for step, rank in places)
        if not odd or values in told:
            continue
        told.add(values)
        step, rank = odd[0]
        alike = [r for s, r in places if s == step and math.isclose(norm(r, s), norm(rank, step))]
        seen = f"{norm(rank, step):.6g}{on_ranks(trial, alike)} in step {step}"
        text = f"gradients are clipped by a norm {phrase(details)}: {seen}"
        wanted = f"the global norm, {right(rank, step):.6g}"
        cause = Cause("clipped by another norm", text, "", wanted, details=details)
        by = lambda r, s, f, norm=norm: clip_coefficient(norm(r, s), limit)  # noqa: E731
        yield _clipped(cause, by, 1 + (number is reported[1]), norm)


def _left_out(trial: Trial, limit: float, norms: Norms) -> Iterator[Way]:
    """Clipping is left out for all, or for those whose first step is what the optimizer makes of the whole gradient."""
    clip = clip_coefficient(norms[trial.first_step], limit)
    pairs = [
        (rank, tensor.fqn)
        for rank, evidence in trial.ranks.items()
        for tensor in evidence.parameters
        if tensor.value.size and update.explained_by_clip(trial, evidence, tensor, clip=1.0)
        if not update.explained_by_clip(trial, evidence, tensor, clip=clip)
    ]
    where, others = where_text(trial, pairs), {*trial.plan.shapes} - {fqn for _, fqn in pairs}
    cause = Cause(
        "clipping left out", f"gradients are not clipped (coefficient {clip:.4g} in step {trial.first_step})", where
    )
    cause = replace(cause, details=(("coefficient", clip),))
    if where == "in every parameter":
        yield _clipped(replace(cause, where=""), lambda rank, step, fqn: 1.0, 0)
        return
    own = {step: norm_of(trial, 0, step, fqns=others) for step in trial.case.steps}
    for used, hint in ((norms, ""), (own, "the others are clipped by their own norm")) if pairs else ():
        by = lambda r, s, f, used=used: 1.0 if (r, f) in pairs else clip_coefficient(used[s], limit)  # noqa: E731
        yield _clipped(replace(cause, hint=hint), by, norm=lambda rank, step, used=used: used[step])  # type: ignore[misc]


# ---- whose gradient an update is of


def by_other_gradients(trial: Trial, norms: Norms, wrong: Collection[str]) -> Iterator[Way]:
    """Each wrong parameter is moved by the gradient of one other parameter of its shape."""
    found: dict[str, str] = {}
    for fqn in wrong:
        others = [other for other in trial.plan.shapes if other != fqn]
        alike = [other for other in others if trial.plan.shapes[other] == trial.plan.shapes[fqn]]
        fits = [one for one in alike if _is_moved(trial, fqn, one, norms)]
        if len(fits) != 1:  # of two that fit neither is it
            return
        found[fqn] = fits[0]
    for fqn, other in itertools.islice(found.items(), 1):
        more = f", and {len(found) - 1} more by others'" * (len(found) > 1)
        text = f"the optimizer moves {fqn} by the gradient of {other}{more}"
        details = (("parameters", tuple(found)), ("sources", tuple(found.values())))
        yield Way(Cause("another tensor", text, details=details), _moved(trial, found, norms), 2)


def _is_moved(trial: Trial, fqn: str, by: str, norms: Norms) -> bool:
    return update.holds(_only(trial, fqn).assuming(_moved(trial, {fqn: by}, norms)), {**norms})


def _moved(trial: Trial, by: Mapping[str, str], norms: Norms) -> AssumedOptimizer:
    seen = {(rank, step.step): step.gradients for rank, step in trial.own_steps()}

    def given(rank: int, step: int, fqn: str, gradient: np.ndarray) -> np.ndarray:
        own = seen[rank, step].get(by.get(fqn, fqn), gradient)
        own = own if own.shape == gradient.shape else gradient
        return clip_coefficient(norms[step], trial.case.training.max_norm) * own.astype(np.float64)

    return AssumedOptimizer(given=given)


def _only(trial: Trial, fqn: str) -> Trial:
    """The evidence of this parameter alone."""
    ranks = {}
    for rank, evidence in trial.ranks.items():
        resumed, held = evidence.resumed, tuple(one for one in evidence.parameters if one.fqn == fqn)
        if resumed is not None:
            resumed = replace(resumed, parameters={f: v for f, v in resumed.parameters.items() if f == fqn})
        ranks[rank] = replace(evidence, parameters=held, resumed=resumed)
    return replace(trial, run=replace(trial.run, ranks=ranks))
