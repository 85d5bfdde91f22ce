"""Literal noise: what repeats of a reference would have left, the same in every step and for every parameter."""

from __future__ import annotations

from dataclasses import replace

from harness.core.case.case import Case
from harness.core.judge.trial import Trial
from harness.reference.record import Noise


def noise_of(
    case: Case,
    *,
    loss: float = 1e-9,
    grad_norm: float = 1e-9,
    gradient: float = 1e-9,
    distance: float = 1e-9,
    fit: float = 1e-9,
) -> Noise:
    def spread(value: float) -> tuple[float, ...]:
        return (value,) * case.training.steps

    def of_parameters(value: float) -> dict[str, tuple[float, ...]]:
        return dict.fromkeys(case.model.parameter_shapes(), spread(value))

    return Noise(16, spread(loss), spread(grad_norm), spread(gradient), of_parameters(distance), of_parameters(fit))


def with_noise(trial: Trial, **sizes: float) -> Trial:
    """The same evidence in a recipe with noise: gradients are reduced in bfloat16."""
    case = replace(trial.case, features=replace(trial.case.features, reduce_dtype="bfloat16"))
    assert trial.golden is not None
    golden = replace(trial.golden, noise={case.noise_key: noise_of(case, **sizes)})
    return replace(trial, case=case, golden=golden)
