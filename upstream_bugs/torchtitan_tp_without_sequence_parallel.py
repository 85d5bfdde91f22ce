"""torchtitan 0.3.0 with tensor parallel and without sequence parallel moves 2.85 times what backward needs.

parallelism.enable_sequence_parallel False, spmd_backend partial_dtensor. A residual stream that every tp rank holds whole needs
one sum over tp a crossing, as often in backward as in forward. torch's own ColwiseParallel and RowwiseParallel do that, where a
rank's tensor becomes a DTensor. torchtitan turns a Replicate input of column-parallel products into Replicate, which has no
backward. So nothing says that its gradient is to be summed there, and each product of backward that meets it sums, scatters or
gathers it separately. The numbers are right.

torchrun --nproc-per-node 2 upstream_bugs/torchtitan_tp_without_sequence_parallel.py     exits with 1 while it is so
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import titan_on_cpu  # noqa: F401
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.sharding import set_llama3_sharding_config

BATCH, LENGTH = 2, 16
MOVERS = ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor")


class Moved(TorchDispatchMode):
    """Bytes of the whole tensor, by collective and the operator on DTensors that requested it."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = Counter[str]()
        self.within = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            self.within = func._schema.name.rpartition("::")[2]
            return NotImplemented
        found = func(*args, **(kwargs or {}))
        name = func._schema.name.rpartition("::")[2].rstrip("_")
        if func.namespace == "_c10d_functional" and name in MOVERS:
            whole = found if name.startswith("all_gather") else args[0]
            self.bytes[f"{name} for {self.within}"] += whole.numel() * whole.element_size()
        return found


def forward_and_backward(model: Any, tokens: torch.Tensor) -> tuple[Counter[str], Counter[str]]:
    with Moved() as forward:
        out = model(tokens)
        loss = (out.to_local() if isinstance(out, DTensor) else out).sum()
    with Moved() as backward:
        loss.backward()
    return forward.bytes, backward.bytes


def torchtitans(tokens: torch.Tensor) -> tuple[Counter[str], Counter[str]]:
    config = model_registry("debugmodel").model
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    set_llama3_sharding_config(config, enable_sp=False)
    set_spmd_backend("partial_dtensor")
    dims = ParallelDims(
        dp_replicate=1, dp_shard=1, cp=1, tp=2, pp=1, ep=1, world_size=2, spmd_backend="partial_dtensor"
    )
    dims.build_mesh()
    with torch.device("meta"):
        model = config.build()
    model.parallelize(dims)
    model.to_empty(device=tokens.device)
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return forward_and_backward(model, tokens)


class Block(nn.Module):
    """What every block of a transformer is to tensor parallel: a column- and a row-parallel product beside a residual."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)))


def torchs(tokens: torch.Tensor) -> tuple[Counter[str], Counter[str]]:
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(nn.Embedding(2048, 256), Block(256), Block(256))
    for block in (model[1], model[2]):
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return forward_and_backward(model, tokens)


def main() -> int:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    tokens = torch.randint(0, 2000, (BATCH, LENGTH))
    factors = {}
    for who, measure in (("torch's styles", torchs), ("torchtitan", torchtitans)):
        forward, backward = measure(tokens)
        factors[who] = backward.total() / forward.total()
        if dist.get_rank() == 0:
            print(f"{who}: forward {dict(forward)}, backward {dict(backward)}: {factors[who]:.2f} times as much")
    dist.barrier()
    dist.destroy_process_group()
    return int(factors["torchtitan"] > 1.5 > factors["torch's styles"])


if __name__ == "__main__":
    sys.exit(main())
