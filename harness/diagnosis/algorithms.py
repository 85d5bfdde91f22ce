"""The optimizer computes by other numbers, of all parameters or of a kind of them, or is another algorithm."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from harness.checks import update
from harness.diagnosis import assume
from harness.diagnosis.hypothesis import Hypothesis
from harness.diagnosis.words import Arrays, Pair
from harness.evidence.records import RankEvidence
from harness.evidence.text import number_text
from harness.judge.assumed import AssumedOptimizer
from harness.judge.result import Cause
from harness.judge.tolerance import clip_coefficient
from harness.judge.trial import Trial
from harness.reference.config import TrainingConfig

FEW = ("norm.weight", "attention.wq.weight", "output.weight", "tok_embeddings.weight")  # of each kind one
BETAS = (0.0, 0.5, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 0.9999)
EPSILONS = (1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-10, 1e-12, 1e-15, 1e-16)
HALF = 2  # so many choices more is what explains the first step alone
WORDS = {"max_norm": "the gradient norm's limit"}


@dataclass(frozen=True)
class Replayed:
    """The optimizer's steps of a few parameters, which many hypotheses are tried on."""

    trial: Trial

    def agrees(self, assumed: AssumedOptimizer, training: TrainingConfig | None = None) -> int | None:
        """Of how many choices more a hypothesis is then: none where `update` holds of these parameters under the assumption,
        HALF where it so holds in the first step alone, and else does not: one of two mistakes. None where it is refuted."""
        case = replace(self.trial.case, training=training) if training else self.trial.case
        part = replace(self._few, case=case, assumption=self.trial.assumption.and_besides(assumed))
        if update.holds(part, self._norms):
            return 0
        return HALF if not self._wrong_at_first(part) and self._wrong_as_requested else None

    @cached_property
    def _norms(self) -> dict[int, float]:
        return update.clipped_norms(self.trial)

    @cached_property
    def _few(self) -> Trial:
        few = {rank: _with_few_parameters(evidence) for rank, evidence in self.trial.ranks.items()}
        return replace(self.trial, run=replace(self.trial.run, ranks=few))

    @cached_property
    def _wrong_as_requested(self) -> bool:
        return self._wrong_at_first(self._few)

    def _wrong_at_first(self, part: Trial) -> bool:
        return any(one.step == part.first_step for one in update.mistakes(part, self._norms))


def _with_few_parameters(evidence: RankEvidence) -> RankEvidence:
    def chosen(fqn: str) -> bool:
        return fqn.endswith(FEW) and not fqn.startswith(tuple(f"layers.{n}" for n in range(1, 10)))

    held = tuple(tensor for tensor in evidence.parameters if chosen(tensor.fqn))
    resumed = evidence.resumed
    if resumed is not None:
        resumed = replace(resumed, parameters={fqn: value for fqn, value in resumed.parameters.items() if chosen(fqn)})
    return replace(evidence, parameters=held, resumed=resumed)


# ---- the recipe's numbers


def other_numbers(trial: Trial) -> Iterator[Hypothesis]:
    """As they are by mistake: a default, another common value, two exchanged."""
    requested, replayed = trial.case.training, Replayed(trial)
    for changes in _changes(requested):
        training = replace(requested, **changes)
        more = replayed.agrees(AssumedOptimizer(), training)
        if more is not None:
            assumed = partial(assume.another_recipe, training=training)
            yield Hypothesis(_changed(requested, changes), assumed, 1 + len(changes) + more)


def _changes(requested: TrainingConfig) -> Iterator[dict[str, Any]]:
    """One number, then two."""
    values: dict[str, tuple[float, ...]] = {}
    if requested.optimizer == "adamw":
        values |= {"beta1": BETAS, "beta2": BETAS, "eps": EPSILONS}
    if requested.max_norm is not None:
        values |= {"max_norm": (1.0, 0.1, 0.5, 2.0, 5.0, 10.0, 2 * requested.max_norm, requested.max_norm / 2)}
    others = {name: [v for v in dict.fromkeys(own) if v != getattr(requested, name)] for name, own in values.items()}
    yield from ({name: value} for name, own in others.items() for value in own)
    if requested.optimizer == "adamw":
        pairs = [(requested.beta2, requested.beta1), *itertools.product((0.9, 0.95), (0.95, 0.99, 0.999))]
        for beta1, beta2 in dict.fromkeys(pairs):
            if beta1 != requested.beta1 and beta2 != requested.beta2:
                yield {"beta1": beta1, "beta2": beta2}


def _changed(requested: TrainingConfig, changes: Mapping[str, float]) -> Cause:
    """Of one number it is the kind."""
    seen = " and ".join(f"{WORDS.get(name, name)} is {number_text(value)}" for name, value in changes.items())
    wanted = " and ".join(number_text(getattr(requested, name)) for name in changes)
    exchanged = [*changes.values()] == [getattr(requested, name) for name in [*changes][::-1]]
    hint = "the two are swapped" * exchanged
    return Cause(next(iter(changes)), f"{seen} in the optimizer", "", wanted, hint)


def kinds_of_parameters(trial: Trial) -> dict[str, set[str]]:
    """Parameters that one group of an optimizer may hold."""
    shapes = trial.case.model.parameter_shapes()
    ends = {fqn for fqn in shapes if not fqn.startswith("layers.") and len(shapes[fqn]) > 1}
    vectors = {fqn for fqn, shape in shapes.items() if len(shape) == 1}
    return {"norm weights": vectors, "matrices": set(shapes) - vectors, "embedding and output": ends}


def by_recipes(recipe: Callable[[int, str], TrainingConfig], trial: Trial) -> Trial:
    """From this launch on."""
    return assume.another_optimizer(trial, AssumedOptimizer(recipe=recipe), recipe=recipe, since=trial.first_step)


# ---- algorithms


@dataclass(frozen=True)
class Algorithm:
    """assumed: of ranks; trained: of the reference, in the words of reference.counterfactual.Otherwise."""

    cause: Cause
    assumed: AssumedOptimizer
    trained: dict[str, Any] = field(default_factory=dict)


def other_algorithms(trial: Trial) -> Iterator[Hypothesis]:
    known = _of_adamw(trial) if trial.case.training.optimizer == "adamw" else _of_sgd(trial)
    replayed = Replayed(trial)
    for one in (*known, *([] if trial.case.resume else [_one_step_late(trial)])):
        more = 0 if one.assumed.amsgrad else replayed.agrees(one.assumed)
        if more is not None:
            yield Hypothesis(one.cause, partial(assume.another_optimizer, assumed=one.assumed, **one.trained), 1 + more)


def _of_adamw(trial: Trial) -> Iterator[Algorithm]:
    states = [state for e in trial.ranks.values() for state in e.steps[-1].optimizer_state.values()]
    if any("max_exp_avg_sq" in state for state in states):
        text = "the optimizer is AMSGrad (it keeps max_exp_avg_sq and divides by it)"
        cause = Cause("amsgrad", text, "", "AdamW without it")
        yield Algorithm(cause, AssumedOptimizer(amsgrad=True, copies=1), {"amsgrad": True})
    if trial.case.training.weight_decay:
        text = "weight decay is added to the gradients (L2, as Adam does)"
        yield _given(trial, Cause("weight decay in the gradients", text, "", "decoupled (AdamW)"), 0.0)
    if not trial.case.resume:
        late = 10**9  # a step so late that nothing is left to correct
        begun = {
            fqn: {"step": np.array(float(late)), "exp_avg": np.zeros(shape), "exp_avg_sq": np.zeros(shape)}
            for fqn, shape in trial.plan.shapes.items()
        }
        assumed = AssumedOptimizer(counter=lambda step, fqn: late + step)
        text = "bias correction of the averages is missing"
        cause = Cause("bias correction", text, "", "Adam's")
        yield Algorithm(cause, assumed, {"state": lambda step: begun if step == 1 else None})


def _of_sgd(trial: Trial) -> Iterator[Algorithm]:
    for momentum, nesterov in itertools.product((0.9, 0.95, 0.99, 0.8, 0.5), (False, True)):
        text = f"SGD has {'Nesterov ' * nesterov}momentum {number_text(momentum)}"
        yield _given(trial, Cause("momentum", text, "", "none"), momentum, nesterov=nesterov, copies=1)


def _given(trial: Trial, cause: Cause, momentum: float, *, nesterov: bool = False, copies: int = 0) -> Algorithm:
    """What the optimizer is given is a sum over the steps so far of clipped gradients, decay added to each; of a rank's slice,
    and of the whole."""
    clip, limit, held = _clips(trial), trial.case.training.max_norm, Arrays()
    seen = {(rank, step.step): step.gradients for rank, step, _ in trial.steps()}
    decay = {fqn: update.recipe_of(trial, fqn).weight_decay for fqn in trial.plan.shapes}
    before, undecayed = parameters_before(trial), replace(trial.case.training, weight_decay=0.0)

    def by_rank(rank: int, step: int, fqn: str, gradient: np.ndarray) -> np.ndarray:
        total = decayed = np.zeros_like(gradient)
        for now in range(trial.first_step, step + 1):
            decayed = clip[now] * seen[rank, now][fqn].astype(np.float64) + decay[fqn] * before[rank, now][fqn]
            total = momentum * total + decayed
        return decayed + momentum * total if nesterov else total

    def whole(step: int, gradients: Arrays, norm: float, parameters: Arrays) -> Arrays:
        by = clip_coefficient(norm, limit)
        decayed = {fqn: by * g + decay[fqn] * parameters[fqn] for fqn, g in gradients.items()}
        held.update({fqn: (momentum * held[fqn] if step > 1 else 0.0) + g for fqn, g in decayed.items()})
        return {fqn: g + momentum * held[fqn] if nesterov else held[fqn] for fqn, g in decayed.items()}

    assumed = AssumedOptimizer(given=by_rank, recipe=lambda step, fqn: undecayed, copies=copies)
    return Algorithm(cause, assumed, {"given": whole, "recipe": lambda step, fqn: undecayed})


def _one_step_late(trial: Trial) -> Algorithm:
    clip, limit, held = _clips(trial), trial.case.training.max_norm, Arrays()
    seen = {(rank, step.step): step.gradients for rank, step, _ in trial.steps()}

    def by_rank(rank: int, step: int, fqn: str, gradient: np.ndarray) -> np.ndarray:
        before = seen.get((rank, step - 1))
        return np.zeros_like(gradient) if before is None else clip[step - 1] * before[fqn].astype(np.float64)

    def whole(step: int, gradients: Arrays, norm: float, parameters: Arrays) -> Arrays:
        given = {fqn: held[fqn] if step > 1 else np.zeros_like(g) for fqn, g in gradients.items()}
        held.update({fqn: clip_coefficient(norm, limit) * g for fqn, g in gradients.items()})
        return given

    text = "each optimizer step uses the gradients of the step before, the first uses none"
    return Algorithm(Cause("one step late", text), AssumedOptimizer(given=by_rank), {"given": whole})


def parameters_before(trial: Trial) -> dict[tuple[int, int], Arrays]:
    found: dict[tuple[int, int], Arrays] = {}
    for rank, evidence in trial.ranks.items():
        held = trial.start_of(rank)
        for step in evidence.steps:
            found[rank, step.step], held = held, step.parameters
    return found


def _clips(trial: Trial) -> dict[int, float]:
    limit = trial.case.training.max_norm
    return {step: clip_coefficient(update.observed_norm(trial, step), limit) for step in trial.case.steps}


# ---- the first step


def first_clip(trial: Trial) -> float:
    return clip_coefficient(update.observed_norm(trial, trial.first_step), trial.case.training.max_norm)


def first_moves(trial: Trial, clip: float, *, explained: bool) -> list[Pair]:
    """The parameters whose first step is, or is not, what the optimizer makes of gradients times that."""
    return [
        (rank, tensor.fqn)
        for rank, evidence in sorted(trial.ranks.items())
        for tensor in evidence.parameters
        if (left := evidence.steps[0].parameters.get(tensor.fqn)) is not None
        if left.shape == tensor.value.shape and trial.stepped_part(rank, tensor.fqn, left).size
        if update.explained_by_clip(trial, evidence, tensor, clip=clip) is explained
    ]
