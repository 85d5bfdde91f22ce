"""torchtitan's history as a test: its fixes, and what made them necessary, each judged before and after.

    python benchmarks/torchtitan_history.py PATH [-k WORDS] [--bisect] [--changed] [--out out/history]

PATH is a clone of pytorch/torchtitan. Each change, and the commit before it, run one case. -k selects changes by a word of
their commit, pull request, bug or case. What was found replaces what torchtitan_history.json has of the same changes, and the
tables of docs/results/torchtitan_history.md are made anew. The exit code is 1 if a fix does not FAIL before and PASS after, or
if what broke it does not PASS before and FAIL after. --bisect looks for what broke it, as `harness bisect` does, between two
commits further away. Its exit code is 1 if it finds another commit. --changed asks what `harness matrix --changed` selects
where the bug comes in: its exit code is 1 if the case that shows the bug is left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torchtitan_commits import Found, found
from torchtitan_fixes import BREAKS, FIXES, NOT_RUN, Change

from harness import ROOT
from harness.adapters.torchtitan import source
from harness.adapters.torchtitan.eras import TRAINER_CONFIG
from harness.core import trainers
from harness.core.case.case import Case
from harness.core.case.loading import find_case, load_all
from harness.core.evidence.store import write_text
from harness.core.judge.result import Verdict
from harness.core.launch import default_server
from harness.core.run.options import Options
from harness.nights.affected.maps import CaseMap, map_file
from harness.nights.affected.selecting import select_affected
from harness.nights.affected.sources import changes_between
from harness.nights.bisect.commits import bisect_commits, run_git, temporary_clone

STORED = Path(__file__).with_suffix(".json")
PAGE = ROOT / "docs" / "results" / "torchtitan_history.md"
DECOYS = ("hsdp_2x2", "tp_2")
BEGIN, END = "<!-- table: benchmarks/torchtitan_history.py -->\n", "<!-- end of table -->\n"
SELECTED = "<!-- table: benchmarks/torchtitan_history.py --changed -->\n"


@dataclass(frozen=True)
class Bisected:
    """The result of bisecting. first: the bad commit that was found; empty if none was.

    commits: how many it judged, both ends among them. seconds: how long it took.
    """

    first: str
    commits: int
    seconds: int


@dataclass(frozen=True)
class Sides:
    """The results of a change's case on the commit before it, and on itself."""

    before: Found
    after: Found
    bisected: Bisected | None = None
    selected: Mapping[str, str] | None = None
    """By case, first the bug's, why --changed selects it; empty where it does not."""
    ran: int = 0
    """How many of the functions that changed the bug's case ran."""

    def shows(self, change: Change) -> bool:
        """Return whether the two sides are as the change claims: FAIL then PASS for a fix, PASS then FAIL for what
        brought a bug."""
        wrong, right = (self.after, self.before) if change.breaks else (self.before, self.after)
        return wrong.verdict == Verdict.FAIL and right.verdict == Verdict.PASS

    @property
    def judged(self) -> bool:
        return "not asked" not in (self.before.verdict, self.after.verdict)


def case_of(change: Change) -> Case:
    """Return the case that a change names, with its recipe and features.

    It has valid labels only unless the change needs others: before 2026-01-25 others fail for the loss alone.
    """
    case = find_case(change.case, load_all())
    if change.features or change.recipe:
        recipe = dataclasses.replace(case.training, **change.recipe)
        features = dataclasses.replace(case.features, **change.features)
        case = dataclasses.replace(case, training=recipe, features=features, file="")
    if not change.valid or case.training.all_valid:
        return case
    recipe = dataclasses.replace(case.training, all_valid=True)
    return dataclasses.replace(case, name=f"{case.name}_valid", training=recipe, file="")


def trainer_of(change: Change, checkout: Path | str, out: Path) -> str:
    """Return the trainer with which a change is judged: torchtitan's adapter, or a written file with one that has its
    options.

    checkout: "" for that of each commit.
    """
    asked = {"options": change.options, "chosen": change.chosen, "shows": change.shows}
    if asked == {"options": {}, "chosen": {}, "shows": True}:
        return trainers.absolute_spec("torchtitan", str(checkout))
    given = ", ".join(f"{name}={value!r}" for name, value in asked.items())
    path = out / f"{change.commit}_{change.case}.py"
    write_text(path, f"from harness.adapters.torchtitan import Torchtitan\n\nadapter = Torchtitan({given})\n")
    return trainers.absolute_spec(str(path), str(checkout))


def judged(repo: Path, change: Change, out: Path) -> Sides:
    """Return the results of the change's case before it and on it, in a temporary clone."""
    with temporary_clone(repo, source.FILES) as checkout:
        before = judged_at(checkout, change.before or f"{change.commit}^", change, out / "before")
        return Sides(before, judged_at(checkout, change.commit, change, out / "after"))


def judged_at(checkout: Path, commit: str, change: Change, out: Path) -> Found:
    """Check out a commit and return the result of the change's case on it."""
    run_git(checkout, "checkout", "--quiet", "--detach", commit)
    options = Options(out=out / change.commit, trainer=trainer_of(change, checkout, out), timeout=240.0)
    return found(case_of(change), options)


def bisected(repo: Path, change: Change, out: Path) -> Bisected:
    """Look for the commit that brought the bug, between the change's good and bad commit, and return the result."""
    good, bad = change.between
    options = Options(out=out / change.commit, trainer=trainer_of(change, "", out), timeout=240.0)
    found = bisect_commits(repo, good, bad, [case_of(change)], options, print)
    first = found.first.commit[:9] if found.first else ""
    return Bisected(first, len({one.commit for one in found.judged}), round(found.seconds))


def selected(repo: Path, change: Change, out: Path) -> tuple[dict[str, str], int]:
    """Return `Sides.selected` and `Sides.ran` for the commit where the bug comes in.

    For a fix that is the commit before it. The map is of the commit without the bug, and has the case that shows the
    bug, and two others.
    """
    with_bug, without = change.before or f"{change.commit}^", change.commit
    if change.breaks:
        with_bug, without = without, with_bug
    with temporary_clone(repo, source.FILES) as checkout:
        base = run_git(checkout, "rev-parse", without).strip()
        run_git(checkout, "checkout", "--quiet", "--detach", base)
        trainer, folder = trainer_of(change, checkout, out), out / "map" / f"{change.commit}_{change.case}"
        options = Options(out=out / change.commit, trainer=trainer, timeout=240.0, map=folder)
        cases = [case_of(change), *(find_case(name, load_all()) for name in DECOYS)]
        asked = [case for case in cases if found(case, options).verdict != "not asked"]
        run_git(checkout, "checkout", "--quiet", "--detach", with_bug)
        why = select_affected(asked, base, trainer, trainers.load_adapter(trainer).name, folder).reasons
        one, changed = CaseMap.load(map_file(folder, cases[0].name)), changes_between(checkout, base, None).functions
        ran = sum(len(names & one.functions.get(file, frozenset())) for file, names in changed.items())
        return {case.name: why.get(case.name, "") for case in asked}, ran


def stored() -> dict[str, Sides]:
    """Return what is stored, by commit and case."""
    records = json.loads(STORED.read_text()) if STORED.exists() else {}
    return {key: sides_of(one) for key, one in records.items()}


def sides_of(record: Mapping[str, Any]) -> Sides:
    found = Bisected(**record["bisected"]) if record["bisected"] else None
    return Sides(Found(**record["before"]), Found(**record["after"]), found, record["selected"], record["ran"])


def keep(change: Change, sides: Sides) -> None:
    """Store the results of a change, and make both tables of the page anew."""
    known = stored() | {change.key: sides}
    rows = {one.key: known[one.key] for one in (*FIXES, *BREAKS) if one.key in known}
    write_text(STORED, json.dumps({key: asdict(one) for key, one in rows.items()}, indent=1) + "\n")
    head, _, rest = PAGE.read_text().partition(BEGIN)
    text = head + BEGIN + "\n".join(tables(rows)) + "\n" + END + rest.partition(END)[2]
    head, _, rest = text.partition(SELECTED)
    write_text(PAGE, head + SELECTED + "\n".join(selections(rows)) + END + rest.partition(END)[2])


def tables(rows: Mapping[str, Sides]) -> Iterator[str]:
    """Yield the tables of fixes, of what made them necessary, and of what was not judged."""
    yield from table("fix", "FAIL before and PASS after", FIXES, rows)
    yield from table("what broke it", "PASS before and FAIL after", BREAKS, rows)
    yield from origins(rows)
    yield from ("| not judged | what was wrong | why |", "|---|---|---|")
    for change in (*FIXES, *BREAKS):
        sides = rows.get(change.key)
        if sides is not None and not sides.judged:
            yield f"| {change.name} | {change.bug} | {sides.before.told or sides.after.told} |"
    yield from (f"| {name} | {bug} | {why} |" for name, bug, why in NOT_RUN)


def table(head: str, wanted: str, changes: Sequence[Change], rows: Mapping[str, Sides]) -> Iterator[str]:
    """Yield the lines of a table of changes, of those that were judged, after a line on how many show what they claim."""
    judged = [(one, rows[one.key]) for one in changes if one.key in rows and rows[one.key].judged]
    yield f"Of {len(judged)} that were judged {sum(sides.shows(one) for one, sides in judged)} {wanted}."
    yield from ("", f"| {head} | what is wrong | case | before | after |", "|---|---|---|---|---|")
    yield from (row(change, sides) for change, sides in judged)
    yield ""


def row(change: Change, sides: Sides) -> str:
    """Return a row of the table: the change, its case, and both results."""
    asked = f", {change.asked}" if change.asked else ""
    run = f"`{case_of(change).name}`{asked}"
    return f"| {change.name} | {change.bug} | {run} | {line(sides.before)} | {line(sides.after)} |"


def origins(rows: Mapping[str, Sides]) -> Iterator[str]:
    """Yield the lines of the table of bisected changes."""
    looked = [(one, found) for one in BREAKS if one.key in rows and (found := rows[one.key].bisected)]
    yield f"Of {len(looked)} that were bisected {sum(found.first == one.commit for one, found in looked)} are found."
    yield from (
        "",
        "| what broke it | what is wrong | good, bad | found | commits judged | seconds |",
        "|---|---|---|---|---|---|",
    )
    for one, found in looked:
        ends = ", ".join(one.between)
        yield f"| {one.name} | {one.bug} | {ends} | {found.first or 'nothing'} | {found.commits} | {found.seconds} |"
    yield ""


def selections(rows: Mapping[str, Sides]) -> Iterator[str]:
    """Yield the lines on what --changed selects where a bug comes in: by a fix that is taken back, or by what broke it."""
    asked = [(one, case_of(one).name, rows[one.key]) for one in (*FIXES, *BREAKS) if one.key in rows]
    found = [(one, case, sides.selected, sides.ran) for one, case, sides in asked if sides.selected]
    missed = sum(not why[case] for _, case, why, _ in found)
    others = [bool(why[name]) for _, case, why, _ in found for name in why if name != case]
    yield f"`--changed` misses {missed} of {len(found)}. In {sum(ran > 0 for *_, ran in found)}, the case ran a function"
    yield "whose body changed, which is reason enough to select it."
    yield f"It leaves out {others.count(False)} of {len(others)} other cases."
    yield ""
    yield "| where it comes in | case that shows it | why it is selected | changed functions that it ran | left out |"
    yield "|---|---|---|---|---|"
    for one, case, why, ran in found:
        left_out = ", ".join(f"`{name}`" for name, reason in why.items() if not reason)
        first = "" if one.breaks else "before "
        yield f"| {first}{one.name} | `{case}` | {why[case] or 'MISSED'} | {ran} | {left_out} |"
    yield ""


def line(found: Found) -> str:
    return f"{found.verdict}: {found.told}".replace("|", "/") if found.told else found.verdict


def main() -> None:
    """Judge, bisect or select the chosen changes; exit with 1 if any does not show what it claims."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repo", type=Path)
    parser.add_argument("-k", default="", metavar="WORDS")
    parser.add_argument("--bisect", action="store_true", help="look for what broke it between distant commits")
    parser.add_argument("--changed", action="store_true", help="ask what `harness matrix --changed` selects")
    parser.add_argument("--out", type=Path, default=Path("out/history"))
    chosen = parser.parse_args()
    default_server(TRAINER_CONFIG.preload)
    missed = 0
    way = by_bisecting if chosen.bisect else by_selecting if chosen.changed else by_both_sides
    for change in [one for one in BREAKS if any(one.between)] if chosen.bisect else (*FIXES, *BREAKS):
        if not chosen.k or any(word in f"{change.name} {change.bug} {change.case}" for word in chosen.k.split()):
            missed += not way(chosen.repo, change, chosen.out)
    sys.exit(1 if missed else 0)


def by_both_sides(repo: Path, change: Change, out: Path) -> bool:
    """Judge and store both sides; return whether they show what the change claims, True also if they could not be judged.

    The results of bisecting and selecting from before are kept.
    """
    known, sides = stored().get(change.key), judged(repo, change, out)
    if known:
        sides = dataclasses.replace(known, before=sides.before, after=sides.after)
    keep(change, sides)
    print(row(change, sides), flush=True)
    return not sides.judged or sides.shows(change)


def by_bisecting(repo: Path, change: Change, out: Path) -> bool:
    """Bisect and store it; return whether the change's own commit was found. Both sides must have been judged before."""
    found = bisected(repo, change, out)
    keep(change, dataclasses.replace(stored()[change.key], bisected=found))
    print(f"{change.name}: {found}", flush=True)
    return found.first == change.commit


def by_selecting(repo: Path, change: Change, out: Path) -> bool:
    """Select and store it; return whether the case that shows the bug is selected.

    Both sides must have been judged before.
    """
    found, ran = selected(repo, change, out)
    keep(change, dataclasses.replace(stored()[change.key], selected=found, ran=ran))
    print(f"{change.name}: {found}", flush=True)
    return bool(found[case_of(change).name])


if __name__ == "__main__":
    main()
