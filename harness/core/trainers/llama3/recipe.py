"""The optimizer and its learning rate, as the recipe has them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from harness.core.trainers.llama3.muon import MuonWithAdamW
from harness.reference.config import TrainingConfig, rule_of
from harness.reference.train import lr_factor


def build_optimizer(model: nn.Module, training: TrainingConfig) -> Optimizer:
    """Return the recipe's optimizer for the trained parameters: AdamW, SGD without momentum, or Muon with AdamW.

    AdamW is fused: one operator a parameter group, which DTensor has to look into once instead of once per arithmetic
    operation. (torch has no sharding rule for the fused SGD.)
    """
    groups = parameter_groups(model, training)
    if training.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=training.lr)
    if training.optimizer == "muon":
        return MuonWithAdamW(groups, {"lr": training.lr})
    betas = (training.beta1, training.beta2)
    return torch.optim.AdamW(groups, lr=training.lr, betas=betas, eps=training.eps, fused=True)


def parameter_groups(model: nn.Module, training: TrainingConfig) -> list[dict[str, Any]]:
    """Return the optimizer's parameter groups: trained parameters with equal rule, weight decay and mesh share one.

    Each is a dict with "params" and "weight_decay"; with Muon also "rule" and the rule's options. Trap: one fused
    operator takes no DTensors beside plain tensors, which norms are without sequence parallel.
    """
    families: dict[tuple[str, float, DeviceMesh | None], list[nn.Parameter]] = {}
    for fqn, parameter in model.named_parameters():
        family = rule_of(training, fqn), weight_decay(fqn, training), getattr(parameter, "device_mesh", None)
        if parameter.requires_grad:
            families.setdefault(family, []).append(parameter)
    muon = {
        "rule": "muon",
        "momentum": training.momentum,
        "nesterov": training.nesterov,
        "adjust_lr": training.adjust_lr,
    }
    adamw = {"rule": "adamw", "betas": (training.beta1, training.beta2), "eps": training.eps}
    options = {"muon": muon, "adamw": adamw} if training.optimizer == "muon" else {}
    return [
        {"params": members, "weight_decay": decay, **options.get(rule, {})}
        for (rule, decay, _), members in families.items()
    ]


def weight_decay(fqn: str, training: TrainingConfig) -> float:
    """Return the weight decay of a parameter: 0 for norm weights if only matrices decay.

    Names decide: a wrapper may flatten what has two dims.
    """
    return 0.0 if training.decay == "matrices" and fqn.endswith("norm.weight") else training.weight_decay


def build_scheduler(optimizer: Optimizer, training: TrainingConfig) -> LambdaLR:
    return LambdaLR(optimizer, functools.partial(_factor, training=training))


def _factor(finished: int, *, training: TrainingConfig) -> float:
    """Return the learning rate's factor for the next step, after `finished` steps."""
    return lr_factor(finished + 1, training)
