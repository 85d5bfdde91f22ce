"""An ordinary training script that nobody wrote for the harness: FSDP2 or HSDP of a small network. REPLICATE: of how many ranks
replicas are; DIES: the rank that kills itself in step 3; WRONG: over one mesh of all ranks whatever was wanted; EVALUATES: once
before it trains, which leaves the root's parameters gathered, and a copy without memory goes forward and backward; BESIDE:
another thread issues collectives, too."""

import os
import signal
import threading
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def build(mesh: object) -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.LayerNorm(16)) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(64, 16), *blocks, nn.Linear(16, 64))
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh)
    return model


def sums_beside(group: dist.ProcessGroup) -> None:
    """As a checkpoint that is written while training goes on; on one rank later than on the other."""
    for _ in range(3):
        time.sleep(0.1 * dist.get_rank())
        dist.all_reduce(torch.ones(2), group=group)


def main() -> None:
    dist.init_process_group("gloo")
    rank, world, replicate = dist.get_rank(), dist.get_world_size(), int(os.environ.get("REPLICATE", "1"))
    mesh = init_device_mesh("cpu", (replicate, world // replicate), mesh_dim_names=("replicate", "shard"))
    if "WRONG" in os.environ:
        mesh = init_device_mesh("cpu", (world,))
    model = build(mesh if replicate > 1 else mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(rank)
    if "EVALUATES" in os.environ:
        with torch.no_grad():
            model(torch.zeros(1, 8, dtype=torch.long))
        with torch.device("meta"):  # a copy whose operations somebody counts
            nn.Linear(16, 64)(torch.ones(8, 16)).sum().backward()
    beside = None
    if "BESIDE" in os.environ:
        beside = threading.Thread(target=sums_beside, args=(dist.new_group(),))
        beside.start()
    for step in range(1, 5):
        tokens = torch.randint(64, (4, 8))
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        if step == 3 and os.environ.get("DIES") == str(rank):
            os.kill(os.getpid(), signal.SIGKILL)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if beside is not None:
        beside.join()
    print("first number", next(model.parameters()).to_local().flatten()[0].item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
