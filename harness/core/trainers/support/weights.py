"""The seed weights, and the slice of each that a rank holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from harness.core.case.case import Case
from harness.core.evidence.fused import Block, blocks_in_order, local_blocks_of
from harness.core.plan.slices import TP_DIM
from harness.core.probe.structure import local_tensor_of
from harness.core.probe.without_memory import is_without_memory
from harness.core.trainers.support.names import with_tied_output
from harness.reference.model import initial_weights

WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module")


def read_weights(weights: Path | None, case: Case) -> Mapping[str, np.ndarray]:
    """Return full tensors by fqn: those of the .npz file, each read when it is asked for, or the seed's if `weights` is
    None.

    Raises ValueError if the file cannot be read, or its names are not the model's.
    """
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


def _shapes_alone(case: Case) -> Mapping[str, Any]:
    """Return weights, by fqn, for parameters without memory: one number each, expanded, so that they add no bytes."""
    number = torch.empty((), dtype=torch.float64)
    return {fqn: number.expand(shape) for fqn, shape in case.model.parameter_shapes().items()}


class DoNotFit(ValueError):
    """The model's parameters do not match the reference's: an unknown name, or another shape.

    The message has the first problem. shapes: of all parameters, by the trainer's names.
    """

    def __init__(self, problems: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> None:
        others = f"; and {len(problems) - 1} more, which `harness doctor` lists" if len(problems) > 1 else ""
        super().__init__(problems[0] + others)
        self.shapes = dict(shapes)


@torch.no_grad()
def load_weights(
    parts: Iterable[nn.Module],
    case: Case,
    weights: Path | None,
    fqn: Callable[[str], str],
    rows: Mapping[str, np.ndarray] = MappingProxyType({}),
    cut: Callable[[str, Tensor], Tensor] = lambda _, full_tensor: full_tensor,
    fused: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> None:
    """Copy this rank's slice of every seed weight, or of those in a file, into the parts' parameters. No communication.

    fqn gives the reference's spelling of a parameter's name; rows and fused are an adapter's, by that name. cut gives
    this rank's part of a whole tensor where the trainer's own layers divide it, and no DTensor says how: see
    `tensor_parallel`. Raises DoNotFit after copying those that fit.
    """
    problems: list[str] = []
    fqn = with_tied_output(case, fqn)
    parameters: dict[str, nn.Parameter] = {}
    for part in parts:
        parameters |= {plain(name): parameter for name, parameter in part.named_parameters()}
    alone = any(is_without_memory(local_tensor_of(parameter)) for parameter in parameters.values())
    full = _shapes_alone(case) if alone else read_weights(weights, case)
    for name, parameter in parameters.items():
        fqns = fused.get(fqn(name), (fqn(name),))
        if not set(fqns) <= set(full):
            problems.append(
                f"{name} {list(parameter.shape)}: fqn gives {fqn(name)!r}, which is none of the reference's"
            )
            continue
        local_parts = {key: cut(key, torch.as_tensor(full[key][rows.get(key, slice(None))])) for key in fqns}
        rows_of_parts = {key: full[key].shape[0] for key in local_parts}
        full_tensor = _fuse_parts(local_parts, blocks_in_order(fqns, rows_of_parts))
        if full_tensor.shape != parameter.shape:
            problems.append(
                f"weights of {name} have shape {tuple(full_tensor.shape)}, the model {tuple(parameter.shape)}"
            )
            continue
        local_tensor = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        local_tensor.copy_(local_slice(full_tensor, parameter))
    if problems:
        raise DoNotFit(problems, {name: tuple(parameter.shape) for name, parameter in parameters.items()})


def _fuse_parts(local_parts: Mapping[str, Tensor], fused_blocks: Sequence[Block]) -> Tensor:
    """Return this rank's slice of a fused tensor. ValueError if a block is cut, so that slices do not fill whole blocks.

    local_parts: its slice of each part, by fqn. fused_blocks: the blocks of the fused tensor.
    """
    if len(local_parts) == 1:
        return next(iter(local_parts.values()))
    length = sum(len(part) for part in local_parts.values())
    used = Counter[str]()
    pieces: list[Tensor] = []
    for part, size in local_blocks_of(fused_blocks, length):
        pieces.append(local_parts[part][used[part] : used[part] + size])
        used[part] += size
    if not pieces:
        raise ValueError(f"{', '.join(local_parts)} are not cut between the blocks that they are fused in")
    return torch.cat(pieces)


def plain(name: str) -> str:
    """Return a parameter's name without what wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def tensor_parallel(rank: int, degree: int) -> Callable[[str, Tensor], Tensor]:
    """Return the `cut` of a tp rank for load_weights, for column- and row-parallel layers as Megatron's are.

    It returns the rank's chunk of a whole tensor; a tensor that tp does not cut, whole.
    """

    def cut(fqn: str, whole: Tensor) -> Tensor:
        dim = next((dim for module, dim in TP_DIM.items() if fqn.removesuffix(".weight").endswith(module)), None)
        return whole if dim is None else whole.chunk(degree, dim)[rank]

    return cut


def local_slice(full: Tensor, parameter: Tensor) -> Tensor:
    """Return the slice of the full tensor that this rank holds, as torch.chunk splits it; the whole for a plain parameter.

    The last ranks may get less, or an empty slice. Trap: FSDP2 over TP on one dim is split by tp first and by dp_shard
    inside, against the mesh's order. Its placement, a _StridedShard, says so.
    """
    if not isinstance(parameter, DTensor):
        return full
    mesh = parameter.device_mesh
    splits = [
        (axis, sharding)
        for axis, sharding in enumerate(parameter.placements)
        if isinstance(sharding, (Shard, _StridedShard))
    ]
    for axis, placement in sorted(splits, key=lambda split: isinstance(split[1], _StridedShard)):
        chunks = full.chunk(mesh.size(axis), placement.dim)
        rank = mesh.get_local_rank(axis)
        full = chunks[rank] if rank < len(chunks) else full.narrow(placement.dim, 0, 0)
    return full
