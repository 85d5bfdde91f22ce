"""A search for the commit of a trainer that failed a check: git bisect in a clone of our own.

The checks judge every commit. The user's repository is only read: the clone borrows its objects and lies in a temporary
folder. Ranks of each commit are fresh processes, forked from one server that has torch imported and nothing of the trainer.

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
from harness.core.evidence.git import run_git as quiet_git
from harness.core.run.folders import make_fresh_folder, name_without_source
from harness.core.run.options import Options, Unsupported
from harness.nights.bisect import BisectError
from harness.nights.bisect.checkouts import JudgeCheckout, files_and_judge
from harness.nights.bisect.search import (
    JudgedRevision,
    PrintProgress,
    SearchResult,
    judge_both_sides,
    revision_text,
    with_judgement,
    with_verdict,
)

TERMS_IF_BROKEN = ("good", "bad")
"""Git's words for the earlier and the later side if a commit broke something. Git keeps these words for that."""
TERMS_IF_FIXED = ("broken", "fixed")
"""The words for the earlier and the later side of a search for what fixed."""


def bisect_commits(
    repo: Path,
    good: str,
    bad: str,
    cases: Sequence[Case],
    options: Options,
    tell: PrintProgress,
    *,
    until: float = math.inf,
) -> SearchResult:
    """Search for the commit that broke a check, or that fixed it if the good commit is the later one. Return the result.

    until: a time of time.monotonic(), after which no further commit is judged. tell: prints progress. Leaves each
    commit's evidence in OUT/bisect/COMMIT/. Raises BisectError if an end cannot be judged, or nothing differs.
    """
    began = time.monotonic()
    files, judged_at = files_and_judge(options, repo)
    good_commit = resolve_commit(repo, good)
    bad_commit = resolve_commit(repo, bad)
    with temporary_clone(repo, files) as checkout:
        fixed = is_proper_ancestor(checkout, bad_commit, good_commit)
        earlier, later = (bad_commit, good_commit) if fixed else (good_commit, bad_commit)
        terms = TERMS_IF_FIXED if fixed else TERMS_IF_BROKEN
        judge = CommitJudge(checkout, cases, dataclasses.replace(options, out=options.out / "bisect"), judged_at)
        sides = judge_both_sides(judge, good_commit, bad_commit, tell)
        names = () if terms == TERMS_IF_BROKEN else (f"--term-old={terms[0]}", f"--term-new={terms[1]}")
        git_output = run_git(
            checkout, "bisect", "start", *names, later, earlier, "--", *(path.strip("/") for path in files)
        )
        judged = [*sides]
        while (step := remaining_text(git_output)) is not None and time.monotonic() < until:
            revision = with_verdict(judge.judge_revision(run_git(checkout, "rev-parse", "HEAD").strip()), *sides)
            judged.append(revision)
            tell(f"{revision_text(revision)}\n{'':9}  {step}")
            git_output = run_git(checkout, "bisect", bisect_term(revision, terms, fixed=fixed), ok=(0, 2))
        return build_search_result(git_output, judged, checkout, time.monotonic() - began, fixed=fixed)


def is_proper_ancestor(repo: Path, earlier: str, later: str) -> bool:
    """Return whether `earlier` is an ancestor of `later`, and not the same commit. Both are full hashes."""
    return earlier != later and run_git(repo, "merge-base", earlier, later, ok=(0, 1)).strip() == earlier


def bisect_term(revision: JudgedRevision, terms: tuple[str, str], *, fixed: bool) -> str:
    """Return the word for `git bisect` on a judged revision: the earlier side's term, the later side's, or "skip".

    terms: those of the earlier and the later side. fixed: the search is for what fixed, so the earlier side is bad.
    """
    earlier, later = terms
    if revision.verdict == "good":
        return later if fixed else earlier
    if revision.verdict == "bad":
        return earlier if fixed else later
    return "skip"


def build_search_result(
    git_output: str, judged: list[JudgedRevision], checkout: Path, seconds: float, *, fixed: bool = False
) -> SearchResult:
    """Return the result of the search, from the last output of `git bisect` and the judged revisions.

    The output names the first commit, or those that remain; these become `candidates`. If time was up, `unfinished` is
    set.
    """
    by_commit = {revision.commit: revision for revision in judged}
    earlier = [revision for revision in judged if revision.verdict == ("bad" if fixed else "good")]
    last_before = max(earlier, key=lambda revision: int(run_git(checkout, "rev-list", "--count", revision.commit)))
    if match := re.search(r"^([0-9a-f]{40}) is the first (bad|fixed) commit", git_output, re.MULTILINE):
        return SearchResult(by_commit[match[1]], last_before, tuple(judged), (), seconds, fixed=fixed)
    candidates = re.findall(r"^([0-9a-f]{40})$", git_output, re.MULTILINE)
    names = tuple(by_commit[candidate].name if candidate in by_commit else candidate[:9] for candidate in candidates)
    unfinished = remaining_text(git_output) or ""
    return SearchResult(None, last_before, tuple(judged), names, seconds, fixed=fixed, unfinished=unfinished)


@dataclass(frozen=True)
class CommitJudge:
    """A judge of commits: it checks each out in one clone, and runs the cases there."""

    checkout: Path
    cases: Sequence[Case]
    options: Options
    judge_checkout: JudgeCheckout
    revision_kind: str = "commit"

    def judge_revision(self, commit: str) -> JudgedRevision:
        """Check out the commit and run the cases. Return the revision; its verdict is still empty, the search sets it.

        The first case that cannot be judged ends it, with the reason in `problem`.
        """
        began = time.monotonic()
        run_git(self.checkout, "checkout", "--quiet", "--detach", commit)
        delete_bytecode(self.checkout)
        date, _, subject = (
            run_git(self.checkout, "show", "--no-patch", "--format=%cs %s", commit).strip().partition(" ")
        )
        revision = JudgedRevision(commit, date, subject, "")
        for case in self.cases:
            revision = self._add_case(revision, case)
            if revision.problem:
                break
        return dataclasses.replace(revision, seconds=time.monotonic() - began)

    def _add_case(self, revision: JudgedRevision, case: Case) -> JudgedRevision:
        """Run one case. Return the revision with its broken checks and cause, or with `problem` if it is not supported."""
        try:
            judgement = self.judge_checkout(case, self.checkout, self.options)
        except Unsupported as refusal:
            return dataclasses.replace(revision, problem=f"{case.name}: {refusal}")
        return with_judgement(revision, case, self._move_evidence(judgement.folder, revision.commit), judgement)

    def _move_evidence(self, folder: Path, commit: str) -> Path:
        """Move a case's evidence to COMMIT/CASE beside it, so that the next commit does not replace it.

        Return the new folder.
        """
        new_folder = folder.parent / commit[:9] / name_without_source(folder.name)
        make_fresh_folder(new_folder).rmdir()
        return folder.rename(new_folder)


def run_git(folder: Path, *arguments: str, ok: tuple[int, ...] = (0,)) -> str:
    """Return what git prints on stdout, in English. Raises BisectError with git's complaint for an exit code not in `ok`."""
    process = quiet_git(folder, *arguments)
    if process.returncode not in ok:
        raise BisectError(f"git {' '.join(arguments[:2])}: {process.stderr.strip() or process.stdout.strip()}")
    return process.stdout


def resolve_commit(repo: Path, name: str) -> str:
    """Return the full hash of a commit. Raises BisectError if the repository does not have it."""
    try:
        return run_git(repo, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}").strip()
    except BisectError:
        raise BisectError(f"{repo}: no commit {name!r} there; --repo is a clone of the trainer's repository") from None


@contextmanager
def temporary_clone(repo: Path, files: Sequence[str]) -> Iterator[Path]:
    """Yield the folder of a clone without a checked-out commit. It is deleted when the block ends."""
    with tempfile.TemporaryDirectory(prefix="harness-bisect-") as folder:
        yield make_clone(repo, Path(folder) / "trainer", files)


def remove_clone(folder: Path) -> None:
    """Delete a clone that this harness made. Nothing happens if the folder does not exist.

    Raises BisectError, with nothing deleted, if the folder is no such clone, or if files in it were changed or stashed.
    """
    if not os.path.lexists(folder):
        return
    foreign = "it" if folder.is_symlink() or not (folder / ".git/objects/info/alternates").is_file() else ""
    if not foreign:
        changed = run_git(folder, "status", "--porcelain", "--ignored", "--untracked-files=all").splitlines()
        foreign = next((line[3:] for line in changed if "__pycache__/" not in line), "")
        foreign = foreign or run_git(folder, "stash", "list").strip()
    if foreign:
        raise BisectError(f"{folder}: {foreign} is not of a clone that this harness made; choose another --out")
    shutil.rmtree(folder)


def delete_bytecode(folder: Path) -> None:
    """Delete all __pycache__ folders below a folder.

    Python finds compiled files by the second and the size of the source, and two commits may have both alike.
    """
    for compiled in list(folder.rglob("__pycache__")):
        shutil.rmtree(compiled)


def make_clone(repo: Path, checkout: Path, files: Sequence[str]) -> Path:
    """Clone the repository into `checkout`, sharing its objects, and return `checkout`. Nothing is checked out yet.

    files: the paths that later checkouts contain; empty for all.
    """
    run_git(repo, "clone", "--quiet", "--shared", "--no-checkout", str(repo.resolve()), str(checkout))
    if files:
        run_git(checkout, "sparse-checkout", "set", "--no-cone", *files)
    return checkout


def remaining_text(git_output: str) -> str | None:
    """Return how many commits and steps are left to search, as a phrase.

    None if git's output says that the search has ended.
    """
    if re.search(r"^Bisecting: a merge base must be tested", git_output, re.MULTILINE):
        return "where the two branches parted comes first"
    match = re.search(
        r"^Bisecting: (\d+) revisions? left to test after this \(roughly (\d+) steps?\)", git_output, re.MULTILINE
    )
    return f"{match[1]} commits left after it, about {match[2]} steps" if match else None
