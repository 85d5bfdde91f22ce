"""How long a recording of many ranks takes to read: `python -m benchmarks.many_ranks dp_replicate=16,dp_shard=128,tp=8 FOLDER`.

The recording is made up: HSDP with tensor parallelism, and stages of a pipeline. Prints
the page with that layout, then without one. With --odd one rank has another switch, holds other bytes, shards one
parameter less and issues one collective less.
"""

from __future__ import annotations

import argparse
import functools
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from harness.core.case.dims import AXES, ParallelDims
from harness.core.case.layout import parse_layout
from harness.core.evidence.codec import array_without_values
from harness.core.evidence.keys import ranks_key, stable_digest
from harness.core.evidence.recording import (
    Fed,
    RankRecord,
    RecordedStep,
    record_bytes,
    record_file,
    save_record,
    summary_line,
)
from harness.core.evidence.records import Collective, Group, RankEvidence, TensorEvidence, Wrapper
from harness.core.evidence.step import StepEvidence
from harness.core.evidence.summary import Summary, summary_of
from harness.core.plan.grid import coordinate_of_rank, rank_grid
from harness.recording.cli.work.recording_report import show_recording

LAYERS, ODD, WIDTH, STEPS = 2, 777, 4096, (1, 2, 3)
MANY = 1 << 40
NESTED = ("dp_replicate", "dp_shard", "tp")
PLACEMENTS = ("Replicate", "Shard(0)", "Shard(1)")


def line(dims: ParallelDims, rank: int, axis: str) -> tuple[int, ...]:
    """Return the ranks along an axis through this rank, itself among them."""
    at = coordinate_of_rank(dims, rank)
    return tuple(rank_grid(dims)[tuple(slice(None) if one == axis else at[one] for one in AXES)].tolist())


@functools.cache
def mesh_of(dims: ParallelDims, stage: int) -> list[object]:
    """Return the mesh of a stage's ranks, as lists nested by the axes above 1; the same object for all ranks of the
    stage."""
    grid = rank_grid(dims)[stage].reshape([getattr(dims, axis) for axis in _nested(dims)])
    return grid.tolist()


def _nested(dims: ParallelDims) -> list[str]:
    return [axis for axis in NESTED if getattr(dims, axis) > 1]


def evidence(rank: int, dims: ParallelDims, odd: int | None) -> RankEvidence:
    """Return made-up evidence of a rank; if it is `odd`, with the differences that the module's docstring lists."""
    stage, axes = coordinate_of_rank(dims, rank)["pp"], _nested(dims)
    placements = tuple(PLACEMENTS[NESTED.index(axis)] for axis in axes)
    held = array_without_values((WIDTH // dims.dp_shard, WIDTH // dims.tp), "float32")
    mesh = mesh_of(dims, stage)
    names = [
        f"layers.{stage * LAYERS + n}.{part}.weight" for n in range(LAYERS) for part in ("attention", "feed_forward")
    ]
    tensors = [TensorEvidence(name, (WIDTH, WIDTH), "bfloat16", mesh, placements, held) for name in names]
    if rank == odd:
        whole = array_without_values((WIDTH, WIDTH), "float32")
        tensors[0] = TensorEvidence(names[0], (WIDTH, WIDTH), "bfloat16", None, (), whole)
    lines = {axis: line(dims, rank, axis) for axis in AXES if getattr(dims, axis) > 1}
    settings: dict[str, tuple[str, ...]] = {"cudnn.benchmark": ("on" if rank == odd else "off",)}
    memory = {"parameters": held.size * 2 * len(names), "gradients": 0, "optimizer_state": held.size * 4 * len(names)}
    steps = tuple(StepEvidence(n, (), None, None, 1e-4, {}, {}, {}, memory, settings=settings) for n in STEPS)
    wrapper = Wrapper("fsdp2", lines.get("dp_shard", ()), lines.get("dp_replicate", ()), tuple(names))
    calls = [call for step in STEPS for call in moved(rank, step, lines, WIDTH * WIDTH * 2 // dims.tp)]
    return RankEvidence(
        rank,
        dims.world_size,
        tuple(tensors),
        tuple(Group(f"{axis} {ranks[0]}", ranks, "nccl") for axis, ranks in lines.items()),
        tuple(calls[:-1] if rank == odd else calls),
        steps,
        structure={"": wrapper},
        environment={"torch": "2.13.0"},
    )


def moved(rank: int, step: int, lines: dict[str, tuple[int, ...]], size: int) -> Iterator[Collective]:
    """Yield the collectives of a rank in a step.

    lines: by axis, the ranks along it. size: bytes of a parameter, as tp leaves it.
    """
    kinds = [
        ("all_reduce", "tp", "forward"),
        ("all_gather", "dp_shard", "forward"),
        ("all_gather", "dp_shard", "backward"),
    ]
    kinds += [("reduce_scatter", "dp_shard", "backward"), ("all_reduce", "dp_replicate", "backward")]
    for op, axis, phase in kinds:
        for _ in range(2 * LAYERS if axis in lines else 0):
            yield Collective(op, lines[axis], f"{axis} {lines[axis][0]}", "bfloat16", size, phase, step, 0)
    stages = lines.get("pp", ())
    at = stages.index(rank) if stages else 0
    for op, peer, phase in (("recv", at - 1, "forward"), ("send", at + 1, "forward")):
        if 0 <= peer < len(stages):
            yield Collective(op, stages, f"pp {stages[0]}", "bfloat16", WIDTH, phase, step, 0, peer=stages[peer])


def record(rank: int, dims: ParallelDims, odd: int | None) -> RankRecord:
    """Return a made-up record of a rank."""
    at, told = coordinate_of_rank(dims, rank), evidence(rank, dims, odd)
    held = at["dp_shard"] * dims.tp + at["tp"] + (rank == odd)
    fed = at["dp_replicate"] * dims.dp_shard + at["dp_shard"]
    names = tuple(tensor.fqn for tensor in told.parameters)
    tokens = (Fed(fed, (1, 8), "int64"),)
    steps = tuple(
        RecordedStep(n, {name: n * 100_000 + held for name in names}, (), tokens if n else (), 1.0) for n in (0, *STEPS)
    )
    return RankRecord(told, steps, ("Transformer",), ("AdamW(betas (0.9, 0.95))",), names, ended="ok", steps_seen=3)


def summary_like(first: Summary, rank: int, dims: ParallelDims) -> Summary:
    """Return the summary of another rank of the same stage, by changing what differs between them. No record is made."""
    at = coordinate_of_rank(dims, rank)
    axes = [axis for axis in AXES if getattr(dims, axis) > 1]
    ours, theirs = ({axis: line(dims, one, axis) for axis in axes} for one in (first.rank, rank))
    keys = {"": ""} | {ranks_key(ours[axis]): ranks_key(theirs[axis]) for axis in axes}
    groups = {"": ""} | {f"{axis} {ours[axis][0]}": f"{axis} {theirs[axis][0]}" for axis in axes}
    peers = {key: str(int(key) - first.rank + rank) for _, key in first.rank_class.groups if key.isdigit()}
    held, fed = (at["dp_shard"], at["tp"]), at["dp_replicate"] * dims.dp_shard + at["dp_shard"]
    inputs = {step: tuple(stable_digest([one, fed]) for one in each) for step, each in first.received.inputs.items()}
    issued = tuple(replace(one, group=groups[one.group], ranks=keys[one.ranks]) for one in first.groups.issued)
    named = tuple((groups[group], (keys | peers)[key]) for group, key in first.rank_class.groups)
    return replace(
        first,
        rank=rank,
        traffic=replace(first.traffic, uses=tuple(replace(use, ranks=keys[use.ranks]) for use in first.traffic.uses)),
        groups=replace(
            first.groups, issued=issued, roles={keys[ranks]: role for ranks, role in first.groups.roles.items()}
        ),
        rank_class=replace(first.rank_class, groups=named),
        parameters=replace(first.parameters, slices=stable_digest([first.parameters.slices, *held])),
        contents=replace(first.contents, by_step=_with_more(first.contents.by_step, *held)),
        received=replace(
            first.received,
            batches=_with_more(first.received.batches, fed),
            tokens=_with_more(first.received.tokens, fed),
            inputs=inputs,
        ),
    )


def _with_more(by_step: dict[int, int], *more: int) -> dict[int, int]:
    return {step: stable_digest([one, *more]) for step, one in by_step.items()}


def write(dims: ParallelDims, folder: Path, odd: int | None) -> int:
    """Write the recording into the folder and return the bytes of all files.

    Behind its own summary each rank has the record of its stage's first rank, the only one that is read of ranks that
    are alike. The rank `odd` and the members of its groups have their own records.
    """
    record_file(folder, 0).parent.mkdir(parents=True)
    for ranks in rank_grid(dims).reshape(dims.pp, -1).tolist():
        one = record(ranks[0], dims, None)
        first = summary_of(one)
        _, _, body = record_bytes(first, one).partition(b"\n")
        for rank in ranks:
            record_file(folder, rank).write_bytes(summary_line(summary_like(first, rank, dims)) + body)
    for rank in () if odd is None else {peer for axis in AXES for peer in line(dims, odd, axis)}:
        one = record(rank, dims, odd)
        save_record(record_file(folder, rank), summary_of(one), one)
    return sum(file.stat().st_size for file in (folder / "ranks").iterdir())


def main() -> None:
    """Write and read in two processes, so that the memory is that of reading alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("layout")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--odd", action="store_true", help="a rank is unlike the others")
    parser.add_argument("--read", choices=("layout", "page"), help="only read what is there")
    args = parser.parse_args()
    if args.read:
        read(args.folder, args.layout if args.read == "layout" else None)
        return
    dims = parse_layout(args.layout, MANY)
    size = write(dims, args.folder, ODD % dims.world_size if args.odd else None)
    print(f"{dims.world_size} files of {size / dims.world_size:.0f} bytes")
    for what in ("layout", "page"):
        command = [sys.executable, "-m", "benchmarks.many_ranks", args.layout, str(args.folder), "--read", what]
        subprocess.run(command, check=True)


def read(folder: Path, text: str | None) -> None:
    """Show the recording with the layout `text`, or without one, and print exit code, seconds and memory."""
    began, cpu = time.monotonic(), time.process_time()
    code = show_recording(argparse.Namespace(json=False), folder, text)
    took, memory = time.process_time() - cpu, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"exit code {code}: {took:.1f} s of CPU, {time.monotonic() - began:.1f} s in all; {memory:.0f} MiB at most")


if __name__ == "__main__":
    main()
