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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness import trainers
from harness.bisect.search import BisectError, Found, Judged, Tell, both_sides, line_of, read, relative
from harness.run.folders import fresh_folder, without_source
from harness.run.options import Options, Unsupported
from harness.run.run_case import run_case
from harness.spec.case import Case
from harness.spec.trainer_spec import TrainerSpec


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
        trainer = trainers.spec(TrainerSpec.parse(self.options.trainer).name, str(self.checkout))
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
