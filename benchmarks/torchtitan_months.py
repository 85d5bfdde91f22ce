"""torchtitan's history, judged at the end of every month: one case each of pp, cp and tp, whose labels are all valid.

    python benchmarks/torchtitan_months.py PATH [--since 2024-09] [--until 2026-08]

PATH is a clone of pytorch/torchtitan. The last commit of each month on its main branch is judged. What was found replaces what
torchtitan_months.json has of the same months, and the table of docs/results/torchtitan.md is made anew. A FAIL that is none of
torchtitan's known defects is shown with its cause, and the exit code is 1: the adapter may be wrong, too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from harness import ROOT, trainers
from harness.bisect.commits import clone, git
from harness.evidence.store import write_text
from harness.judge.judgement import Judgement
from harness.judge.result import Verdict
from harness.launch import default_server
from harness.report.text import headline
from harness.run.options import Options, Unsupported
from harness.run.run_case import run_case
from harness.spec.case import Case
from harness.spec.loading import find_case, load_all
from harness.trainers.torchtitan import source
from harness.trainers.torchtitan.eras import TRAINER_CONFIG

CASES = {"pp": "pp_2_valid", "cp": "cp_2_valid", "tp": "fsdp_2_tp_2_valid"}
STORED = Path(__file__).with_suffix(".json")
README = ROOT / "docs" / "results" / "torchtitan.md"
BEGIN, END = "<!-- table: make titan-months -->\n", "<!-- end of table -->\n"

DEFECTS: dict[str, tuple[str, ...]] = {
    "gradients are clipped by the norm of one stage (to #649)": (
        "gradients are clipped by a norm not reduced over pp",
        "each rank clips by the norm of its own shards",
    ),
    "cp without data ranks looks for a mesh that is not there (to #683)": ("Valid mesh_dim_names are ['cp']",),
    "cp without data ranks has no FSDP (#683 to #685)": ("every cp rank holds whole parameters",),
    "the reported loss is not averaged over cp (to #761)": ("the loss is reported not reduced over cp",),
    "a pipeline's gradients are never divided (#2206 to #2937)": ("512 times what they should be",),
    "the largest loss reported is below the mean (#2206 to #2314)": ("the reported largest loss is wrong",),
    "a sum over tp is lost behind the loss in chunks (#2937 to #3412)": ("backward moves less than planned over tp",),
    "cp names heads as what it cuts (#2963 to #3681)": ("invalid gradient at index 0",),
}
"""torchtitan's, with what began and what ended each -> parts of the cause by which it is known, today and in what is stored."""


@dataclass(frozen=True)
class Found:
    """What one case came to. told: of a FAIL or UNKNOWN the cause, of what was not requested the reason."""

    verdict: str
    told: str = ""

    def __str__(self) -> str:
        if self.verdict == Verdict.PASS:
            return "PASS"
        return f"{self.verdict}: {self.defect or self.told}"

    @property
    def defect(self) -> str:
        return next((defect for defect, known in DEFECTS.items() if any(words in self.told for words in known)), "")


@dataclass(frozen=True)
class Month:
    month: str
    commit: str
    date: str
    found: dict[str, Found]

    def __str__(self) -> str:
        return f"| {self.commit} | {self.date} | {' | '.join(str(self.found[axis]) for axis in CASES)} |"


def months(since: str, until: str) -> Iterator[str]:
    year, month = map(int, since.split("-"))
    while (name := f"{year:04}-{month:02}") <= until:
        yield name
        year, month = year + month // 12, month % 12 + 1


def last_of(repo: Path, month: str) -> str:
    """By the date of the commit on the main branch."""
    _, after = itertools.islice(months(month, "9999-12"), 2)
    words = ("rev-list", "-1", "--first-parent", f"--before={after}-01T00:00:00Z", "main")
    return git(repo, *words).strip()


def judged(repo: Path, month: str, out: Path) -> Month:
    with clone(repo, source.FILES) as checkout:
        git(checkout, "checkout", "--quiet", "--detach", last_of(repo, month))
        commit, day = git(checkout, "show", "--no-patch", "--format=%h %cs", "--abbrev=9").split()
        options = Options(out=out / commit, trainer=trainers.spec("torchtitan", str(checkout)), timeout=240.0)
        cases = load_all()
        return Month(month, commit, day, {axis: found(find_case(name, cases), options) for axis, name in CASES.items()})


def found(case: Case, options: Options) -> Found:
    try:
        judgement = run_case(case, options)
    except Unsupported as reason:
        return Found("not asked", str(reason))
    return Found(judgement.verdict.value, cause(judgement))


def cause(judgement: Judgement) -> str:
    return headline(judgement).partition("    ")[2]


def stored() -> dict[str, Month]:
    records = json.loads(STORED.read_text()) if STORED.exists() else []
    rows = [Month(**{**r, "found": {axis: Found(**told) for axis, told in r["found"].items()}}) for r in records]
    return {row.month: row for row in rows}


def keep(row: Month) -> None:
    rows = sorted((stored() | {row.month: row}).values(), key=lambda one: one.month)
    write_text(STORED, json.dumps([asdict(one) for one in rows], indent=1) + "\n")
    write_text(README, with_table(README.read_text(), rows))


def with_table(text: str, rows: list[Month]) -> str:
    head, _, rest = text.partition(BEGIN)
    told = [
        f"| commit | date | {' | '.join(f'{axis}: `{name}`' for axis, name in CASES.items())} |",
        "|---|---|---|---|---|",
    ]
    return head + BEGIN + "\n".join([*told, *map(str, rows)]) + "\n" + END + rest.partition(END)[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repo", type=Path)
    parser.add_argument("--since", default="2024-09")
    parser.add_argument("--until", default="2026-08")
    parser.add_argument("--out", type=Path, default=Path("out/months"))
    chosen = parser.parse_args()
    default_server(TRAINER_CONFIG.preload)
    rows = []
    for month in months(chosen.since, chosen.until):
        rows.append(judged(chosen.repo, month, chosen.out))
        keep(rows[-1])
        print(rows[-1], flush=True)
    unexplained = [
        row for row in rows for told in row.found.values() if told.verdict in ("FAIL", "UNKNOWN") and not told.defect
    ]
    sys.exit(1 if unexplained else 0)


if __name__ == "__main__":
    main()
