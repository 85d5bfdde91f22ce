"""torch's AdamW and SGD, each parameter with its own options.

They are the functional forms of torch.optim. Building one of its classes would import torch's compiler (3.5 s), which takes
longer than all that is trained again to prove a cause.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

Moments = dict[str, Tensor]


class Optimizer:
    """amsgrad: what torch.optim.AdamW calls so. state: of AdamW by fqn, under the names that torch.optim.AdamW gives it."""

    def __init__(self, model: nn.Module, *, kind: str, amsgrad: bool = False) -> None:
        self.parameters = dict(model.named_parameters())
        self.kind, self.amsgrad = kind, amsgrad
        self.state: dict[str, Moments] = {}

    @torch.no_grad()
    def step(self, options: Mapping[str, Mapping[str, Any]]) -> None:
        """options, by fqn: lr and weight_decay, and of AdamW beta1, beta2 and eps. What has no gradient is left alone."""
        for fqn, p in self.parameters.items():
            if p.grad is not None and self.kind == "sgd":
                plain = {"momentum": 0.0, "dampening": 0.0, "nesterov": False}
                sgd([p], [p.grad], [None], foreach=False, maximize=False, **plain, **options[fqn])
            elif p.grad is not None:
                self._adamw(p, p.grad, self.state.get(fqn) or self._begun(fqn), options[fqn])

    def _begun(self, fqn: str) -> Moments:
        p = self.parameters[fqn]
        names = ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if self.amsgrad else ()))
        self.state[fqn] = {"step": torch.tensor(0.0), **{name: torch.zeros_like(p) for name in names}}
        return self.state[fqn]

    def _adamw(self, p: Tensor, gradient: Tensor, state: Moments, options: Mapping[str, Any]) -> None:
        largest = [state["max_exp_avg_sq"]] if self.amsgrad else []
        moments = ([state["exp_avg"]], [state["exp_avg_sq"]], largest, [state["step"]])
        adamw([p], [gradient], *moments, foreach=False, amsgrad=self.amsgrad, maximize=False, **options)
