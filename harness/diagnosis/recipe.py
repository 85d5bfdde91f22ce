"""Another recipe than the requested one leads from these gradients to these weights: which?

The space is spanned by the fields of TrainingConfig: each has its default, common values, twice and half, the value of another
field, or another choice; one field, then two. Beside it stand what the optimizer shows, numbers that the first step is fitted
by, a table of algorithms, and a table of ways to clip. Each is replayed on a few parameters; the checks judge the whole.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from harness.checks import update
from harness.diagnosis import assume
from harness.diagnosis.differences import OF_GRADIENTS, loss_off, replicas_agree, wrong_pairs
from harness.diagnosis.hypothesis import Broken, Fact, Hypothesis
from harness.diagnosis.replicas import replicas_differ, train_apart
from harness.diagnosis.reported import (
    READ,
    Number,
    Source,
    groupings,
    norm_of,
    norms,
    of_other_steps,
    on_record,
    phrase,
)
from harness.diagnosis.words import Arrays, Pair, in_parameters, on_ranks, where_text
from harness.evidence.records import RankEvidence
from harness.evidence.text import number_text
from harness.judge.assumed import AssumedOptimizer
from harness.judge.contents import take
from harness.judge.result import Cause
from harness.judge.tolerance import clip_coefficient
from harness.judge.trial import Trial
from harness.plan.grid import coordinate
from harness.reference.config import CHOICES, TrainingConfig
from harness.reference.distance import best_fit

LARGEST_DECAY = 0.2  # of a weight in a step; what takes more of it is no weight decay
HALF = 2  # so many choices more is what explains the first step alone
FEWER = 5  # values of a field that are tried together with those of another
NOT_OF_THE_OPTIMIZER = {"seed", "dtype", "global_batch", "seq_len", "data", "compute_dtype", "quantize", "tf32"} | {
    *("variable_length", "document_mask", "masked_samples", "all_valid")
}
COMMON: dict[str, tuple[float, ...]] = {
    "beta1": (0.9, 0.95, 0.8, 0.0, 0.5, 0.85, 0.98, 0.99),
    "beta2": (0.999, 0.99, 0.95, 0.98, 0.9, 0.995, 0.9999),
    "eps": (1e-8, 1e-6, 1e-5, 1e-3, 1e-4, 1e-7, 1e-10, 1e-12, 1e-15, 1e-16),
    "weight_decay": (0.01, 0.0),
    "warmup_steps": (0,),
    "final_lr_fraction": (1.0, 0.0, 0.01, 0.5),
    "max_norm": (0.1, 0.5, 2.0, 5.0, 10.0),
}
SCHEDULE = ("lr", "warmup_steps", "final_lr_fraction", "steps", "rates")
KINDS = dict.fromkeys(SCHEDULE, "learning rate") | dict.fromkeys(("weight_decay", "decay"), "weight decay")
"""Of fields that are no kind of their own."""
By = Callable[[int, int, str], Any]
"""By rank, step and parameter: a coefficient or a rate."""


@dataclass(frozen=True)
class Way:
    """What optimizers may have done. fitted: of how many numbers or choices. by: what may differ between ranks of it."""

    cause: Cause
    assumed: AssumedOptimizer
    fitted: int = 1
    by: By | None = None
    reports: tuple[tuple[str, Number], ...] = ()
    """What ranks may then report; the first is assumed that they all do."""
    optimizer: str = ""
    """Where it is another one than requested."""

    def requested_of(self, trial: Trial) -> Trial:
        other = replace(trial.case.training, optimizer=self.optimizer or trial.case.training.optimizer)
        return assume.another_case(trial, replace(trial.case, training=other)) if self.optimizer else trial


def wrong_recipe(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Two fields are tried where nothing simpler explains all."""
    if "update" not in broken:
        return
    replayed, explained = Replayed(trial), False
    for way in (*_shown_rates(trial), *_not_stepped(trial), *_amsgrad(trial)):
        yield Hypothesis(way.cause, partial(_assuming, way), way.fitted)
    tables = _fields(trial, replayed.wrong, 1), _first_step(trial), _algorithms(trial), _clippings(trial)
    for way in itertools.chain(*tables):
        if (more := replayed.agrees(way)) is not None:
            yield Hypothesis(way.cause, partial(_assuming, way), way.fitted + more)
            explained |= not more
    for way in () if explained else _fields(trial, replayed.wrong, 2):
        if replayed.agrees(way) == 0:
            yield Hypothesis(way.cause, partial(_assuming, way), way.fitted)


def not_finite(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """What the optimizer made NaN of numbers. All numbers after that follow."""
    first = [(rank, step) for rank, step, _ in trial.steps() if step.step == trial.first_step]
    bad = [(rank, fqn) for rank, step in first for fqn, v in step.parameters.items() if not np.isfinite(v).all()]
    finite = all(np.isfinite(gradient).all() for _, step in first for gradient in step.gradients.values())
    if bad and finite and "update" in broken:
        text = f"parameters are NaN or infinite after step {trial.first_step}, gradients were finite"
        before = loss_off(trial, trial.first_step) or wrong_pairs(trial, trial.first_step)  # what the optimizer leaves
        follows = {"update", "finite"} | (set() if before else OF_GRADIENTS)
        yield Fact(Cause("not finite", text, where_text(trial, bad)), tuple(one for one in broken if one in follows))


def _assuming(way: Way, trial: Trial) -> Trial:
    """As if the optimizer had done so. Whether it did is judged by the check of updates, from weights seen to weights seen; the
    reference is trained with these, and what it has then is what they lead to."""
    trial, dims = way.requested_of(trial), trial.case.dims
    replicas = {rank: coordinate(dims, rank)["dp_replicate"] for rank in sorted(trial.ranks)}
    ranks = [[rank for rank in replicas if replicas[rank] == one] for one in range(dims.dp_replicate)]
    if way.by and replicas_differ(trial, partial(_of_all_steps, trial, way.by)):
        left = [{"left": partial(_as_left, trial, own)} for own in ranks]
        other = train_apart(trial, "dp_replicate", otherwise=left).assuming(way.assumed)
    else:
        other = assume.another_optimizer(trial, way.assumed, left=partial(_as_left, trial, [*replicas]))
    for check, number in way.reports:
        shown = [(READ[check](step), number(rank, step.step)) for rank, step, _ in trial.steps()]
        if all(seen is None or math.isclose(seen, of or 0.0, rel_tol=1e-6) for seen, of in shown):
            return other.assuming(reports={check: number})
    return other


def _of_all_steps(trial: Trial, by: By, rank: int, fqn: str) -> list[bytes]:
    return [np.asarray(by(rank, step, fqn)).tobytes() for step in trial.case.steps]


def _as_left(trial: Trial, ranks: Sequence[int], step: int, parameters: Arrays) -> Arrays:
    """The weights that these ranks' optimizers left, whole."""
    whole = {fqn: value.copy() for fqn, value in parameters.items()}
    for rank in ranks:
        for fqn, held in (
            (f, v) for one in trial.ranks[rank].steps if one.step == step for f, v in one.parameters.items()
        ):
            if fqn in whole and (part := trial.slice_of(rank, fqn)):
                target = take(whole[fqn].reshape(trial.plan.shapes[fqn]), part)
                if target.size == held.size:
                    target[...] = held.reshape(target.shape)
    return whole


@dataclass(frozen=True)
class Replayed:
    """The optimizer's steps of a few parameters, of each kind a wrong and a right one, which each way is tried on."""

    trial: Trial

    def agrees(self, way: Way) -> int | None:
        """Of how many choices more a hypothesis is then: none where `update` holds of these parameters under the assumption,
        HALF where it so holds in the first step alone, and else does not: one of two mistakes. None where it is refuted."""
        part = way.requested_of(self._few).assuming(way.assumed)
        if update.holds(part, self._norms):
            return 0
        return HALF if self._wrong_at_first and not self._mistakes_at_first(part) else None

    @cached_property
    def wrong(self) -> set[str]:
        return {str(one.name) for one in update.mistakes(self.trial, self._norms) if one.kind == "parameter"}

    @cached_property
    def _norms(self) -> dict[int, float]:
        return update.clipped_norms(self.trial)

    @cached_property
    def _few(self) -> Trial:
        few = {rank: self._with_few(evidence) for rank, evidence in self.trial.ranks.items()}
        return replace(self.trial, run=replace(self.trial.run, ranks=few))

    def _with_few(self, evidence: RankEvidence) -> RankEvidence:
        kinds: dict[object, str] = {}
        for tensor in sorted(evidence.parameters, key=lambda one: (one.fqn not in self.wrong, one.value.size)):
            kinds.setdefault((tensor.fqn in self.wrong, *tensor.fqn.split(".")[-2:]), tensor.fqn)
        held = {tensor.fqn: tensor for tensor in evidence.parameters}
        chosen, resumed = [*kinds.values()], evidence.resumed
        if resumed is not None:
            known = {fqn: resumed.parameters[fqn] for fqn in chosen if fqn in resumed.parameters}
            resumed = replace(resumed, parameters=known)
        return replace(evidence, parameters=tuple(held[fqn] for fqn in chosen), resumed=resumed)

    @cached_property
    def _wrong_at_first(self) -> bool:
        return self._mistakes_at_first(self._few)

    def _mistakes_at_first(self, part: Trial) -> bool:
        return any(one.step == part.first_step for one in update.mistakes(part, self._norms))


# ---- fields of the recipe


def _fields(trial: Trial, wrong: Collection[str], count: int) -> Iterator[Way]:
    """Of all parameters, and of those that are wrong."""
    requested = trial.case.training
    for fqns in ({*trial.plan.shapes}, {*wrong}) if {*wrong} < {*trial.plan.shapes} else ({*trial.plan.shapes},):
        part = len(fqns) < len(trial.plan.shapes)
        for changes, other in _changes(requested, count):
            names = " and ".join(f"{name} is {_text(value)}" for name, value in changes.items())
            wanted = " and ".join(_text(getattr(requested, name)) for name in changes)
            where, kind = in_parameters(trial, fqns) * part, next(KINDS.get(name, name) for name in changes)
            swapped = [*changes.values()] == [getattr(requested, name) for name in [*changes][::-1]]
            hint = "the two are swapped" * (swapped and count > 1)
            cause = Cause(kind, f"{names} in the optimizer", where, wanted, hint, details=tuple(changes.items()))
            yield _by_recipe(trial, cause, other, fqns, 1 + count + part)


def _text(value: object) -> str:
    return number_text(value) if isinstance(value, float) else str(value)


def _changes(requested: TrainingConfig, count: int) -> Iterator[tuple[dict[str, Any], TrainingConfig]]:
    """What such a recipe itself refuses is left out."""
    values = _values(requested)
    for names in itertools.combinations(values, count):
        several = itertools.product(*(values[name][: FEWER if count > 1 else None] for name in names))
        exchanged = tuple(getattr(requested, name) for name in names[::-1])
        for chosen in dict.fromkeys((*several, exchanged) if count > 1 else several):
            with suppress(ValueError, TypeError):
                changes = dict(zip(names, chosen, strict=True))
                yield changes, replace(requested, **changes)


def _values(requested: TrainingConfig) -> dict[str, list[Any]]:
    """By field, those that it may have by mistake."""
    fields = [field for field in dataclasses.fields(requested) if field.name not in NOT_OF_THE_OPTIMIZER]
    now = {field.name: getattr(requested, field.name) for field in fields}
    found: dict[str, list[Any]] = {}
    for field in fields:
        name, value = field.name, now[field.name]
        values = [field.default, *CHOICES.get(name, ()), *COMMON.get(name, ())]
        if isinstance(value, bool):
            values = [not value]
        elif isinstance(value, int):
            values += [value - 1, value + 1, 2 * value, value // 2]
        elif isinstance(value, float):
            values += [2 * value, value / 2, 10 * value, value / 10, *(v for v in now.values() if isinstance(v, float))]
        found[name] = [one for one in dict.fromkeys(values) if one != value]
    return found


def _by_recipe(trial: Trial, cause: Cause, other: TrainingConfig, fqns: Collection[str], fitted: int) -> Way:
    """These parameters are trained by another one."""
    requested, norms = trial.case.training, update.clipped_norms(trial)
    undecayed, shapes = replace(other, weight_decay=0.0), trial.case.model.parameter_shapes()
    usual = {fqn: update.recipe_of(trial, fqn) for fqn in trial.plan.shapes}
    own = {f: undecayed if other.decay == "matrices" and len(shapes.get(f, ())) == 1 else other for f in fqns}
    planned = {step.step: step.lr for step in trial.reference.steps}
    rates = {step: _rate_at(step, other) for step in planned}
    slower = any(rates[step] != _rate_at(step, requested) for step in planned)

    def given(rank: int, step: int, fqn: str, gradient: np.ndarray) -> np.ndarray:
        limit = (other if fqn in fqns else requested).max_norm
        return clip_coefficient(norms[step], limit) * gradient

    assumed = AssumedOptimizer(
        recipe=lambda step, fqn: own.get(fqn, usual[fqn]),
        rate=(lambda rank, step, fqn: (rates if fqn in fqns else planned)[step]) if slower else None,
        given=given if other.max_norm != requested.max_norm else None,
    )
    return Way(cause, assumed, fitted, optimizer=other.optimizer if other.optimizer != requested.optimizer else "")


# ---- rates that the optimizer shows


def _shown_rates(trial: Trial) -> Iterator[Way]:
    """Of all parameters; or of those alone that were stepped by them."""
    usual = {step.step: step.lr for step in trial.reference.steps}
    shown = {(rank, step.step): step.lr for rank, step, _ in trial.steps() if step.lr is not None}
    wrong = {at: lr for at, lr in shown.items() if not math.isclose(lr, usual[at[1]], rel_tol=1e-12)}
    if not wrong:
        return
    first = min(step for _, step in wrong)
    ranks, rate = (
        [rank for rank, step in wrong if step == first],
        next(lr for at, lr in wrong.items() if at[1] == first),
    )
    rule = _rule(trial, wrong, {at: lr for at, lr in shown.items() if at[0] in {rank for rank, _ in wrong}})
    text = f"learning rate of step {first}{on_ranks(trial, ranks)} is {number_text(rate)}"
    details = (("step", first), ("rate", rate), ("ranks", tuple(ranks)), ("rule", rule))
    others: set[str] = set()
    for _ in range(2):
        by = partial(_rate_of, shown, usual, frozenset(others))
        where = in_parameters(trial, {*trial.plan.shapes} - others) if others else ""
        cause = Cause("learning rate", text, where, number_text(usual[first]), rule, details=details)
        taken, planned = lambda rank, step: shown.get((rank, step), usual[step]), lambda rank, step: usual[step]
        reports = ("reported_rate", planned), ("reported_rate", taken)
        yield Way(cause, AssumedOptimizer(rate=by), 1 + bool(others), by, reports)
        others = Replayed(trial.assuming(AssumedOptimizer(rate=by))).wrong
        if not others or others >= {*trial.plan.shapes}:
            return


def _rate_of(
    shown: Mapping[tuple[int, int], float], usual: Mapping[int, float], others: Collection[str], *at: Any
) -> float:
    rank, step, fqn = at
    return usual[step] if fqn in others else shown.get((rank, step), usual[step])


def _rule(trial: Trial, wrong: Mapping[Any, float], shown: Mapping[tuple[int, int], float]) -> str:
    """In words, the schedules that give all rates of these ranks; empty where there is none. Of one wrong rate none is said,
    unless there are right ones before and behind it."""
    steps, taken = {step for _, step in wrong}, {step for _, step in shown}
    if len(steps) == 1 and not min(taken) < min(steps) < max(taken):
        return ""
    known = {(step, lr) for (_, step), lr in shown.items()}
    tables = _shifted(trial.case.training), _schedules(trial.case.training, 1), _schedules(trial.case.training, 2)
    for table in tables:
        if found := [text for text, rate in table if all(math.isclose(rate(step), lr) for step, lr in known)]:
            return " or ".join(found[:2])
    return ""


def _shifted(training: TrainingConfig) -> Iterator[tuple[str, Callable[[int], float]]]:
    """Each step has the rate of another."""
    table: dict[str, Callable[[int], int]] = {
        "every step takes the rate of the step before": lambda step: step - 1,
        "every step takes the rate of the next step": lambda step: step + 1,
    }
    for by in range(2, 9):
        table[f"each step advances the schedule by {by}"] = lambda step, by=by: 1 + by * (step - 1)  # type: ignore[misc]
    for late in range(2, training.steps):
        text = f"each step from step {late} on takes the rate of the step before"
        table[text] = lambda step, late=late: step - (step >= late)  # type: ignore[misc]
    for text, at in table.items():
        yield text, lambda step, at=at: _rate_at(at(step), training)  # type: ignore[misc]


def _schedules(training: TrainingConfig, count: int) -> Iterator[tuple[str, Callable[[int], float]]]:
    for changes, other in _changes(training, count):
        if {*changes} <= {*SCHEDULE}:
            text = " and ".join(f"{name} {_text(value)}" for name, value in changes.items())
            yield f"as with {text}", partial(_rate_at, training=other)


def _rate_at(step: int, training: TrainingConfig) -> float:
    """Imports torch, which judging does not need."""
    from harness.reference.train import learning_rate

    return learning_rate(step, training)


# ---- what is seen of moves


def _not_stepped(trial: Trial) -> Iterator[Way]:
    """What has a gradient or decays, and does not move: from a step on, or in one step alone."""
    before, norms, limit = _before(trial), update.clipped_norms(trial), trial.case.training.max_norm
    still = {
        (rank, step.step, fqn): np.array_equal(after, before[rank, step.step][fqn])
        for rank, step, wanted in trial.steps()
        for fqn, after in step.parameters.items()
        if wanted.lr and after.size and fqn in before[rank, step.step]
    }
    if not any(still.values()):
        return
    first = min(step for (_, step, _), stays in still.items() if stays)
    pairs = sorted((rank, fqn) for (rank, step, fqn), stays in still.items() if step == first and stays)

    def given(rank: int, step: int, fqn: str, gradient: np.ndarray) -> np.ndarray | None:
        return None if still.get((rank, step, fqn)) else clip_coefficient(norms[step], limit) * gradient

    cause = Cause("not stepped", f"the optimizer does not move parameters in step {first}", where_text(trial, pairs))
    cause = replace(cause, details=(("step", first), ("pairs", tuple(pairs))))
    yield Way(cause, AssumedOptimizer(given), by=lambda *at: still.get(at, False))


def _first_step(trial: Trial) -> Iterator[Way]:
    """Which parameters move otherwise, and by what multiple of the rate or by what decay that is so, in every step."""
    requested, usual = trial.case.training, {step.step: step.lr for step in trial.reference.steps}
    clip = clip_coefficient(update.clipped_norms(trial)[trial.first_step], requested.max_norm)
    if not (wrong := _first_moves(trial, clip, explained=False)):
        return
    fqns, where = {fqn for _, fqn in wrong}, where_text(trial, wrong)
    where = where if len(fqns) < len(trial.plan.shapes) else where.removeprefix("in every parameter").strip()
    moves = [_move(trial, trial, clip, *pair) for pair in wrong]
    if (factor := _multiple([(seen - before, wanted - before) for wanted, seen, before in moves])) is not None:
        text, details = f"learning rate is {number_text(factor * requested.lr)}", (("factor", factor),)
        cause = Cause("learning rate", text, where, number_text(requested.lr), details=details)
        rates = {step: factor * lr for step, lr in usual.items()}
        yield Way(cause, AssumedOptimizer(rate=lambda rank, step, fqn: (rates if fqn in fqns else usual)[step]), 3)
    recipes = {fqn: update.recipe_of(trial, fqn) for fqn in trial.plan.shapes}
    plain = trial.assuming(AssumedOptimizer(recipe=lambda step, fqn: replace(recipes[fqn], weight_decay=0.0)))
    moves = [_move(plain, trial, clip, *pair) for pair in wrong]
    taken = _multiple([(wanted - seen, before) for wanted, seen, before in moves])  # rate x decay
    if taken is None or not -1e-12 < taken < LARGEST_DECAY or not usual[trial.first_step]:
        return
    decay = max(0.0, taken / usual[trial.first_step])
    decay = next((one for one in (0.0, float(f"{decay:.6g}")) if math.isclose(one, decay, abs_tol=1e-9)), decay)
    decays = {f"weight decay is {number_text(decay)}": dict.fromkeys(usual, decay)}
    if math.isclose(taken, requested.weight_decay):
        decays["weight decay is not multiplied by the learning rate"] = {n: taken / lr for n, lr in usual.items() if lr}
    for text, by_step in decays.items():
        details = (("weight_decay", by_step[trial.first_step]),)
        cause = Cause("weight decay", text, where, number_text(requested.weight_decay), details=details)
        yield Way(cause, AssumedOptimizer(recipe=partial(_decaying, recipes, fqns, by_step)), 3)


def _decaying(
    recipes: Mapping[str, TrainingConfig], fqns: Collection[str], decays: Mapping[int, float], step: int, fqn: str
) -> TrainingConfig:
    return replace(recipes[fqn], weight_decay=decays.get(step, 0.0)) if fqn in fqns else recipes[fqn]


def _first_moves(trial: Trial, clip: float, *, explained: bool) -> list[Pair]:
    """The parameters whose first step is, or is not, what the optimizer makes of gradients times that."""
    return [
        (rank, tensor.fqn)
        for rank, evidence in sorted(trial.ranks.items())
        for tensor in evidence.parameters
        if (left := evidence.steps[0].parameters.get(tensor.fqn)) is not None
        if left.shape == tensor.value.shape and trial.stepped_part(rank, tensor.fqn, left).size
        if update.explained_by_clip(trial, evidence, tensor, clip=clip) is explained
    ]


def _move(assumed: Trial, trial: Trial, clip: float, rank: int, fqn: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of the first step: what there should be under the assumption, what was seen, and what was there before."""
    evidence = trial.ranks[rank]
    tensor = next(tensor for tensor in evidence.parameters if tensor.fqn == fqn)
    wanted, _ = update.expected_after_first_step(assumed, evidence, tensor, clip=clip)
    before = trial.stepped_part(rank, fqn, trial.start_of(rank)[fqn])
    return wanted, trial.stepped_part(rank, fqn, evidence.steps[0].parameters[fqn]), before


def _multiple(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> float | None:
    """The number by which the first of each two is the second; None if there is no one number."""
    factors = [best_fit(seen, of) for seen, of in pairs]
    fits = (
        np.any(of) and np.allclose(seen, by * of, rtol=0, atol=1e-12)
        for by, (seen, of) in zip(factors, pairs, strict=True)
    )
    return float(np.median(factors)) if all(fits) and np.allclose(factors, factors[0]) else None


def _before(trial: Trial) -> dict[tuple[int, int], Arrays]:
    found: dict[tuple[int, int], Arrays] = {}
    for rank, evidence in trial.ranks.items():
        held = trial.start_of(rank)
        for step in evidence.steps:
            found[rank, step.step], held = held, step.parameters
    return found


# ---- algorithms


def _amsgrad(trial: Trial) -> Iterator[Way]:
    states = (state for e in trial.ranks.values() for state in e.steps[-1].optimizer_state.values())
    if any("max_exp_avg_sq" in state for state in states):
        cause = Cause("amsgrad", "the optimizer divides by max_exp_avg_sq, as AMSGrad does", "", "AdamW without it")
        yield Way(cause, AssumedOptimizer(amsgrad=True, copies=1))


def _algorithms(trial: Trial) -> Iterator[Way]:
    """What the optimizer is given may be a sum of clipped gradients, by how many steps ago each was."""
    adamw, begins = trial.case.training.optimizer == "adamw", not trial.case.resume
    if adamw and trial.case.training.weight_decay:
        cause = Cause(
            "weight decay in the gradients", "weight decay is added to the gradients", "", "decoupled, as AdamW does"
        )
        yield _of_history(trial, cause, lambda ago: float(ago == 0), decayed=True)
    if begins:
        text = "each optimizer step uses the gradients of the step before, the first uses none"
        yield _of_history(trial, Cause("one step late", text), lambda ago: float(ago == 1), decayed=False)
    if adamw and begins:
        late = AssumedOptimizer(counter=lambda step, fqn: 10**9 + step)  # when nothing is left to correct
        yield Way(Cause("bias correction", "bias correction of the averages is missing", "", "Adam's"), late)
    for by, nesterov in itertools.product((0.9, 0.95, 0.99, 0.8, 0.5), (0, 1)) if begins and not adamw else ():
        details = (("momentum", by), ("nesterov", bool(nesterov)))
        cause = Cause("momentum", f"SGD has {'Nesterov ' * nesterov}momentum {by}", "", "none", details=details)
        share = lambda ago, by=by, nesterov=nesterov: by ** (ago + nesterov) + nesterov * (ago == 0)  # type: ignore[misc]  # noqa: E731
        yield _of_history(trial, cause, share, decayed=True, copies=1)


def _of_history(trial: Trial, cause: Cause, share: Callable[[int], float], *, decayed: bool, copies: int = 0) -> Way:
    """decayed: weights times weight decay are added to the gradients, and to nothing else. copies: of it that are kept."""
    limit, norms, before = trial.case.training.max_norm, update.clipped_norms(trial), _before(trial)
    seen = {(rank, step.step): step.gradients for rank, step, _ in trial.steps()}
    recipes = {fqn: update.recipe_of(trial, fqn) for fqn in trial.plan.shapes}
    undecayed = {fqn: replace(recipe, weight_decay=0.0) for fqn, recipe in recipes.items()}

    def given(rank: int, step: int, fqn: str, gradient: np.ndarray) -> np.ndarray | None:
        total = np.zeros_like(gradient)
        for now in range(trial.first_step, step + 1):
            held = before[rank, now].get(fqn)
            if fqn not in seen[rank, now] or held is None:
                return None
            own = clip_coefficient(norms[now], limit) * seen[rank, now][fqn].astype(np.float64)
            own += decayed * recipes[fqn].weight_decay * trial.stepped_part(rank, fqn, held)
            total += share(step - now) * own
        return total

    recipe = (lambda step, fqn: undecayed[fqn]) if decayed else None
    return Way(cause, AssumedOptimizer(given, recipe=recipe, copies=copies))


# ---- clipping


def _clippings(trial: Trial) -> Iterator[Way]:
    limit, norms = trial.case.training.max_norm, update.clipped_norms(trial)
    if limit is None or not replicas_agree(trial, trial.first_step):
        return
    yield from _by_norms(trial, limit)
    for name, parts in groupings(trial).items():
        whose = {fqn: parts_of for parts_of in map(frozenset, parts) for fqn in parts_of}
        table = {
            (fqns, step): norm_of(trial, 0, step, fqns=fqns) for fqns in {*whose.values()} for step in trial.case.steps
        }
        cause = Cause(
            "clipped by another norm", f"each of the {name} is clipped by its own norm", details=(("each", name),)
        )
        yield _clipped(cause, lambda r, s, f, of=whose, table=table: clip_coefficient(table[of[f], s], limit))  # type: ignore[misc]
    low = next((step for step in trial.case.steps if norms[step] < limit), None)
    if low is not None:
        by = limit / (norms[low] + 1e-6)
        text = f"clipping enlarges gradients: it multiplies by {number_text(by, 4)} in step {low}"
        cause = Cause("clipping enlarges gradients", text, details=(("step", low), ("factor", by)))
        yield _clipped(cause, lambda rank, step, fqn: limit / (norms[step] + 1e-6))
    cause = Cause("clipped without 1e-6", "clipping multiplies by max_norm / norm", "", "max_norm / (norm + 1e-6)")
    yield _clipped(cause, lambda rank, step, fqn: limit / max(norms[step], limit))
    seen = {(rank, step.step): step.gradients for rank, step in trial.own_steps()}
    for most in dict.fromkeys((limit, 1.0)):
        cause = Cause(
            "clipped by value", f"gradients are clipped entry by entry, to {most:g}", details=(("value", most),)
        )
        yield _clipped(cause, lambda r, s, f, most=most: most / np.maximum(np.abs(seen[r, s][f]), np.float64(most)))  # type: ignore[misc]
    yield from _left_out(trial, limit, norms)


def _clipped(cause: Cause, by: By, fitted: int = 1, norm: Number | None = None) -> Way:
    """By: what gradients are multiplied by, in place of clipping."""
    reports = (("grad_norm", norm),) if norm else ()
    return Way(cause, AssumedOptimizer(lambda *at: by(*at[:3]) * at[3]), fitted, by, reports)


def _by_norms(trial: Trial, limit: float) -> Iterator[Way]:
    """Each norm on record that differs from what the rank's gradients have; the one that ranks report is a choice more."""
    right, places = partial(on_record, trial, "grad_norm"), [*itertools.product(trial.case.steps, sorted(trial.ranks))]
    shown = {(rank, step.step): step.grad_norm for rank, step in trial.own_steps()}
    of_others = ((details, number) for details, number in of_other_steps(trial, right))
    late: Source = (("before", 1), ("first", "that of itself")), lambda r, s: right(r, s - 1) or right(r, s)
    reported: Source = ((("reported", True),), lambda rank, step: shown.get((rank, step)) or 0.0)
    told: set[tuple[float, ...]] = set()
    for details, number in (*norms(trial), *of_others, late, reported):
        norm = functools.cache(number)
        values = tuple(round(norm(rank, step) or 0.0, 12) for step, rank in places)
        odd = [(s, r) for s, r in places if not math.isclose(norm(r, s) or 0.0, right(r, s) or 0.0)]
        if not odd or values in told:
            continue
        told.add(values)
        step, rank = odd[0]
        seen = f"{norm(rank, step) or 0.0:.6g} on rank {rank} in step {step}"
        text = f"gradients are clipped by {phrase('gradient norm', details)}: {seen}"
        cause = Cause("clipped by another norm", text, "", f"the global norm, {right(rank, step):.6g}", details=details)
        yield _clipped(
            cause,
            lambda r, s, f, norm=norm: clip_coefficient(norm(r, s) or 0.0, limit),
            1 + (details[0][0] == "reported"),
            norm,
        )  # type: ignore[misc]


def _left_out(trial: Trial, limit: float, norms: Mapping[int, float]) -> Iterator[Way]:
    """Of all, or of those for which the first step is what the optimizer makes of the whole gradient."""
    clip = clip_coefficient(norms[trial.first_step], limit)
    pairs = {*_first_moves(trial, 1.0, explained=True)} - {*_first_moves(trial, clip, explained=True)}
    if not pairs:
        return
    where = where_text(trial, pairs)
    text, details = f"gradients are not clipped (coefficient {clip:.4g})", (("coefficient", clip),)
    if where == "in every parameter":
        yield _clipped(Cause("clipping left out", text, details=details), lambda rank, step, fqn: 1.0, 0)
        return
    others = {*trial.plan.shapes} - {fqn for _, fqn in pairs}
    own = {step: norm_of(trial, 0, step, fqns=others) for step in trial.case.steps}
    for used, hint in ((norms, ""), (own, "the others are clipped by their own norm")):
        by = lambda r, s, f, used=used: 1.0 if (r, f) in pairs else clip_coefficient(used[s], limit)  # type: ignore[misc]  # noqa: E731
        cause = Cause("clipping left out", text, where, hint=hint, details=details)
        yield _clipped(cause, by, norm=lambda rank, step, used=used: used[step])  # type: ignore[misc]
