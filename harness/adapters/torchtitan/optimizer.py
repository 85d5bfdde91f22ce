"""The case's optimizer in torchtitan's own container of optimizers, since 2026-02-23."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from harness.core.case.case import Case

NORMS = r"norm\.weight$"


def configured(case: Case) -> Any:
    return sgd(case) if case.training.optimizer == "sgd" else adamw(case)


def adamw(case: Case) -> Any:
    """Return it with a separate group, which matches first, for norms that are not decayed."""
    from torchtitan.components import optimizer

    config = getattr(optimizer, "default_adamw", optimizer.OptimizersContainer.Config)(lr=case.training.lr)
    if case.training.decay == "matrices":
        (whole,) = config.param_groups
        undecayed = {**whole.optimizer_kwargs, "weight_decay": 0.0}
        config.param_groups.insert(0, dataclasses.replace(whole, pattern=NORMS, optimizer_kwargs=undecayed))
    return config


def sgd(case: Case) -> Any:
    """Return a container that inherits from torchtitan's, which is how its users add an optimizer that it does not name."""
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

    class WithSGD(OptimizersContainer):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(OptimizersContainer.Config): ...

        @staticmethod
        def _resolve_optimizer_factory(name: str) -> Any:
            return getattr(torch.optim, name)

    kwargs = {"lr": case.training.lr, "weight_decay": case.training.weight_decay}
    whole = ParamGroupConfig(pattern=".*", optimizer_name="SGD", optimizer_kwargs=kwargs)
    undecayed = ParamGroupConfig(pattern=NORMS, optimizer_name="SGD", optimizer_kwargs=kwargs | {"weight_decay": 0.0})
    groups = [whole] if case.training.decay == "all" else [undecayed, whole]
    return WithSGD.Config(param_groups=groups, implementation="for-loop")
