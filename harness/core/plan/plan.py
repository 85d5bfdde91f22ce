"""The plan: which ranks form groups, which slices they hold, what moves between them, what is kept in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from harness.core.case.dims import ParallelDims
from harness.core.case.measured import Observed
from harness.core.case.traits import USUAL_TRAITS, TrainerTraits
from harness.core.plan.slices import FlatUnit, Slice, tp_dim
from harness.core.plan.traffic.flow import PARAMETER_ROLES, TIED_ROLE, Flow


@dataclass(frozen=True)
class Kept:
    """What one rank keeps of one parameter between forward and backward."""

    degree: int
    """Number of ranks that it is cut over; 1 if it is whole."""
    bytes: int
    """Bytes that are there. Where they exceed the rank's own slice, the slice is there as well."""


@dataclass(frozen=True)
class Plan:
    """What must be true of one launch. It follows from the case and the trainer's traits alone."""

    dims: ParallelDims
    """Degrees of the layout."""
    shapes: dict[str, tuple[int, ...]]
    """Fqn -> the parameter's shape; one dim where FSDP1 or ZeRO cut flattened parameters."""
    groups: dict[str, tuple[tuple[int, ...], ...]]
    """Axis of degree above 1 -> the global ranks of each of its groups."""
    shard_axis: str
    """Axis that FSDP shards over: dp_shard, cp or dp_shard_cp."""
    stages: Mapping[int, tuple[int, ...]]
    """Rank -> the pipeline stages that it runs."""
    slices: Mapping[int, dict[str, Slice]]
    """Rank and fqn -> the part of a parameter that it must hold."""
    flows: Mapping[int, tuple[Flow, ...]]
    """Rank -> its traffic in steps 1, 3, ..."""
    even_flows: Mapping[int, tuple[Flow, ...]]
    """Rank -> its traffic in steps 2, 4, ..."""
    last_flows: Mapping[int, tuple[Flow, ...]]
    """Rank -> its traffic in the launch's last step, which may have fewer samples."""
    parameter_bytes: Mapping[int, tuple[int, int]]
    """Rank -> (least, most) bytes of parameters kept between steps; the most counts the padding of uneven chunks."""
    outside_bytes: Mapping[int, int]
    """Rank -> the most bytes moved in a step outside forward and backward, in addition to planned flows."""
    integer_bytes: int
    """Most bytes of integers moved inside forward and backward, in the first two steps."""
    used_bytes: int
    """Most bytes of integers moved inside forward and backward in a later step, which DDP's find_unused_parameters
    moves."""
    spare_bytes: Mapping[int, int]
    """Rank -> the most bytes of float tensors other than parameters, gradients and optimizer state."""
    units: Mapping[int, tuple[tuple[str, ...], ...]]
    """Rank -> the fqns of each unit that FSDP gathers together; empty with other wrappers."""
    replicate_axis: str = "dp_replicate"
    """Axis that whole gradients are reduced over: dp_replicate, or under DDP with context parallel cp or dp_replicate_cp."""
    table_bytes: int = 0
    """Bytes of tables of positions, which is also how far retained bytes may grow from step to step."""
    traits: TrainerTraits = USUAL_TRAITS
    """Traits of the trainer that it is the plan for, declared and measured."""
    gradient_spare: Mapping[int, int] = field(default_factory=dict)
    """Rank -> the most bytes of gradients beyond those of its parameters."""
    flat: tuple[FlatUnit, ...] = ()
    """Units whose flattened parameters FSDP1 or ZeRO cuts; empty where parameters are cut one by one."""
    after_forward: Mapping[int, dict[str, Kept]] = field(default_factory=dict)
    """Rank and fqn -> what it keeps when a forward pass has ended; empty where nothing is gathered."""
    padding_after_forward: Mapping[int, int] = field(default_factory=dict)
    """Rank -> the most bytes that padding may add to what it keeps after forward."""
    is_exact: bool = True
    """Whether it states the bytes that are moved and held. If a layout alone is requested, it states only the least that is
    moved for parameters and gradients, and the most that is held of parameters."""
    steps: range = range(1, 2)
    """Steps that this launch trains, from 1."""
    quantized: tuple[str, ...] = ()
    """Modules whose matmuls run in 8 bits."""
    unreduced: frozenset[tuple[str, int]] = frozenset()
    """(axis, step) of gradients that a hypothesis assumes are not reduced."""
    gradient_slices: Mapping[int, dict[str, Slice]] = field(default_factory=dict)
    """Rank and fqn -> the part of a reduced gradient that it holds; empty where it is the parameter's."""
    state_slices: Mapping[int, dict[str, Slice]] = field(default_factory=dict)
    """Rank and fqn -> the part of the optimizer state that it holds; empty where it is the parameter's."""
    gradient_bytes: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Rank -> (least, most) bytes of gradients; empty where they are those of parameters."""
    state_bytes: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Rank -> (least, most) bytes of each number that the optimizer keeps; empty where they are those of parameters."""

    @property
    def measured_units(self) -> Observed | None:
        """Return FSDP2's units by rank, as measured; None if the case or the trainer's traits name them."""
        return self.traits.measured.units

    @property
    def torch_release(self) -> str:
        """Return the release of torch that ran; empty if it was not measured."""
        return self.traits.measured.torch

    @property
    def shard_degree(self) -> int:
        """Return the number of ranks in a shard group, over which FSDP or ZeRO cuts; 1 if the shard axis has degree 1."""
        return len(self.peers(0, self.shard_axis))

    @property
    def column_blocks(self) -> dict[str, int]:
        """Return the number of blocks of columns, the tp degree, of each flattened matrix that tp cuts along dim 1, by fqn.

        Empty without tp, and where parameters are not flattened.
        """
        return {fqn: self.dims.tp for fqn in self.shapes if self.flat and self.dims.tp > 1 and tp_dim(fqn) == 1}

    def states(self, flow: Flow) -> bool:
        """Return whether the bytes of a flow are stated: if the plan is not exact, only those of parameters and gradients."""
        return self.is_exact or flow.role in PARAMETER_ROLES

    def flows_of(self, rank: int, step: int) -> tuple[Flow, ...]:
        """Return a rank's traffic in a step: even ones may train on shorter samples, the last one on fewer.

        Flows that are due only in the first, the last or later steps are left out of others. So are the gradients that
        a hypothesis assumes are not reduced (`unreduced`).
        """
        flows = self.flows[rank] if step % 2 else self.even_flows[rank]
        flows = self.last_flows[rank] if step == self.steps[-1] else flows
        due = (flow for flow in flows if not (flow.later if step == self.steps[0] else flow.first))
        due = (flow for flow in due if not flow.last or step == self.steps[-1])
        return tuple(
            flow for flow in due if flow.role not in ("gradients", TIED_ROLE) or (flow.axis, step) not in self.unreduced
        )

    def group_of(self, rank: int, axis: str) -> tuple[int, ...]:
        """Return a rank's group along that axis; the rank alone where it is in no group of it."""
        return next((group for group in self.groups[axis] if rank in group), (rank,))

    def peers(self, rank: int, axis: str) -> tuple[int, ...]:
        """Return a rank's group along that axis; the rank alone where the axis has degree 1, or it is in no group of it."""
        return self.group_of(rank, axis) if axis in self.groups else (rank,)


def without_slices(plan: Plan) -> Plan:
    """Return the plan with no slices and no flat vectors, and without units where there were vectors.

    It judges recordings whose slices cannot be planned, such as those of a job with tp.
    """
    units = {rank: () for rank in plan.units} if plan.flat else plan.units
    return replace(plan, flat=(), units=units, slices={rank: {} for rank in plan.slices})
