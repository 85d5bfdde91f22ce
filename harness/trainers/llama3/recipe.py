"""The optimizer and its learning rate, as the recipe has them."""

from __future__ import annotations

import functools
import math

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from harness.case import TrainingConfig


def build_optimizer(model: nn.Module, training: TrainingConfig) -> Optimizer:
    """AdamW, or SGD without momentum; weight decay on every parameter.

    AdamW is fused: one operator a parameter group, which DTensor has to look into once instead of once per arithmetic
    operation. (torch has no sharding rule for the fused SGD.)
    """
    parameters = [{"params": family} for family in by_mesh(model)]
    if training.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=training.lr, weight_decay=training.weight_decay)
    return torch.optim.AdamW(
        parameters,
        lr=training.lr,
        betas=(training.beta1, training.beta2),
        eps=training.eps,
        weight_decay=training.weight_decay,
        fused=True,
    )


def by_mesh(model: nn.Module) -> list[list[nn.Parameter]]:
    """Trap: one fused operator takes no DTensors beside plain tensors, which norms are without sequence parallel."""
    families: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        families.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return list(families.values())


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
