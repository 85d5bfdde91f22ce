"""What `make gpu` runs after the cases: the catalogue of faults by kind of bug, a model of 1B parameters, what watching costs,
and torchtitan. Each is a command with a name; what it prints is kept as NAME.txt, its end as a line of programs.jsonl.

A program that has its line is not run again. One that time cut short has none, and is begun anew.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import ROOT
from harness.faults import all_faults

DONE = "programs.jsonl"
LLAMA_3_2_1B = {
    **{"dim": 2048, "n_layers": 16, "n_heads": 32, "n_kv_heads": 8, "ffn_dim": 8192, "vocab_size": 128256},
    "tied_embeddings": True,
}
"""The published shape: https://huggingface.co/meta-llama/Llama-3.2-1B, config.json."""
SMALL = {"dim": 64, "n_layers": 2, "n_heads": 8, "n_kv_heads": 4, "ffn_dim": 192, "vocab_size": 256}
"""In its place on CPU, where this file is only tried."""


@dataclass(frozen=True)
class Program:
    """A program to run: its name and the arguments of Python.

    lacking: why it cannot run here; empty if it can.
    """

    name: str
    words: tuple[str, ...]
    lacking: str = ""

    @property
    def command(self) -> list[str]:
        return [sys.executable, *self.words]


def programs(device: str, out: Path) -> Iterator[Program]:
    """Yield all programs, most worth for their time first. The case of the large model is written into `out`."""
    case = str(large_case(device, out))
    train = ("-m", "torch.distributed.run", "--nproc-per-node", "1", "-m", "harness.core.trainers.llama3")
    trainer = (*train, "--case", f"{case}::large", "--device", device)
    recorded = ("-m", "harness", "record", "--layout", "dp_shard=1", "-o", str(out / "recording"), "--", sys.executable)
    yield Program("large model", trainer)
    yield Program("large model recorded", (*recorded, *trainer))
    yield Program("probe cost", ("benchmarks/probe_cost.py", "--device", device, "--case", f"{case}::large"))
    missing = "" if importlib.util.find_spec("torchtitan") else "torchtitan is not installed"
    titan = ("-m", "harness", "matrix", "--trainer", "torchtitan", "-k", "single", "--device", device)
    yield Program("torchtitan", (*titan, "--out", str(out / "torchtitan")), missing)
    yield from catalogue(device, out)


def catalogue(device: str, out: Path) -> Iterator[Program]:
    """Yield a program for each kind of bug, which runs `harness faults` on it; ranks of a case share a GPU."""
    shared = ("--ranks-per-gpu", "8") if device == "cuda" else ()
    faults = all_faults()
    for family in dict.fromkeys(fault.family for fault in faults):
        names = " or ".join(fault.name for fault in faults if fault.family == family)
        where = ("--device", device, *shared, "--out", str(out / "faults"))
        yield Program(f"faults: {family}", ("-m", "harness", "faults", "--checks-only", "-k", names, *where))


def large_case(device: str, out: Path) -> Path:
    """Write the case of the large model, one rank in bfloat16, and return its absolute path.

    On CPU the model is small.
    """
    training = {"dtype": "bfloat16", "steps": 6}
    size = {"seq_len": 2048, "global_batch": 4} if device == "cuda" else {"seq_len": 32, "global_batch": 4}
    model = LLAMA_3_2_1B if device == "cuda" else SMALL
    case = {"why": "a step that takes long", "model": model, "training": training | size}
    out.mkdir(parents=True, exist_ok=True)
    file = out / "large.yaml"
    file.write_text(json.dumps({"cases": {"large": case}}), encoding="utf-8")
    return file.resolve()


def run(folder: Path, chosen: Sequence[Program], give_up: float) -> int:
    """Run the chosen programs that have no line yet, appending one for each.

    Return how many are left when the time is over. give_up: when the time is over, by time.monotonic().
    """
    known = {record["program"] for record in records(folder)}
    todo = [program for program in chosen if program.name not in known]
    for number, program in enumerate(todo):
        if not (ended := end_of(folder, program, give_up)):
            return len(todo) - number
        with open(folder / DONE, "a", encoding="utf-8") as file:
            file.write(json.dumps(ended) + "\n")
        print(line(ended), flush=True)
    return 0


def end_of(folder: Path, program: Program, give_up: float) -> dict[str, object]:
    """Run a program, its output in NAME.txt, and return its record. Empty if the time was over before it ended.

    A program that lacks something is not run: its record has the code None and the reason.
    """
    ended: dict[str, object] = {"program": program.name, "command": " ".join(program.command)}
    if program.lacking:
        return {**ended, "code": None, "reason": program.lacking}
    began = time.monotonic()
    if began >= give_up:
        return {}
    with open(folder / f"{program.name.replace(': ', '_').replace(' ', '_')}.txt", "w", encoding="utf-8") as told:
        try:
            done = subprocess.run(
                program.command, cwd=ROOT, stdout=told, stderr=subprocess.STDOUT, timeout=give_up - began, check=False
            )
        except subprocess.TimeoutExpired:
            return {}
    return {**ended, "code": done.returncode, "seconds": round(time.monotonic() - began, 1)}


def records(folder: Path) -> list[dict[str, object]]:
    """Return the records of the programs that ended, from the folder's file; empty without a file."""
    file = folder / DONE
    return [json.loads(text) for text in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def line(ended: dict[str, object]) -> str:
    """Return a line on one record: the program, and its exit code and seconds, or why it did not run."""
    how = f"not run: {ended['reason']}" if ended["code"] is None else f"exit code {ended['code']}, {ended['seconds']} s"
    return f"{ended['program']:<30} {how}"
