"""Deliberate mistakes in DeepSpeed itself, for its cases alone. All of them, and one:

    harness faults --trainer deepspeed --checks-only
    harness run zero1_2 --fault harness/faults/deepspeed.py:NAME --dtype float32 \\
        --trainer deepspeed --cases harness/adapters/deepspeed/cases

What each is named: docs/results/deepspeed.md.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from harness.faults import fault
from harness.faults import operators as op

STAGE_1_AND_2 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"


def configured_with(**zero: int) -> op.Operator:
    """Return the operator that adds these options to "zero_optimization" of the engine's configuration."""
    return op.change_result(
        "harness.adapters.deepspeed.engine:configuration",
        lambda config: config | {"zero_optimization": config["zero_optimization"] | zero},
    )


nothing_is_wrong = fault(
    breaks="nothing: the optimizer's step is called through one more function",
    bug="",
    case="zero1_2",
    caught_by="",
    named="",
    does=op.before_call(f"{STAGE_1_AND_2}.step", lambda *_, **__: None),
)

zero1_runs_as_zero0 = fault(
    breaks="the engine is configured with stage 0 where ZeRO-1 is requested: every rank has all optimizer state",
    bug="of the family of M01 pytorch/torchtitan #711: another parallelism than requested, and equal losses",
    case="zero1_2",
    caught_by="features memory",
    named="another stage of ZeRO",
    does=configured_with(stage=0),
)

zero2_runs_as_zero1 = fault(
    breaks="the engine is configured with stage 1 where ZeRO-2 is requested",
    bug="of the family of M01 pytorch/torchtitan #711: another parallelism than requested, and equal losses",
    case="zero2_2_accum",
    caught_by="features traffic",
    named="another feature",
    does=configured_with(stage=1),
)


@fault(
    breaks="the rank's part of the gradients is taken one element late, so that each is the neighbour's",
    bug="of the family of S10 pytorch/torchtitan #3356: an offset into a flat vector",
    case="zero2_2",
    caught_by="gradients",
    named="gradients shifted",
)
@partial(op.instead, f"{STAGE_1_AND_2}.get_flat_partition")
def partition_off_by_one(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the rank's parts of the flat gradient, of which each element is its left neighbour's."""
    import torch

    parts = original(*args, **kwargs)
    shifted = torch.cat([part.reshape(-1) for part in parts]).roll(1)
    return list(shifted.split([part.numel() for part in parts]))


gradients_not_averaged = fault(
    breaks="gradients are summed over the data ranks and not divided by their number",
    bug="of the family of G: a mean that is a sum",
    case="zero1_2",
    caught_by="gradients grad_norm",
    named="gradients scaled",
    does=op.override_argument(f"{STAGE_1_AND_2}.__init__", gradient_average=False),
)

gradients_not_reduced = fault(
    breaks="a bucket of gradients is not reduced: each rank's optimizer gets its own samples' gradients",
    bug="of the family of G: a reduction that is left out",
    case="zero2_2",
    caught_by="gradients traffic",
    named="gradients not reduced",
    does=op.instead(
        f"{STAGE_1_AND_2}.allreduce_bucket", lambda original, self, bucket, *args, **kwargs: self.flatten(bucket)
    ),
)

parameters_not_gathered = fault(
    breaks="parameters updated by other ranks are not gathered",
    bug="of the family of G: a collective that is left out",
    case="zero1_2",
    caught_by="replica_agreement traffic",
    named="parameters not gathered",
    does=op.skip_call("deepspeed.runtime.zero.stage_1_and_2:all_gather_dp_groups"),
)
