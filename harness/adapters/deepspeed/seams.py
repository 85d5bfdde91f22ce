"""The connection of DeepSpeed's engine, whoever made it, to the probe: where it reduces, where it clips, and where
shards lie.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from harness.adapters.deepspeed.shards import PartitionedParameters, Vectors
from harness.core.probe.shards import note_shards
from harness.core.probe.structure import note_wrapper
from harness.core.probe.values import note_gradients, reducing_gradients


def note_engine(engine: Any) -> int:
    """Patch an engine so that the probe sees its reductions, clipping, wrapper and shards. Return its stage of ZeRO, 0 to 3.

    With stage 0 its own DDP is noted as wrapper, if there are several ranks.
    """
    ranks = range(dist.get_world_size())
    stage = int(engine.zero_optimization_stage())
    engine.allreduce_gradients = _call_within(reducing_gradients, engine.allreduce_gradients)
    if stage == 0:
        if len(ranks) > 1:
            note_wrapper(engine, "ddp", replicate_ranks=ranks)
        engine.clip_fp32_gradients = _call_after(note_gradients, engine.clip_fp32_gradients)
        return stage
    zero = engine.optimizer
    note_wrapper(engine, f"zero{stage}", shard_ranks=ranks)
    note_shards(engine, (PartitionedParameters if stage == 3 else Vectors)(engine.module, zero))
    zero.unscale_and_clip_grads = _call_after(note_gradients, zero.unscale_and_clip_grads)
    return stage


def _call_within(context: Callable[[], Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, changed to run within a new context of that kind at each call."""

    def inside(*args: Any, **kwargs: Any) -> Any:
        with context():
            return function(*args, **kwargs)

    return inside


def _call_after(first: Callable[[], None], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, changed to call `first` before each call."""

    def call_both(*args: Any, **kwargs: Any) -> Any:
        first()
        return function(*args, **kwargs)

    return call_both
