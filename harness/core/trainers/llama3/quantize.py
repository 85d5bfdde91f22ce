"""Matmuls in 8 bits, by torchao: modules are replaced before anything else is done to the model."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from harness.core.case.case import Case
from harness.reference.config import quantized_modules
from harness.reference.precision import runs_in_hardware


def convert(model: nn.Module, case: Case, device: torch.device) -> None:
    """Replace the recipe's modules (all nn.Linear of the blocks) by torchao's, in place.

    It does nothing without `quantize`. Products are emulated where the device lacks the format.
    """
    recipe = case.training.quantize
    modules = quantized_modules(case.model)
    if recipe == "mxfp8":
        for fqn in modules:
            _to_mxfp8(model, fqn, device)
    elif recipe:
        _to_float8(model, recipe.removeprefix("float8_"), modules, device)


def _to_float8(model: nn.Module, recipe: str, modules: tuple[str, ...], device: torch.device) -> None:
    """Replace these modules by torchao's float8 linear modules, in place. recipe: torchao's name, such as "rowwise"."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name(recipe), emulate=not runs_in_hardware(recipe, device)
    )
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, fqn: fqn in modules)


def _to_mxfp8(model: nn.Module, fqn: str, device: torch.device) -> None:
    """Replace a linear module by torchao's MXFP8 one with the same weight.

    torchao has no function for that: it is a prototype.
    """
    from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    linear = model.get_submodule(fqn)
    preference = KernelPreference.AUTO if runs_in_hardware("mxfp8", device) else KernelPreference.EMULATED
    shape = {"in_features": linear.in_features, "out_features": linear.out_features}
    exchanged = MXFP8Linear(**shape, bias=False, kernel_preference=preference, device="meta")
    exchanged.weight = linear.weight
    parent, _, name = fqn.rpartition(".")
    setattr(model.get_submodule(parent), name, exchanged)
