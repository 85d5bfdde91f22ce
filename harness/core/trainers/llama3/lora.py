"""Adapters of low rank under tensor parallel: cut as their matrix is, and merged with it for others.

B is cut where a matrix is cut by rows, and A is whole on every rank. A is cut where it is cut by columns, and B is whole. What
is whole has on each rank the gradient of that rank's part alone, so it is reduced over tp, as norms' are.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from harness.reference.config import Lora
from harness.reference.model import Adapted

PARTS = ("lora_a", "lora_b")


def modules_with_adapters(model: nn.Module) -> dict[str, Adapted]:
    """Return the modules that have adapters, by name. Empty without LoRA."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Adapted)}


def take_out_adapters(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Remove the adapters' parts from all adapted matrices, in place, and return them for `put_back`.

    By the matrix's module name, {"lora_a": nn.Linear, "lora_b": nn.Linear}; empty without LoRA. The matrices cannot run
    forward until the parts are back. The reason: torch's styles cut every parameter inside a module as its weight.
    """
    adapters: dict[str, dict[str, Any]] = {}
    for name, module in modules_with_adapters(model).items():
        adapters[name] = {part: module._modules.pop(part) for part in PARTS}
    return adapters


def put_back(model: nn.Module, adapters: dict[str, dict[str, Any]], mesh: DeviceMesh) -> None:
    """Put adapters back into the model, in place, their weights as new DTensors over tp, cut to fit their matrices.

    adapters: as `take_out_adapters` returned them. A frozen weight stays frozen. Precondition: the matrices are cut.
    """
    for name, module in modules_with_adapters(model).items():
        for part, linear in adapters[name].items():
            placed = distribute_tensor(linear.weight, mesh, [placement(module.weight, part)])
            linear.weight = nn.Parameter(placed, requires_grad=linear.weight.requires_grad)
            module._modules[part] = linear


def placement(weight: Tensor, part: str) -> Placement:
    """Return the placement over tp of an adapter's part ("lora_a" or "lora_b") beside its matrix `weight`.

    It is the matrix's own for lora_b of a matrix cut by rows and lora_a of one cut by columns; else it is replicated.
    """
    assert isinstance(weight, DTensor)
    (cut,) = weight.placements
    return cut if cut == Shard(1 if part == "lora_a" else 0) else Replicate()


def with_merged_adapters(state: dict[str, Tensor], lora: Lora) -> dict[str, Tensor]:
    """Return the whole weights, by fqn, without adapters: B A, alpha / rank times, is added to each adapted matrix."""
    merged_weights = {fqn: value for fqn, value in state.items() if ".lora_" not in fqn}
    for fqn in merged_weights:
        module = fqn.removesuffix(".weight")
        if f"{module}.lora_a.weight" in state:
            a, b = (state[f"{module}.{part}.weight"] for part in PARTS)
            merged_weights[fqn] = merged_weights[fqn] + lora.scale * (b @ a)
    return merged_weights
