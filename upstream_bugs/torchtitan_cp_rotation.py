"""torchtitan 0.2.2 ignores context_parallel_rotate_method: with "alltoall" keys and values are still gathered.

The option is read in `create_context_parallel_ctx` alone, which the trainer calls no more. The model is its Llama 3, whose
attention its `parallelize_llama` makes context parallel; the rest are the lines of its train.py. 0.2.1 turns them as asked.

PYTHONPATH=WHERE_IT_LIES torchrun --nproc-per-node 2 upstream_bugs/torchtitan_cp_rotation.py     exits with 1 if it is so
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from torch.profiler import ProfilerActivity, profile
from torchtitan_gradients import LENGTH, WORDS, parallelized, torchtitan

METHODS = ("allgather", "alltoall")
MOVERS = ("all_gather_into_tensor", "all_to_all_single")
ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def attend_on_cpu(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    """torch's ring does not know the operator that attention is on CPUs; to it this one is as that of GPUs."""
    names = ("query", "key", "value", "dropout_p", "is_causal")
    given = dict(zip(names, args, strict=False)) | kwargs
    mesh = given["query"].device_mesh
    local = {name: value.to_local() if isinstance(value, DTensor) else value for name, value in given.items()}
    parts = ring._templated_ring_attention(mesh.get_group(), 2, ON_CPU, **local)
    return tuple(DTensor.from_local(part, mesh, [Shard(2)], run_check=False) for part in parts)


def cut(model: Any, tokens: torch.Tensor, mesh: Any, method: str) -> tuple[Any, Any, dict[str, Any]]:
    """Return a context to run the model in, its tokens, and its other arguments."""
    utils = importlib.import_module("torchtitan.distributed.utils")
    with contextlib.suppress(ImportError):
        cp = importlib.import_module("torchtitan.distributed.context_parallel")
        tokens, _, more = cp.prepare_context_parallel_input(tokens, tokens, {}, mesh, tokens.device)
        return contextlib.nullcontext(), tokens, more
    buffers = [tokens, model.freqs_cis]
    return utils.create_context_parallel_ctx(mesh, buffers, [1, 0], {tokens}, method), tokens, {}


def moved(titan: SimpleNamespace, method: str) -> Counter[str]:
    """How often which collective ran in one forward pass."""
    model, _ = parallelized(titan, cp=2, rotation=method)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(1)
    context, tokens, more = cut(model, torch.randint(WORDS, (1, LENGTH)), mesh, method)
    with profile(activities=[ProfilerActivity.CPU]) as seen, torch.no_grad(), context:
        model(tokens, **more)
    return Counter(
        {name: e.count for e in seen.key_averages() for name in MOVERS if e.key == f"_c10d_functional::{name}"}
    )


def main() -> int:
    os.environ.setdefault("LOCAL_RANK", "0")
    dist.init_process_group("gloo")
    handlers: dict[Any, Any] = ring.custom_ops
    handlers[ON_CPU] = attend_on_cpu
    titan = torchtitan()
    found = {method: moved(titan, method) for method in METHODS}
    if dist.get_rank() == 0:
        print("\n".join(f"requested {method}: {dict(counts)}" for method, counts in found.items()), flush=True)
    dist.destroy_process_group()
    return int(not found["alltoall"]["all_to_all_single"])


if __name__ == "__main__":
    sys.exit(main())
