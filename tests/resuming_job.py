"""A small Llama trainer with dropout, a schedule and AdamW that saves a checkpoint, or goes on from one."""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from layouts_script import LENGTH, WORDS, Model, loss_of
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

BATCH = 8


class Dropped(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.model, self.dropout = Model(), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.model(x))


def load(folder: str, forget: str, model: nn.Module, optimizer: Any, schedule: Any, scaler: Any) -> int:
    """Return after which step the checkpoint was saved."""
    before = {name: torch.clone(value) for name, value in model.state_dict().items()}
    weights, state = get_state_dict(model, optimizer)
    extra: dict[str, Any] = {
        "step": 0,
        "schedule": schedule.state_dict(),
        "random": torch.get_rng_state(),
        "scale": scaler.state_dict(),
    }
    held = {"model": weights, "optimizer": state, **extra}
    dcp.load(held, checkpoint_id=folder)
    if forget == "layer":
        held["model"]["model.layers.1.up.weight"].zero_()
    set_state_dict(model, optimizer, model_state_dict=held["model"], optim_state_dict=held["optimizer"])
    if forget == "weights":
        model.load_state_dict(before)
    if forget == "optimizer":
        optimizer.state.clear()
    if forget != "schedule":
        schedule.load_state_dict(held["schedule"])
    if forget != "scale":
        scaler.load_state_dict(held["scale"])
    if forget != "random":
        torch.set_rng_state(held["random"])
    return int(held["step"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--scaled", action="store_true")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--save-after", type=int, default=0)
    parser.add_argument("--checkpoint", default="")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--forget", default="")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo") if args.fsdp else None
    torch.manual_seed(0)
    model: Any = Dropped(args.dropout)
    share, shares = 0, 1
    if args.fsdp:
        share, shares = dist.get_rank(), dist.get_world_size()
        mesh = init_device_mesh("cpu", (shares,))
        for block in model.model.layers.values():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1, enabled=args.scaled)
    done = load(args.checkpoint, args.forget, model, optimizer, schedule, scaler) if args.resume else 0
    for step in range(done + 1, args.steps + 1):
        draw = torch.Generator().manual_seed(step - done * (args.forget == "samples"))
        rows = torch.randint(0, WORDS, (BATCH, LENGTH + 1), generator=draw)[share::shares]
        optimizer.zero_grad()
        scaler.scale(loss_of(model(rows[:, :-1]), rows[:, 1:])).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        if step == args.save_after:
            weights, state = get_state_dict(model, optimizer)
            extra = {"step": step, "schedule": schedule.state_dict(), "random": torch.get_rng_state()}
            extra |= {"scale": scaler.state_dict()}
            dcp.save({"model": weights, "optimizer": state, **extra}, checkpoint_id=args.checkpoint)
    dist.destroy_process_group() if args.fsdp else None


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
