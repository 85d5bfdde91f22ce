"""torchtitan 0.3.0 as it comes (parallelism.spmd_backend "spmd_types") does not start on two ranks with torch 2.13.

It hands fully_shard plain parameters with dp_mesh_dims, which fully_shard of torch 2.13 takes with DTensors of the whole mesh
only. "partial_dtensor" starts, and is what the harness judges; context parallel since 2026-08-19 has no other backend.

torchrun --nproc-per-node 2 upstream_bugs/torchtitan_default_backend.py     exits with 1 while it is so
"""

from __future__ import annotations

import sys

import torch.distributed as dist
from torchtitan.config import ParallelismConfig
from torchtitan_accumulation_reduces_every_microbatch import configured


def refusal(backend: str) -> str | None:
    config = configured()
    config.parallelism.spmd_backend = backend
    try:
        config.build()
    except ValueError as error:
        return str(error)
    return None


def main() -> int:
    default = ParallelismConfig().spmd_backend
    refused = {backend: refusal(backend) for backend in ("partial_dtensor", default)}
    if dist.get_rank() == 0:
        print("\n".join(f"{backend}: {why or 'starts'}" for backend, why in refused.items()))
    dist.destroy_process_group()
    return int(refused[default] is not None)


if __name__ == "__main__":
    sys.exit(main())
