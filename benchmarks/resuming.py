"""Runs that are killed at random moments and resumed: is any case lost, or counted twice, and is anything left?

    python benchmarks/resuming.py --times 20 --shards 3
    python benchmarks/resuming.py --times 1 --cases 300 --kills 10 --longest 40

Each time a matrix of small cases, in so many shards, is killed (SIGKILL) and resumed until every shard has ended. Then they are
merged. Every other time it is killed at the moment in which a line of verdicts.jsonl appears. It looks at the lines of that
file, the folders of cases, processes, and the temporary folder. It also takes all slots, because none may still be held. Linux
only: it looks into /proc.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from harness import ROOT
from harness.core.launch import Pool
from harness.core.run import verdicts
from harness.nights.merged import find_problems, merge_outcomes

SMALL = "why: small, model: {n_layers: 1}, training: {steps: 1}"
PATIENCE = 3600.0  # seconds that the last of the runs, without a kill, may take


def cases_of(names: list[str]) -> str:
    """Return the text of a file of small cases with these names, on one rank and on two in turn."""
    dims = (f"{{{SMALL}, dims: {{dp_replicate: {1 + number % 2}}}}}" for number in range(len(names)))
    return "cases:\n" + "".join(f"  {name}: {each}\n" for name, each in zip(names, dims, strict=True))


@dataclass(frozen=True)
class Moment:
    """The moment of a kill: seconds after the start, or as soon as verdicts.jsonl has grown by that many bytes."""

    seconds: float = PATIENCE
    more: int = 10**9


def killed(arguments: list[str], where: Path, out: str, moment: Moment) -> bool:
    """Run the matrix, and kill it at this moment; return whether it was killed before its end."""
    command = [sys.executable, "-m", "harness", "matrix", *arguments, "--out", out]
    began, before = time.monotonic(), _size(where / out)
    with open(where / "told.txt", "ab") as told:
        process = subprocess.Popen(
            command, cwd=where, env=environment(where), stdout=told, stderr=told, start_new_session=True
        )
        while process.poll() is None:
            if time.monotonic() - began > moment.seconds or _size(where / out) - before >= moment.more:
                process.send_signal(signal.SIGKILL)
                process.wait()
                return True
            time.sleep(0.0002)
    return False


def environment(where: Path) -> dict[str, str]:
    """Return an environment with separate slots, temporary folder and runtime folder, so with a separate resident
    process."""
    folders = {"HARNESS_SLOTS_FOLDER": "slots", "TMPDIR": "temporary", "XDG_RUNTIME_DIR": "runtime"}
    own = {name: str(where / folder) for name, folder in folders.items()}
    return {**os.environ, "PYTHONPATH": str(ROOT), "HARNESS_SLOTS": "4", **own}


def _size(out: Path) -> int:
    file = verdicts.verdicts_file_in(out)
    return file.stat().st_size if file is not None else 0


def run_part(shard: str, out: str, where: Path, draw: random.Random, longest: float, most: int) -> int:
    """Run a shard, killing and resuming it, until it ends; return the number of kills.

    longest: seconds until a kill. most: the most kills. TimeoutError if it does not end within PATIENCE.
    """
    for kills in range(most + 1):
        last = kills == most
        seconds, more = draw.uniform(0.0, longest), draw.randint(1, 4000)
        moment = Moment() if last else Moment(seconds=seconds) if draw.random() < 0.5 else Moment(more=more)
        begun = verdicts.verdicts_file_in(where / out) is not None
        if not killed(["--resume"] if begun else ["--shard", shard], where, out, moment):
            return kills
    raise TimeoutError(f"part {shard} did not come to its end within {PATIENCE:g} s")


def once(shards: int, names: list[str], draw: random.Random, longest: float, most: int) -> tuple[int, list[str]]:
    """Run, kill and resume a matrix in a temporary folder; return the number of kills, and what is wrong afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        for name in ("cases", "temporary", "runtime"):
            (where / name).mkdir(mode=0o700)
        (where / "cases" / "small.yaml").write_text(cases_of(names))
        outs = [f"out_{part}" for part in range(shards)]
        kills = sum(run_part(f"{part + 1}/{shards}", out, where, draw, longest, most) for part, out in enumerate(outs))
        wrong = wrong_verdicts(names, [where / out for out in outs]) + left(where)
        told = (where / "told.txt").read_text()
        wrong += [line for line in told.splitlines() if line.startswith("harness: --resume")]  # sources were edited
        if wrong:
            print(told, file=sys.stderr)
        with Pool(where / "slots", tuple(path.name for path in (where / "slots").glob("core_*"))).take_slots(4):
            pass  # all slots are free again
        return kills, wrong


def wrong_verdicts(names: list[str], outs: list[Path]) -> list[str]:
    """Return lines on cases that are lost, doubled or not judged, by the lines of verdicts.jsonl and the folders of
    cases."""
    runs = [verdicts.last_run(out)[0] for out in outs]
    found = Counter(one.case for one in merge_outcomes(runs))
    ended = Counter(name for run in runs for name in (*run.outcomes, *run.ended_twice))
    folders = Counter(path.parent.name for out in outs for path in out.glob("[!.]*/run"))
    wrong = [f"{name}: lost" for name in names if not found[name] or not folders[name]]
    wrong += [f"{name}: ended {count} times" for name, count in ended.items() if count > 1]
    wrong += [f"{name}: nobody asked for it" for name in ended.keys() | folders.keys() if name not in names]
    wrong += [
        f"{one.case}: {one.verdict} {one.reason}{one.cause}"
        for one in merge_outcomes(runs)
        if one.failed and "golden" not in one.report
    ]
    return sum(find_problems(runs), wrong)


def left(where: Path) -> list[str]:
    """End the resident process; return lines on processes that outlive it, and on files in the temporary folder.

    torch makes a cache there when it is imported, which is left out.
    """
    stop = [sys.executable, "-m", "harness", "run", "--server", "end"]
    subprocess.run(stop, env=environment(where), cwd=where, stdout=subprocess.DEVNULL, check=True)
    time.sleep(3.0)  # what is left may see by itself that it is alone
    found = [
        f"left: {path.name}" for path in (where / "temporary").glob("*") if not path.name.startswith("torchinductor_")
    ]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.fsencode(where) in (process / "environ").read_bytes():
                found.append(f"left: process {process.name} {(process / 'cmdline').read_bytes()!r}")
        except OSError:  # it ended as we looked
            continue
    return found


def main() -> None:
    """Do so many runs and print what is wrong with each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=8)
    parser.add_argument("--kills", type=int, default=3, help="at most, of each shard")
    parser.add_argument("--longest", type=float, help="seconds to a kill; default: what a run without kills takes")
    args = parser.parse_args()
    draw, names = random.Random(args.seed), [f"case_{number}" for number in range(args.cases)]
    print(f"{args.times} runs of {args.cases} cases, seed {args.seed}", flush=True)
    longest = args.longest
    if longest is None:
        began = time.monotonic()
        once(args.shards, names, draw, longest=0.0, most=0)
        longest = (time.monotonic() - began) / args.shards
    kills = bad = 0
    for number in range(args.times):
        more, wrong = once(args.shards, names, draw, longest, args.kills)
        kills, bad = kills + more, bad + bool(wrong)
        print(f"run {number + 1}: {more} kills; {'; '.join(wrong) or 'each case once, nothing left'}", flush=True)
    print(f"{args.times} runs, {kills} kills: {bad} with a case lost or doubled, or something left")


if __name__ == "__main__":
    main()
