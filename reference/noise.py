"""The reference's own noise: how far its numbers move if nothing but the order of summation changes.

A correct layout computes what one device computes and sums it up in another order, in one of two ways.

    shares  the batch is cut, each share's gradient is rounded and the shares' are added: data and pipeline parallel,
            accumulation. Every product is computed as on one device, if its kernel sums in the same order for fewer rows.
    parts   products are cut as well, and each part is rounded before they are added: tensor and context parallel.
            Kernels that sum in another order (torch.compile) belong here too: every contraction is permuted. So do
            models written in another way. torchtitan's norm rounds its result once, the reference's (Llama's own) before
            the weight too. In bfloat16 this alone moves the first loss by 3.2e-4, to the bit what torchtitan shows,
            and every product after it has another rounding. In float32 it is pairs turned as complex numbers.

A repeat of the reference does that on one device. It does `parts` at the level of torch's operators, so that forward,
backward and emulated products are all met.

Quantized products jump. An operand next to the middle between two 8-bit values goes the other way if it moves by one
unit of the last place, and later operands follow. In 60 runs (float32, float8_rowwise_with_gw_hp, parts) one in thirty had
such a jump in step 1. A gradient is off by 8e-3 then, and by 5e-7 without. Repeats that had none
would condemn a correct run that has one. So they move each operand by up to SHAKE units before it is rounded, and each
repeat has as many jumps as SHAKE runs. Under `parts` the units are those of float32, in which products are summed. Under
`shares` the first forward pass is that of one device bit by bit, and the units are the parameters', from step 2 on. Operands
in bfloat16 need no help: its unit is a sixteenth of theirs, so that jumps are many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .config import TrainingConfig
from .distance import best_fit, largest_of, relative_distance
from .precision import DTYPES
from .record import Noise, ReferenceStep

SHAKE = 64
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
aten = torch.ops.aten


SPLITS = {
    "shares": ((2, 1), (4, 1), (8, 1), (16, 1)),
    "parts": ((1, 1), (2, 1), (4, 2), (1, 2), (8, 1), (2, 4), (16, 1), (1, 4)),
}
REPEATS = 16
Distance = Callable[[ReferenceStep, ReferenceStep], float]


@dataclass(frozen=True)
class Order:
    """shares: how many backward passes a batch is cut into, after its samples were permuted by `seed`; their gradients
    are added in reduce_dtype. parts: how many sums a contraction is cut into. shake: units that operands are moved by."""

    kind: str
    shares: int
    parts: int
    seed: int
    reduce_dtype: torch.dtype
    unit: float

    def cut(self, tokens: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
        there = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(self.seed))
        return list(zip(tokens[there].chunk(self.shares), labels[there].chunk(self.shares), strict=True))


def orders(kind: str, training: TrainingConfig, reduce_dtype: torch.dtype) -> list[Order]:
    """REPEATS of them; a batch is cut at most into its samples."""
    splits = [SPLITS[kind][n % len(SPLITS[kind])] for n in range(REPEATS)]
    unit = torch.finfo(torch.float32 if kind == "parts" else DTYPES[training.dtype]).eps / 2
    unit = 0.0 if training.compute_dtype == "bfloat16" else unit
    most = training.global_batch
    return [Order(kind, min(shares, most), parts, n, reduce_dtype, unit) for n, (shares, parts) in enumerate(splits)]


def measure(steps: tuple[ReferenceStep, ...], repeats: Iterable[tuple[ReferenceStep, ...]]) -> Noise:
    """The largest relative distance of a repeat from the reference, by step; it cannot shrink from step to step.

    Only a repeat's distances are kept: sixteen that are made one by one take no more memory than one.
    """
    kinds: dict[str, Distance] = {
        "loss": lambda seen, step: abs(seen.loss / step.loss - 1),
        "grad_norm": lambda seen, step: abs(seen.grad_norm / step.grad_norm - 1),
        "gradient": _gradient_distance,
    }
    names = tuple(steps[0].gradients)
    kinds |= {f"distance {fqn}": _distance_of(fqn) for fqn in names} | {f"fit {fqn}": _misfit_of(fqn) for fqn in names}

    def distances(repeat: tuple[ReferenceStep, ...]) -> dict[str, list[float]]:
        return {kind: [how(*both) for both in zip(repeat, steps, strict=True)] for kind, how in kinds.items()}

    found = list(map(distances, repeats))  # no loop, whose variable would keep the last one while the next is made

    def spread(kind: str) -> tuple[float, ...]:
        by_step = (largest_of([0.0, *(one[kind][number] for one in found)]) for number in range(len(steps)))
        return tuple(accumulate(by_step, lambda one, other: largest_of([one, other])))

    return Noise(
        repeats=len(found),
        loss=spread("loss"),
        grad_norm=spread("grad_norm"),
        gradient=spread("gradient"),
        distance={fqn: spread(f"distance {fqn}") for fqn in names},
        fit={fqn: spread(f"fit {fqn}") for fqn in names},
    )


def _distance_of(fqn: str) -> Distance:
    return lambda seen, step: relative_distance(seen.gradients[fqn], step.gradients[fqn])


def _misfit_of(fqn: str) -> Distance:
    return lambda seen, step: abs(best_fit(seen.gradients[fqn], step.gradients[fqn]) - 1)


def _gradient_distance(seen: ReferenceStep, step: ReferenceStep) -> float:
    """Return the distance of the parameter that is farthest off, relative to its largest entry."""
    largest = {fqn: float(abs(gradient).max()) for fqn, gradient in step.gradients.items()}
    return largest_of(
        [float(abs(seen.gradients[f] - step.gradients[f]).max()) / largest[f] for f in largest if largest[f]]
    )


def reorders(order: Order, step: int, training: TrainingConfig) -> bool:
    """Return whether a step has products in another order, or operands that are shaken.

    If not, `Reordered` would change nothing, and takes several times as long as the step itself.
    """
    shakes = step > 1 and order.unit > 0 and training.quantize is not None
    return order.kind == "parts" or shakes


class Reordered(TorchDispatchMode):
    """While active, products and sums run in another order (under `parts`) and operands are shaken before rounding."""

    def __init__(self, order: Order, step: int) -> None:
        super().__init__()
        self.order, self.shake = order, SHAKE * order.unit if order.kind == "parts" or step > 1 else 0.0
        self.generator = torch.Generator().manual_seed(1000 * order.seed + step)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind not in (Tensor, nn.Parameter) for kind in types):
            return NotImplemented  # a quantized tensor, whose own product comes by here as a plain one
        if func is aten._to_copy.default and kwargs.get("dtype") in FLOAT8:
            return func(self._shaken(args[0]), **kwargs)
        return self._reordered(func, args, kwargs) if self.order.kind == "parts" else func(*args, **kwargs)

    def _reordered(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in (aten.mm.default, aten.bmm.default):
            return self._product(func, *args)
        if func in (aten.sum.dim_IntList, aten.mean.dim) and not kwargs:
            return func(self._permuted(args[0], args[1]), *args[1:])
        if func is aten._log_softmax.default:
            there = self._permutation(args[0].shape[args[1]], args[0])
            return func(args[0].index_select(args[1], there), *args[1:]).index_select(args[1], there.argsort())
        if func is aten.embedding_dense_backward.default:
            rows = args[0].flatten(0, -2)
            there = self._permutation(rows.shape[0], rows)
            return func(rows[there], args[1].flatten()[there], *args[2:])
        return func(*args, **kwargs)

    def _product(self, func: Any, a: Tensor, b: Tensor) -> Tensor:
        there = self._permutation(a.shape[-1], a)
        parts = self.order.parts
        a, b = a.index_select(-1, there), b.index_select(-2, there)
        total, *others = (func(x, y) for x, y in zip(a.chunk(parts, -1), b.chunk(parts, -2), strict=True))
        for other in others:
            total = total + other
        return total

    def _permuted(self, x: Tensor, dims: list[int]) -> Tensor:
        for dim in dims:
            x = x.index_select(dim, self._permutation(x.shape[dim], x))
        return x

    def _permutation(self, n: int, like: Tensor) -> Tensor:
        return torch.randperm(n, generator=self.generator).to(like.device)

    def _shaken(self, x: Tensor) -> Tensor:
        if not self.shake:
            return x
        by = torch.rand(x.shape, generator=self.generator).to(x.device, x.dtype)
        return x * (1 + by.mul_(2).sub_(1).mul_(self.shake))
