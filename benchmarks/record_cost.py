"""What recording costs a training step, one that is not recorded and one that is: `python -m benchmarks.record_cost`.

Two processes train the same network, one of them with the recorder, and take their steps by turns on one core. So whatever else
the machine does affects neighbouring steps alike. CPU time of all threads is counted. A step makes some hundreds of calls of
modules and a dozen collectives, of a group of one rank, so that nothing is waited for. Prints the median of the ratios of
neighbouring steps, and between which ratios half of them lie; then the same of two processes without the recorder.
"""

from __future__ import annotations

import copy
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from harness.recording.injection import environment_for_recording, make_fresh_folder

PAIRS, SKIPPED, COLLECTIVES = 200, 10, 12
SIZES = {"15.8 million parameters": (60, 64), "4.0 million": (15, 256)}
"""Blocks of 0.26 million parameters, and rows of a step, whose product is the same."""
FEW = 12
"""Steps that are recorded."""


def train(size: str) -> None:
    """Take a step for each line that comes in, and print the milliseconds of CPU. Runs in a separate process."""
    import torch
    import torch.distributed as dist
    from torch import nn

    blocks, rows = SIZES[size]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        of_block = [nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256), nn.LayerNorm(256)]
        model, number = nn.Sequential(*(copy.deepcopy(nn.Sequential(*of_block)) for _ in range(blocks))), torch.zeros(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in sys.stdin:
            began = time.process_time()
            model(torch.randn(rows, 256)).square().mean().backward()
            for _ in range(COLLECTIVES):
                dist.all_reduce(number)
            optimizer.step()
            optimizer.zero_grad()
            print(1000 * (time.process_time() - began), flush=True)
        dist.destroy_process_group()


class Training:
    """A process that trains, one step at each request. steps: which it records; empty: without the recorder."""

    def __init__(self, stack: ExitStack, size: str, *, steps: str = "") -> None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        make_fresh_folder(folder / "out")
        told = environment_for_recording(folder / "out", steps) if steps else None
        words = [sys.executable, "-m", "benchmarks.record_cost", "train", size]
        self._process = subprocess.Popen(words, env=told, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        stack.callback(self._process.wait)
        stack.callback(_end_of(self._process.stdin).close)

    def step(self) -> float:
        """Run one step and return its milliseconds of CPU."""
        requests = _end_of(self._process.stdin)
        requests.write("step\n")
        requests.flush()
        return float(_end_of(self._process.stdout).readline())


def _end_of(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def _pair(one: Training, other: Training, *, first: bool) -> tuple[float, float]:
    """Run a step of each and return their milliseconds, in the order of the arguments.

    first: whether `one` goes first.
    """
    if first:
        taken = one.step()
        return taken, other.step()
    taken = other.step()
    return one.step(), taken


def compare(what: str, size: str, steps: str = "", pairs: int = PAIRS) -> None:
    """Print the median of the ratios of neighbouring steps.

    steps: those that the second process records; empty: no recorder.
    """
    with ExitStack() as stack:
        one, other = Training(stack, size), Training(stack, size, steps=steps)
        taken = [_pair(one, other, first=number % 2 == 0) for number in range(SKIPPED + pairs)]
    ratios = [with_it / without for without, with_it in taken[SKIPPED:]]
    quarter, middle, rest = statistics.quantiles(ratios, n=4)
    step = statistics.median(without for without, _ in taken[SKIPPED:])
    print(
        f"{what}, {size}: {middle:.3f} times a step of {step:.1f} ms, half of {pairs} between {quarter:.3f} and {rest:.3f}"
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train(sys.argv[2])
    else:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        for size in SIZES:
            compare("a step that is not recorded", size, "1-3")
            compare("a recorded step", size, f"{SKIPPED + 1}-{SKIPPED + FEW}", FEW)
            compare("without the recorder, as well", size)
