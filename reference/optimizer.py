"""Functional optimizers: torch's AdamW and SGD, and Muon, each parameter with its own options.

They are the functional forms of torch.optim. Building one of its classes would import torch's compiler (3.5 s), which
takes longer than all that is trained again to prove a cause.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from . import muon
from .config import RULES, TrainingConfig, rule_of

Moments = dict[str, Tensor]
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""Names of what the state may hold of a parameter's size, as torch.optim's classes have them."""


def options_of(training: TrainingConfig, fqn: str, *, lr: float, decays: bool = True) -> dict[str, Any]:
    """Return a parameter's options in a step: "rule", "lr", "weight_decay" and the recipe's values of the rule's own fields.

    decays: False sets the weight decay to 0.
    """
    rule = rule_of(training, fqn)
    own = {name: getattr(training, name) for name in RULES[rule]}
    return {"rule": rule, "lr": lr, "weight_decay": training.weight_decay if decays else 0.0, **own}


class Optimizer:
    """The optimizer of a model's parameters. amsgrad: torch.optim.AdamW's option of that name.

    state: by fqn, {name: tensor}, under the names that torch.optim's classes give them; empty before the first step.
    """

    def __init__(self, model: nn.Module, *, amsgrad: bool = False) -> None:
        self.parameters = dict(model.named_parameters())
        self.amsgrad = amsgrad
        self.state: dict[str, Moments] = {}

    @torch.no_grad()
    def step(self, options: Mapping[str, Mapping[str, Any]]) -> None:
        """Update all parameters that have a gradient. options: by fqn, those of `options_of`."""
        rules = {"sgd": self._sgd, "adamw": self._adamw, "muon": self._muon}
        for fqn, p in self.parameters.items():
            if p.grad is not None:
                own = dict(options[fqn])
                rules[own.pop("rule")](fqn, p, p.grad, own)

    def _state_of(self, fqn: str, *names: str) -> Moments:
        """Return a parameter's state, which is changed in place: names that it lacks are added, as zeros."""
        state = self.state.setdefault(fqn, {})
        p = self.parameters[fqn]
        for name in names:
            state.setdefault(name, torch.tensor(0.0) if name == "step" else torch.zeros_like(p))
        return state

    def _sgd(self, fqn: str, p: Tensor, gradient: Tensor, options: dict[str, Any]) -> None:
        plain = {"momentum": 0.0, "dampening": 0.0, "nesterov": False}
        sgd([p], [gradient], [None], foreach=False, maximize=False, **plain, **options)

    def _adamw(self, fqn: str, p: Tensor, gradient: Tensor, options: dict[str, Any]) -> None:
        """Update one parameter in place by torch's AdamW."""
        largest = ["max_exp_avg_sq"] * self.amsgrad
        state = self._state_of(fqn, "step", "exp_avg", "exp_avg_sq", *largest)
        moments = [state["exp_avg"]], [state["exp_avg_sq"]], [state[name] for name in largest], [state["step"]]
        adamw([p], [gradient], *moments, foreach=False, amsgrad=self.amsgrad, maximize=False, **options)

    def _muon(self, fqn: str, p: Tensor, gradient: Tensor, options: dict[str, Any]) -> None:
        """Update one parameter in place by Muon: its average of gradients, its weight decay, its orthogonalised update."""
        momentum = options["momentum"]
        average = self._state_of(fqn, "momentum_buffer")["momentum_buffer"]
        average.lerp_(gradient, 1 - momentum)
        turned = muon.newton_schulz(
            muon.matrix_to_orthogonalise(average, gradient, momentum=momentum, nesterov=options["nesterov"])
        )
        p.mul_(1 - options["lr"] * options["weight_decay"])
        p.add_(turned, alpha=-options["lr"] * muon.learning_rate_factor(p.shape, options["adjust_lr"]))
