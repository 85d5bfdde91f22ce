"""Which commit of a trainer broke a law: git bisect in a clone of our own, every commit judged by the laws.

The user's repository is only read: the clone borrows its objects and lies in a temporary folder. Ranks of each commit are
fresh processes, forked from one server that has torch imported and nothing of the trainer.

A commit is bad if it breaks a law that the bad one breaks and the good one keeps. A law broken on both sides says nothing
of the change that is looked for. What cannot be judged (it cannot be imported, its set-up raises or takes too long, it
breaks otherwise than the bad one) is skipped, and the reason kept.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from harness import trainers
from harness.case import Case
from harness.folders import fresh_folder, without_source
from harness.line import Judgement, Options, Unsupported, run_case
from harness.testify import started_file
from harness.trial import Verdict

Law = tuple[str, str]  # case, law


class BisectError(Exception):
    """Nothing can be searched for. The message says what to change."""


@dataclass(frozen=True)
class Judged:
    """One commit, or one version of a package. verdict: good, bad or skip. causes: by broken case. problem: why it was not
    judged."""

    commit: str
    date: str
    subject: str
    verdict: str
    broken: frozenset[Law] = frozenset()
    causes: dict[str, str] = field(default_factory=dict)
    problem: str = ""
    folders: dict[str, Path] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def label(self) -> str:
        return self.commit if "==" in self.commit else self.commit[:9]

    @property
    def name(self) -> str:
        return "  ".join(filter(None, (self.label, self.date, self.subject)))


@dataclass(frozen=True)
class Found:
    """first_bad is None where skipped ones hide it; then candidates names who it may be. what: "commit" or "version"."""

    first_bad: Judged | None
    last_good: Judged | None
    judged: tuple[Judged, ...]
    candidates: tuple[str, ...]
    seconds: float
    what: str = "commit"


Tell = Callable[[str], None]


def bisect(repo: Path, good: str, bad: str, cases: Sequence[Case], options: Options, tell: Tell) -> Found:
    """Raises BisectError. Leaves each commit's evidence in OUT/bisect/COMMIT/."""
    began = time.monotonic()
    adapter = trainers.load(options.trainer)
    if not hasattr(adapter, "of"):
        raise BisectError(f"trainer {adapter.name} is part of this harness: `git bisect run harness run CASE --bisect`")
    first, last = resolve(repo, good), resolve(repo, bad)
    paths = [path.strip("/") for path in getattr(adapter, "files", ())]
    with clone(repo, getattr(adapter, "files", ())) as checkout:
        judge = Judge(checkout, cases, dataclasses.replace(options, out=options.out / "bisect"))
        sides = both_sides(judge, first, last, tell)
        said = git(checkout, "bisect", "start", last, first, "--", *paths)
        judged = [*sides]
        while (step := left(said)) is not None:
            found = relative(judge.look(git(checkout, "rev-parse", "HEAD").strip()), *sides)
            judged.append(found)
            tell(f"{line_of(found)}\n{'':9}  {step}")
            said = git(checkout, "bisect", found.verdict, ok=(0, 2))
        return conclude(said, judged, checkout, time.monotonic() - began)


class Looks(Protocol):
    @property
    def what(self) -> str: ...

    def look(self, commit: str) -> Judged:
        """Its verdict is still open."""
        ...


def both_sides(judge: Looks, first: str, last: str, tell: Tell) -> tuple[Judged, Judged]:
    """The good and the bad one, judged; what differs between them is what is searched for. Raises BisectError."""
    sides = []
    for commit, verdict in ((first, "good"), (last, "bad")):
        found = judge.look(commit)
        if found.problem:
            raise BisectError(f"the {verdict} {judge.what} {found.name} cannot be judged: {found.problem}")
        sides.append(dataclasses.replace(found, verdict=verdict))
        tell(line_of(sides[-1]))
    if not sides[1].broken - sides[0].broken:
        laws = ", ".join(law for _, law in sorted(sides[1].broken)) or "none"
        raise BisectError(f"the bad {judge.what} breaks no law that the good one keeps (broken on both sides: {laws})")
    return sides[0], sides[1]


def relative(found: Judged, good: Judged, bad: Judged) -> Judged:
    """Its verdict, as seen from both ends."""
    if found.problem:
        return dataclasses.replace(found, verdict="skip")
    wanted = bad.broken - good.broken
    if found.broken & wanted:
        return dataclasses.replace(found, verdict="bad")
    if others := found.broken - good.broken:
        laws = ", ".join(law for _, law in sorted(others))
        return dataclasses.replace(found, verdict="skip", problem=f"breaks other laws than the bad one: {laws}")
    return dataclasses.replace(found, verdict="good")


def conclude(said: str, judged: list[Judged], checkout: Path, seconds: float) -> Found:
    by_commit = {found.commit: found for found in judged}
    match = re.search(r"^([0-9a-f]{40}) is the first bad commit", said, re.MULTILINE)
    goods = [found for found in judged if found.verdict == "good"]
    last_good = max(goods, key=lambda found: int(git(checkout, "rev-list", "--count", found.commit)))
    if match:
        return Found(by_commit[match[1]], last_good, tuple(judged), (), seconds)
    candidates = re.findall(r"^([0-9a-f]{40})$", said, re.MULTILINE)
    names = tuple(by_commit[c].name if c in by_commit else c[:9] for c in candidates)
    return Found(None, last_good, tuple(judged), names, seconds)


# ---- one commit


@dataclass(frozen=True)
class Judge:
    checkout: Path
    cases: Sequence[Case]
    options: Options
    what: str = "commit"

    def look(self, commit: str) -> Judged:
        """Its verdict is still open."""
        began = time.monotonic()
        git(self.checkout, "checkout", "--quiet", "--detach", commit)
        date, _, subject = git(self.checkout, "show", "--no-patch", "--format=%cs %s", commit).strip().partition(" ")
        found = Judged(commit, date, subject, "")
        trainer = trainers.spec(self.options.trainer.partition("@")[0], str(self.checkout))
        for case in self.cases:
            found = self._with_case(found, case, dataclasses.replace(self.options, trainer=trainer))
            if found.problem:
                break
        return dataclasses.replace(found, seconds=time.monotonic() - began)

    def _with_case(self, found: Judged, case: Case, options: Options) -> Judged:
        try:
            judgement = run_case(case, options)
        except Unsupported as refusal:
            return dataclasses.replace(found, problem=f"{case.name}: {refusal}")
        return read(found, case, self._keep(judgement.folder, found.commit), judgement)

    def _keep(self, folder: Path, commit: str) -> Path:
        """Out of the way of the next commit's evidence."""
        kept = folder.parent / commit[:9] / without_source(folder.name)
        fresh_folder(kept).rmdir()
        return folder.rename(kept)


def read(found: Judged, case: Case, folder: Path, judgement: Judgement) -> Judged:
    """With what was judged of this case, whose evidence lies in folder."""
    cause = judgement.diagnosis.cause if judgement.diagnosis else ""
    if not set_up(folder / "run", case):
        return dataclasses.replace(found, problem=f"{case.name}, before its first step: {cause}")
    broken = {(case.name, result.check) for result in judgement.results if result.verdict is Verdict.FAIL}
    if not broken and (reason := not_judged(judgement)):
        return dataclasses.replace(found, problem=f"{case.name}: {reason}")
    folders = found.folders | {case.name: folder}
    causes = found.causes | ({case.name: cause} if broken else {})
    return dataclasses.replace(found, broken=found.broken | broken, causes=causes, folders=folders)


def set_up(folder: Path, case: Case) -> bool:
    return all(started_file(folder, rank).exists() for rank in range(case.dims.world_size))


def not_judged(judgement: Judgement) -> str:
    if judgement.verdict is not Verdict.UNKNOWN:
        return ""
    return next(
        (f"{r.check}: {r.note}" for r in judgement.results if r.verdict is Verdict.UNKNOWN), "nothing was judged"
    )


def line_of(found: Judged) -> str:
    """And below it a line for each different cause."""
    why = [found.problem] if found.problem else list(dict.fromkeys(found.causes.values()))
    return "\n".join([f"{found.verdict:<4}  {found.name}  ({found.seconds:.0f} s)", *(f"{'':9}  {one}" for one in why)])


# ---- git


def git(folder: Path, *arguments: str, ok: tuple[int, ...] = (0,)) -> str:
    """What it says, in English whatever the user speaks. Raises BisectError with its complaint."""
    words = ["git", "-C", str(folder), *arguments]
    done = subprocess.run(
        words, env=os.environ | {"LC_ALL": "C"}, capture_output=True, encoding="utf-8", errors="replace"
    )
    if done.returncode not in ok:
        raise BisectError(f"git {' '.join(arguments[:2])}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def resolve(repo: Path, name: str) -> str:
    try:
        return git(repo, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}").strip()
    except BisectError:
        raise BisectError(f"{repo}: no commit {name!r} there; --repo is a clone of the trainer's repository") from None


@contextmanager
def clone(repo: Path, files: Sequence[str]) -> Iterator[Path]:
    """A clone that borrows the repository's objects, with only those files of each commit; gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="harness-bisect-") as folder:
        checkout = Path(folder) / "trainer"
        git(repo, "clone", "--quiet", "--shared", "--no-checkout", str(repo.resolve()), str(checkout))
        if files:
            git(checkout, "sparse-checkout", "set", "--no-cone", *files)
        yield checkout


def left(said: str) -> str | None:
    """How much is left, as git says it; None where it has come to an end."""
    match = re.search(
        r"^Bisecting: (\d+) revisions? left to test after this \(roughly (\d+) steps?\)", said, re.MULTILINE
    )
    return f"{match[1]} commits left after it, about {match[2]} steps" if match else None
