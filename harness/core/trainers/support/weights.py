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
from harness.core.evidence.fused import Block, blocks, held_blocks
from harness.core.plan.slices import TP_DIM
from harness.core.probe.structure import local
from harness.core.probe.without_memory import is_without_memory
from harness.core.trainers.support.names import with_tied_output
from harness.reference.model import initial_weights

WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "module")


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


def _shapes_alone(case: Case) -> Mapping[str, Any]:
    """Return weights for parameters without memory: tensors of one number each, expanded, so that they add nothing to what a
    rank has at once."""
    one = torch.empty((), dtype=torch.float64)
    return {fqn: one.expand(shape) for fqn, shape in case.model.parameter_shapes().items()}


class DoNotFit(ValueError):
    """Parameters that are none of the reference's, or of another shape. shapes: of all parameters, by the trainer's names."""

    def __init__(self, problems: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> None:
        more = f"; and {len(problems) - 1} more, which `harness doctor` lists" if len(problems) > 1 else ""
        super().__init__(problems[0] + more)
        self.shapes = dict(shapes)


@torch.no_grad()
def load_weights(
    parts: Iterable[nn.Module],
    case: Case,
    weights: Path | None,
    fqn: Callable[[str], str],
    rows: Mapping[str, np.ndarray] = MappingProxyType({}),
    cut: Callable[[str, Tensor], Tensor] = lambda _, whole: whole,
    fused: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> None:
    """Copy this rank's slice of every seed weight into place. No communication. Raises DoNotFit.

    fqn gives the reference's spelling of a parameter's name; rows and fused are an adapter's, by that name. cut gives this
    rank's part of a whole tensor where the trainer's own layers divide it, and no DTensor says how: see `tensor_parallel`.
    """
    problems: list[str] = []
    fqn = with_tied_output(case, fqn)
    parameters = {plain(name): parameter for part in parts for name, parameter in part.named_parameters()}
    alone = any(is_without_memory(local(parameter)) for parameter in parameters.values())
    full = _shapes_alone(case) if alone else read_weights(weights, case)
    for name, parameter in parameters.items():
        parts = fused.get(fqn(name), (fqn(name),))
        if not set(parts) <= set(full):
            problems.append(
                f"{name} {list(parameter.shape)}: fqn gives {fqn(name)!r}, which is none of the reference's"
            )
            continue
        held = {part: cut(part, torch.as_tensor(full[part][rows.get(part, slice(None))])) for part in parts}
        whole = _fused(held, blocks(parts, {part: full[part].shape[0] for part in held}))
        if whole.shape != parameter.shape:
            problems.append(f"weights of {name} have shape {tuple(whole.shape)}, the model {tuple(parameter.shape)}")
            continue
        mine = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        mine.copy_(local_slice(whole, parameter))
    if problems:
        raise DoNotFit(problems, {name: tuple(parameter.shape) for name, parameter in parameters.items()})


def _fused(held: Mapping[str, Tensor], whole: Sequence[Block]) -> Tensor:
    """held: of each part what this rank has. whole: the blocks of the fused tensor, of which it has its share."""
    if len(held) == 1:
        return next(iter(held.values()))
    length, used, pieces = sum(len(part) for part in held.values()), Counter[str](), []
    for part, size in held_blocks(whole, length):
        pieces.append(held[part][used[part] : used[part] + size])
        used[part] += size
    if not pieces:
        raise ValueError(f"{', '.join(held)} are not cut between the blocks that they are fused in")
    return torch.cat(pieces)


def plain(name: str) -> str:
    """A parameter's name without what wrappers put into it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def tensor_parallel(rank: int, degree: int) -> Callable[[str, Tensor], Tensor]:
    """`cut` of layers that are column and row parallel as Megatron's are, and of which this is one of `degree` tp ranks."""

    def cut(fqn: str, whole: Tensor) -> Tensor:
        dim = next((dim for module, dim in TP_DIM.items() if fqn.removesuffix(".weight").endswith(module)), None)
        return whole if dim is None else whole.chunk(degree, dim)[rank]

    return cut


def local_slice(full: Tensor, parameter: Tensor) -> Tensor:
    """The part of the full tensor that this rank holds, as torch.chunk splits it: the last ranks may get less, or none.

    Trap: FSDP2 over TP on one dim is split by tp first and by dp_shard inside, against the mesh's order. Its placement, a
    _StridedShard, says so.
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
