"""Muon for matrices, AdamW for all else, in one optimizer. Newton-Schulz runs in the parameter's own dtype.

torch.optim.Muon casts to bfloat16, which no layout repeats to the last digit. A matrix is orthogonalised whole: every
rank gathers the update of all slices, orthogonalises it, and keeps its own slice. The average of gradients is cut as
the parameter is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer
from torch.optim.adamw import adamw

POLYNOMIAL = (3.4445, -4.7750, 2.0315)
MOMENTS = ("exp_avg", "exp_avg_sq")


class MuonWithAdamW(Optimizer):
    """An optimizer whose parameter groups say by which `rule` ("muon" or "adamw") they are stepped, and have its options."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update all parameters that have a gradient, by their group's rule. No closure is accepted."""
        assert closure is None
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if group["rule"] == "adamw":
                self._adamw(parameters, group)
            else:
                for parameter in parameters:
                    self._muon(parameter, group)

    def _adamw(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Step all parameters of a group in place by torch's fused operator; nothing if there are none.

        A parameter's state begins as zeros when it is first stepped. Why the operator is fused: recipe.py.
        """
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter] = {"step": torch.zeros((), device=parameter.device)} | {
                    moment: torch.zeros_like(parameter) for moment in MOMENTS
                }
        averages: list[Tensor] = []
        average_squares: list[Tensor] = []
        for parameter in parameters:
            averages.append(self.state[parameter][MOMENTS[0]])
            average_squares.append(self.state[parameter][MOMENTS[1]])
        steps = [self.state[parameter]["step"] for parameter in parameters]
        beta1, beta2 = group["betas"]
        options = {name: group[name] for name in ("lr", "weight_decay", "eps")} | {"beta1": beta1, "beta2": beta2}
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if parameters:
            adamw(
                parameters,
                gradients,
                averages,
                average_squares,
                [],
                steps,
                fused=True,
                amsgrad=False,
                maximize=False,
                **options,
            )

    def _muon(self, parameter: Tensor, group: dict[str, Any]) -> None:
        """Step one parameter in place by Muon, with its average of gradients, which is kept in the optimizer's state.

        The update is the average with this gradient in it; with `nesterov`, its mean with the gradient once more. It is
        orthogonalised as a whole matrix. The weight decays by lr * weight_decay; then this rank's slice of the update,
        times lr and scale_of, is subtracted. A DTensor's ranks must all call this. Precondition: the parameter has a
        gradient.
        """
        average = average_of(parameter, self.state[parameter])
        gradient = parameter.grad
        assert gradient is not None
        average.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(average, group["momentum"]) if group["nesterov"] else average
        update = own_slice(orthogonalise(gather_matrix(update)), parameter)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"] * scale_of(parameter, group["adjust_lr"]))


def average_of(p: Tensor, state: dict[str, Any]) -> Tensor:
    """Return the average of gradients in a parameter's optimizer state, zeros at first, cut as the parameter is."""
    average: Tensor = state.setdefault("momentum_buffer", torch.zeros_like(p))
    return average


def gather_matrix(update: Tensor) -> Tensor:
    """Return the whole matrix of an update, as a plain tensor, on every rank; a plain tensor is returned as it is.

    One mesh axis after the other is gathered, from the outermost: FSDP has cut the slices that tp made, so it is undone
    first.
    """
    if not isinstance(update, DTensor):
        return update
    for axis in range(update.device_mesh.ndim):
        placements = [Replicate() if index <= axis else placement for index, placement in enumerate(update.placements)]
        update = update.redistribute(placements=placements)
    return update.to_local()


def orthogonalise(matrix: Tensor) -> Tensor:
    """Return a whole matrix with its singular values moved towards 1, by five steps of Newton-Schulz. [m, n] -> [m, n]"""
    a, b, c = POLYNOMIAL
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def own_slice(matrix: Tensor, p: Tensor) -> Tensor:
    """Return this rank's slice of the whole matrix, placed as the parameter is.

    No communication. A plain parameter: the whole.
    """
    if not isinstance(p, DTensor):
        return matrix
    replicated = [Replicate()] * p.device_mesh.ndim
    return DTensor.from_local(matrix, p.device_mesh, replicated, run_check=False).redistribute(placements=p.placements)


def scale_of(p: Tensor, adjust_lr: str) -> float:
    """Return Muon's factor of the learning rate for a matrix of this shape.

    A DTensor's shape is that of the whole matrix.
    """
    rows, columns = p.shape
    return math.sqrt(max(1, rows / columns)) if adjust_lr == "original" else 0.2 * math.sqrt(max(rows, columns))
