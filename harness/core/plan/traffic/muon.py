"""Traffic of Muon: the matrices that it orthogonalises whole, of which each rank has a slice."""

from __future__ import annotations

from collections.abc import Iterable

from harness.core.case.case import Case
from harness.core.case.traits import TrainerTraits
from harness.core.plan.grid import coordinate_of_rank, shard_axis
from harness.core.plan.slices import BYTES, padded_numel, parameter_shapes, tp_dim
from harness.core.plan.stages import parameters_of_rank
from harness.core.plan.traffic.flow import OUTSIDE, Flow
from harness.reference.config import rule_of

MATRICES_ROLE = "matrices"
"""Role of what Muon gathers: updates whose slices lie on several ranks."""


def muon_flows(case: Case, traits: TrainerTraits, rank: int) -> Iterable[Flow]:
    """Yield what a rank gathers so that Muon orthogonalises whole matrices, over the shard axis and over tp.

    Nothing if each matrix has an owner that does it for the others (`muon_owner`). Flows of 0 bytes if no matrix is
    Muon's.
    """
    if not traits.muon_owner:
        for axis, size in _gathered_bytes_by_axis(case, traits, rank):
            yield Flow(axis, MATRICES_ROLE, "all_gather", OUTSIDE, size)


def owners_bytes(case: Case, traits: TrainerTraits, rank: int) -> int:
    """Return the most bytes that ranks move to the owners of matrices and back, by any collectives; 0 without
    `muon_owner`."""
    if not traits.muon_owner:
        return 0
    return 2 * sum(size for _, size in _gathered_bytes_by_axis(case, traits, rank))


def _gathered_bytes_by_axis(case: Case, traits: TrainerTraits, rank: int) -> Iterable[tuple[str, int]]:
    """Yield an axis and the bytes gathered over it: FSDP's cuts are undone first, of what tp left of a matrix; then
    those of tp."""
    fqns = [fqn for fqn in parameters_of_rank(case, rank) if rule_of(case.training, fqn) == "muon"]
    size = BYTES[case.training.dtype]
    tp_index = coordinate_of_rank(case.dims, rank)["tp"]
    if case.shards > 1:
        yield shard_axis(case.data_dims), sum(padded_numel(case, traits, fqn, tp_index) for fqn in fqns) * size
    if case.dims.tp > 1:
        yield "tp", sum(_padded_over_tp(case, fqn) for fqn in fqns) * size


def _padded_over_tp(case: Case, fqn: str) -> int:
    """Return the number of elements of a whole matrix, the dim that tp cuts padded to equal parts; dim 0 if tp cuts
    none."""
    rows, columns = parameter_shapes(case.model)[fqn]
    tp = case.dims.tp
    dim = tp_dim(fqn)
    return -(-(rows, columns)[dim or 0] // tp) * tp * (rows if dim else columns)
