"""The reference that literal trials are compared with: random weights and gradients, the optimizer in closed form."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from harness.core.case.case import Case
from harness.reference.config import TrainingConfig, is_trainable
from harness.reference.counterfactual import Batch
from harness.reference.record import ReferenceRun, ReferenceStep


@dataclass(frozen=True)
class LiteralReference(ReferenceRun):
    """sample_gradients: of step 1, by fqn, what each sample gives, [samples, entries]. part_gradients: what each eighth of the
    token positions gives, [8, entries]; nothing where all give the same."""

    sample_gradients: dict[str, np.ndarray] = field(default_factory=dict)
    part_gradients: dict[str, np.ndarray] = field(default_factory=dict)


def reference_of(case: Case) -> LiteralReference:
    """Random weights and gradients (none near zero), random losses of samples; everything else follows from them."""
    draw = np.random.default_rng(0)
    shapes, training = case.model.parameter_shapes(), case.training
    weights = {fqn: draw.standard_normal(shape) for fqn, shape in shapes.items()}
    if case.model_of is not None:
        weights = reference_of(case.first_launch).steps[case.model_of - 1].parameters
    trained = {fqn: shape for fqn, shape in shapes.items() if is_trainable(training, fqn)}
    gradients = [{fqn: _away_from_zero(draw, shape) for fqn, shape in trained.items()} for _ in range(training.steps)]
    batch = training.global_batch
    samples = tuple(tuple(range(step * batch, (step + 1) * batch)) for step in range(training.steps))
    ids = tuple(id_ for step in samples for id_ in step)
    tokens = np.array([[(id_ + 1) // 5**place % 5 for place in range(training.seq_len)] for id_ in ids], np.int64)
    if training.seq_len > 4:
        tokens = np.random.default_rng(3).integers(0, 7, tokens.shape)
    labels = np.where(draw.random(tokens.shape) < 0.3, -100, tokens + 1)
    steps = tuple(_reference_step(case, number, weights, gradients, labels) for number in range(1, training.steps + 1))
    counted = (labels[:batch] != -100).any(axis=1)
    parts = {fqn: _sample_gradients(draw, full, counted) for fqn, full in gradients[0].items()}
    return LiteralReference(weights, steps, samples, ids, tokens, labels, {"torch": "none"}, sample_gradients=parts)


def _sample_gradients(draw: np.random.Generator, full: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """[samples, all positions]: any numbers that sum to the whole gradient, none of samples without valid tokens."""
    parts = draw.standard_normal((len(counted), full.size)) * counted[:, None]
    parts[counted] += (full.ravel() - parts.sum(axis=0)) / counted.sum()
    return parts


def _away_from_zero(draw: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return draw.uniform(0.05, 0.15, shape) * draw.choice([-1.0, 1.0], shape)


def sample_loss(id_: int) -> float:
    """Sum of the losses of a sample's valid tokens: any number, but another one for each."""
    return 5.0 + math.sin(id_)


def _reference_step(case: Case, number: int, weights: Any, gradients: list[Any], labels: np.ndarray) -> ReferenceStep:
    batch = case.training.global_batch
    ids = range((number - 1) * batch, number * batch)
    valid = int((labels[list(ids), : case.seq_len(number)] != -100).sum())
    norms = [math.sqrt(math.fsum(x * x for g in step.values() for x in g.ravel().tolist())) for step in gradients]
    parameters, state = dict(weights), {}
    for fqn, start in ((fqn, weights[fqn]) for fqn in gradients[0]):
        seen = [clip(norm, case.training) * step[fqn] for norm, step in zip(norms, gradients, strict=True)]
        parameters[fqn], state[fqn] = optimize(start, seen[:number], recipe_of(fqn, case.training))
    loss = math.fsum(map(sample_loss, ids)) / valid
    return ReferenceStep(
        number, loss, norms[number - 1], rate(number, case.training), valid, gradients[number - 1], parameters, state
    )


def recipe_of(fqn: str, training: TrainingConfig) -> TrainingConfig:
    """decay "matrices" leaves norm weights alone."""
    spared = training.decay == "matrices" and fqn.endswith("norm.weight")
    return replace(training, weight_decay=0.0) if spared else training


def rate(step: int, training: TrainingConfig) -> float:
    return training.lr * (0.5, 1.0, 0.75)[step - 1]


def clip(norm: float, training: TrainingConfig) -> float:
    if training.max_norm is None or norm + 1e-6 <= training.max_norm:
        return 1.0
    return training.max_norm / (norm + 1e-6)


def optimize(
    start: np.ndarray, gradients: list[np.ndarray], training: TrainingConfig
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The parameter after all these clipped gradients; averages as the sums they are: (1 - b) sum b^(t-i) g_i."""
    value, state = start, {}
    for step in range(1, len(gradients) + 1):
        lr, past = rate(step, training), gradients[:step]
        if training.optimizer == "sgd":
            value = value - lr * past[-1] - lr * training.weight_decay * value
            continue
        first, second = _average(past, training.beta1), _average([g**2 for g in past], training.beta2)
        unbiased = first / (1 - training.beta1**step), second / (1 - training.beta2**step)
        decayed = value - lr * training.weight_decay * value
        value = decayed - lr * unbiased[0] / (np.sqrt(unbiased[1]) + training.eps)
        state = {"exp_avg": first, "exp_avg_sq": second}
    return value, state


def _average(values: list[np.ndarray], beta: float) -> np.ndarray:
    return (1 - beta) * sum(beta ** (len(values) - 1 - i) * value for i, value in enumerate(values))


def retrained(training: TrainingConfig, reference: ReferenceRun, **otherwise: Any) -> ReferenceRun:
    """What reference.counterfactual.retrain gives, of literal steps: their gradients do not depend on the parameters, nor on
    what is trained on, so that `weights`, `gradients`, `given`, `rate` and `left` are what can be assumed."""
    values = dict(otherwise.get("weights") or reference.weights)
    moments = {fqn: (np.zeros_like(v), np.zeros_like(v)) for fqn, v in values.items()}
    steps = []

    def recipe(step: int, fqn: str) -> TrainingConfig:
        return otherwise["recipe"](step, fqn) if otherwise.get("recipe") else recipe_of(fqn, training)

    for step in reference.steps:
        gradients = otherwise["gradients"](step.step, step.gradients) if otherwise.get("gradients") else step.gradients
        norm = math.sqrt(math.fsum(x * x for g in gradients.values() for x in g.ravel().tolist()))
        usual = {fqn: clip(norm, training) * g for fqn, g in gradients.items()}
        given = otherwise["given"](step.step, gradients, norm, values) if otherwise.get("given") else usual
        rates = {fqn: otherwise["rate"](step.step, fqn) if otherwise.get("rate") else step.lr for fqn in values}
        for fqn, gradient in given.items():
            values[fqn], moments[fqn] = _moved(
                values[fqn], moments[fqn], gradient, step.step, rates[fqn], recipe(step.step, fqn)
            )
        values = dict(otherwise["left"](step.step, values)) if otherwise.get("left") else values
        same = set(rates.values())
        state = {f: {"exp_avg": a, "exp_avg_sq": b} for f, (a, b) in moments.items()} if step.optimizer_state else {}
        lr = same.pop() if len(same) == 1 else step.lr
        steps.append(
            replace(step, grad_norm=norm, lr=lr, gradients=gradients, parameters=dict(values), optimizer_state=state)
        )
    return replace(reference, weights=dict(otherwise.get("weights") or reference.weights), steps=tuple(steps))


def retrained_apart(
    training: TrainingConfig, reference: ReferenceRun, otherwise: Any, *, owners: Any, shares: Any, reduce: Any
) -> tuple[ReferenceRun, ...]:
    """What reference.counterfactual.retrain_apart gives: gradients of step 1 are the sum of what pieces of the samples
    contribute, those of later steps are as they are."""
    first = reference.steps[0]
    batch = Batch(reference.tokens[: len(reference.samples[0])], reference.labels[: len(reference.samples[0])])
    assert {*owners} <= {*range(len(otherwise))}
    parts = [_of_tokens(reference, counts) for _, counts in zip(owners, shares(1, batch), strict=True)]
    reduced = reduce(1, parts)
    for step in reference.steps[1:]:  # as it would be called; what it gives is not needed
        reduce(step.step, [{fqn: value / len(parts) for fqn, value in step.gradients.items()} for _ in parts])
    return tuple(
        retrained(
            training,
            replace(reference, steps=(replace(first, gradients=own), *reference.steps[1:])),
            **of_copy,
        )
        for own, of_copy in zip(reduced, otherwise, strict=True)
    )


def _of_tokens(reference: LiteralReference, counts: np.ndarray) -> dict[str, np.ndarray]:
    """The gradient of these tokens' losses: of whole samples, or of eighths of the sequence, or of both."""
    return {
        fqn: (counts.mean(axis=1) @ reference.sample_gradients[fqn] + _of_eighths(reference, fqn, counts)).reshape(
            full.shape
        )
        for fqn, full in reference.steps[0].gradients.items()
    }


def _of_eighths(reference: LiteralReference, fqn: str, counts: np.ndarray) -> np.ndarray | float:
    """What is too much or too little in an eighth is divided between the samples that count."""
    known = reference.part_gradients.get(fqn)
    if known is None:
        return 0.0
    counted = reference.sample_gradients[fqn].any(axis=1)
    eighths = np.stack([part.mean(axis=1) for part in np.split(counts, 8, axis=1)], axis=1)[counted]  # [samples, 8]
    return eighths.sum(axis=0) @ (known - known.sum(axis=0) / 8) / counted.sum()


def _moved(
    value: np.ndarray,
    moments: tuple[np.ndarray, np.ndarray],
    gradient: np.ndarray,
    step: int,
    lr: float,
    training: TrainingConfig,
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """One step of the optimizer: the parameter and its averages."""
    if training.optimizer == "sgd":
        return value - lr * gradient - lr * training.weight_decay * value, moments
    first = training.beta1 * moments[0] + (1 - training.beta1) * gradient
    second = training.beta2 * moments[1] + (1 - training.beta2) * gradient**2
    decayed = value - lr * training.weight_decay * value
    unbiased = first / (1 - training.beta1**step), second / (1 - training.beta2**step)
    return decayed - lr * unbiased[0] / (np.sqrt(unbiased[1]) + training.eps), (first, second)
