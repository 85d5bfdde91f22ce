"""Which faults of the catalogue the gate makes: those that the last change can affect, and a quarter of the others.

    python -m tools.drawn_faults              prints their names, as an expression for `make faults K=..`
    python -m tools.drawn_faults --base MAIN  the change is all since that commit; by default the last commit

`make faults` and each night make all. The quarter is drawn by a digest of the commit's files, so that a repetition on the same
commit draws the same faults, and other commits draw others. What a change can affect is told by texts alone: see `affected`.
Anything else that it affects, the quarter and the night have to show. Where git does not say what changed, all are drawn.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath

from harness.faults import Fault, all_faults

ROOT = Path(__file__).resolve().parent.parent
ONE_IN = 4
TRAINER = PurePosixPath("harness/core/trainers/llama3")


def draw_faults(base: str = "HEAD^") -> list[Fault]:
    """Return the faults to make for the change from commit `base` to HEAD, in the order of the catalogue.

    All faults if git fails.
    """
    tree = git("rev-parse", "HEAD^{tree}")
    listed = git("diff", "--name-only", base, "HEAD")
    if tree is None or listed is None:
        return all_faults()
    changed = [PurePosixPath(line) for line in listed.splitlines()]
    return [fault for fault in all_faults() if can_affect(fault, changed) or is_in_the_quarter(fault.name, tree)]


def is_in_the_quarter(name: str, tree: str) -> bool:
    """Return whether a fault is drawn, whatever changed, on the commit whose files have the digest `tree`: one in
    ONE_IN is."""
    return hashlib.sha256(f"{tree} {name}".encode()).digest()[0] % ONE_IN == 0


def can_affect(fault: Fault, changed: Iterable[PurePosixPath]) -> bool:
    """Return whether a changed file that still exists can affect the fault.

    That is its own file, a check that catches it, a file that names its cause, or the trainer's module in which it is
    made.
    """
    source = Path(fault.file).read_text(encoding="utf-8")
    return any(_touches(fault, source, file) for file in changed if file.suffix == ".py" and (ROOT / file).exists())


def _touches(fault: Fault, source: str, file: PurePosixPath) -> bool:
    """Return whether one changed file can affect the fault. source: the text of the fault's file."""
    if file.parts[:3] == ("harness", "core", "checks"):
        return file.stem in fault.caught_by
    if file.parts[:-1] in (("harness", "core", "causes"), ("harness", "hypotheses")):
        return bool(fault.named) and f'"{fault.named}"' in (ROOT / file).read_text(encoding="utf-8")
    if file.parent == TRAINER:
        return f'".{file.stem}:' in source
    return ROOT / file == Path(fault.file)


def git(*words: str) -> str | None:
    """Return the output of git in this repository, stripped; None if git fails, as outside of a repository or for a
    missing commit."""
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def main(argv: Sequence[str] | None = None) -> int:
    """Print the names of the drawn faults as an expression for -k, joined by " or "; return 0."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m tools.drawn_faults", description=__doc__, formatter_class=raw)
    parser.add_argument("--base", default="HEAD^", metavar="COMMIT")
    args = parser.parse_args(argv)
    print(" or ".join(fault.name for fault in draw_faults(args.base)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
