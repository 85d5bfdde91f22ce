"""Ranks whose records differ only in the ranks that they name: checks need the record of one of them, and where others stand.

A record is split into one number, the same for ranks that are alike, and the groups of ranks that it names, in that order.
What no check of a recorded job reads is left out: digests, times, errors, machines.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from harness.core.evidence.keys import number, ranks_key
from harness.core.evidence.recording import RankRecord, RecordedStep
from harness.core.evidence.records import BACKGROUND, Collective, RankEvidence, TensorEvidence, Wrapper
from harness.core.evidence.store import encoded_without_values


@dataclass
class Places:
    """The number that stands for a group and its ranks here."""

    numbers: dict[tuple[str, str], int] = field(default_factory=dict)

    def of(self, ranks: Sequence[int], group: str = "") -> list[Any]:
        """Return that number, with the ranks if their order is not the usual one."""
        usual = _sorted(tuple(ranks))
        told = [self.numbers.setdefault((group, ranks_key(usual)), len(self.numbers))]
        return told if usual == tuple(ranks) else [*told, list(ranks)]


def alike(record: RankRecord) -> tuple[int, tuple[tuple[str, str], ...]]:
    """The number, and (group, ranks) of each place; group is empty where none is named."""
    places, evidence = Places(), record.evidence
    named = [
        [(module, _wrapper(wrapper, places)) for module, wrapper in evidence.structure.items()],
        _parameters(evidence, places),
        [_call(call, places) for call in sorted(evidence.collectives, key=_thread)],
    ]
    groups = sorted((places.of(group.ranks, group.name), group.backend) for group in evidence.groups)
    rest = replace(
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
    plain = replace(
        RankRecord(rest, tuple(map(_step, record.steps))), optimizers=record.optimizers, stepped=record.stepped
    )
    return number([named, groups, encoded_without_values(plain)]), tuple(places.numbers)


@functools.lru_cache(maxsize=4096)
def _sorted(ranks: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(ranks))


def _step(step: RecordedStep) -> RecordedStep:
    fed = tuple(replace(one, digest=0, others=()) for one in step.fed)
    return replace(step, digests=dict.fromkeys(step.digests, 0), fed=fed, seconds=0.0, peak=0, began=0.0)


def _wrapper(wrapper: Wrapper, places: Places) -> dict[str, Any]:
    ranks = {name: places.of(getattr(wrapper, name)) for name in ("shard_ranks", "replicate_ranks")}
    return vars(wrapper) | ranks


def _thread(call: Collective) -> tuple[str, ...]:
    """What runs in the background comes last, by group: when it does, beside the thread that trains, is chance."""
    return (call.group, *map(str, call.ranks)) if call.phase == BACKGROUND else ()


def _call(call: Collective, places: Places) -> list[Any]:
    peer = None if call.peer is None else places.of((call.peer,))
    group = places.of(call.ranks, call.group)
    return [group, peer, call.op, call.dtype, call.bytes, call.phase, call.step, call.seq, call.root_place]


def _parameters(evidence: RankEvidence, places: Places) -> list[Any]:
    meshes: dict[int, Any] = {}
    for tensor in evidence.parameters:
        if tensor.mesh is not None and id(tensor.mesh) not in meshes:
            meshes[id(tensor.mesh)] = _mesh(evidence.rank, np.array(tensor.mesh), places)
    return [_tensor(tensor, meshes) for tensor in evidence.parameters]


def _tensor(tensor: TensorEvidence, meshes: Mapping[int, Any]) -> list[Any]:
    mesh = None if tensor.mesh is None else meshes[id(tensor.mesh)]
    held = [list(tensor.value.shape), str(tensor.value.dtype)]
    return [tensor.fqn, tensor.global_shape, tensor.dtype, mesh, tensor.placements, held]


def _mesh(rank: int, mesh: np.ndarray, places: Places) -> list[Any]:
    """Its shape, and the rank's line along each axis. Where a rank stands in its line follows from that, unless the line is not
    in the order of ranks."""
    if rank not in mesh:
        return ["elsewhere", mesh.tolist()]
    return [list(mesh.shape), *map(places.of, lines_through(rank, mesh))]


def lines_through(rank: int, mesh: np.ndarray) -> list[list[int]]:
    """Return, by axis of a mesh that has the rank, the ranks that differ from it in that axis alone."""
    at = [int(index) for index in np.argwhere(mesh == rank)[0]]
    return [np.moveaxis(mesh, axis, -1)[tuple(at[:axis] + at[axis + 1 :])].tolist() for axis in range(mesh.ndim)]
