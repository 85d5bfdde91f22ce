"""Frozen parameters that are trained, and adapters that count more or less than they should."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from harness.diagnosis.assume import another_recipe, another_reference
from harness.diagnosis.differences import expected_gradient
from harness.diagnosis.hypothesis import Broken, Hypothesis
from harness.diagnosis.words import in_order, some
from harness.evidence.text import number_text
from harness.judge.result import Cause
from harness.judge.trial import Trial
from harness.reference.config import trains
from harness.reference.distance import best_fit


def not_frozen(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Frozen parameters with a gradient: they are trained as all others are."""
    training, seen = trial.case.training, {fqn for _, step in trial.own_steps() for fqn in step.gradients}
    names = tuple(in_order(trial, {fqn for fqn in seen & set(trial.plan.shapes) if not trains(training, fqn)}))
    if "completed" in broken and names:
        text = f"{some(names)} {'has a gradient' if len(names) == 1 else 'have gradients'}, though frozen"
        other = replace(training, trainable=(*training.trainable, *names))
        cause = Cause("not frozen", text, details=(("parameters", names),))
        yield Hypothesis(cause, partial(another_recipe, training=other))


def adapters_scaled(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """While B is zero, its gradient is proportional to what the adapter is multiplied by, and nothing else depends on that."""
    lora, step = trial.case.model.lora, trial.first_step
    if lora is None or step > 1 or "gradients" not in broken:
        return
    factors = []
    for rank, record in trial.own_steps():
        for fqn, gradient in record.gradients.items() if record.step == step else ():
            expected = expected_gradient(trial, rank, fqn, step) if ".lora_b." in fqn else None
            if expected is not None and expected.shape == gradient.shape and expected.any():
                factors.append(best_fit(gradient, expected))
    factor = float(np.median(factors)) if factors else 1.0
    if factors and abs(factor - 1) > 1e-6 and np.allclose(factors, factor, rtol=1e-6):
        text = f"adapters are added {number_text(factor * lora.scale)} times"
        cause = Cause(
            "adapters scaled",
            text,
            "",
            f"alpha / rank = {number_text(lora.scale)} times",
            details=(("factor", factor),),
        )
        yield Hypothesis(cause, partial(another_reference, altered=partial(_scaled, factor * lora.scale)))


def _scaled(scale: float, model: Any, step: int) -> None:
    for module in model.modules():
        if hasattr(module, "lora_b"):
            module.scale = scale
