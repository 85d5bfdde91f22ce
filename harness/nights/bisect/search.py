"""The judging of one revision in a search over commits or versions: whether it is good, bad or skipped."""

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

CaseAndCheck = tuple[str, str]  # case, check
START_CHECK = "start"
"""In place of a check, of a case whose ranks do not come to their first step."""


@dataclass(frozen=True)
class JudgedRevision:
    """One commit, or one version of a package, with its verdict."""

    commit: str  # or PACKAGE==VERSION
    date: str
    subject: str
    verdict: str  # good, bad or skip; empty while it is open
    broken: frozenset[CaseAndCheck] = frozenset()
    causes: dict[str, str] = field(default_factory=dict)  # by broken case
    problem: str = ""  # why it was not judged by checks
    folders: dict[str, Path] = field(default_factory=dict)  # by case, of its evidence
    seconds: float = 0.0
    note: str = ""  # how it was judged, if not as the others
    raised: str = ""  # what ended the first rank to blame, if the case does not come to its first step

    @property
    def label(self) -> str:
        """Return a short name: the first nine digits of a commit, or PACKAGE==VERSION."""
        return self.commit if "==" in self.commit else self.commit[:9]

    @property
    def name(self) -> str:
        """Return label, date and subject, separated by two spaces. Empty ones are left out."""
        return "  ".join(filter(None, (self.label, self.date, self.subject)))


@dataclass(frozen=True)
class SearchResult:
    """The result of a search for the first revision, a commit or version, that fails a check (`fixed`: that passes again)."""

    first: JudgedRevision | None
    """The first bad revision (`fixed`: the first good one); None: skipped revisions hide it, or time was up."""
    before: JudgedRevision | None
    """The last revision judged good before that (`fixed`: the last bad one)."""
    judged: tuple[JudgedRevision, ...]
    """All that were judged, in that order: the good end, the bad end, then those between."""
    candidates: tuple[str, ...]
    """Names of the revisions of which one is the first, if `first` is None; else empty."""
    seconds: float
    """Duration of the search, in seconds."""
    what: str = "commit"
    """"commit" or "version"."""
    fixed: bool = False
    """Whether the search was for what fixed a check, not for what broke it."""
    unfinished: str = ""
    """What is left to search, in words, if time was up; else empty."""


PrintProgress = Callable[[str], None]


class RevisionJudge(Protocol):
    """A judge of commits, or of versions of a package."""

    @property
    def revision_kind(self) -> str:
        """Return what it judges: "commit" or "version"."""
        ...

    def judge_revision(self, commit: str) -> JudgedRevision:
        """Run the cases at this commit; the search sets the verdict."""
        ...


def judge_both_sides(
    judge: RevisionJudge, first: str, last: str, tell: PrintProgress
) -> tuple[JudgedRevision, JudgedRevision]:
    """Judge the two ends of a search, print each, and return them: the good revision and the bad one.

    first: the good one. last: the bad one. Raises BisectError if one cannot be judged, or the bad one fails no check
    that the good one keeps. A bad end whose ranks do not come to a first step is accepted.
    """
    sides = []
    for commit, verdict in ((first, "good"), (last, "bad")):
        revision = judge.judge_revision(commit)
        if revision.problem and not (verdict == "bad" and revision.raised):
            raise BisectError(
                f"the {verdict} {judge.revision_kind} {revision.name} cannot be judged: {revision.problem}"
            )
        sides.append(dataclasses.replace(revision, verdict=verdict))
        tell(revision_text(sides[-1]))
    if not sides[1].broken - sides[0].broken:
        checks = ", ".join(check for _, check in sorted(sides[1].broken)) or "none"
        raise BisectError(
            f"the bad {judge.revision_kind} fails no check that the good one keeps (broken on both sides: {checks})"
        )
    return sides[0], sides[1]


def with_verdict(revision: JudgedRevision, good: JudgedRevision, bad: JudgedRevision) -> JudgedRevision:
    """Return a revision with its verdict, good, bad or skip, by comparison with the two ends.

    It is bad if it fails a check that only the bad end fails, and skipped if it fails others or was not judged. If the
    bad end does not start, a revision that ends with the same words is bad, and one that starts is good.
    """
    if revision.problem:
        return dataclasses.replace(
            revision, verdict="bad" if revision.raised and revision.raised == bad.raised else "skip"
        )
    sought = bad.broken - good.broken
    if revision.broken & sought:
        return dataclasses.replace(revision, verdict="bad")
    if (others := revision.broken - good.broken) and not bad.problem:
        checks = ", ".join(check for _, check in sorted(others))
        return dataclasses.replace(revision, verdict="skip", problem=f"fails other checks than the bad one: {checks}")
    return dataclasses.replace(revision, verdict="good")


def with_judgement(revision: JudgedRevision, case: Case, folder: Path, judgement: Judgement) -> JudgedRevision:
    """Return the revision with the broken checks, cause and folder of one judged case.

    `problem` is set if the checks could not judge it. If a rank did not come to its first step, `raised` is set too,
    and the check "start" counts as broken.
    """
    cause = diagnosis_line(judgement.diagnosis)
    revision = dataclasses.replace(revision, note=judgement.made.get("adapter", revision.note))
    if not has_started(folder / "run", case):
        return dataclasses.replace(
            revision,
            problem=f"{case.name}, before its first step: {cause}",
            raised=_first_error(judgement) or cause,
            broken=revision.broken | {(case.name, START_CHECK)},
            causes=revision.causes | {case.name: cause},
            folders=revision.folders | {case.name: folder},
        )
    broken = {(case.name, result.check) for result in judgement.results if result.verdict is Verdict.FAIL}
    if not broken and (reason := reason_not_judged(judgement)):
        return dataclasses.replace(revision, problem=f"{case.name}: {reason}")
    folders = revision.folders | {case.name: folder}
    causes = revision.causes | ({case.name: cause} if broken else {})
    return dataclasses.replace(revision, broken=revision.broken | broken, causes=causes, folders=folders)


def _first_error(judgement: Judgement) -> str:
    """Return the first line of the error of the first rank to blame, as the check "completed" found it.

    Empty if there is none.
    """
    for result in judgement.results:
        if result.check == "completed":
            for finding in result.findings:
                if finding.kind == "process":
                    return str(finding.observed).partition("\n")[0]
    return ""


def has_started(folder: Path, case: Case) -> bool:
    """Return whether every rank of the case came to its first step. folder: of the launch."""
    return all(started_file(folder, rank).exists() for rank in range(case.dims.world_size))


def reason_not_judged(judgement: Judgement) -> str:
    """Return "CHECK: NOTE" of the first check that is UNKNOWN if the whole verdict is UNKNOWN. Empty for other verdicts."""
    if judgement.verdict is not Verdict.UNKNOWN:
        return ""
    unknown = (result for result in judgement.results if result.verdict is Verdict.UNKNOWN)
    return next((f"{result.check}: {result.note}" for result in unknown), "nothing was judged")


def revision_text(revision: JudgedRevision) -> str:
    """Return the line on a revision with its verdict and seconds, and below it its problem or its causes, and its note."""
    reasons = [revision.problem] if revision.problem else list(dict.fromkeys(revision.causes.values()))
    if revision.note:
        reasons.append(revision.note)
    lines = [f"{revision.verdict:<4}  {revision.name}  ({revision.seconds:.0f} s)"]
    lines += [f"{'':9}  {reason}" for reason in reasons]
    return "\n".join(lines)
