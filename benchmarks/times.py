"""What people wait for, in two checkouts on one machine: seconds and core seconds of the usual commands, in turns.

    python -m benchmarks.times BEFORE AFTER                 all commands, each checkout once; both need their .venv
    python -m benchmarks.times BEFORE AFTER --only matrix --times 3

Of `make matrix` it also says when the first and the tenth verdict came. Prints a table in markdown. Only the ratio after/before
can be compared between machines. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

VERDICTS = (1, 10)
"""Which verdicts of a matrix are timed."""
COMMANDS = {
    "matrix, fresh": ["harness", "matrix", "--server", "own", "--out", "OUT"],
    "matrix, second": ["harness", "matrix", "--server", "own", "--out", "OUT"],
    "pytest -k hsdp": ["pytest", "-q", "-k", "hsdp"],
    "make test": ["make", "test"],
    "make faults": ["harness", "faults", "--checks-only", "--server", "own", "--out", "OUT"],
    "gate": [".ci/run"],
    "harness --help": ["harness", "--help"],
}
"""What is typed, by its name in the table. OUT is a folder that is empty at first, and kept for the next command."""


@dataclass
class Taken:
    """The time that one command took."""

    wall: float
    """Seconds until it ended."""
    core: float
    """Seconds of user and system time of it and of all that it started and waited for."""
    verdicts: dict[int, float] = field(default_factory=dict)
    """Number of a verdict -> seconds until it was recorded."""


def timed(words: Sequence[str], checkout: Path, out: Path) -> Taken:
    """Run a command of a checkout, and return what it took. Its exit code does not matter: cases may fail."""
    paths = os.pathsep.join([str(checkout / ".venv" / "bin"), os.environ["PATH"]])
    environment = os.environ | {"PATH": paths, "PYTHONPATH": str(checkout)}
    typed = [str(out) if word == "OUT" else word for word in words]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    process = subprocess.Popen(
        typed, cwd=checkout, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    verdicts: dict[int, float] = {}
    watcher = threading.Thread(target=_watch, args=(process, out / "verdicts.jsonl", began, verdicts))
    watcher.start()
    process.wait()
    wall = time.monotonic() - began
    watcher.join()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    core = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Taken(wall, core, verdicts)


def _watch(process: subprocess.Popen[bytes], file: Path, began: float, verdicts: dict[int, float]) -> None:
    """Note the seconds at which the numbers of verdicts in VERDICTS were reached, until the process ends.

    Lines from before are not counted.
    """
    already = _outcomes(file)
    while process.poll() is None:
        count = _outcomes(file) - already
        for number in VERDICTS:
            if count >= number:
                verdicts.setdefault(number, time.monotonic() - began)
        time.sleep(0.1)


def _outcomes(file: Path) -> int:
    """Return the number of lines in the file that have a verdict; 0 without a file."""
    if not file.exists():
        return 0
    return sum('"verdict"' in line for line in file.read_text(encoding="utf-8", errors="replace").splitlines())


def row(name: str, label: str, before: Sequence[float], after: Sequence[float]) -> str:
    """Return a line of the table: medians, and their ratio."""
    first = statistics.median(before)
    second = statistics.median(after)
    return f"| {name} | {label} | {first:.1f} | {second:.1f} | {second / first:.2f} |"


def main(argv: Sequence[str] | None = None) -> int:
    """Run all commands in both checkouts and print the table; return 0."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks.times", description=__doc__, formatter_class=raw)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--only", default="", metavar="WORD", help="commands whose names have it")
    parser.add_argument("--times", type=int, default=1, metavar="N", help="turns")
    args = parser.parse_args(argv)
    checkouts = {"before": args.before.resolve(), "after": args.after.resolve()}
    took: dict[tuple[str, str], list[Taken]] = {}
    for _ in range(args.times):
        folders = {side: Path(tempfile.mkdtemp(prefix=f"times_{side}_")) for side in checkouts}
        for name, words in COMMANDS.items():
            if args.only in name:
                for side, checkout in checkouts.items():
                    took.setdefault((name, side), []).append(timed(words, checkout, folders[side]))
        for folder in folders.values():
            shutil.rmtree(folder)
    print("| command | | before | after | ratio |")
    print("|---|---|---|---|---|")
    for name in dict.fromkeys(name for name, _ in took):
        before = took[name, "before"]
        after = took[name, "after"]
        print(row(name, "seconds", [one.wall for one in before], [one.wall for one in after]))
        print(row(name, "core seconds", [one.core for one in before], [one.core for one in after]))
        for number in VERDICTS:
            sides = [[one.verdicts[number] for one in side if number in one.verdicts] for side in (before, after)]
            if all(sides):
                print(row(name, f"verdict {number}", *sides))
    return 0


if __name__ == "__main__":
    sys.exit(main())
