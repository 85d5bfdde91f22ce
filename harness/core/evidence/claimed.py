"""What a rank's wrappers and DTensors claim: where parameters lie, and what groups are for.

A mesh may have thousands of ranks, and most parameters are on the same one: each is looked up once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from harness.core.evidence.alike import lines_through
from harness.core.evidence.keys import number, ranks_key, ranks_of
from harness.core.evidence.recording import RankRecord
from harness.core.evidence.records import RankEvidence, TensorEvidence

# ---- Parameters of which nothing says where they lie: what each one held before the first step, and after the last on record


MOST = 1000
"""Parameters that are listed, at most: a summary must be small."""


def unclaimed(record: RankRecord) -> dict[str, tuple[int, int]]:
    """Return by fqn two digests; empty where a wrapper or a DTensor claims something."""
    evidence = record.evidence
    if evidence.structure or any(tensor.mesh is not None for tensor in evidence.parameters):
        return {}
    read = {step.step: step.digests for step in record.steps if step.digests}
    if 0 not in read or len(read) < 2:
        return {}
    first, last = read[0], read[max(read)]
    return {fqn: (first[fqn], last[fqn]) for fqn in sorted({*first} & {*last})[:MOST]}


# ---- parameters that are claimed


NOWHERE: list[int] = []
_known: dict[int, tuple[Any, np.ndarray, int]] = {}


def _looked_up(mesh: Any) -> tuple[Any, np.ndarray, int]:
    """The mesh itself, so that its address is not used again; as an array; and its ranks as one number."""
    if id(mesh) not in _known:
        if len(_known) > 64:
            _known.clear()
        array = np.array(mesh)
        _known[id(mesh)] = (mesh, array, number(sorted(array.flatten().tolist())))
    return _known[id(mesh)]


def placement_text(tensor: TensorEvidence) -> str:
    """ "Replicate over 2, Shard(0) over 8"; "plain"."""
    if tensor.mesh is None:
        return "plain"
    degrees = _looked_up(tensor.mesh)[1].shape
    texts = [f"{kind} over {n}" for kind, n in zip(tensor.placements, degrees, strict=True) if n > 1]
    return ", ".join(texts) or "on one rank"


def claimed_places(evidence: RankEvidence) -> list[tuple[Any, ...]]:
    """Which of its parts this rank claims to hold, of each parameter of which something claims it. Ranks with equal places are
    replicas. What DDP looks after is whole on the ranks of its group, and what FSDP1 shards over no ranks."""
    wrappers = evidence.structure.values()
    ignored = {fqn for wrapper in wrappers for fqn in wrapper.ignored}
    whole = {w.replicate_ranks for w in wrappers if w.kind in ("ddp", "replicate")} - {()}  # of a group without ranks
    if wrappers and all(w.kind == "fsdp1" and len(w.shard_ranks) <= 1 for w in wrappers):  # NO_SHARD
        whole = {w.replicate_ranks for w in wrappers if len(w.replicate_ranks) > 1}
    of_ddp = (ranks_key(whole.pop()),) if len(whole) == 1 else None
    found = []
    for tensor in evidence.parameters:
        plain = None if tensor.fqn in ignored else of_ddp
        place = _place(evidence.rank, tensor) if tensor.mesh is not None else plain
        if place is not None:
            found.append((tensor.fqn, *place))
    return found


def _place(rank: int, tensor: TensorEvidence) -> tuple[Any, ...] | None:
    """The mesh, and by sharded axis of it how the tensor is cut, in how many parts, and which one this is. A mesh of one rank
    claims nothing of others."""
    mesh = _looked_up(tensor.mesh)[1]
    if rank not in mesh or mesh.size == 1:
        return None
    at = [int(index) for index in np.argwhere(mesh == rank)[0]]
    cut = [(kind, n, i) for kind, n, i in zip(tensor.placements, mesh.shape, at, strict=True) if n > 1]
    if any(kind == "Partial" for kind, _, _ in cut):
        return None
    return (_looked_up(tensor.mesh)[2], *(one for one in cut if one[0] != "Replicate"))


def roles(evidence: RankEvidence) -> dict[str, str]:
    """Return what is claimed of each group: a wrapper shards parameters over it, or replicates them; DTensors are cut or copied
    over it. DTensors do not say whether this is tensor parallelism."""
    found: dict[str, str] = {}
    for tensor in evidence.parameters:
        for kind, ranks in _lines(evidence.rank, tensor):
            found[ranks] = "cut" if "Shard" in kind else found.get(ranks, "copied")
    for wrapper in evidence.structure.values():
        if len(wrapper.shard_ranks) > 1:
            found[ranks_key(tuple(sorted(wrapper.shard_ranks)))] = f"sharded by {wrapper.kind}"
        if len(wrapper.replicate_ranks) > 1:
            alone = " alone" * (wrapper.kind.startswith("fsdp") and len(wrapper.shard_ranks) <= 1)
            found[ranks_key(tuple(sorted(wrapper.replicate_ranks)))] = f"replicated by {wrapper.kind}{alone}"
    return found


def copies(record: RankRecord) -> dict[str, dict[int, int]]:
    """Return, by group, what DTensors claim to copy: under tensor parallelism norms, for example."""
    copied, cut = defaultdict[str, set[str]](set), set[str]()
    for tensor in record.evidence.parameters:
        for kind, ranks in _lines(record.evidence.rank, tensor):
            if "Shard" in kind:
                cut.add(ranks)
            elif kind == "Replicate" and "Partial" not in tensor.placements:
                copied[ranks].add(tensor.fqn)
    found: dict[str, dict[int, int]] = {}
    for ranks in sorted(cut.intersection(copied)):
        found[ranks] = _contents(record, copied[ranks])
    return found


def uncut(record: RankRecord) -> dict[str, dict[int, int]]:
    """Return the contents by step of parameters that lie outside of a mesh over which DTensors cut others.

    Under tensor parallelism these are norms that a trainer lays on the data ranks alone. Each rank of the group then holds all
    of such a parameter, unless the trainer cut it by hand. So a key is a group and one of two kinds of parameters.
    `drawn` did not begin as constants: ranks that cut them by hand began with other numbers.
    `constant` lie in modules all of whose parameters began as constants; a layer that is cut by hand has a weight besides.
    """
    wrappers = record.evidence.structure.values()
    left_alone = {fqn for wrapper in wrappers for fqn in wrapper.ignored}
    of_wrappers = {ranks_key(tuple(sorted(ranks))) for w in wrappers for ranks in (w.shard_ranks, w.replicate_ranks)}
    rank, parameters = record.evidence.rank, record.evidence.parameters
    lines = {tensor.fqn: _lines(rank, tensor) for tensor in parameters}
    cut_over = {ranks for line in lines.values() for kind, ranks in line if "Shard" in kind} - of_wrappers
    constant = {fqn for step in record.steps for fqn in step.constant}
    with_drawn = {fqn.rpartition(".")[0] for fqn in lines if fqn not in constant}
    found: dict[str, dict[int, int]] = {}
    for ranks in sorted(cut_over):
        outside = [
            tensor for tensor in parameters if tensor.fqn not in left_alone and _outside(tensor, ranks_of(ranks))
        ]
        drawn = {tensor.fqn for tensor in outside} - constant
        alike = {tensor.fqn for tensor in outside if tensor.fqn.rpartition(".")[0] not in with_drawn}
        for how, fqns in (("drawn", drawn), ("constant", alike)):
            if fqns:
                found[f"{ranks} {how}"] = _contents(record, fqns)
    return found


def _outside(tensor: TensorEvidence, ranks: Sequence[int]) -> bool:
    """Return whether a mesh of the tensor's own, or none, lacks other ranks of a group."""
    return tensor.mesh is None or not set(ranks) <= set(_looked_up(tensor.mesh)[1].flatten().tolist())


def _contents(record: RankRecord, fqns: Collection[str]) -> dict[int, int]:
    """Return by step one number for the bytes of these parameters."""
    read = {step.step: sorted((fqn, step.digests[fqn]) for fqn in fqns if fqn in step.digests) for step in record.steps}
    return {step: number(digests) for step, digests in read.items() if digests}


def ignored(record: RankRecord) -> dict[str, dict[int, int]]:
    """A rank's own experts, or replicas that a wrapper ignores by mistake. Two experts may both begin with zeros."""
    constant = {fqn for step in record.steps for fqn in step.constant}
    names = {fqn for wrapper in record.evidence.structure.values() for fqn in wrapper.ignored} - constant
    return {fqn: {s.step: s.digests[fqn] for s in record.steps if fqn in s.digests} for fqn in sorted(names)}


def _lines(rank: int, tensor: TensorEvidence) -> list[tuple[str, str]]:
    """Return the placement on each axis of its mesh, and the ranks along it."""
    if rank not in (mesh := _looked_up(tensor.mesh if tensor.mesh is not None else NOWHERE)[1]):
        return []
    named = zip(tensor.placements, lines_through(rank, mesh), strict=True)
    return [(kind, ranks_key(tuple(sorted(line)))) for kind, line in named if len(line) > 1]
