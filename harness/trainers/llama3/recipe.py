"""The optimizer and its learning rate, as the recipe has them."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from harness.spec.loading import TrainingConfig


def build_optimizer(model: nn.Module, training: TrainingConfig) -> Optimizer:
    """AdamW, or SGD without momentum.

    AdamW is fused: one operator a parameter group, which DTensor has to look into once instead of once per arithmetic
    operation. (torch has no sharding rule for the fused SGD.)
    """
    groups = parameter_groups(model, training)
    if training.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=training.lr)
    betas = (training.beta1, training.beta2)
    return torch.optim.AdamW(groups, lr=training.lr, betas=betas, eps=training.eps, fused=True)


def parameter_groups(model: nn.Module, training: TrainingConfig) -> list[dict[str, Any]]:
    """A group for each weight decay and each mesh.

    Trap: one fused operator takes no DTensors beside plain tensors, which norms are without sequence parallel.
    """
    families: dict[tuple[float, DeviceMesh | None], list[nn.Parameter]] = {}
    for fqn, parameter in model.named_parameters():
        family = weight_decay(fqn, training), getattr(parameter, "device_mesh", None)
        families.setdefault(family, []).append(parameter)
    return [{"params": members, "weight_decay": decay} for (decay, _), members in families.items()]


def weight_decay(fqn: str, training: TrainingConfig) -> float:
    """Norm weights are left alone if only matrices are to decay. By name: a wrapper may flatten what has two dims."""
    return 0.0 if training.decay == "matrices" and fqn.endswith("norm.weight") else training.weight_decay


def build_scheduler(optimizer: Optimizer, training: TrainingConfig) -> LambdaLR:
    return LambdaLR(optimizer, functools.partial(lr_factor, training=training))


def lr_factor(finished: int, training: TrainingConfig) -> float:
    """What the learning rate is multiplied by after this many finished steps.

    Linear up to 1 in step `warmup_steps`, then a cosine down to final_lr_fraction in step `steps`, then constant.
    """
    step = finished + 1
    if step <= training.warmup_steps:
        return step / training.warmup_steps
    decay_steps = max(1, training.steps - training.warmup_steps)
    progress = min(1.0, (step - training.warmup_steps) / decay_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return training.final_lr_fraction + (1 - training.final_lr_fraction) * cosine
