"""A recipe's low precision: parameters cast for forward and backward, and matmuls in 8 bits.

Which modules are quantized follows from the model's shape alone (config.quantized_modules), for reference, plan and
trainer alike.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from .config import TrainingConfig

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


@contextlib.contextmanager
def float32_matmuls(training: TrainingConfig) -> Iterator[None]:
    """Set torch's precision of float32 matmuls to the recipe's in the block.

    The switch is the process's, and is put back.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if training.tf32 else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def quantize(model: nn.Module, recipe: str, modules: Iterable[str]) -> None:
    """Replace these nn.Linear by torchao's modules, in place. The parameters stay the same objects, with the same names.

    Products are emulated where the device that the model lies on lacks the format. Tensor parallelism must come after
    this.
    """
    for name in modules:
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, _quantize_linear(model.get_submodule(name), recipe))


def _quantize_linear(linear: nn.Module, recipe: str) -> nn.Module:
    """Return torchao's module for a linear one and a recipe, with the same weight."""
    assert isinstance(linear, nn.Linear), f"{type(linear).__name__} cannot be quantized"
    emulate = not runs_in_hardware(recipe, linear.weight.device)
    if recipe == "mxfp8":
        from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
        from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

        with torch.device("meta"):
            made = MXFP8Linear(linear.in_features, linear.out_features, bias=False)
        made.kernel_preference = KernelPreference.EMULATED if emulate else KernelPreference.AUTO
        made.weight = linear.weight
        return made
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    config = Float8LinearConfig.from_recipe_name(recipe.removeprefix("float8_"))
    return Float8Linear.from_float(linear, dataclasses.replace(config, emulate=emulate))


NATIVE_SINCE = {"mxfp8": (10, 0)}
"""Compute capability from which GPUs multiply in a format; the others of 8 bits from 8.9 on."""


def runs_in_hardware(recipe: str, device: torch.device) -> bool:
    """Return whether this device multiplies in the recipe's format; False on CPU.

    A Hopper (9.0) has float8 and no MXFP8.
    """
    if device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= NATIVE_SINCE.get(recipe, (8, 9))


class Worker:
    """The module that computes for a model: itself, or a copy in the compute dtype, as with FSDP2's MixedPrecisionPolicy.

    The copy gets the parameters' values before every step. Its gradients are cast to reduce_dtype before they are added
    up, and to the parameters' dtype after that.
    """

    def __init__(self, model: nn.Module, training: TrainingConfig, modules: Iterable[str]) -> None:
        self.model = self.module = model
        if training.compute_dtype not in (None, training.dtype):
            self.module = copy.deepcopy(model).to(DTYPES[training.compute_dtype])
        if training.quantize:
            quantize(self.module, training.quantize, modules)
        self._sums: list[Tensor] = []

    @torch.no_grad()
    def begin(self) -> None:
        """Begin a step: clear all gradients, and copy the parameters' values into the copy, if there is one."""
        self.model.zero_grad()
        self._sums = []
        if self.module is not self.model:
            for own, parameter in zip(self.module.parameters(), self.model.parameters(), strict=True):
                own.copy_(parameter)

    def collect_gradients(self, reduce_dtype: torch.dtype | None) -> None:
        """Add the copy's gradients, in reduce_dtype, to the step's sums; call it after each backward pass.

        None: their own dtype. Without a copy it does nothing: the model's own gradients add up where they are.
        """
        if self.module is self.model:
            return
        gradients = [_gradient_or_zeros(p).to(reduce_dtype or p.dtype) for p in _trainable_parameters(self.module)]
        if self._sums:
            gradients = [a + b for a, b in zip(self._sums, gradients, strict=True)]
        self._sums = gradients
        self.module.zero_grad()

    def store_gradients(self) -> None:
        """Set the model's gradients to the sums of the copy's, in the parameters' dtype; without a copy it does nothing."""
        for parameter, total in zip(_trainable_parameters(self.model), self._sums, strict=bool(self._sums)):
            parameter.grad = total.to(parameter.dtype)


def _trainable_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    return (parameter for parameter in model.parameters() if parameter.requires_grad)


def _gradient_or_zeros(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
