"""What the probe costs a training step: the same trainer, with and without it in turn, in one run.

    python benchmarks/probe_cost.py [--ranks 2] [--rounds 5] [--trainer torchtitan]
    python benchmarks/probe_cost.py --unfrozen               ranks that torchrun starts, without freezing Python's objects
    python benchmarks/probe_cost.py --device cuda --case FILE.yaml::NAME     a model and dims of one's own

Blocks of steps alternate (without, with, without, ...) in the same processes, so a drift of the machine affects both.
Prints the median step of each, the median of the ratios of neighbouring blocks, and the CPU seconds in which the probe begins.
In a job's first steps the probe also looks for what is kept; a long job pays for the later ones, which stand apart. Rank 0's
CPU time includes that of its threads, and depends less than seconds do on what else runs on the machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.core import trainers
from harness.core.case.case import Case, to_json
from harness.core.case.loading import find_case, from_json, load_cases
from harness.core.launch import Job, default_server, launch

FIRST, LATER = 4, 8  # steps of a block; the probe looks for what is kept between the first ones

Seconds = tuple[float, float]
"""Of one step: by the clock, and of CPU."""


def measure(options: dict[str, Any]) -> None:
    """Train on this rank in blocks of steps, without and with the probe in turn; rank 0 writes all times to `result`,
    as JSON."""
    from harness.core.probe import Probe

    if options["unfrozen"]:
        gc.unfreeze()
    case = from_json(options["case"])
    adapter = trainers.load_adapter(options["trainer"])
    trainer = adapter.start(case, None, options["device"])
    step = stepping(trainer)
    blocks: list[list[Seconds]] = []
    begins = []
    _block(step)  # warm-up
    for index in range(2 * options["rounds"]):
        began, probe = time.process_time(), None
        if index % 2:
            probe = Probe(int(os.environ["RANK"]), case.dims.world_size)
            probe.install()
            probe.attach(trainer.model_parts)
            begins.append(time.process_time() - began)
        blocks.append(_block(step))
        if probe:
            probe.remove()
    if os.environ["RANK"] == "0":
        Path(options["result"]).write_text(json.dumps([blocks, begins]), encoding="utf-8")
    adapter.stop()


def stepping(trainer: Any) -> Callable[[], Any]:
    """Return a function that runs one step of a trainer: of ours, or of torchtitan's, which counts and feeds itself in
    its loop."""
    if hasattr(trainer, "train_step"):
        return lambda: trainer.metrics.append(trainer.train_step())
    theirs = trainer._trainer
    batches = theirs.batch_generator(theirs.dataloader)

    def step() -> None:
        theirs.step += 1
        theirs.train_step(batches)

    return step


def _block(step: Callable[[], Any]) -> list[Seconds]:
    """Run a block of steps and return the times of each."""
    import torch

    times = []
    for _ in range(FIRST + LATER):
        started, began = time.perf_counter(), time.process_time()
        step()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        times.append((time.perf_counter() - started, time.process_time() - began))
    return times


def main() -> None:
    """Measure on all ranks and print medians and ratios. SystemExit if a rank fails."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trainer", default="llama3")
    parser.add_argument("--unfrozen", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--case", metavar="FILE::NAME", help="of as many ranks; default a model of 4 million parameters"
    )
    chosen = parser.parse_args()
    default_server(trainers.load_adapter(chosen.trainer).preload, device=chosen.device)
    case = of_file(chosen.case) if chosen.case else usual(chosen.ranks)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        options = {"case": to_json(case), "rounds": chosen.rounds, "result": str(result), "trainer": chosen.trainer}
        options |= {"device": chosen.device, "unfrozen": chosen.unfrozen}
        job = Job(Path(folder) / "job", case.dims.world_size, "probe_cost:measure", options, 600, device=chosen.device)
        exits = launch(job)
        failed = [exit for exit in exits if exit.how != "ok"]
        if failed:
            raise SystemExit(f"rank {failed[0].rank} {failed[0].how}: {failed[0].error}\n{failed[0].stack}")
        blocks, begins = json.loads(result.read_text(encoding="utf-8"))
    print(f"{case.dims.world_size} ranks, {case.dims}, {chosen.rounds} pairs of blocks of {FIRST + LATER} steps")
    tokens = case.training.global_batch * case.training.seq_len
    seconds = statistics.median(wall for block in blocks[::2] for wall, _ in block)
    print(f"tokens a second without the probe {tokens / seconds:,.0f}")
    for name, steps in (("first", slice(FIRST)), ("later", slice(FIRST, None))):
        for what, column in (("seconds", 0), ("CPU", 1)):
            print(f"{name} steps, {what}:", told([[step[column] for step in block[steps]] for block in blocks]))
    print(f"CPU seconds in which the probe begins: median {statistics.median(begins):.3f}, at most {max(begins):.3f}")


def told(blocks: list[list[float]]) -> str:
    """Return a text on medians and ratios. blocks: seconds of steps, without the probe and with it in turn."""
    without, probed = ([statistics.median(times) for times in blocks[start::2]] for start in (0, 1))
    ratios = [b / a for a, b in zip(without, probed, strict=True)]
    medians = (
        f"median {statistics.median(without) * 1e3:.1f} ms, with the probe {statistics.median(probed) * 1e3:.1f} ms"
    )
    return f"{medians}; ratio {statistics.median(ratios):.3f}  ({min(ratios):.3f} to {max(ratios):.3f})"


def usual(ranks: int) -> Case:
    """Return the case of a model of 4 million parameters, over FSDP on so many ranks."""
    model = {"dim": 256, "n_layers": 4, "n_heads": 8, "n_kv_heads": 4, "ffn_dim": 768, "vocab_size": 1024}
    training = {"dtype": "float32", "seq_len": 128, "global_batch": 8 * ranks, "steps": 1000}
    dims = {"dp_shard": ranks}
    return from_json({"name": "cost", "why": "benchmark", "dims": dims, "model": model, "training": training})


def of_file(where: str) -> Case:
    """Return the case FILE::NAME, with 1000 steps, which are more than are run."""
    path, _, name = where.partition("::")
    case = find_case(name, load_cases(Path(path)))
    return replace(case, training=replace(case.training, steps=1000))


if __name__ == "__main__":
    main()
