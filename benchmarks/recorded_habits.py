"""Correct jobs with the habits of real trainers, recorded: `python -m benchmarks.recorded_habits [-k WORDS] [--json FILE]`.

The page may call nothing in them anomalous, and with their own layout no check may fail. Ranks are forked from one process into
which the recorder was injected as usual. Each job leaves its own recording. FILE gets the verdicts.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import math
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from harness.core.case import layout as layouts
from harness.core.cli import main as command_line
from harness.recording.injection import environment_for_recording, make_fresh_folder
from harness.recording.judged.anomalies import find_anomalies
from harness.recording.judged.recorded_layout import judge_recording
from harness.recording.judged.stored_recording import load_recording
from tools.said import said_of

STEPS, HEIGHT, WIDTH = 4, 8, 16
Job = Callable[[], None]
JOBS: dict[str, tuple[str, Job]] = {}


def job(layout: str) -> Callable[[Job], Job]:
    """Return a decorator that registers a job under its function's name, with its layout."""

    def added(function: Job) -> Job:
        JOBS[function.__name__] = (layout, function)
        return function

    return added


class Block(nn.Module):
    def __init__(self, *, recomputed: bool = False) -> None:
        super().__init__()
        self.norm, self.w1, self.w2 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.recomputed = recomputed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.recomputed else self.inner(x)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.w2(torch.relu(self.w1(self.norm(x))))


class Network(nn.Module):
    def __init__(self, **how: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = nn.ModuleList(Block(**how) for _ in range(3)), nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(step: int) -> torch.Tensor:
    return torch.randn(HEIGHT, WIDTH, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, between: Callable[[], None] = lambda: None) -> None:
    """Train for STEPS steps, with clipping; `between` is called after each."""
    for step in range(STEPS):
        model(batch(step)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        between()


def sharded(model: Network, **how: Any) -> Network:
    """Apply FSDP2 to each block and the whole model, in place, and return it."""
    for block in model.blocks:
        fully_shard(block, **how)
    return fully_shard(model, **how)


@job("dp_replicate=2")
def ddp() -> None:
    model = DistributedDataParallel(Network())
    train(model, adamw(model))


@job("dp_replicate=2")
def ddp_that_accumulates_and_validates() -> None:
    model = DistributedDataParallel(Network())
    optimizer = adamw(model)
    for step in range(STEPS):
        for part in range(3):
            with contextlib.nullcontext() if part == 2 else model.no_sync():
                (model(batch(3 * step + part)).square().mean() / 3).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            dist.all_reduce(model(torch.ones(2, WIDTH)).mean())
        model.train()


@job("dp_shard=2")
def fsdp2_with_an_average_of_its_weights() -> None:
    model = sharded(Network())
    average = [copy.deepcopy(p.detach()) for p in model.parameters()]

    def averaged() -> None:
        for kept, p in zip(average, model.parameters(), strict=True):
            kept.mul_(0.9).add_(p.detach(), alpha=0.1)

    train(model, adamw(model), averaged)


@job("dp_shard=2")
def fsdp2_that_accumulates_logs_and_recomputes() -> None:
    model = sharded(Network(recomputed=True), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    optimizer = adamw(model)
    for step in range(STEPS):
        for part in (0, 1):
            model.set_requires_gradient_sync(part == 1)
            loss = model(batch(2 * step + part)).float().square().mean() / 2
            loss.backward()
        seen = loss.detach().clone()
        dist.all_reduce(seen)
        optimizer.step()
        optimizer.zero_grad()


@job("dp_shard=2")
def fsdp2_compiled_in_blocks() -> None:
    model = Network()
    for block in model.blocks:
        block.compile(backend="eager")
    train(sharded(model), adamw(model))


class Headless(Network):
    """Its head is applied with the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


@job("dp_shard=4")
def fsdp2_with_its_head_in_the_loss() -> None:
    """Which is in one unit with the norm, so that this is needed until the loss is there."""
    model = Headless()
    for block in model.blocks:
        fully_shard(block)
    fully_shard([model.norm, model.head])
    fully_shard(model)
    optimizer = adamw(model)
    for step in range(STEPS):
        model.head(model(batch(step))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@job("dp_replicate=2,dp_shard=2")
def hsdp_that_keeps_its_units() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(Network(), mesh=mesh, reshard_after_forward=False)
    train(model, adamw(model))


@job("dp_shard=2")
def fsdp1() -> None:
    model = FullyShardedDataParallel(Network(), device_id=torch.device("cpu"))
    optimizer = adamw(model)
    for step in range(STEPS):
        model(batch(step)).square().mean().backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()


@job("tp=2")
def tensor_parallel() -> None:
    model, mesh = Network(), init_device_mesh("cpu", (2,))
    for block in model.blocks:
        parallelize_module(block, mesh, {"w1": ColwiseParallel(), "w2": RowwiseParallel()})
    optimizer = adamw(model)
    for _ in range(STEPS):
        model(torch.ones(4, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@job("dp_replicate=2")
def two_networks_and_their_optimizers() -> None:
    one, other = DistributedDataParallel(Network()), DistributedDataParallel(nn.Linear(4, 1))
    optimizers = torch.optim.SGD(one.parameters(), lr=0.01), adamw(other)
    for step in range(STEPS):
        other(one(batch(step))).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@job("dp_shard=2")
def fsdp2_of_which_most_is_frozen() -> None:
    model = Network()
    for p in model.blocks.parameters():
        p.requires_grad_(False)
    train(sharded(model), adamw(model))


@job("pp=2")
def pipeline() -> None:
    torch.manual_seed(0)
    rank = dist.get_rank()
    stage = PipelineStage(nn.Sequential(Block(), Block()), rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda y, _: y.square().mean())
    optimizer = adamw(stage.submod)
    for step in range(STEPS):
        schedule.step(*([batch(step)] if rank == 0 else []), **({"target": batch(step)} if rank else {}))
        optimizer.step()
        optimizer.zero_grad()


# ---- recording them


def ranks_of(layout: str) -> int:
    return math.prod(int(part.partition("=")[2]) for part in layout.split(","))


def record(name: str, folder: Path) -> None:
    """Run a job on forked ranks, each of which records into folder/name, and print their exit statuses.

    Trap: atexit and its handlers are those of the process forked from.
    """
    from harness.recording import recorder

    layout, run = JOBS[name]
    world, children = ranks_of(layout), []
    for rank in range(world):
        if (child := os.fork()) == 0:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
            assert recorder._recorder is not None
            recorder._recorder.directory = folder / name
            try:
                torch.set_num_threads(1)
                dist.init_process_group(
                    "gloo", store=dist.FileStore(f"{folder}/{name}.store", world), rank=rank, world_size=world
                )
                run()
                dist.destroy_process_group()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            recorder._recorder.write_last_record()
            os._exit(0)
        children.append(child)
    print(name, "ended", [os.waitpid(child, 0)[1] for child in children], flush=True)


def shown(name: str, folder: Path) -> tuple[bool, str]:
    """Return whether the page of a recorded job has no false word, and the page."""
    page = io.StringIO()
    with contextlib.redirect_stdout(page):
        alone = command_line(["report", str(folder / name)])
        command_line(["report", str(folder / name), "--layout", JOBS[name][0], "--all"])
    text = page.getvalue()
    return alone == 0 and "FAIL" not in text and "UNKNOWN" not in text, text


def said(name: str, folder: Path) -> dict[str, Any]:
    """Return the judgement of a job with the layout that it has, as data."""
    recording = load_recording(folder / name)
    results, diagnosis = judge_recording(recording, layouts.parse_layout(JOBS[name][0], recording.world))
    return said_of(name, results, diagnosis, [anomaly.label for anomaly in find_anomalies(recording)])


def main() -> int:
    """Record all jobs, print whether each is right, and return the exit code: 1 if any is not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-k", default="", help="a part of a job's name")
    parser.add_argument(
        "--pages", action="store_true", help="of all, not only of those of which something false is said"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where verdicts, causes and findings go, as data")
    parser.add_argument("--record", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    names = [name for name in JOBS if args.k in name]
    if args.record:
        for name in names:
            record(name, args.record)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name in names:
            make_fresh_folder(folder / name)
        words = [sys.executable, "-m", "benchmarks.recorded_habits", "-k", args.k, "--record", str(folder)]
        subprocess.run(
            words, env=environment_for_recording(folder / names[0], "1-3") | {"OMP_NUM_THREADS": "1"}, check=True
        )
        pages = {name: shown(name, folder) for name in names}
        if args.json:
            args.json.write_text(json.dumps([said(name, folder) for name in names], indent=1), encoding="utf-8")
    for name, (right, text) in pages.items():
        print(f"{'right' if right else 'WRONG'}  {name}" + (f"\n{text}" if args.pages or not right else ""))
    print(f"{sum(right for right, _ in pages.values())} of {len(pages)} correct jobs without a false word")
    return 0 if all(right for right, _ in pages.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
