"""The duration of a step, an estimate to compare layouts by: what is computed, and for what of communication a rank waits.

Computing attains a fixed part of a GPU's peak, links a fixed part of theirs. Tensor, context and pipeline parallel wait
for all that they send. Data parallel sends while blocks compute, and is waited for beyond that. Latencies and
stragglers are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from harness.core.case.case import Case
from harness.core.plan.figures.gpus import Machine
from harness.core.plan.figures.links import traffic_by_axis
from harness.core.plan.figures.pipeline_time import linear_operations, matmul_operations, pipeline_time
from harness.core.plan.figures.rank_bytes import RankBytes
from harness.core.plan.plan import Plan
from harness.core.plan.stages import stages_of_rank

COMPUTE_EFFICIENCY = 0.6
"""Part of the peak that is attained: chosen, not measured."""
LINK_EFFICIENCY = 0.7
"""Part of the links' speed that is attained: chosen, not measured."""
RECOMPUTED_FORWARDS = {"none": 0.0, "op": 0.5, "layer": 0.5, "full": 1.0}
"""Forward passes that checkpointing computes again."""
WAITED_AXES = ("tp", "cp", "pp")


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step of one rank, by what they are spent on."""

    computing: float
    """Matmuls and attention, those that are computed again among them."""
    bubble: float
    """Idle time of the busiest rank of a pipeline."""
    waited: float
    """Communication of tp, cp and pp."""
    data: float
    """Communication of data parallel, which computing may hide."""
    useful: float
    """Matmuls and attention alone, at the GPU's peak."""
    spared: float
    """What of computing float8 spares, if the linear layers of blocks run in it."""

    @property
    def exposed(self) -> float:
        """Return the seconds of data-parallel communication beyond what computing hides; 0 if it hides all."""
        return max(0.0, self.data - self.computing)

    @property
    def seconds(self) -> float:
        """Return the seconds of the whole step."""
        return self.computing + self.bubble + self.waited + self.exposed

    @property
    def in_float8(self) -> StepTime:
        """Return the time of a step whose linear layers run in float8. It sends as much."""
        computing = self.computing - self.spared
        return replace(self, computing=computing, bubble=self.bubble * computing / self.computing, spared=0.0)

    @property
    def utilization(self) -> float:
        """Return the part of the peak that the model's own operations use (MFU)."""
        return self.useful / self.seconds


@dataclass(frozen=True)
class FittingLayout:
    """A layout that fits."""

    case: Case
    """The layout as a case."""
    peak_rank: RankBytes
    """Bytes of the kind of ranks that needs most."""
    time: StepTime
    """Estimated time of the kind of ranks that takes longest."""


@dataclass(frozen=True)
class FittingLayouts:
    """The layouts of one request."""

    layouts: tuple[FittingLayout, ...]
    """Those that fit, best first."""
    examined_count: int
    """How many were looked at."""
    published: Mapping[int, str]
    """Place among those that fit -> the name of a layout that was published."""
    unlisted: Mapping[str, str]
    """Name of a published layout of this model and number of GPUs that is not among them -> why."""
    degrees: Mapping[str, int]
    """Name of a published layout of this request -> the best place of its degrees, whatever else differs."""


def bubble_ratio_of(case: Case) -> float:
    """Return the idle time of a pipeline's busiest rank, as a part of the time that it computes; 0 without a pipeline."""
    return pipeline_time(case).bubble_ratio if case.dims.pp > 1 else 0.0


def step_time(case: Case, plan: Plan, rank: int, machine: Machine, gpus_per_node: int, bubble: float) -> StepTime:
    """Return the time of a step of one rank in seconds, an estimate.

    rank: one of the kind that is asked about. bubble: of the case (`bubble_ratio_of`).
    """
    tokens = case.training.global_batch // case.dims.dp * case.training.seq_len
    stages = stages_of_rank(case, rank)
    seconds_per_operation = tokens / (case.dims.tp * case.dims.cp) / machine.operations_per_second
    once = sum(matmul_operations(case, stage) for stage in stages) * seconds_per_operation
    passes = (3 + RECOMPUTED_FORWARDS[case.features.activation_checkpointing]) / COMPUTE_EFFICIENCY
    linear = sum(linear_operations(case, stage) for stage in stages)
    spared = linear * seconds_per_operation * passes * (1 - 1 / machine.float8_speedup)
    computing = once * passes
    waited = 0.0
    hidden = 0.0
    for axis in traffic_by_axis(plan, rank, gpus_per_node=gpus_per_node):
        speed = machine.bytes_per_second_in_node if axis.nodes == 1 else machine.bytes_per_second_across_nodes
        seconds = axis.sent / (speed * LINK_EFFICIENCY)
        if axis.axis in WAITED_AXES:
            waited += seconds
        else:
            hidden += seconds
    return StepTime(computing, computing * bubble, waited, hidden, 3 * once, spared)
