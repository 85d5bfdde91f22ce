"""Classes of ranks whose records differ only in the ranks that they name.

Checks need the record of one rank of a class, and the groups that each other rank names in its place. So a record is split into
a number, which is the same for all ranks of a class, and the groups of ranks that it names, in order. Values that no check of
a recorded job reads are left out: digests, times, errors, machines.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from harness.core.evidence.codec import encoded_without_values
from harness.core.evidence.keys import ranks_key, stable_digest
from harness.core.evidence.recording import RankRecord, RecordedStep
from harness.core.evidence.records import BACKGROUND, Collective, RankEvidence, TensorEvidence, Wrapper


@dataclass
class NumberedGroups:
    """The groups that a record names, numbered in the order in which they first occur: (group's name, its ranks as
    ranks_key writes them) -> number.
    """

    numbers: dict[tuple[str, str], int] = field(default_factory=dict)

    def number_group(self, ranks: Sequence[int], group: str = "") -> list[Any]:
        """Return [number of the group], followed by the ranks if they are not in ascending order. A new group gets the
        next number.
        """
        ascending = _ascending(tuple(ranks))
        number_of_group = self.numbers.setdefault((group, ranks_key(ascending)), len(self.numbers))
        if ascending == tuple(ranks):
            return [number_of_group]
        return [number_of_group, list(ranks)]


def rank_class_of_record(record: RankRecord) -> tuple[int, tuple[tuple[str, str], ...]]:
    """Return the number of a record's class, and (group, ranks) of each group that it names, in the order of their
    numbers.

    The ranks are a text of ranks_key. The name of the group is empty where only ranks are named. Collectives in the
    background come last, by group.
    """
    places = NumberedGroups()
    evidence = record.evidence
    named = [
        [(module, _encode_wrapper(wrapper, places)) for module, wrapper in evidence.structure.items()],
        _encode_parameters(evidence, places),
        [_encode_call(call, places) for call in sorted(evidence.collectives, key=_background_last)],
    ]
    groups = sorted((places.number_group(group.ranks, group.name), group.backend) for group in evidence.groups)
    compared_evidence = replace(
        evidence,
        rank=0,
        launch="",
        groups=(),
        structure={},
        parameters=(),
        collectives=(),
        own_groups=(),
        environment={},
        compiler={},
        settings={},
    )
    compared_steps = tuple(map(_comparable_step, record.steps))
    compared = replace(
        RankRecord(compared_evidence, compared_steps), optimizers=record.optimizers, stepped=record.stepped
    )
    return stable_digest([named, groups, encoded_without_values(compared)]), tuple(places.numbers)


@functools.lru_cache(maxsize=4096)
def _ascending(ranks: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(ranks))


def _comparable_step(step: RecordedStep) -> RecordedStep:
    """Return the step with digests, times and memory set to 0, for ranks of one class may have different ones."""
    fed = tuple(replace(inputs, digest=0, others=()) for inputs in step.fed)
    return replace(step, digests=dict.fromkeys(step.digests, 0), fed=fed, seconds=0.0, peak=0, began=0.0)


def _encode_wrapper(wrapper: Wrapper, places: NumberedGroups) -> dict[str, Any]:
    """Return a wrapper's fields as plain values, its ranks as numbers of groups."""
    ranks = {name: places.number_group(getattr(wrapper, name)) for name in ("shard_ranks", "replicate_ranks")}
    return vars(wrapper) | ranks


def _background_last(call: Collective) -> tuple[str, ...]:
    """Return a sort key that puts calls of background threads last, by group.

    When they run beside the thread that trains is chance, so their place in the order of issue means nothing.
    """
    return (call.group, *map(str, call.ranks)) if call.phase == BACKGROUND else ()


def _encode_call(call: Collective, places: NumberedGroups) -> list[Any]:
    """Return a collective as plain values, its ranks and its peer as numbers of groups, its root as a place in the
    group.
    """
    peer = None if call.peer is None else places.number_group((call.peer,))
    group = places.number_group(call.ranks, call.group)
    return [group, peer, call.op, call.dtype, call.bytes, call.phase, call.step, call.seq, call.root_place]


def _encode_parameters(evidence: RankEvidence, places: NumberedGroups) -> list[Any]:
    """Return all parameters as plain values without contents. Each mesh is encoded once, for most parameters are on the
    same one.
    """
    meshes: dict[int, Any] = {}
    for tensor in evidence.parameters:
        if tensor.mesh is not None and id(tensor.mesh) not in meshes:
            meshes[id(tensor.mesh)] = _encode_mesh(evidence.rank, np.array(tensor.mesh), places)
    return [_encode_tensor(tensor, meshes) for tensor in evidence.parameters]


def _encode_tensor(tensor: TensorEvidence, meshes: Mapping[int, Any]) -> list[Any]:
    """Return a parameter's claims, and the shape and dtype of the local shard. meshes: by address of a mesh, the
    encoded one.
    """
    mesh = None if tensor.mesh is None else meshes[id(tensor.mesh)]
    local_shard = [list(tensor.value.shape), str(tensor.value.dtype)]
    return [tensor.fqn, tensor.global_shape, tensor.dtype, mesh, tensor.placements, local_shard]


def _encode_mesh(rank: int, mesh: np.ndarray, places: NumberedGroups) -> list[Any]:
    """Return the mesh's shape, and the rank's line along each axis: the ranks that differ from it in that axis alone,
    and itself.

    A rank outside of the mesh has ["elsewhere", the mesh]. The rank's coordinate follows from its lines, unless a line
    is not in ascending order: NumberedGroups.encode adds the ranks then.
    """
    if rank not in mesh:
        return ["elsewhere", mesh.tolist()]
    return [list(mesh.shape), *map(places.number_group, mesh_lines_of_rank(rank, mesh))]


def mesh_lines_of_rank(rank: int, mesh: np.ndarray) -> list[list[int]]:
    """Return, by axis of a mesh, the ranks that differ from this rank in that axis alone, and itself, in the mesh's
    order.

    Precondition: the rank is in the mesh.
    """
    coordinate = [int(index) for index in np.argwhere(mesh == rank)[0]]
    lines = []
    for axis in range(mesh.ndim):
        other_indices = tuple(coordinate[:axis] + coordinate[axis + 1 :])
        lines.append(np.moveaxis(mesh, axis, -1)[other_indices].tolist())
    return lines
