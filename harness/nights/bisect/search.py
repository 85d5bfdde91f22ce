"""What the searches over commits and over versions have in common: judging one side, and whether it is good, bad or
skipped."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from harness.core.case.case import Case
from harness.core.judge.judgement import Judgement
from harness.core.judge.result import Verdict
from harness.core.report.cause_text import diagnosis_line
from harness.core.run.rank_main import started_file
from harness.nights.bisect import BisectError

Check = tuple[str, str]  # case, check
START = "start"
"""In place of a check, of a case whose ranks do not come to their first step."""


@dataclass(frozen=True)
class Judged:
    """One commit, or one version of a package. verdict: good, bad or skip. causes: by broken case. problem: why it was not
    judged by checks."""

    commit: str
    date: str
    subject: str
    verdict: str
    broken: frozenset[Check] = frozenset()
    causes: dict[str, str] = field(default_factory=dict)
    problem: str = ""
    folders: dict[str, Path] = field(default_factory=dict)
    seconds: float = 0.0
    note: str = ""
    """How it was judged, if not as the others."""

    raised: str = ""
    """What ended the first rank to blame, if the case does not come to its first step."""

    @property
    def label(self) -> str:
        return self.commit if "==" in self.commit else self.commit[:9]

    @property
    def name(self) -> str:
        return "  ".join(filter(None, (self.label, self.date, self.subject)))


@dataclass(frozen=True)
class Found:
    """What a search found."""

    first: Judged | None  # the first bad one (`fixed`: good one); None: skipped ones hide it, or time was up
    before: Judged | None  # the nearest one before it that was not
    judged: tuple[Judged, ...]
    candidates: tuple[str, ...]  # which it may be, if `first` is None
    seconds: float
    what: str = "commit"  # or "version"
    fixed: bool = False  # what fixed it was looked for
    unfinished: str = ""  # what is left to search, if time was up


Tell = Callable[[str], None]


class Looks(Protocol):
    @property
    def what(self) -> str: ...

    def look(self, commit: str) -> Judged:
        """Its verdict is still open."""
        ...


def both_sides(judge: Looks, first: str, last: str, tell: Tell) -> tuple[Judged, Judged]:
    """Judge the good and the bad one. What differs between them is searched for: failing checks, or that the bad one does
    not start. Raises BisectError."""
    sides = []
    for commit, verdict in ((first, "good"), (last, "bad")):
        found = judge.look(commit)
        if found.problem and not (verdict == "bad" and found.raised):
            raise BisectError(f"the {verdict} {judge.what} {found.name} cannot be judged: {found.problem}")
        sides.append(dataclasses.replace(found, verdict=verdict))
        tell(line_of(sides[-1]))
    if not sides[1].broken - sides[0].broken:
        checks = ", ".join(check for _, check in sorted(sides[1].broken)) or "none"
        raise BisectError(
            f"the bad {judge.what} fails no check that the good one keeps (broken on both sides: {checks})"
        )
    return sides[0], sides[1]


def relative(found: Judged, good: Judged, bad: Judged) -> Judged:
    """Its verdict, as seen from both ends. If the bad one does not start, one that ends with the same words is as bad, and one
    that starts is good."""
    if found.problem:
        return dataclasses.replace(found, verdict="bad" if found.raised and found.raised == bad.raised else "skip")
    wanted = bad.broken - good.broken
    if found.broken & wanted:
        return dataclasses.replace(found, verdict="bad")
    if (others := found.broken - good.broken) and not bad.problem:
        checks = ", ".join(check for _, check in sorted(others))
        return dataclasses.replace(found, verdict="skip", problem=f"fails other checks than the bad one: {checks}")
    return dataclasses.replace(found, verdict="good")


def read(found: Judged, case: Case, folder: Path, judgement: Judgement) -> Judged:
    """Return it with what was judged of this case, whose evidence lies in folder."""
    cause = diagnosis_line(judgement.diagnosis)
    found = dataclasses.replace(found, note=judgement.made.get("adapter", found.note))
    if not set_up(folder / "run", case):
        return dataclasses.replace(
            found,
            problem=f"{case.name}, before its first step: {cause}",
            raised=_raised(judgement) or cause,
            broken=found.broken | {(case.name, START)},
            causes=found.causes | {case.name: cause},
            folders=found.folders | {case.name: folder},
        )
    broken = {(case.name, result.check) for result in judgement.results if result.verdict is Verdict.FAIL}
    if not broken and (reason := not_judged(judgement)):
        return dataclasses.replace(found, problem=f"{case.name}: {reason}")
    folders = found.folders | {case.name: folder}
    causes = found.causes | ({case.name: cause} if broken else {})
    return dataclasses.replace(found, broken=found.broken | broken, causes=causes, folders=folders)


def _raised(judgement: Judgement) -> str:
    """Return the error of the first rank that is to blame."""
    ended = (one for result in judgement.results if result.check == "completed" for one in result.findings)
    return next((str(one.observed).partition("\n")[0] for one in ended if one.kind == "process"), "")


def set_up(folder: Path, case: Case) -> bool:
    return all(started_file(folder, rank).exists() for rank in range(case.dims.world_size))


def not_judged(judgement: Judgement) -> str:
    if judgement.verdict is not Verdict.UNKNOWN:
        return ""
    return next(
        (f"{r.check}: {r.note}" for r in judgement.results if r.verdict is Verdict.UNKNOWN), "nothing was judged"
    )


def line_of(found: Judged) -> str:
    """Return its line, and below it a line for each different cause."""
    why = [found.problem] if found.problem else list(dict.fromkeys(found.causes.values()))
    why += [found.note] if found.note else []
    return "\n".join([f"{found.verdict:<4}  {found.name}  ({found.seconds:.0f} s)", *(f"{'':9}  {one}" for one in why)])
