"""The plan: which ranks form groups, which slices they hold, what moves between them, what stays in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from harness.plan.observed_units import Observed
from harness.plan.slices import FlatUnit, Slice, tp_dim
from harness.plan.traffic.flow import Flow
from harness.spec.dims import ParallelDims
from harness.spec.traits import USUAL, TrainerTraits


@dataclass(frozen=True)
class Kept:
    """Of one parameter on one rank, between forward and backward: over how many ranks it is cut (1: it is whole), and the
    bytes of what is there; where that is more than the rank's own slice, the slice is there as well."""

    degree: int
    bytes: int


@dataclass(frozen=True)
class Plan:
    """traits: of the trainer that it is the plan for. groups: by axis of degree above 1, its groups' ranks.
    slices[rank][fqn]: what each rank must hold of a parameter. gradient_slices, state_slices: of its gradient once that is
    reduced, and of its optimizer state; ZeRO cuts these and not the parameter, empty where all three are cut alike.

    shapes: of every parameter; where FSDP1 or ZeRO cuts flattened ones (`flat`: its units), of the vector: all is judged
    flattened, what tp cuts rank by rank (`columns`).
    shard_axis: the one that FSDP shards over: dp_shard, cp or dp_shard_cp. replicate_axis: the one over which whole gradients
    are reduced: dp_replicate, under DDP with context parallel cp or dp_replicate_cp. stages[rank]: the pipeline stages it runs.
    flows[rank]: its traffic in odd steps, even_flows[rank] in even ones. parameter_bytes[rank]: (least, most) bytes of
    parameters a rank may keep between steps; the most counts the padding of uneven chunks. gradient_bytes, state_bytes:
    likewise, the second of each number that the optimizer keeps; empty where they are those of parameters.
    after_forward[rank][fqn]: what it keeps of a parameter when a forward pass has ended, nothing where none is gathered;
    padding_after_forward[rank]: the bytes that padding may add to all of it. outside_bytes[rank]: the most it may move in
    a step outside forward and backward, besides what is planned there; integer_bytes: of integers inside, in the first two
    steps; used_bytes: later, with find_unused_parameters.
    units[rank]: the parameters that FSDP gathers together, nothing with other wrappers; `observed`: they are those that
    wrappers claim, for case and traits leave them open.
    table_bytes: of tables of positions, which is also the most by which what is kept may grow from step to step.
    spare_bytes[rank]: of float tensors that are neither parameters, gradients nor optimizer state, the most it may keep;
    gradient_spare[rank]: of gradients, beyond those of its parameters.
    torch: the release that ran. steps: of this launch. quantized: the modules whose matmuls run in 8 bits.
    unreduced: (axis, step) of gradients that a hypothesis assumes not to be reduced.
    """

    dims: ParallelDims
    shapes: dict[str, tuple[int, ...]]
    groups: dict[str, tuple[tuple[int, ...], ...]]
    shard_axis: str
    stages: Mapping[int, tuple[int, ...]]
    slices: Mapping[int, dict[str, Slice]]
    flows: Mapping[int, tuple[Flow, ...]]
    even_flows: Mapping[int, tuple[Flow, ...]]
    parameter_bytes: Mapping[int, tuple[int, int]]
    outside_bytes: Mapping[int, int]
    integer_bytes: int
    used_bytes: int
    spare_bytes: Mapping[int, int]
    units: Mapping[int, tuple[tuple[str, ...], ...]]
    replicate_axis: str = "dp_replicate"
    table_bytes: int = 0
    traits: TrainerTraits = USUAL
    observed: Observed | None = None
    gradient_spare: Mapping[int, int] = field(default_factory=dict)
    torch: str = ""
    flat: tuple[FlatUnit, ...] = ()
    after_forward: Mapping[int, dict[str, Kept]] = field(default_factory=dict)
    padding_after_forward: Mapping[int, int] = field(default_factory=dict)
    steps: range = range(1, 2)
    quantized: tuple[str, ...] = ()
    unreduced: frozenset[tuple[str, int]] = frozenset()
    gradient_slices: Mapping[int, dict[str, Slice]] = field(default_factory=dict)
    state_slices: Mapping[int, dict[str, Slice]] = field(default_factory=dict)
    gradient_bytes: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    state_bytes: Mapping[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def shards(self) -> int:
        """Over how many ranks FSDP cuts a parameter."""
        return len(self.peers(0, self.shard_axis))

    @property
    def columns(self) -> dict[str, int]:
        """By fqn, of flattened matrices that tp cuts along dim 1: in how many blocks of columns they lie."""
        return {fqn: self.dims.tp for fqn in self.shapes if self.flat and self.dims.tp > 1 and tp_dim(fqn) == 1}

    def flows_of(self, rank: int, step: int) -> tuple[Flow, ...]:
        """Its traffic in a step: even ones may train on shorter samples."""
        flows = self.flows[rank] if step % 2 else self.even_flows[rank]
        due = (flow for flow in flows if not (flow.later if step == self.steps[0] else flow.first))
        due = (flow for flow in due if not flow.last or step == self.steps[-1])
        return tuple(flow for flow in due if flow.role != "gradients" or (flow.axis, step) not in self.unreduced)

    def group_of(self, rank: int, axis: str) -> tuple[int, ...]:
        return next(group for group in self.groups[axis] if rank in group)

    def peers(self, rank: int, axis: str) -> tuple[int, ...]:
        """The same, but of a rank alone where the axis has degree 1."""
        return self.group_of(rank, axis) if axis in self.groups else (rank,)
