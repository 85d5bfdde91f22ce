"""The seed weights, and the slice of each that a rank holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from harness.reference.model import initial_weights
from harness.spec.case import Case


def read_weights(weights: Path | None, case: Case) -> Mapping[str, np.ndarray]:
    """Full tensors by fqn; from a file each is read when requested. Raises ValueError if names or shapes do not fit."""
    if weights is None:
        return initial_weights(case.model, case.training.seed)
    try:
        arrays = np.load(weights, allow_pickle=False)
    except OSError as error:
        raise ValueError(f"{weights}: cannot be read: {error.strerror or error}") from error
    expected = case.model.parameter_shapes()
    if unmatched := sorted(set(arrays) ^ set(expected)):
        raise ValueError(f"{weights}: {unmatched[0]!r} is {'missing' if unmatched[0] in expected else 'unknown'}")
    return arrays


@torch.no_grad()
def load_weights(
    parts: Iterable[nn.Module],
    case: Case,
    weights: Path | None,
    fqn: Callable[[str], str],
    rows: Mapping[str, np.ndarray] = MappingProxyType({}),
) -> None:
    """Copy this rank's slice of every seed weight into place. No communication.

    fqn: the reference's spelling of a parameter's name. rows: by that, as an adapter's `rows`.
    """
    full = read_weights(weights, case)
    for part in parts:
        for name, parameter in part.named_parameters():
            whole = torch.from_numpy(full[fqn(name)][rows.get(fqn(name), slice(None))])
            if whole.shape != parameter.shape:
                raise ValueError(
                    f"weights of {name} have shape {tuple(whole.shape)}, the model {tuple(parameter.shape)}"
                )
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.copy_(local_slice(whole, parameter))


def local_slice(full: Tensor, parameter: Tensor) -> Tensor:
    """The part of the full tensor that this rank holds, as torch.chunk splits it: the last ranks may get less, or none.

    Trap: FSDP2 over TP on one dim is split by tp first and by dp_shard inside, against the mesh's order; its placement
    says so by being a _StridedShard.
    """
    if not isinstance(parameter, DTensor):
        return full
    mesh = parameter.device_mesh
    splits = [(axis, p) for axis, p in enumerate(parameter.placements) if isinstance(p, (Shard, _StridedShard))]
    for axis, placement in sorted(splits, key=lambda split: isinstance(split[1], _StridedShard)):
        chunks = full.chunk(mesh.size(axis), placement.dim)
        rank = mesh.get_local_rank(axis)
        full = chunks[rank] if rank < len(chunks) else full.narrow(placement.dim, 0, 0)
    return full
