"""How long the page on a recording of many ranks takes: `python -m benchmarks.many_ranks 16384 FOLDER`.

The recording is made up: HSDP of 128 ranks a replica, one of whose ranks has another switch and holds other bytes.
"""

from __future__ import annotations

import dataclasses
import resource
import subprocess
import sys
import time
from pathlib import Path

from harness.evidence.recording import RankRecord, RecordedStep, head, packed, record_file
from harness.evidence.records import Collective, Group, RankEvidence, StepEvidence, TensorEvidence, Wrapper
from harness.evidence.store import without_values
from harness.evidence.summary import Summary, number, ranks_key, summary_of
from harness.judge.stored_recording import load_recording
from harness.report.recording_page import page

SHARDS, LAYERS, ODD = 128, 16, 777


def evidence(rank: int, world: int, mesh: list[list[int]]) -> RankEvidence:
    shard, replicate = tuple(mesh[rank // SHARDS]), tuple(row[rank % SHARDS] for row in mesh)
    names = [
        f"layers.{layer}.{part}.weight" for layer in range(LAYERS) for part in ("attention", "feed_forward", "norm")
    ]
    parameters = tuple(
        TensorEvidence(
            name,
            (4096, 4096),
            "bfloat16",
            mesh,
            ("Replicate", "Shard(0)"),
            without_values((4096 // SHARDS, 4096), "float32"),
        )
        for name in names
    )
    moved = [("all_gather", "forward", shard), ("all_gather", "backward", shard)]
    moved += [("reduce_scatter", "backward", shard), ("all_reduce", "backward", replicate)]
    calls = tuple(
        Collective(op, ranks, str(ranks[:2]), "bfloat16", 4096 * 4096 * 6, phase, step, 0)
        for step in (1, 2, 3)
        for op, phase, ranks in moved
        for _ in range(LAYERS)
    )
    settings: dict[str, tuple[str, ...]] = {"cudnn.benchmark": ("on" if rank == ODD else "off",)}
    memory = {"parameters": 12_582_912, "gradients": 12_582_912, "optimizer_state": 25_165_824}
    steps = tuple(StepEvidence(n, (), None, None, 1e-4, {}, {}, {}, memory, settings=settings) for n in (1, 2, 3))
    groups = tuple(Group(str(ranks[:2]), ranks, "nccl") for ranks in (shard, replicate))
    wrapper = {"": Wrapper("fsdp2", shard, replicate, tuple(names))}
    return RankEvidence(
        rank, world, parameters, groups, calls, steps, structure=wrapper, environment={"torch": "2.13.0"}
    )


def record(rank: int, world: int, mesh: list[list[int]]) -> RankRecord:
    held = rank % SHARDS + (rank == ODD)
    told = evidence(rank, world, mesh)
    steps = tuple(RecordedStep(n, {t.fqn: n * 1000 + held for t in told.parameters}, seconds=1.0) for n in (0, 1, 2, 3))
    names = tuple(tensor.fqn for tensor in told.parameters)
    return RankRecord(told, steps, ("Transformer",), ("AdamW(betas (0.9, 0.95))",), names, ended="ok", steps_seen=3)


def summary_like(first: Summary, rank: int, world: int) -> Summary:
    """That of the same job's rank, without its whole record being made again: what differs between its ranks is here."""
    start, place = rank // SHARDS * SHARDS, rank % SHARDS
    keys = {"shard": ranks_key(tuple(range(start, start + SHARDS)))}
    keys["replicate"] = ranks_key(tuple(range(place, world, SHARDS)))
    theirs = {ranks_key(tuple(range(SHARDS))): "shard", ranks_key(tuple(range(0, world, SHARDS))): "replicate"}
    held = number([(name, place + (rank == ODD)) for name in first.parts])
    return dataclasses.replace(
        first,
        rank=rank,
        uses=tuple(dataclasses.replace(use, ranks=keys[theirs[use.ranks]]) for use in first.uses),
        issued=tuple(
            dataclasses.replace(one, group=keys[theirs[one.ranks]], ranks=keys[theirs[one.ranks]])
            for one in first.issued
        ),
        roles={keys[theirs[ranks]]: role for ranks, role in first.roles.items()},
        slices=number([first.slices, place]),
        contents={step: number([step, held]) for step in first.contents},
        settings=first.settings | {"cudnn.benchmark": "on" if rank == ODD else "off"},
    )


def write(world: int, folder: Path) -> int:
    """Bytes of all files."""
    mesh = [list(range(start, start + SHARDS)) for start in range(0, world, SHARDS)]
    first = record(0, world, mesh)
    summary, size = summary_of(first), 0
    _, _, body = packed(summary, first).partition(b"\n")
    for rank in range(world):
        file = head(summary_like(summary, rank, world)) + body
        record_file(folder, rank).write_bytes(file)
        size += len(file)
    return size


def main(world: int, folder: Path) -> None:
    """In two processes, so that the memory is that of who reads."""
    record_file(folder, 0).parent.mkdir(parents=True)
    print(f"{world} files of {write(world, folder) / world:.0f} bytes")
    subprocess.run([sys.executable, "-m", "benchmarks.many_ranks", "read", str(folder)], check=True)


def read(folder: Path) -> None:
    began = time.process_time()
    recording = dataclasses.replace(load_recording(folder), command="torchrun train.py")
    loaded = time.process_time() - began
    print(page(recording))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"read in {loaded:.1f} s, page in {time.process_time() - began - loaded:.1f} s of CPU; {memory:.0f} MiB at most"
    )


if __name__ == "__main__":
    read(Path(sys.argv[2])) if sys.argv[1] == "read" else main(int(sys.argv[1]), Path(sys.argv[2]))
