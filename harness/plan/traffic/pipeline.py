"""Traffic of pipeline parallelism: activations and their gradients between stages."""

from __future__ import annotations

from collections.abc import Iterable

from harness.plan.slices import BYTES
from harness.plan.stages import stages_of_rank
from harness.plan.traffic.flow import Flow
from harness.spec.case import Case


def pipeline_flows(case: Case, rank: int, length: int) -> Iterable[Flow]:
    """A microbatch's activations go to the rank of the next stage, and their gradients come back. Neighbouring stages on one
    rank (the tip of a V) send nothing. With sequence parallel each tp rank sends its part."""
    dims, training = case.dims, case.training
    mine = stages_of_rank(case, rank)
    borders = [stage for stage in (*mine, *(stage + 1 for stage in mine)) if 0 < stage < case.n_stages]
    crossings = sum(borders.count(stage) == 1 for stage in borders)
    degree = dims.cp * (dims.tp if case.features.sequence_parallel else 1)
    size = BYTES[training.compute_dtype or training.dtype]
    moved = crossings * case.passes * case.local_batch * (length // degree) * case.model.dim * size
    if dims.pp > 1:
        yield Flow("pp", "activations and their gradients", "send", "pipeline", moved)
        yield Flow("pp", "activations and their gradients", "recv", "pipeline", moved)
