"""The trainer of a checkout: which files of a commit running it needs, and what judges it.

Its adapter has other sources (`of`), or lies in the trainer's own repository and is of the commit too, or it is this project's.
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from harness.core import trainers
from harness.core.case.case import Case
from harness.core.case.trainer_spec import TrainerSpec
from harness.core.evidence.git import git
from harness.core.judge.judgement import Judgement
from harness.core.run.options import Options, Unsupported
from harness.core.run.run_case import run_case
from harness.nights.bisect import BisectError, own_commits

JudgedAt = Callable[[Case, Path, Options], Judgement]


def how_to_judge(options: Options, repo: Path) -> tuple[Sequence[str], JudgedAt]:
    """Return the files to take of each commit, and how to judge a checkout. Raises BisectError."""
    if TrainerSpec.parse(options.trainer).name == own_commits.TRAINER:
        return own_commits.FILES, own_commits.judged_at
    of_checkout = trainer_of(options.trainer, repo)
    return files_of(options.trainer), functools.partial(_judged_at, of_checkout)


def files_of(trainer: str) -> Sequence[str]:
    """Return the files to take of each commit; none: all of them."""
    return getattr(trainers.load(trainer), "files", ())


def trainer_of(trainer: str, repo: Path) -> Callable[[Path], str]:
    """Return the trainer of each checkout, as trainers.load takes it. Raises BisectError."""
    name = TrainerSpec.parse(trainer).name
    adapter = trainers.load(trainer)
    if hasattr(adapter, "of"):
        return lambda checkout: trainers.spec(name, str(checkout))
    file = Path(name).resolve()
    repo = repo.resolve()
    if not name.endswith(".py") or not file.is_relative_to(repo):
        raise BisectError(
            f"trainer {adapter.name} has no other sources: its adapter has no `of`, and is no file in {repo}"
        )
    return functools.partial(adapter_in, file, file.relative_to(repo))


def adapter_in(file: Path, relative: Path, checkout: Path) -> str:
    """Return the commit's own adapter; today's file is laid there if the commit is older than its adoption."""
    adapter = checkout / relative
    if not adapter.exists():
        adapter.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, adapter)
    return str(adapter)


def _judged_at(of_checkout: Callable[[Path], str], case: Case, checkout: Path, options: Options) -> Judgement:
    """Judge the case by this harness.

    Raises Unsupported if the commit has no adapter that can be loaded, and as run_case does.
    """
    trainer = of_checkout(checkout)
    file = Path(TrainerSpec.parse(trainer).name)
    is_laid_there = file.is_relative_to(checkout) and not commit_has(checkout, file)
    try:
        reloaded(trainer)
        judgement = run_case(case, dataclasses.replace(options, trainer=trainer))
    finally:
        if is_laid_there:  # else it would be in the way of the next commit's
            file.unlink()
    note = {"adapter": "by today's adapter: the commit has none"} if is_laid_there else {}
    return dataclasses.replace(judgement, made=judgement.made | note)


def reloaded(trainer: str) -> None:
    """Load the trainer anew. Raises Unsupported if it cannot be loaded."""
    try:
        trainers.reload(trainer)
    except (ValueError, OSError) as error:
        raise Unsupported(str(error)) from error


def commit_has(checkout: Path, file: Path) -> bool:
    """Return whether the file is of the commit that is checked out."""
    return git(checkout, "cat-file", "-e", f"HEAD:{file.relative_to(checkout)}").returncode == 0
