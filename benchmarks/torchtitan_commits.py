"""torchtitan's main, commit by commit: each that touches what these cases run, newest first; or each month's last one.

    python benchmarks/torchtitan_commits.py PATH [--since 2026-01] [--minutes 60]
    python benchmarks/torchtitan_commits.py PATH --months [--since 2024-09] [--again]

PATH is a clone of pytorch/torchtitan. After each commit what was found is kept in torchtitan_commits.json, with its torch,
and docs/results/torchtitan_commits.md is made anew. What is there already is not judged again, but with --again. Commits of
some times start with some releases of torch only. The exit code is 1 while a FAIL is none of torchtitan's known defects: the
adapter may be wrong, too.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from harness import ROOT
from harness.adapters.torchtitan import source
from harness.adapters.torchtitan.eras import TRAINER_CONFIG
from harness.core import trainers
from harness.core.case.case import Case
from harness.core.case.loading import find_case, load_all
from harness.core.evidence.store import write_text
from harness.core.judge.judgement import Judgement
from harness.core.judge.result import Verdict
from harness.core.launch import default_server
from harness.core.report.text import headline
from harness.core.run.options import Options, Unsupported
from harness.core.run.run_case import run_case
from harness.nights.bisect.commits import run_git, temporary_clone

CASES = ("hsdp_2x2", "fsdp_2_tp_2", "cp_2", "pp_2", "hsdp_2x2_accum", "fsdp_4_to_hsdp_2x2")
OF_MONTHS = (
    "pp_2_valid",
    "cp_2_valid",
    "fsdp_2_tp_2_valid",
)  # with valid labels only: they can pass before 2026-01-25, too
TOUCHED = [f"torchtitan/{part}" for part in ("distributed", "models/llama3", "components", "trainer.py", "train.py")]
STORED = Path(__file__).with_suffix(".json")
PAGE = ROOT / "docs" / "results" / "torchtitan_commits.md"


@dataclass(frozen=True)
class Defect:
    """A known defect of torchtitan."""

    name: str
    """What is wrong, with the pull requests that brought and ended it."""
    words: tuple[str, ...]
    """Parts of the cause by which it is known, today and in what is stored."""
    until: str
    """Date of the commit that ended it: a later one with the same words is not known."""
    since: str = ""
    """Date of the commit that brought it, where that is known."""


DEFECTS = (
    Defect(
        "gradients are clipped by the norm of one stage (to #649)",
        ("gradients are clipped by a norm not reduced over pp", "each rank clips by the norm of its own shards"),
        until="2024-11-16",
    ),
    Defect(
        "cp without data ranks looks for a mesh that is not there (to #683)",
        ("Valid mesh_dim_names are ['cp']",),
        until="2024-11-28",
    ),
    Defect(
        "cp without data ranks has no FSDP (#683 to #685)",
        ("every cp rank holds whole parameters",),
        until="2024-12-11",
        since="2024-11-28",
    ),
    Defect(
        "the reported loss is not averaged over cp (to #761)",
        ("the loss is reported not reduced over cp",),
        until="2024-12-26",
    ),
    Defect(
        "each rank's or microbatch's mean, whatever number of labels counts (to #2206)",
        ("the loss is averaged per",),
        until="2026-01-25",
    ),
    Defect(
        "a pipeline's gradients are never divided (#2206 to #2937)",
        (
            "512 times what they should be",
            "272 times what they should be",  # by the labels that count where not all do
        ),
        until="2026-04-27",
        since="2026-01-25",
    ),
    Defect(
        "the largest loss reported is below the mean (#2206 to #2314)",
        ("the reported largest loss is wrong",),
        until="2026-02-03",
        since="2026-01-25",
    ),
    Defect(
        "a sum over tp is lost behind the loss in chunks (#2937 to #3412)",
        ("backward moves less than planned over tp",),
        until="2026-05-21",
        since="2026-04-27",
    ),
    Defect(
        "a docstring without its end: nothing is imported (#3578 to #3580)",
        ("unterminated string literal",),
        until="2026-06-08",
        since="2026-06-08",
    ),
    Defect(
        "a loss that is a DTensor is reported without the data ranks' sum (#2963 to #2937)",
        ("the loss is reported not reduced over dp_shard",),
        until="2026-04-27",
        since="2026-04-27",
    ),
    Defect(
        "cp names heads as what it cuts (#2963 to #3681)",
        ("invalid gradient at index 0",),
        until="2026-06-16",
        since="2026-04-27",
    ),
)


@dataclass(frozen=True)
class Found:
    """The result of one case on a commit."""

    verdict: str
    told: str = ""  # the cause of a FAIL or UNKNOWN, or the reason why the case was not requested

    def on(self, date: str) -> str:
        """Return the text on this result for a commit of this date: the verdict, and the known defect or the cause."""
        if self.verdict == Verdict.PASS:
            return "PASS"
        return f"{self.verdict}: {self.defect(date) or self.told}"

    def defect(self, date: str) -> str:
        """Return the name of the known defect that this result shows on a commit of this date; empty if none."""
        at_that_time = (one for one in DEFECTS if one.since <= date <= one.until)
        return next((one.name for one in at_that_time if any(words in self.told for words in one.words)), "")


@dataclass(frozen=True)
class Row:
    """The results of one commit with one release of torch."""

    commit: str
    date: str
    torch: str
    found: dict[str, Found]  # by case

    @property
    def unexplained(self) -> bool:
        return any(told.verdict in ("FAIL", "UNKNOWN") and not told.defect(self.date) for told in self.found.values())

    @property
    def passes(self) -> bool:
        """Return whether all cases that were requested pass, or fail as expected."""
        return all(told.verdict in ("PASS", "XFAIL", "not asked") for told in self.found.values())

    def has(self, commit: str, cases: Iterable[str]) -> bool:
        return self.commit == commit and self.found.keys() >= {*cases}


def touching(repo: Path, since: str) -> list[str]:
    """Return the commits since that month that touch the code that these cases run, newest first."""
    words = ("rev-list", "--first-parent", f"--since={since}-01T00:00:00Z", "main", "--", *TOUCHED)
    return [commit[:9] for commit in run_git(repo, *words).split()]


def ends_of_months(repo: Path, since: str) -> Iterator[str]:
    """Yield the last commit of each month that is over on main, by the date of the commit."""
    newest = run_git(repo, "show", "--no-patch", "--format=%cs", "main")[:7]
    for _, after in itertools.takewhile(lambda pair: pair[0] < newest, itertools.pairwise(months(since))):
        yield run_git(repo, "rev-list", "-1", "--first-parent", f"--before={after}-01T00:00:00Z", "main").strip()[:9]


def months(since: str) -> Iterator[str]:
    """Yield the months from `since` on, "2026-01", without end."""
    year, month = map(int, since.split("-"))
    while True:
        yield f"{year:04}-{month:02}"
        year, month = year + month // 12, month % 12 + 1


def judged(repo: Path, commit: str, cases: Iterable[str], out: Path) -> Row:
    """Run the cases on a commit of a temporary clone, and return the results."""
    with temporary_clone(repo, source.FILES) as checkout:
        run_git(checkout, "checkout", "--quiet", "--detach", commit)
        date = run_git(checkout, "show", "--no-patch", "--format=%cs").strip()
        options = Options(out=out / commit, trainer=trainers.absolute_spec("torchtitan", str(checkout)), timeout=240.0)
        known = load_all()
        told = {name: found(find_case(name, known), options) for name in cases}
        told = {name: Found(one.verdict, one.told.replace(f"{checkout}/", "")) for name, one in told.items()}
        return Row(commit, date, importlib.metadata.version("torch").partition("+")[0], told)


def found(case: Case, options: Options) -> Found:
    """Return the result of a case; "not asked" with the reason if the trainer does not support it."""
    try:
        judgement = run_case(case, options)
    except Unsupported as reason:
        return Found("not asked", str(reason))
    return Found(judgement.verdict.value, cause(judgement))


def cause(judgement: Judgement) -> str:
    """Return the cause in a judgement's headline; empty if it has none."""
    return headline(judgement).partition("    ")[2]


def stored() -> list[Row]:
    """Return all rows that are stored; none without a file."""
    records = json.loads(STORED.read_text()) if STORED.exists() else []
    return [Row(**{**one, "found": {case: Found(**told) for case, told in one["found"].items()}}) for one in records]


def keep(row: Row) -> list[Row]:
    """Store a row, make the page anew, and return all rows, newest first. Results of the same cases are replaced."""
    known = {(one.date, one.commit, one.torch): one for one in stored()}
    key = (row.date, row.commit, row.torch)
    before = known[key].found if key in known else {}
    known[key] = Row(row.commit, row.date, row.torch, before | row.found)
    rows = [known[key] for key in sorted(known, reverse=True)]
    write_text(STORED, json.dumps([asdict(one) for one in rows], indent=1) + "\n")
    write_text(PAGE, "\n".join(page(rows)) + "\n")
    return rows


def page(rows: list[Row]) -> Iterator[str]:
    """Yield the lines of the page: a table by month, torch and cases. A commit that stands alone is named."""
    every, some = (", ".join(f"`{name}`" for name in names) for names in (CASES, OF_MONTHS))
    yield from (
        "# torchtitan's commits",
        "",
        "`benchmarks/torchtitan_commits.py` judges commits of main, newest first. They touch "
        f"{', '.join(f'`{place}`' for place in TOUCHED)}.",
        f"The cases are {every}.",
        f"With `--months` it judges each month's last commit by {some}, whose labels are all valid.",
        "",
        "| month | torch | commits | cases | all that was asked PASS | of the others unexplained | what else was found |",
        "|---|---|---|---|---|---|---|",
    )
    groups: dict[tuple[str, str, tuple[str, ...]], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.date[:7], row.torch, (*row.found,)), []).append(row)
    for key, mine in groups.items():
        yield line(*key, mine)


def line(month: str, torch: str, names: tuple[str, ...], rows: list[Row]) -> str:
    """Return a line of the table: the results of some commits of one month with one torch, on the same cases."""
    others = Counter(
        f"`{case}` {told.on(row.date)}"
        for row in rows
        for case, told in row.found.items()
        if told.verdict not in ("PASS", "XFAIL")
    )
    else_found = "; ".join(f"{text} ({count})" if len(rows) > 1 else text for text, count in others.items())
    who = f"{rows[0].commit}, {rows[0].date}" if len(rows) == 1 else str(len(rows))
    asked = [text for text, cases in (("the six", CASES), ("of months", OF_MONTHS)) if {*cases} <= {*names}]
    counts = (str(sum(row.passes for row in rows)), str(sum(row.unexplained for row in rows)))
    cells = (month, torch, who, ", ".join(asked), *counts, else_found)
    return f"| {' | '.join(cells)} |".replace("  ", " ")


def main() -> None:
    """Judge the commits that are not known yet, newest first; exit with 1 if any failure is not explained by a known
    defect."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repo", type=Path)
    parser.add_argument("--months", action="store_true", help="each month's last commit")
    parser.add_argument("--since", metavar="MONTH", help="2026-01, of months 2024-09 by default")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no other commit after these")
    parser.add_argument("--again", action="store_true", help="judge what is known as well")
    parser.add_argument("--out", type=Path, default=Path("out/commits"))
    chosen = parser.parse_args()
    default_server(TRAINER_CONFIG.preload)
    until, rows = time.monotonic() + 60 * chosen.minutes, stored()
    cases = OF_MONTHS if chosen.months else CASES
    listed = ends_of_months if chosen.months else touching
    for commit in listed(chosen.repo, chosen.since or ("2024-09" if chosen.months else "2026-01")):
        if (chosen.again or not any(row.has(commit, cases) for row in rows)) and time.monotonic() < until:
            row = judged(chosen.repo, commit, cases, chosen.out)
            rows = keep(row)
            print(commit, {case: told.on(row.date) for case, told in row.found.items()}, flush=True)
    sys.exit(1 if any(row.unexplained for row in rows) else 0)


if __name__ == "__main__":
    main()
