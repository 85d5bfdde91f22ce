"""Every commit of torchtitan's main that touches what these cases run, judged by six of them; newest first, and resumable.

    python benchmarks/torchtitan_commits.py PATH [--since 2026-01-01] [--minutes 60]

PATH is a clone of pytorch/torchtitan. After each commit what was found is kept in torchtitan_commits.json, with its torch,
and docs/results/torchtitan_commits.md is made anew. A commit that is there already is not judged again. Commits of some times
start with some releases of torch only. It exits with 1 while a FAIL is none of the known defects.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from torchtitan_months import Found, found

from harness import ROOT, trainers
from harness.bisect.commits import clone, git
from harness.evidence.store import write_text
from harness.launch import default_server
from harness.run.options import Options
from harness.spec.loading import find_case, load_all
from harness.trainers.torchtitan import source
from harness.trainers.torchtitan.eras import TRAINER_CONFIG

CASES = ("hsdp_2x2", "fsdp_2_tp_2", "cp_2", "pp_2", "hsdp_2x2_accum", "fsdp_4_to_hsdp_2x2")
TOUCHED = [f"torchtitan/{part}" for part in ("distributed", "models/llama3", "components", "trainer.py", "train.py")]
RIGHT = ("PASS", "XFAIL", "not asked")
STORED = Path(__file__).with_suffix(".json")
PAGE = ROOT / "docs" / "results" / "torchtitan_commits.md"


@dataclass(frozen=True)
class Row:
    """What one commit came to."""

    commit: str
    date: str
    torch: str
    found: dict[str, Found]

    @property
    def unexplained(self) -> bool:
        return any(told.verdict in ("FAIL", "UNKNOWN") and not told.defect for told in self.found.values())


def listed(repo: Path, since: str) -> list[str]:
    """Return the commits, newest first."""
    words = ("rev-list", "--first-parent", f"--since={since}", "main", "--", *TOUCHED)
    return [commit[:9] for commit in git(repo, *words).split()]


def judged(repo: Path, commit: str, out: Path) -> Row:
    with clone(repo, source.FILES) as checkout:
        git(checkout, "checkout", "--quiet", "--detach", commit)
        date = git(checkout, "show", "--no-patch", "--format=%cs").strip()
        options = Options(out=out / commit, trainer=trainers.spec("torchtitan", str(checkout)), timeout=240.0)
        cases = load_all()
        told = {name: found(find_case(name, cases), options) for name in CASES}
        return Row(commit, date, importlib.metadata.version("torch"), told)


def stored() -> dict[str, Row]:
    records = json.loads(STORED.read_text()) if STORED.exists() else []
    rows = [Row(**{**one, "found": {case: Found(**told) for case, told in one["found"].items()}}) for one in records]
    return {row.commit: row for row in rows}


def keep(rows: dict[str, Row]) -> None:
    ordered = sorted(rows.values(), key=lambda row: (row.date, row.commit), reverse=True)
    write_text(STORED, json.dumps([asdict(row) for row in ordered], indent=1) + "\n")
    write_text(PAGE, page(ordered))


def page(rows: list[Row]) -> str:
    """Return a table by month, and one of every commit that does not PASS all that was asked of it."""
    places, cases = (", ".join(f"`{one}`" for one in each) for each in (TOUCHED, CASES))
    lines = [
        "# torchtitan's commits",
        "",
        f"`benchmarks/torchtitan_commits.py` judges commits of main, newest first. They touch {places}.",
        f"The cases are {cases}.",
        "",
        "| month | torch | commits | all that was asked PASS | other | of these unexplained |",
        "|---|---|---|---|---|---|",
    ]
    for month in sorted({row.date[:7] for row in rows}, reverse=True):
        mine = [row for row in rows if row.date.startswith(month)]
        right = [row for row in mine if _is_right(row)]
        versions = ", ".join(sorted({row.torch.partition("+")[0] for row in mine}))
        counts = (len(mine), len(right), len(mine) - len(right), sum(row.unexplained for row in mine))
        lines.append(f"| {month} | {versions} | {' | '.join(map(str, counts))} |")
    told = [
        f"| {row.commit} | {row.date} | `{case}` | {found} |"
        for row in rows
        for case, found in row.found.items()
        if found.verdict not in RIGHT
    ]
    lines += ["", "| commit | date | case | what was found |", "|---|---|---|---|", *told] if told else []
    return "\n".join(lines) + "\n"


def _is_right(row: Row) -> bool:
    return all(told.verdict in RIGHT for told in row.found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repo", type=Path)
    parser.add_argument("--since", default="2026-01-01")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--out", type=Path, default=Path("out/commits"))
    chosen = parser.parse_args()
    default_server(TRAINER_CONFIG.preload)
    until, rows = time.monotonic() + 60 * chosen.minutes, stored()
    for commit in listed(chosen.repo, chosen.since):
        if commit not in rows and time.monotonic() < until:
            rows[commit] = judged(chosen.repo, commit, chosen.out)
            keep(rows)
            print(commit, {case: str(told) for case, told in rows[commit].found.items()}, flush=True)
    sys.exit(1 if any(row.unexplained for row in rows.values()) else 0)


if __name__ == "__main__":
    main()
