"""Imbalance between ranks: the matmuls of stages, rows of the vocabulary over shards, causal attention over cp."""

from __future__ import annotations

from dataclasses import dataclass, replace

from harness.core.case.case import Case
from harness.core.plan.figures.pipeline_time import matmul_operations
from harness.core.plan.grid import shard_degree_and_index
from harness.core.plan.plan import Plan
from harness.core.plan.slices import numel, slice_of
from harness.core.plan.stages import layers_of_stage, stages_of_rank, token_positions_of_rank


@dataclass(frozen=True)
class Balance:
    """Work or memory of ranks along an axis."""

    shares: tuple[float, ...]
    """Amount at each index of the axis."""

    @property
    def excess(self) -> float:
        """Return by which part of the mean the busiest exceeds it, 0.25 for a quarter more: all others wait for it."""
        return max(self.shares) * len(self.shares) / sum(self.shares) - 1


def layers_by_stage(case: Case) -> tuple[int, ...]:
    """Return the number of layers of each stage."""
    return tuple(len(layers_of_stage(case, stage)) for stage in range(case.n_stages))


def matmuls_over_pp(case: Case) -> Balance:
    """Return the operations of a token's forward pass on each rank of a pipeline, all its stages together."""
    operations = []
    for index in range(case.dims.pp):
        first_rank = index * case.dims.world_size // case.dims.pp
        operations.append(sum(matmul_operations(case, stage) for stage in stages_of_rank(case, first_rank)))
    return Balance(tuple(operations))


def attention_over_cp(case: Case) -> Balance:
    """Return the number of pairs of a query and a key that is not masked, by cp rank, for one sample."""
    ranks = [index * case.dims.tp for index in range(case.dims.cp)]
    return Balance(
        tuple(float((token_positions_of_rank(case, rank, case.training.seq_len) + 1).sum()) for rank in ranks)
    )


def unbalanced_attention_over_cp(case: Case) -> Balance:
    """Return the number of pairs of a query and a key that is not masked, by cp rank, as if no load balance were
    requested."""
    return attention_over_cp(replace(case, features=replace(case.features, cp_load_balance=False)))


def rows_over_shards(case: Case, plan: Plan, fqn: str) -> Balance:
    """Return the number of elements of a parameter on each rank of a shard group, at index 0 of tp."""
    degree, _ = shard_degree_and_index(case.data_dims, 0)
    shape = plan.shapes[fqn]
    cut_dim = plan.traits.measured.cut_dims.get(fqn, 0)
    elements = []
    for index in range(degree):
        elements.append(numel(slice_of(fqn, shape, (case.dims.tp, 0), (degree, index), cut_dim)))
    return Balance(tuple(elements))
