"""The reference's own noise: the distance between its numbers and those of another order of summation.

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
from .distance import best_fitting_factor, largest_or_nan, relative_distance
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
class SummationOrder:
    """An order of summation, in which a repeat of the reference computes."""

    kind: str
    """"shares" or "parts"."""
    shares: int
    """Number of backward passes that a batch is cut into, after its samples were permuted."""
    parts: int
    """Number of sums that a contraction is cut into."""
    seed: int
    """Seed of permutations."""
    reduce_dtype: torch.dtype
    """Dtype in which the shares' gradients are added."""
    unit: float
    """Unit of which operands are moved by up to SHAKE; 0: they are not moved."""

    def cut_into_shares(self, tokens: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return at most `shares` shares of a batch, after its samples were permuted: (tokens, labels) each."""
        permutation = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(self.seed))
        token_shares = tokens[permutation].chunk(self.shares)
        label_shares = labels[permutation].chunk(self.shares)
        return list(zip(token_shares, label_shares, strict=True))


def noise_orders_of_kind(kind: str, training: TrainingConfig, reduce_dtype: torch.dtype) -> list[SummationOrder]:
    """Return REPEATS orders of summation of a kind, "shares" or "parts". A batch is cut at most into its samples."""
    unit = torch.finfo(torch.float32 if kind == "parts" else DTYPES[training.dtype]).eps / 2
    if training.compute_dtype == "bfloat16":
        unit = 0.0
    repeats = []
    for seed in range(REPEATS):
        shares, parts = SPLITS[kind][seed % len(SPLITS[kind])]
        repeats.append(SummationOrder(kind, min(shares, training.global_batch), parts, seed, reduce_dtype, unit))
    return repeats


def measure_noise(steps: tuple[ReferenceStep, ...], repeats: Iterable[tuple[ReferenceStep, ...]]) -> Noise:
    """Return the largest relative distance of any repeat from the reference, by step, never below that of an earlier step.

    Repeats are consumed one by one, and only their distances are kept: sixteen take no more memory than one.
    """
    kinds: dict[str, Distance] = {
        "loss": lambda seen, step: abs(seen.loss / step.loss - 1),
        "grad_norm": lambda seen, step: abs(seen.grad_norm / step.grad_norm - 1),
        "gradient": _gradient_distance,
    }
    names = tuple(steps[0].gradients)
    kinds |= {f"distance {fqn}": _distance_of(fqn) for fqn in names} | {f"fit {fqn}": _misfit_of(fqn) for fqn in names}

    def distances(repeat: tuple[ReferenceStep, ...]) -> dict[str, list[float]]:
        """Return a repeat's distances from the reference, by kind of distance and then step."""
        by_kind: dict[str, list[float]] = {}
        for kind, distance in kinds.items():
            by_kind[kind] = [distance(repeated, step) for repeated, step in zip(repeat, steps, strict=True)]
        return by_kind

    # No loop, whose variable would keep the last repeat while the next is made.
    distances_of_repeats = list(map(distances, repeats))

    def spread(kind: str) -> tuple[float, ...]:
        """Return the largest distance of this kind, by step, never below that of an earlier step."""
        largest_by_step = []
        for number in range(len(steps)):
            largest_by_step.append(largest_or_nan([0.0, *(by_kind[kind][number] for by_kind in distances_of_repeats)]))
        return tuple(accumulate(largest_by_step, lambda before, step_largest: largest_or_nan([before, step_largest])))

    return Noise(
        repeats=len(distances_of_repeats),
        loss=spread("loss"),
        grad_norm=spread("grad_norm"),
        gradient=spread("gradient"),
        distance={fqn: spread(f"distance {fqn}") for fqn in names},
        fit={fqn: spread(f"fit {fqn}") for fqn in names},
    )


def _distance_of(fqn: str) -> Distance:
    return lambda seen, step: relative_distance(seen.gradients[fqn], step.gradients[fqn])


def _misfit_of(fqn: str) -> Distance:
    return lambda seen, step: abs(best_fitting_factor(seen.gradients[fqn], step.gradients[fqn]) - 1)


def _gradient_distance(seen: ReferenceStep, step: ReferenceStep) -> float:
    """Return the largest difference of an entry, relative to its parameter's largest entry, over all parameters.

    Parameters whose gradient is all zero are left out. NaN if any distance is NaN.
    """
    distances = []
    for fqn, gradient in step.gradients.items():
        largest = float(abs(gradient).max())
        if largest:
            distances.append(float(abs(seen.gradients[fqn] - gradient).max()) / largest)
    return largest_or_nan(distances)


def reorders_step(order: SummationOrder, step: int, training: TrainingConfig) -> bool:
    """Return whether a repeat changes this step: it has products in another order, or operands that are shaken.

    If not, `Reordered` would change nothing, and takes several times as long as the step itself.
    """
    shakes = step > 1 and order.unit > 0 and training.quantize is not None
    return order.kind == "parts" or shakes


class Reordered(TorchDispatchMode):
    """A mode of torch in which products and sums run in another order (under `parts`) and operands are shaken before
    rounding."""

    def __init__(self, order: SummationOrder, step: int) -> None:
        super().__init__()
        self.order = order
        self.shake = SHAKE * order.unit if order.kind == "parts" or step > 1 else 0.0
        self.generator = torch.Generator().manual_seed(1000 * order.seed + step)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind not in (Tensor, nn.Parameter) for kind in types):
            return NotImplemented  # a quantized tensor, whose own product comes by here as a plain one
        if func is aten._to_copy.default and kwargs.get("dtype") in FLOAT8:
            return func(self._shake(args[0]), **kwargs)
        return self._run_reordered(func, args, kwargs) if self.order.kind == "parts" else func(*args, **kwargs)

    def _run_reordered(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator with its contraction or summation permuted; one that has none runs as it is."""
        if func in (aten.mm.default, aten.bmm.default):
            return self._split_product(func, *args)
        if func in (aten.sum.dim_IntList, aten.mean.dim) and not kwargs:
            return func(self._permute_dims(args[0], args[1]), *args[1:])
        if func is aten._log_softmax.default:
            permutation = self._permutation(args[0].shape[args[1]], args[0])
            permuted = func(args[0].index_select(args[1], permutation), *args[1:])
            return permuted.index_select(args[1], permutation.argsort())
        if func is aten.embedding_dense_backward.default:
            rows = args[0].flatten(0, -2)
            permutation = self._permutation(rows.shape[0], rows)
            return func(rows[permutation], args[1].flatten()[permutation], *args[2:])
        return func(*args, **kwargs)

    def _split_product(self, func: Any, a: Tensor, b: Tensor) -> Tensor:
        """Return the product of two matrices, with the contraction permuted, cut into `parts` and added up."""
        permutation = self._permutation(a.shape[-1], a)
        parts = self.order.parts
        a = a.index_select(-1, permutation)
        b = b.index_select(-2, permutation)
        total, *other_parts = (func(x, y) for x, y in zip(a.chunk(parts, -1), b.chunk(parts, -2), strict=True))
        for part in other_parts:
            total = total + part
        return total

    def _permute_dims(self, x: Tensor, dims: list[int]) -> Tensor:
        """Return x with its entries permuted along each of these dims."""
        for dim in dims:
            x = x.index_select(dim, self._permutation(x.shape[dim], x))
        return x

    def _permutation(self, n: int, like: Tensor) -> Tensor:
        return torch.randperm(n, generator=self.generator).to(like.device)

    def _shake(self, x: Tensor) -> Tensor:
        """Return x with each entry moved by up to `shake` of itself, up or down; x itself if `shake` is 0."""
        if not self.shake:
            return x
        shift = torch.rand(x.shape, generator=self.generator).to(x.device, x.dtype)
        return x * (1 + shift.mul_(2).sub_(1).mul_(self.shake))
