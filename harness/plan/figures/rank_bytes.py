"""The bytes of a rank's memory: what stays between steps exactly, what is there within a step by arithmetic of its wrapper.

Left out: the CUDA context, buffers of NCCL, workspaces of kernels, copies for communication, and what the allocator wastes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from harness.plan.figures.activations import activation_bytes
from harness.plan.grid import coordinate
from harness.plan.plan import Plan
from harness.plan.slices import BYTES, padded_numel
from harness.spec.case import Case

GPUS = {"A100": 80, "H100": 80, "H200": 141, "B200": 180}
"""GB that they are sold with, of 10^9 bytes each. (80 GB are 80 GiB, 5.9e9 bytes more, of which a context, NCCL and an
allocator take some that nobody can compute.)"""

STATES = {"adamw": 2, "sgd": 0}


@dataclass(frozen=True)
class RankBytes:
    """parameters, gradients, optimizer: of the rank's slices, exactly; padding: of the first two, at most. These stay between
    steps. gathered: parameters of other ranks, at their most. unreduced: gradients that wait to be reduced. activations: an
    estimate, see activations.py."""

    parameters: int
    gradients: int
    optimizer: int
    padding: int
    gathered: int
    unreduced: int
    activations: int

    @property
    def stays(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.padding

    @property
    def most(self) -> int:
        return self.stays + self.gathered + self.unreduced + self.activations


def rank_bytes(case: Case, plan: Plan, rank: int) -> RankBytes:
    parameters, padded = plan.parameter_bytes[rank]
    return RankBytes(
        parameters=parameters,
        gradients=parameters,
        optimizer=STATES[case.training.optimizer] * parameters,
        padding=2 * (padded - parameters),
        gathered=_gathered(case, plan, rank),
        unreduced=_unreduced(case, plan, rank),
        activations=activation_bytes(case, rank, plan.traits),
    )


def _gathered(case: Case, plan: Plan, rank: int) -> int:
    """What stays whole after forward, and of the units that do not the two largest: one in use, one that is prefetched. A
    pipeline's stages keep what backward gathered until the pass is over."""
    if plan.shards == 1:
        return 0
    size = BYTES[case.training.compute_dtype or case.training.dtype]
    if case.dims.pp > 1:
        return _elements(case, plan, rank, plan.slices[rank]) * size
    after = plan.after_forward[rank]
    kept = sum(one.bytes for one in after.values() if one.degree < plan.shards)
    return kept + _two_largest(case, plan, rank, freed=True) * size


def _unreduced(case: Case, plan: Plan, rank: int) -> int:
    """Where several backwards add up before they are reduced, whole gradients, in the dtype that they are reduced in; else
    those of two units, as they are computed. DDP's buckets are a copy of all."""
    if case.wrapper in ("ddp", "replicate"):
        return plan.parameter_bytes[rank][1]
    if plan.shards == 1 and case.wrapper is None:
        return 0
    computed, features = case.training.compute_dtype or case.training.dtype, case.features
    if case.dims.pp > 1 or (features.accumulation > 1 and features.defer_sync is True):
        return _elements(case, plan, rank, plan.slices[rank]) * BYTES[features.reduce_dtype or computed]
    return _two_largest(case, plan, rank, freed=False) * BYTES[computed]


def _two_largest(case: Case, plan: Plan, rank: int, *, freed: bool) -> int:
    """Elements of FSDP's units, of those that are freed after forward alone or of all."""
    after = plan.after_forward[rank]
    units = [
        [fqn for fqn in unit if not freed or fqn not in after or after[fqn].degree == plan.shards]
        for unit in plan.units[rank]
    ]
    return sum(sorted(_elements(case, plan, rank, unit) for unit in units)[-2:])


def _elements(case: Case, plan: Plan, rank: int, names: Iterable[str]) -> int:
    """Of these parameters as tp leaves them, padded as FSDP gathers them."""
    tp_index = coordinate(case.dims, rank)["tp"]
    return sum(padded_numel(case, plan.traits, fqn, tp_index) for fqn in names)
