"""Profiler traces in NCCL's format as torch writes them, of as many ranks as a test wants: a Kineto JSON file each."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

MAIN, AUTOGRAD, GPU = 1, 2, 7
Groups = Mapping[str, Sequence[int]]
"""Name of a process group -> its ranks."""
Issued = tuple[str, str, int, int]
"""Name of a collective as torch writes it, group, elements in and out."""


class Rank:
    """The trace of one rank, made event by event."""

    def __init__(self, rank: int, world: int, groups: Groups) -> None:
        self.rank, self.world, self.groups = rank, world, groups
        self.events: list[dict[str, Any]] = []
        self.now, self.step = 1000.0, 0
        self.info: dict[str, Any] = {"backend": "nccl", "rank": rank, "world_size": world}
        self.info["pg_config"] = [
            {"pg_name": name, "pg_desc": "mesh", "backend_config": "cuda:nccl", "pg_size": len(of), "ranks": list(of)}
            for name, of in groups.items()
        ]

    def add(self, kind: str, name: str, lasts: float, thread: int = MAIN, **args: Any) -> None:
        event = {"ph": "X", "cat": kind, "name": name, "pid": self.rank, "tid": thread, "ts": self.now, "dur": lasts}
        self.events.append({**event, "args": args})

    def collective(self, one: Issued, thread: int = MAIN, lasts: float = 40.0) -> None:
        name, group, elements, out = one
        ranks = self.groups[group]
        shown = f"[{', '.join(map(str, ranks[:30]))}{', ...' * (len(ranks) > 30)}]"
        args = {"Collective name": name, "dtype": "Float", "In msg nelems": elements, "Out msg nelems": out}
        args |= {"Group size": len(ranks), "Process Group Name": group, "Process Group Ranks": shown}
        self.add("cpu_op", f"c10d::{name}_", 9.0, thread)
        self.now += 1
        self.add("cpu_op", "record_param_comms", 5.0, thread, **args)
        self.now += 10
        self.add("kernel", f"ncclDevKernel_{name}", lasts, GPU, stream=GPU, **args)
        self.now += 40

    def computes(self, lasts: float = 30.0) -> None:
        self.add("kernel", "gemm", lasts, GPU, stream=3)

    def forward(self) -> None:
        self.add("cpu_op", "aten::linear", 3.0, **{"Sequence number": 1, "Fwd thread id": 0})
        self.computes()
        self.now += 10

    def backward(self, *issued: Issued) -> None:
        lasts = 10 + 60.0 * len(issued)
        self.add("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", lasts, AUTOGRAD)
        self.computes()
        self.now += 1
        for one in issued:
            self.collective(one, AUTOGRAD)
        self.now += lasts

    def optimizer(self) -> None:
        self.add("user_annotation", "Optimizer.step#AdamW.step", 20.0)
        self.now += 30

    def whole_step(self, did: Callable[[Rank], None]) -> None:
        began, self.step = self.now, self.step + 1
        self.now += 5
        did(self)
        self.now, ended = began, self.now
        self.add("user_annotation", f"ProfilerStep#{self.step}", ended - began - 1)
        self.now = ended

    def save(self, folder: Path, packed: bool = True) -> Path:
        path = folder / f"rank{self.rank}.json{'.gz' * packed}"
        text = json.dumps({"schemaVersion": 1, "distributedInfo": self.info, "traceEvents": self.events}, indent=1)
        path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
        return path


def fsdp_step(shards: str, replicas: str = "", units: int = 3) -> Callable[[Rank], None]:
    """Gather over one group, scatter gradients over it, and sum them over another one if there is one."""

    def did(rank: Rank) -> None:
        parts = len(rank.groups[shards])
        gather = ("_allgather_base", shards, 4096 // parts, 4096)
        reduced = [("_reduce_scatter_base", shards, 4096, 4096 // parts)]
        reduced += [("allreduce", replicas, 4096 // parts, 4096 // parts)] if replicas else []
        for _ in range(units):
            rank.collective(gather)
            rank.forward()
        for _ in range(units):
            rank.backward(gather, *reduced)
        rank.collective(("allreduce", "world", 1, 1))
        rank.optimizer()

    return did


def ddp_step(rank: Rank) -> None:
    rank.forward()
    rank.backward(("allreduce", "world", 12288, 12288))
    rank.optimizer()


def mesh_of(rank: int, world: int, shards: int) -> dict[str, Sequence[int]]:
    first = rank // shards * shards
    return {
        "world": range(world),
        "shard": range(first, first + shards),
        "replicate": range(rank % shards, world, shards),
    }


def save_job(
    folder: Path,
    did: Callable[[Rank], None],
    *,
    world: int = 16,
    shards: int = 8,
    ranks: Sequence[int] = (),
    steps: int = 3,
) -> Path:
    """Write the traces of a job, of all ranks or some. All its groups are there, whatever ran over them."""
    folder.mkdir(exist_ok=True)
    for number in ranks or range(world):
        rank = Rank(number, world, mesh_of(number, world, shards))
        for _ in range(steps):
            rank.whole_step(did)
        rank.save(folder)
    return folder


def load_info(path: Path) -> dict[str, Any]:
    return dict(json.loads(gzip.decompress(path.read_bytes())))


def save_info(path: Path, info: Mapping[str, Any]) -> None:
    path.write_bytes(gzip.compress(json.dumps(info).encode()))
