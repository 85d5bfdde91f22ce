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
from harness.core.evidence.git import run_git
from harness.core.judge.judgement import Judgement
from harness.core.run.options import Options, Unsupported
from harness.core.run.run_case import run_case
from harness.nights.bisect import BisectError, own_commits

JudgeCheckout = Callable[[Case, Path, Options], Judgement]


def files_and_judge(options: Options, repo: Path) -> tuple[Sequence[str], JudgeCheckout]:
    """Return the paths to check out of each commit (none: all), and a function that judges a case in a checkout.

    Raises BisectError if the trainer's adapter cannot run other sources.
    """
    if TrainerSpec.parse(options.trainer).name == own_commits.OWN_TRAINER:
        return own_commits.SPARSE_FILES, own_commits.judge_checkout
    of_checkout = trainer_by_checkout(options.trainer, repo)
    return files_of_trainer(options.trainer), functools.partial(_judge_checkout, of_checkout)


def files_of_trainer(trainer: str) -> Sequence[str]:
    """Return the paths of the trainer's repository that a run needs. Empty if the adapter names none: then all are needed."""
    return getattr(trainers.load_adapter(trainer), "files", ())


def trainer_by_checkout(trainer: str, repo: Path) -> Callable[[Path], str]:
    """Return a function from a checkout's folder to the trainer's spec there, as load_adapter takes it.

    Raises BisectError if the adapter has no `of` and is no file in the repository.
    """
    name = TrainerSpec.parse(trainer).name
    adapter = trainers.load_adapter(trainer)
    if hasattr(adapter, "of"):
        return lambda checkout: trainers.absolute_spec(name, str(checkout))
    file = Path(name).resolve()
    repo = repo.resolve()
    if not name.endswith(".py") or not file.is_relative_to(repo):
        raise BisectError(
            f"trainer {adapter.name} has no other sources: its adapter has no `of`, and is no file in {repo}"
        )
    return functools.partial(adapter_of_commit, file, file.relative_to(repo))


def adapter_of_commit(file: Path, relative: Path, checkout: Path) -> str:
    """Return the path of the adapter in the checkout. Today's `file` is copied there if the commit has none.

    relative: the adapter's path in the repository.
    """
    adapter = checkout / relative
    if not adapter.exists():
        adapter.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, adapter)
    return str(adapter)


def _judge_checkout(of_checkout: Callable[[Path], str], case: Case, checkout: Path, options: Options) -> Judgement:
    """Run the case with the trainer of a checkout, and return this harness's judgement.

    If the commit has no adapter, today's is used and deleted afterwards, and `made["adapter"]` says so. Raises
    Unsupported if the adapter cannot be loaded, and as run_case does.
    """
    trainer = of_checkout(checkout)
    file = Path(TrainerSpec.parse(trainer).name)
    is_laid_there = file.is_relative_to(checkout) and not is_in_commit(checkout, file)
    try:
        reload_trainer(trainer)
        judgement = run_case(case, dataclasses.replace(options, trainer=trainer))
    finally:
        if is_laid_there:  # else it would be in the way of the next commit's
            file.unlink()
    note = {"adapter": "by today's adapter: the commit has none"} if is_laid_there else {}
    return dataclasses.replace(judgement, made=judgement.made | note)


def reload_trainer(trainer: str) -> None:
    """Load the trainer anew. Raises Unsupported if it cannot be loaded."""
    try:
        trainers.reload_adapter(trainer)
    except (ValueError, OSError) as error:
        raise Unsupported(str(error)) from error


def is_in_commit(checkout: Path, file: Path) -> bool:
    """Return whether the file is part of the commit that is checked out. file: a path below the checkout."""
    return run_git(checkout, "cat-file", "-e", f"HEAD:{file.relative_to(checkout)}").returncode == 0
