"""Variations of the model or the loss by one number that is not known beforehand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .altered import Alteration, Variation, angles, given, setting
from .config import ModelConfig
from .data import IGNORED
from .variations import capped, scaled, with_eps


@dataclass(frozen=True)
class Family:
    """Variations by one number, between two ends. of(number) -> the variation."""

    low: float
    high: float
    of: Callable[[float], Variation]


def _family(
    low: float, high: float, name: str, text: str, expected: str, part: str, alter: Callable[[float], Alteration]
) -> Family:
    return Family(low, high, lambda x: Variation(name, text.format(x), expected, part, alter(x)))


def families(model: ModelConfig) -> list[Family]:
    theta, eps = f"{model.rope_theta:g}", f"{model.norm_eps:g}"
    rows: list[tuple[float, float, str, str, str, str, Callable[[float], Alteration]]] = [
        (1e2, 1e8, "rotary base", "the rotary base is {:.6g}", theta, "attention", lambda x: setting(rope_theta=x)),
        (
            1e-2,
            1e2,
            "rotary positions",
            "positions are {:.6g} times",
            "1",
            "attention",
            lambda x: angles(lambda a: x * a),
        ),
        (1e-9, 1e-1, "norm eps", "the norm's eps is {:.6g}", eps, "norm", with_eps),
        (0.1, 10, "attention scale", "attention scores are {:.6g} times", "1", "inner", scaled),
        (0.05, 20, "logit scale", "logits are {:.6g} times", "1", "model", lambda x: given(lambda y: x * y)),
        (1, 1e3, "logit cap", "logits are capped at {:.6g}", "none", "model", lambda x: given(capped(x))),
        (
            0.05,
            20,
            "embedding scale",
            "embeddings are {:.6g} times",
            "1",
            "embedding",
            lambda x: given(lambda y: x * y),
        ),
    ]
    found = [_family(*row) for row in rows]
    z = "the loss has {:.6g} times the square of its normaliser's logarithm"
    return [
        *found,
        Family(
            1e-4,
            0.9,
            lambda x: Variation("label smoothing", f"labels are smoothed by {x:.6g}", "0", "model", loss=_smoothed(x)),
        ),
        Family(1e-6, 1, lambda x: Variation("z-loss", z.format(x), "none", "model", loss=_with_z(x))),
    ]


def _smoothed(by: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda logits, labels: F.cross_entropy(
        logits, labels, ignore_index=IGNORED, reduction="none", label_smoothing=by
    )


def _with_z(weight: float) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        own = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
        return own + weight * torch.where(labels == IGNORED, 0.0, logits.logsumexp(-1) ** 2)

    return loss
