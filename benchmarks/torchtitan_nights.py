"""Weeks of torchtitan's history as nights: what a nightly job would have said each morning, and which commit was to blame.

    python benchmarks/torchtitan_nights.py PATH [--since 2024-10-30] [--until 2024-12-03] [--out out/nights]

PATH is a clone of pytorch/torchtitan. Each night is `harness nightly` of the last commit of a day on main. Nights that
are in OUT/days.json already are not run again. Then the table of docs/nights.md is made anew, a row for each night in which
a verdict changed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, timedelta
from pathlib import Path

from harness import ROOT
from harness.bisect.commits import git
from harness.evidence.store import write_text
from harness.run.history import Night, runs_in, series
from harness.run.nights import Culprits, culprits_in, of_night

CASES = ("hsdp_2x2_valid", "fsdp_2_tp_2_valid")
PAGE = ROOT / "docs" / "nights.md"
BEGIN, END = "<!-- table: benchmarks/torchtitan_nights.py -->\n", "<!-- end of table -->\n"


def days(since: str, until: str) -> Iterator[str]:
    day, last = date.fromisoformat(since), date.fromisoformat(until)
    while day <= last:
        yield str(day)
        day += timedelta(1)


def last_of(repo: Path, day: str) -> str:
    """By the date of the commit on the main branch."""
    after = date.fromisoformat(day) + timedelta(1)
    return git(repo, "rev-list", "-1", "--first-parent", f"--before={after}T00:00:00Z", "main").strip()[:9]


def night(repo: Path, commit: str, out: Path) -> int:
    words = [
        "harness",
        "nightly",
        str(out / "nights"),
        "--trainer",
        "torchtitan",
        "--repo",
        str(repo),
        "--commit",
        commit,
    ]
    words += ["-k", " or ".join(CASES), "--tier", "all", "--timeout", "240", "--out", str(out / "evidence")]
    return subprocess.run([sys.executable, "-m", *words], check=False).returncode


def run_all(repo: Path, wanted: Sequence[str], out: Path) -> dict[str, str]:
    """By day, the commit that was run."""
    file = out / "days.json"
    done: dict[str, str] = json.loads(file.read_text()) if file.exists() else {}
    for day in wanted:
        if day not in done:
            commit = last_of(repo, day)
            print(f"=== {day}: {commit}", flush=True)
            print(f"=== exit code {night(repo, commit, out)}", flush=True)
            done[day] = commit
            write_text(file, json.dumps(done, indent=1))
    return done


def table(done: Mapping[str, str], row: Sequence[Night], culprits: Culprits) -> str:
    """A row for the first night, and for each in which a verdict is another one than the night before."""
    lines = [
        f"| night | commit | {' | '.join(f'`{case}`' for case in CASES)} | what was found |",
        f"|{'---|' * (len(CASES) + 3)}",
    ]
    before: list[str] = []
    for (day, commit), one in zip(done.items(), row, strict=True):
        verdicts = [one.outcomes[case].verdict if case in one.outcomes else "none" for case in CASES]
        if verdicts != before:
            found = dict.fromkeys(culprits[case, of_night(one)] for case in CASES if (case, of_night(one)) in culprits)
            said = "; ".join(f"{'fixed' if each.fixed else 'broken'} by {each}: {each.cause}" for each in found)
            lines.append(f"| {day} | {commit} | {' | '.join(verdicts)} | {said} |")
        before = verdicts
    return "\n".join([*lines, ""])


def with_table(text: str, told: str) -> str:
    head, _, rest = text.partition(BEGIN)
    return head + BEGIN + told + END + rest.partition(END)[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repo", type=Path)
    parser.add_argument("--since", default="2024-10-30")
    parser.add_argument("--until", default="2024-12-03")
    parser.add_argument("--out", type=Path, default=Path("out/nights"))
    chosen = parser.parse_args()
    done = run_all(chosen.repo, list(days(chosen.since, chosen.until)), chosen.out)
    (row,) = series(runs_in([chosen.out / "nights"])[0]).values()
    told = table(done, row, culprits_in([chosen.out / "nights"]))
    print(told)
    write_text(PAGE, with_table(PAGE.read_text(), told))


if __name__ == "__main__":
    main()
