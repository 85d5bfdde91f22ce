"""Numbers that are shown in addition to loss, norm and rate: their meanings, and the norm of the parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from harness.core.trainers import Number
from harness.core.trainers.llama3 import parallelize
from harness.reference.model import at_least_float32

MEANINGS: dict[str, dict[str, Any]] = {
    "tokens per second": {"of": "tokens", "rate": True},
    "tokens seen": {"of": "tokens", "steps": None},
    "own valid tokens": {"of": "valid tokens", "over": ()},
    "valid tokens per sample": {"of": "mean"},
    "epochs": {"of": "epochs", "steps": None},
    "validation loss": {"of": "validation loss"},
    "parameter norm": {"of": "parameter norm"},
}


def with_meanings(shown: Mapping[str, float], handed_over: Mapping[str, dict[str, Any]]) -> dict[str, Number]:
    """Return each shown number with its meaning, by name. KeyError for a name that MEANINGS lacks.

    handed_over: more fields of a Number, by name, which depend on the step.
    """
    return {name: Number(value, **MEANINGS[name], **handed_over.get(name, {})) for name, value in shown.items()}


def mean_over_ranks(sum_and_count: torch.Tensor, mesh: DeviceMesh | None) -> float:
    """Return the mean over all data ranks.

    sum_and_count: this rank's sum and the number of its terms, [2], which is changed.
    """
    total, count = parallelize.sum_over_data_ranks(sum_and_count, mesh).tolist()
    return float(total / count)


def parameter_norm(parameters: Iterable[nn.Parameter], groups: Iterable[dist.ProcessGroup]) -> float:
    """Return the 2-norm of all parameters over all ranks, each element once.

    groups: of ranks that hold other elements without a DTensor saying so. Trap: a slice that FSDP2 cuts from one of tp
    lies as a _StridedShard, of which is_shard() returns False.
    """
    squares: dict[Any, torch.Tensor] = {}
    for parameter in parameters:
        value = parameter.detach()
        cut = isinstance(value, DTensor)
        layout = (value.device_mesh, value.placements) if cut else (None, ())
        own_square_sum = at_least_float32(value.to_local() if cut else value).square().sum()
        squares[layout] = squares[layout] + own_square_sum if layout in squares else own_square_sum
    for (mesh, placements), total in squares.items():
        for axis, placement in enumerate(placements):
            if not placement.is_replicate() and mesh.size(axis) > 1:
                dist.all_reduce(total, group=mesh.get_group(axis))
    norm = torch.stack([*squares.values()]).sum()
    for group in groups:
        dist.all_reduce(norm, group=group)
    return float(norm.sqrt())
