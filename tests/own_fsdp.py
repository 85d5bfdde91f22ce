"""The trainer from outside with FSDP2, wrapped in one of the ways that people do it, and with one of their habits.

An adapter of it is a file: `from own_fsdp import Fsdp; adapter = Fsdp("blocks")`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from own_trainer import Own, Started

from harness.adapters.support.requests import beyond
from harness.core.case.case import Case
from harness.core.trainers import Metrics, StartedTrainer

FEATURES = ("dp_replicate", "dp_shard", "reshard_after_forward", "all_valid", "fsdp_units")
SIZES = ("dim", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size")
KNOWN = dict.fromkeys((*FEATURES, *SIZES), ...)
Shard = Callable[..., Any]


def model_only(model: Any, shard: Shard) -> None:
    shard(model)


def blocks(model: Any, shard: Shard) -> None:
    """As torch's documentation does it."""
    for block in model.blocks:
        shard(block)
    shard(model)


def all_freed(model: Any, shard: Shard) -> None:
    for block in model.blocks:
        shard(block, reshard_after_forward=True)
    shard(model, reshard_after_forward=True)


def all_kept(model: Any, shard: Shard) -> None:
    for block in model.blocks:
        shard(block, reshard_after_forward=False)
    shard(model, reshard_after_forward=False)


def linears(model: Any, shard: Shard) -> None:
    from torch import nn

    for module in model.modules():
        if isinstance(module, nn.Linear):
            shard(module)
    blocks(model, shard)


def pairs_of_blocks(model: Any, shard: Shard) -> None:
    for first in range(0, len(model.blocks), 2):
        shard([*model.blocks[first : first + 2]])
    shard(model)


def outside_apart(model: Any, shard: Shard) -> None:
    for module in (model.embed, model.last, model.head):
        shard(module)
    blocks(model, shard)


def each_otherwise(model: Any, shard: Shard) -> None:
    """One kept, one freed, one over two ranks and so on."""
    for number, block in enumerate(model.blocks):
        shard(block, reshard_after_forward=(False, True, 2)[number % 3])
    shard(model.head, reshard_after_forward=2)
    shard(model)


def nothing(started: Started, step: int) -> None:
    pass


def validates(started: Started, step: int) -> None:
    """As trainers do after a step; what the root gathered stays, by torch's default."""
    import torch

    started.model.eval()
    with torch.no_grad():
        for tokens, labels in started.batches(step):
            started.loss(started.model(tokens), labels)
    started.model.train()


class Fsdp(Own):
    name = "own_fsdp"

    def __init__(self, wrap: str = "blocks", habit: Callable[[Any, int], None] = nothing) -> None:
        self.wrap, self.habit = globals()[wrap], habit

    def unsupported(self, case: Case) -> str | None:
        return next(beyond(case, KNOWN, self.name), None)

    def start(self, case: Case, weights: Path | None, device: str) -> StartedTrainer:
        return StartedFsdp(case, weights, self)


class StartedFsdp(Started):
    def __init__(self, case: Case, weights: Path | None, adapter: Fsdp) -> None:
        self.adapter, self.dims = adapter, case.dims
        super().__init__(case, weights)

    def wrapped(self, model: Any) -> Any:
        import functools

        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        sizes = {"dp_replicate": self.dims.dp_replicate, "dp_shard": self.dims.dp_shard}
        sizes = {axis: size for axis, size in sizes.items() if size > 1 or axis == "dp_shard"}
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        self.adapter.wrap(model, functools.partial(fully_shard, mesh=mesh))
        return model

    def step(self, step: int) -> Metrics:
        shown = super().step(step)
        self.adapter.habit(self, step)
        return shown
