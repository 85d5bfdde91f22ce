"""How long the page on a recording of many ranks takes: `python -m benchmarks.many_ranks 16384 FOLDER`.

The recording is made up: HSDP of 128 ranks a replica, one of whose ranks has another switch and holds other bytes.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path

from harness.evidence.recording import RankRecord, RecordedStep, packed, record_file
from harness.evidence.records import Collective, Group, RankEvidence, StepEvidence, TensorEvidence, Wrapper
from harness.evidence.store import without_values
from harness.evidence.summary import summary_of
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


def main(world: int, folder: Path) -> None:
    mesh = [list(range(start, start + SHARDS)) for start in range(0, world, SHARDS)]
    record_file(folder, 0).parent.mkdir(parents=True)
    began, size = time.process_time(), 0
    for rank in range(world):
        one = record(rank, world, mesh)
        file = packed(summary_of(one), one)
        record_file(folder, rank).write_bytes(file)
        size += len(file)
    print(f"{world} files of {size / world:.0f} bytes in {time.process_time() - began:.1f} s of CPU")
    began = time.process_time()
    recording = dataclasses.replace(load_recording(folder), command="torchrun train.py")
    read = time.process_time() - began
    print(page(recording))
    print(f"read in {read:.1f} s, page in {time.process_time() - began - read:.1f} s of CPU")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
