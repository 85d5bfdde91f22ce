"""Claims of a rank's wrappers and DTensors: which slices of parameters it holds, and the role of each group.

A mesh may have thousands of ranks, and most parameters are on the same one. So each mesh is turned into an array once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from harness.core.evidence.alike import mesh_lines_of_rank
from harness.core.evidence.keys import ranks_from_key, ranks_key, stable_digest
from harness.core.evidence.recording import RankRecord
from harness.core.evidence.records import RankEvidence, TensorEvidence

# ---- Parameters of which nothing says where they lie: what each one held before the first step, and after the last on record


MAX_LISTED_PARAMETERS = 1000
"""Parameters that are listed, at most: a summary must be small."""


def unclaimed_digests(record: RankRecord) -> dict[str, tuple[int, int]]:
    """Return, by fqn, the digests of a parameter before the first step and after the last on record.

    Empty where a wrapper or a DTensor claims something, and where digests before the first step or after another are
    missing. At most MAX_LISTED_PARAMETERS are listed, the first by name.
    """
    evidence = record.evidence
    if evidence.structure or any(tensor.mesh is not None for tensor in evidence.parameters):
        return {}
    digests_by_step = {step.step: step.digests for step in record.steps if step.digests}
    if 0 not in digests_by_step or len(digests_by_step) < 2:
        return {}
    first = digests_by_step[0]
    last = digests_by_step[max(digests_by_step)]
    return {fqn: (first[fqn], last[fqn]) for fqn in sorted({*first} & {*last})[:MAX_LISTED_PARAMETERS]}


# ---- parameters that are claimed


NOWHERE: list[int] = []
_known: dict[int, tuple[Any, np.ndarray, int]] = {}


def _cached_mesh(mesh: Any) -> tuple[Any, np.ndarray, int]:
    """Return the mesh itself, the mesh as an array, and one number for its ranks.

    The cache is by address. It keeps the mesh itself, so that no other mesh gets the same address.
    """
    if id(mesh) not in _known:
        if len(_known) > 64:
            _known.clear()
        array = np.array(mesh)
        _known[id(mesh)] = (mesh, array, stable_digest(sorted(array.flatten().tolist())))
    return _known[id(mesh)]


def placement_text(tensor: TensorEvidence) -> str:
    """Return a text of a tensor's placement along axes of several ranks: "Replicate over 2, Shard(0) over 8".

    It is "plain" for a tensor without a mesh, and "on one rank" where no axis has several ranks.
    """
    if tensor.mesh is None:
        return "plain"
    _, mesh, _ = _cached_mesh(tensor.mesh)
    texts = [
        f"{placement} over {degree}"
        for placement, degree in zip(tensor.placements, mesh.shape, strict=True)
        if degree > 1
    ]
    return ", ".join(texts) or "on one rank"


def claimed_slice_keys(evidence: RankEvidence) -> list[tuple[Any, ...]]:
    """Return a key of the slice that this rank claims to hold, for each parameter of which something claims it.

    A key is (fqn, group or mesh, cuts). Ranks with equal keys are replicas. A parameter that DDP manages is whole on
    the ranks of its group, and so is one that FSDP1 shards over no ranks. Left out are plain parameters that DDP
    ignores or that no wrapper copies, and DTensors that _slice_key has no key of.
    """
    wrappers = evidence.structure.values()
    ignored_fqns = set[str]().union(*(wrapper.ignored for wrapper in wrappers))
    replicas = {wrapper.replicate_ranks for wrapper in wrappers if wrapper.kind in ("ddp", "replicate")}
    replicas -= {()}  # of a group without ranks
    if wrappers and all(wrapper.kind == "fsdp1" and len(wrapper.shard_ranks) <= 1 for wrapper in wrappers):  # NO_SHARD
        replicas = {wrapper.replicate_ranks for wrapper in wrappers if len(wrapper.replicate_ranks) > 1}
    replicated_key = (ranks_key(replicas.pop()),) if len(replicas) == 1 else None
    keys: list[tuple[Any, ...]] = []
    for tensor in evidence.parameters:
        key: tuple[Any, ...] | None
        if tensor.mesh is not None:
            key = _slice_key(evidence.rank, tensor)
        else:
            key = None if tensor.fqn in ignored_fqns else replicated_key
        if key is not None:
            keys.append((tensor.fqn, *key))
    return keys


def _slice_key(rank: int, tensor: TensorEvidence) -> tuple[Any, ...] | None:
    """Return (number of the mesh, (placement, degree, index) of each axis that cuts the tensor).

    None if the rank is not in the mesh, if the mesh has one rank, which claims nothing of others, or if the tensor is partial.
    """
    _, mesh, mesh_number = _cached_mesh(tensor.mesh)
    if rank not in mesh or mesh.size == 1:
        return None
    coordinate = [int(index) for index in np.argwhere(mesh == rank)[0]]
    axes = [
        (placement, degree, index)
        for placement, degree, index in zip(tensor.placements, mesh.shape, coordinate, strict=True)
        if degree > 1
    ]
    if any(placement == "Partial" for placement, _, _ in axes):
        return None
    return (mesh_number, *(axis for axis in axes if axis[0] != "Replicate"))


def group_roles(evidence: RankEvidence) -> dict[str, str]:
    """Return the role of each group in words, by its ranks as ranks_key writes them.

    "sharded by fsdp2" and "replicated by ddp" name the wrapper; "replicated by fsdp1 alone" is one that shards nothing.
    "cut" and "copied" are of DTensors alone, which do not show whether this is tensor parallelism. A wrapper's role
    comes before a DTensor's.
    """
    role_of: dict[str, str] = {}
    for tensor in evidence.parameters:
        for placement, group in _placements_by_group(evidence.rank, tensor):
            role_of[group] = "cut" if "Shard" in placement else role_of.get(group, "copied")
    for wrapper in evidence.structure.values():
        if len(wrapper.shard_ranks) > 1:
            role_of[ranks_key(tuple(sorted(wrapper.shard_ranks)))] = f"sharded by {wrapper.kind}"
        if len(wrapper.replicate_ranks) > 1:
            role = f"replicated by {wrapper.kind}"
            if wrapper.kind.startswith("fsdp") and len(wrapper.shard_ranks) <= 1:
                role += " alone"
            role_of[ranks_key(tuple(sorted(wrapper.replicate_ranks)))] = role
    return role_of


def copied_contents(record: RankRecord) -> dict[str, dict[int, int]]:
    """Return the contents by step of parameters that DTensors claim to copy over a group over which they cut others.

    The key is the group's ranks as ranks_key writes them; a group without such parameters is left out. Contents are one
    number for all of them. Under tensor parallelism these are norms, for example.
    """
    copied = defaultdict[str, set[str]](set)
    cut = set[str]()
    for tensor in record.evidence.parameters:
        for placement, ranks in _placements_by_group(record.evidence.rank, tensor):
            if "Shard" in placement:
                cut.add(ranks)
            elif placement == "Replicate" and "Partial" not in tensor.placements:
                copied[ranks].add(tensor.fqn)
    return {group: _contents_by_step(record, copied[group]) for group in sorted(cut.intersection(copied))}


def uncut_contents(record: RankRecord) -> dict[str, dict[int, int]]:
    """Return the contents by step of parameters that lie outside of a mesh over which DTensors cut others.

    Under tensor parallelism these are norms that a trainer lays on the data ranks alone. Each rank of the group then
    holds all of such a parameter, unless the trainer cut it by hand. A key is the group's ranks as ranks_key writes
    them, and one of two kinds of parameters; a kind without any is left out, and so are groups of wrappers.

    `drawn` did not begin as constants: ranks that cut them by hand began with other numbers. `constant` lie in modules
    all of whose parameters began as constants; a layer that is cut by hand has a weight besides.
    """
    wrappers = record.evidence.structure.values()
    ignored_fqns = set[str]()
    wrapper_groups = set[str]()
    for wrapper in wrappers:
        ignored_fqns.update(wrapper.ignored)
        wrapper_groups.add(ranks_key(tuple(sorted(wrapper.shard_ranks))))
        wrapper_groups.add(ranks_key(tuple(sorted(wrapper.replicate_ranks))))
    parameters = record.evidence.parameters
    cut_over = set[str]()
    for tensor in parameters:
        for placement, group in _placements_by_group(record.evidence.rank, tensor):
            if "Shard" in placement:
                cut_over.add(group)
    constant_fqns = set[str]().union(*(step.constant for step in record.steps))
    modules_with_drawn = {_module_of(tensor.fqn) for tensor in parameters if tensor.fqn not in constant_fqns}
    contents: dict[str, dict[int, int]] = {}
    for group in sorted(cut_over - wrapper_groups):
        outside_fqns = {
            tensor.fqn
            for tensor in parameters
            if tensor.fqn not in ignored_fqns and _lies_outside(tensor, ranks_from_key(group))
        }
        drawn_fqns = outside_fqns - constant_fqns
        of_constant_modules = {fqn for fqn in outside_fqns if _module_of(fqn) not in modules_with_drawn}
        for beginning, fqns in (("drawn", drawn_fqns), ("constant", of_constant_modules)):
            if fqns:
                contents[f"{group} {beginning}"] = _contents_by_step(record, fqns)
    return contents


def _module_of(fqn: str) -> str:
    """Return the name of the module that has a parameter: layers.0.wq of layers.0.wq.weight. Empty for one of the root."""
    return fqn.rpartition(".")[0]


def _lies_outside(tensor: TensorEvidence, ranks: Sequence[int]) -> bool:
    """Return whether a tensor is plain, or is on a mesh that lacks some of these ranks."""
    return tensor.mesh is None or not set(ranks) <= set(_cached_mesh(tensor.mesh)[1].flatten().tolist())


def _contents_by_step(record: RankRecord, fqns: Collection[str]) -> dict[int, int]:
    """Return, by step, one number for the bytes of these parameters. Steps without digests are left out."""
    digests_by_step = {}
    for step in record.steps:
        digests_by_step[step.step] = sorted((fqn, step.digests[fqn]) for fqn in fqns if fqn in step.digests)
    return {step: stable_digest(digests) for step, digests in digests_by_step.items() if digests}


def ignored_digests(record: RankRecord) -> dict[str, dict[int, int]]:
    """Return, by fqn, the digest by step of each parameter that a wrapper ignores, without those that begin as
    constants.

    They are a rank's own experts, or replicas that a wrapper ignores by mistake. Two experts may both begin with zeros.
    A parameter without digests has an empty dict.
    """
    ignored_fqns = set[str]()
    for wrapper in record.evidence.structure.values():
        ignored_fqns.update(wrapper.ignored)
    for step in record.steps:
        ignored_fqns.difference_update(step.constant)
    digests_of = {}
    for fqn in sorted(ignored_fqns):
        digests_of[fqn] = {step.step: step.digests[fqn] for step in record.steps if fqn in step.digests}
    return digests_of


def _placements_by_group(rank: int, tensor: TensorEvidence) -> list[tuple[str, str]]:
    """Return (placement, ranks along it as ranks_key writes them) of each axis of the tensor's mesh that has several
    ranks.

    Empty for a plain tensor, and for a rank outside of the mesh.
    """
    _, mesh, _ = _cached_mesh(tensor.mesh if tensor.mesh is not None else NOWHERE)
    if rank not in mesh:
        return []
    axes = zip(tensor.placements, mesh_lines_of_rank(rank, mesh), strict=True)
    return [(placement, ranks_key(tuple(sorted(line)))) for placement, line in axes if len(line) > 1]
