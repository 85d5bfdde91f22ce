"""Which commit of a trainer failed a check: git bisect in a clone of our own, every commit judged by the checks.

The user's repository is only read: the clone borrows its objects and lies in a temporary folder. Ranks of each commit are
fresh processes, forked from one server that has torch imported and nothing of the trainer.

A commit is bad if it fails a check that the bad one breaks and the good one keeps. A check failing on both sides says nothing
of the change that is looked for. A commit is skipped, with a reason, if it cannot be imported, its set-up raises or takes
too long, or it fails other checks than the bad one. But if the bad one's set-up raises, commits that end
with the same words are as bad, and those that start are good.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.core.case.case import Case
from harness.core.evidence.git import git as quiet_git
from harness.core.run.folders import fresh_folder, without_source
from harness.core.run.options import Options, Unsupported
from harness.nights.bisect import BisectError
from harness.nights.bisect.checkouts import JudgedAt, how_to_judge
from harness.nights.bisect.search import Found, Judged, Tell, both_sides, line_of, read, relative

BROKEN_LATER, FIXED_LATER = ("good", "bad"), ("broken", "fixed")
"""Git's words for the earlier and the later side. It keeps "good" and "bad" for what broke."""


def bisect(
    repo: Path, good: str, bad: str, cases: Sequence[Case], options: Options, tell: Tell, *, until: float = math.inf
) -> Found:
    """What broke it, or what fixed it where the good one is the later one. until: by time.monotonic(), after which no other
    commit is looked at. Raises BisectError. Leaves each commit's evidence in OUT/bisect/COMMIT/."""
    began = time.monotonic()
    files, judged_at = how_to_judge(options, repo)
    holds, breaks = resolve(repo, good), resolve(repo, bad)
    with clone(repo, files) as checkout:
        fixed = precedes(checkout, breaks, holds)
        earlier, later = (breaks, holds) if fixed else (holds, breaks)
        terms = FIXED_LATER if fixed else BROKEN_LATER
        judge = Judge(checkout, cases, dataclasses.replace(options, out=options.out / "bisect"), judged_at)
        sides = both_sides(judge, holds, breaks, tell)
        names = () if terms == BROKEN_LATER else (f"--term-old={terms[0]}", f"--term-new={terms[1]}")
        said = git(checkout, "bisect", "start", *names, later, earlier, "--", *(path.strip("/") for path in files))
        judged = [*sides]
        while (step := left(said)) is not None and time.monotonic() < until:
            found = relative(judge.look(git(checkout, "rev-parse", "HEAD").strip()), *sides)
            judged.append(found)
            tell(f"{line_of(found)}\n{'':9}  {step}")
            said = git(checkout, "bisect", term(found, terms, fixed=fixed), ok=(0, 2))
        return conclude(said, judged, checkout, time.monotonic() - began, fixed=fixed)


def precedes(repo: Path, one: str, other: str) -> bool:
    """Whether it is an ancestor, and another one."""
    return one != other and git(repo, "merge-base", one, other, ok=(0, 1)).strip() == one


def term(found: Judged, terms: tuple[str, str], *, fixed: bool) -> str:
    earlier, later = terms
    return {"good": later if fixed else earlier, "bad": earlier if fixed else later}.get(found.verdict, "skip")


def conclude(said: str, judged: list[Judged], checkout: Path, seconds: float, *, fixed: bool = False) -> Found:
    by_commit = {found.commit: found for found in judged}
    earlier = [found for found in judged if found.verdict == ("bad" if fixed else "good")]
    before = max(earlier, key=lambda found: int(git(checkout, "rev-list", "--count", found.commit)))
    if match := re.search(r"^([0-9a-f]{40}) is the first (bad|fixed) commit", said, re.MULTILINE):
        return Found(by_commit[match[1]], before, tuple(judged), (), seconds, fixed=fixed)
    candidates = re.findall(r"^([0-9a-f]{40})$", said, re.MULTILINE)
    names = tuple(by_commit[c].name if c in by_commit else c[:9] for c in candidates)
    unfinished = left(said) or ""
    return Found(None, before, tuple(judged), names, seconds, fixed=fixed, unfinished=unfinished)


@dataclass(frozen=True)
class Judge:
    checkout: Path
    cases: Sequence[Case]
    options: Options
    judged_at: JudgedAt
    what: str = "commit"

    def look(self, commit: str) -> Judged:
        """Its verdict is still open."""
        began = time.monotonic()
        git(self.checkout, "checkout", "--quiet", "--detach", commit)
        forget_bytecode(self.checkout)
        date, _, subject = git(self.checkout, "show", "--no-patch", "--format=%cs %s", commit).strip().partition(" ")
        found = Judged(commit, date, subject, "")
        for case in self.cases:
            found = self._with_case(found, case)
            if found.problem:
                break
        return dataclasses.replace(found, seconds=time.monotonic() - began)

    def _with_case(self, found: Judged, case: Case) -> Judged:
        try:
            judgement = self.judged_at(case, self.checkout, self.options)
        except Unsupported as refusal:
            return dataclasses.replace(found, problem=f"{case.name}: {refusal}")
        return read(found, case, self._keep(judgement.folder, found.commit), judgement)

    def _keep(self, folder: Path, commit: str) -> Path:
        """Out of the way of the next commit's evidence."""
        kept = folder.parent / commit[:9] / without_source(folder.name)
        fresh_folder(kept).rmdir()
        return folder.rename(kept)


def git(folder: Path, *arguments: str, ok: tuple[int, ...] = (0,)) -> str:
    """What it says, in English whatever the user speaks. Raises BisectError with its complaint."""
    done = quiet_git(folder, *arguments)
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
    """A clone that is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="harness-bisect-") as folder:
        yield cloned(repo, Path(folder) / "trainer", files)


def remove_clone(folder: Path) -> None:
    """Delete a clone that `cloned` made. Raises BisectError, with nothing deleted, for anything else, or if it was changed."""
    if not os.path.lexists(folder):
        return
    foreign = "it" if folder.is_symlink() or not (folder / ".git/objects/info/alternates").is_file() else ""
    if not foreign:
        changed = git(folder, "status", "--porcelain", "--ignored", "--untracked-files=all").splitlines()
        foreign = next((line[3:] for line in changed if "__pycache__/" not in line), "")
        foreign = foreign or git(folder, "stash", "list").strip()
    if foreign:
        raise BisectError(f"{folder}: {foreign} is not of a clone that this harness made; choose another --out")
    shutil.rmtree(folder)


def forget_bytecode(folder: Path) -> None:
    """It is found by the second and the size of its source, and two commits may have both alike."""
    for compiled in list(folder.rglob("__pycache__")):
        shutil.rmtree(compiled)


def cloned(repo: Path, checkout: Path, files: Sequence[str]) -> Path:
    """A clone that borrows the repository's objects, with only those files of each commit, and none yet."""
    git(repo, "clone", "--quiet", "--shared", "--no-checkout", str(repo.resolve()), str(checkout))
    if files:
        git(checkout, "sparse-checkout", "set", "--no-cone", *files)
    return checkout


def left(said: str) -> str | None:
    """How much is left, as git says it; None where it has come to an end."""
    if re.search(r"^Bisecting: a merge base must be tested", said, re.MULTILINE):
        return "where the two branches parted comes first"
    match = re.search(
        r"^Bisecting: (\d+) revisions? left to test after this \(roughly (\d+) steps?\)", said, re.MULTILINE
    )
    return f"{match[1]} commits left after it, about {match[2]} steps" if match else None
