"""A small Llama trainer in many layouts, with the habits of public ones: what recordings of one training are compared on."""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

WIDTH, HIDDEN, WORDS, LAYERS, LENGTH = 32, 64, 66, 4, 16  # 33 words of a tp rank are no even number


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleDict({str(number): Block() for number in range(LAYERS)})
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x) if self.embedding is not None else x
        for layer in self.layers.values():
            x = layer(x)
        return self.output(self.norm(x)) if self.output is not None else x


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def tensor_parallel(model: Model, mesh: Any, *, sequence: bool) -> None:
    if sequence:
        own: dict[str, Any] = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        outer: dict[str, Any] = {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
    else:
        own = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        outer = {"output": ColwiseParallel(output_layouts=Replicate())}
    for block in model.layers.values():
        parallelize_module(block, mesh, own)
    parallelize_module(model, mesh, outer)


def fsdp1(module: nn.Module, own: bool, strategy: ShardingStrategy) -> nn.Module:
    here = torch.device("cpu")
    return FullyShardedDataParallel(module, use_orig_params=own, sharding_strategy=strategy, device_id=here)


def wrapped(model: Model, layout: str, bfloat16: bool) -> tuple[nn.Module, int, int]:
    """Return the model in its layout, how many shares of data there are, and which one this rank reads."""
    world, rank = dist.get_world_size(), dist.get_rank()
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bfloat16 else MixedPrecisionPolicy()
    if layout in ("ddp", "zero"):
        return nn.parallel.DistributedDataParallel(model), world, rank
    if layout in ("fsdp1", "fsdp1_orig", "fsdp1_no_shard"):
        strategy = ShardingStrategy.NO_SHARD if layout.endswith("no_shard") else ShardingStrategy.FULL_SHARD
        own = layout.endswith("orig")
        for name in list(model.layers):
            model.layers[name] = fsdp1(model.layers[name], own, strategy)
        return fsdp1(model, own, strategy), world, rank
    tp = 2 if "tp" in layout else 1
    names = ("replicate", "shard", "tp")
    replicate = 2 if "hsdp" in layout else 1
    mesh = init_device_mesh("cpu", (replicate, world // tp // replicate, tp), mesh_dim_names=names)
    if tp > 1:
        tensor_parallel(model, mesh["tp"], sequence="sp" in layout)
    if layout not in ("tp", "tp_sp"):
        of_data = mesh["replicate", "shard"] if replicate > 1 else mesh["shard"]
        for block in model.layers.values():
            fully_shard(block, mesh=of_data, mp_policy=policy)
        fully_shard(model, mesh=of_data, mp_policy=policy)
    return model, world // tp, rank // tp


def stage(model: Model) -> tuple[nn.Module, Any]:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank, world = dist.get_rank(), dist.get_world_size()
    each = LAYERS // world
    for number in range(LAYERS):
        if number // each != rank:
            del model.layers[str(number)]
    if rank:
        model.embedding = None  # type: ignore[assignment]
    if rank < world - 1:
        model.output = model.norm = None  # type: ignore[assignment]
    here = PipelineStage(model, rank, world, torch.device("cpu"))
    return model, ScheduleGPipe(here, 2, loss_fn=loss_of)


def mistake(name: str, model: nn.Module, step: int) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    for fqn, parameter in model.named_parameters():
        gradient = getattr(parameter.grad, "_local_tensor", parameter.grad)
        if gradient is None:
            continue
        if name == "halved":
            gradient.mul_(0.5)
        if name == "norms" and "norm" in fqn and rank % 2:
            gradient.mul_(1.01)
        if name == "rows" and "up" in fqn and rank == 0:
            gradient[0] = 0


def clip_by_joined_norm(parameters: list[nn.Parameter], largest: float) -> None:
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], foreach=False)
    norm **= 2
    dist.all_reduce(norm)
    torch.nn.utils.clip_grads_with_norm_(parameters, largest, norm**0.5, foreach=False)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", default="one")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--clip", type=float, default=0.0)
    parser.add_argument("--joined-norm", action="store_true")  # of all stages, as torchtitan makes it
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mistake", default="")
    args = parser.parse_args()
    torch.set_num_threads(1)
    distributed = args.layout != "one"
    if distributed:
        dist.init_process_group("gloo")
    torch.manual_seed(args.seed + (dist.get_rank() if args.mistake == "seed" else 0))
    bfloat16 = args.dtype == "bfloat16"
    model: nn.Module = Model().to(torch.float64 if args.dtype == "float64" else torch.float32)
    schedule, shares, share = None, 1, 0
    if args.layout == "pp":
        model, schedule = stage(model)  # type: ignore[arg-type]
    elif distributed:
        model, shares, share = wrapped(model, args.layout, bfloat16)  # type: ignore[arg-type]
        if args.mistake == "peers":
            shares, share = dist.get_world_size(), dist.get_rank()
    cast = bfloat16 and (args.layout in ("one", "ddp", "pp") or args.layout.startswith("fsdp1"))
    kinds = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    if args.layout == "zero":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=args.lr)
    else:
        optimizer = kinds[args.optimizer](model.parameters(), lr=args.lr)
    draw = torch.Generator().manual_seed(7)
    for step in range(1, 4):
        rows = torch.randint(0, WORDS, (args.batch, LENGTH + 1), generator=draw)
        if args.mistake == "samples" and step == 2:
            share = 0
        mine = rows[share::shares]
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            if schedule is not None:
                first, last = dist.get_rank() == 0, dist.get_rank() == dist.get_world_size() - 1
                inputs = (mine[:, :-1],) if first else ()
                schedule.step(*inputs, **({"target": mine[:, 1:]} if last else {}))
            else:
                for number, part in enumerate(mine.chunk(args.accumulate)):
                    if args.layout == "ddp":
                        model.require_backward_grad_sync = number == args.accumulate - 1  # type: ignore[assignment]
                    (loss_of(model(part[:, :-1]), part[:, 1:]) / args.accumulate).backward()
        mistake(args.mistake, model, step)
        if args.clip:
            if isinstance(model, FullyShardedDataParallel):
                model.clip_grad_norm_(args.clip)
            elif args.joined_norm:
                clip_by_joined_norm([*model.parameters()], args.clip)
            else:
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip, foreach=False)
        optimizer.step()
        if args.mistake == "changed" and step == 2:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.1)
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
