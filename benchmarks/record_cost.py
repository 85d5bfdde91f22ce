"""What recording costs a training step that is not recorded: `python -m benchmarks.record_cost`.

One process trains the same network with and without the recorder, by turns, and CPU time is counted. It wants a machine that
does nothing else: under other work the same step takes a third more or less of CPU time, and the ratio says nothing. A step
makes some hundreds of calls of modules and a dozen collectives, of a group of one rank, so that nothing is waited for.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness.record.injection import environment, fresh

TURNS, STEPS, SKIPPED, BLOCKS, COLLECTIVES = 3, 40, 5, 60, 12


def train() -> None:
    """In a process of its own: prints the milliseconds of CPU of the median step."""
    import torch
    import torch.distributed as dist
    from torch import nn

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        blocks = [
            nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256), nn.LayerNorm(256)) for _ in range(BLOCKS)
        ]
        model, taken = nn.Sequential(*blocks), []
        optimizer, number = torch.optim.SGD(model.parameters(), lr=0.01), torch.zeros(1)
        for _ in range(STEPS):
            began = time.process_time()
            model(torch.randn(64, 256)).square().mean().backward()
            for _ in range(COLLECTIVES):
                dist.all_reduce(number)
            optimizer.step()
            optimizer.zero_grad()
            taken.append(1000 * (time.process_time() - began))
        print(statistics.median(taken[SKIPPED:]))
        dist.destroy_process_group()


def median(*, recorded: bool) -> float:
    with tempfile.TemporaryDirectory() as folder:
        fresh(Path(folder) / "out")
        told = environment(Path(folder) / "out", "1-3") if recorded else None
        words = [sys.executable, "-m", "benchmarks.record_cost", "train"]
        return float(subprocess.run(words, env=told, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    pairs = [(median(recorded=False), median(recorded=True)) for _ in range(TURNS)]
    for without, recorded in pairs:
        print(f"{without:.1f} ms without, {recorded:.1f} ms with the recorder: {100 * (recorded / without - 1):+.1f} %")
    ratio = statistics.median(recorded / without for without, recorded in pairs)
    print(f"median {100 * (ratio - 1):+.1f} % of a step that is not recorded")


if __name__ == "__main__":
    train() if sys.argv[1:] == ["train"] else main()
