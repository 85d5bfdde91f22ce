"""A search for the version of an installed package that failed a check.

Each version has its own environment, in OUT/.environments; a prepared interpreter may be named instead. The checks
judge it. The search works like that over commits, but over a list of versions.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.core.case.case import Case
from harness.core.case.trainer_spec import TrainerSpec
from harness.core.evidence.store import EvidenceError
from harness.core.run.folders import folder_of, make_fresh_folder
from harness.core.run.judging import judge_folder
from harness.core.run.options import Options
from harness.core.trainers.support.environments import EnvironmentFailed, environment, run_python
from harness.nights.bisect import BisectError
from harness.nights.bisect.search import (
    JudgedRevision,
    PrintProgress,
    SearchResult,
    judge_both_sides,
    revision_text,
    with_judgement,
    with_verdict,
)


@dataclass(frozen=True)
class Version:
    """A version of an installed package, as a search over versions judges it. Its text is "torch==2.12.0"."""

    package: str
    number: str
    python: Path | None = None
    """Absolute path of a prepared interpreter that has it; None: an environment is made when the version is judged."""

    def __str__(self) -> str:
        return f"{self.package}=={self.number}"


def parse_versions(text: str) -> list[Version]:
    """Return the versions of PACKAGE==GOOD,..,BAD, from the good one to the bad one. VERSION@PATH names a prepared interpreter.

    Raises BisectError for another form, fewer than two versions, or an interpreter that does not exist.
    """
    package, _, numbers = text.partition("==")
    parsed_versions = []
    for entry in numbers.split(","):
        number, _, python = entry.removeprefix(f"{package}==").partition("@")
        parsed_versions.append(Version(package, number, Path(python).absolute() if python else None))
    if (
        not package
        or len(parsed_versions) < 2
        or not all(re.fullmatch(r"[\w.+!-]+", version.number) for version in parsed_versions)
    ):
        raise BisectError(f"--over {text}: expected PACKAGE==GOOD,..,BAD, as in torch==2.11.0,2.12.0@PYTHON,2.13.0")
    for version in parsed_versions:
        if version.python and not version.python.is_file():
            raise BisectError(f"--over {version}: no interpreter at {version.python}")
    return parsed_versions


def search_versions(
    requested: Sequence[Version], cases: Sequence[Case], cases_at: Path, options: Options, tell: PrintProgress
) -> SearchResult:
    """Search for the first version that fails a check, and return the result. Raises BisectError.

    requested: from the good one to the bad one. cases_at: the folder of the cases. If skipped versions hide the first
    bad one, `first` is None, and the candidates are all after the last good one up to a bad one.

    Leaves each version's evidence in OUT/bisect/PACKAGE==VERSION/, and prints progress by `tell`.
    """
    began = time.monotonic()
    judge = VersionJudge({str(version): version for version in requested}, cases, cases_at, options, tell)
    names = [str(version) for version in requested]
    good, bad = judge_both_sides(judge, names[0], names[-1], tell)
    judged = {names[0]: good, names[-1]: bad}
    while (name := next_to_judge(names, judged)) is not None:
        judged[name] = with_verdict(judge.judge_revision(name), good, bad)
        tell(revision_text(judged[name]))
    last_good, first_bad = last_good_and_first_bad(names, judged)
    between = names[names.index(last_good) + 1 : names.index(first_bad) + 1]
    first = judged[first_bad] if len(between) == 1 else None
    all_judged = tuple(judged.values())
    seconds = time.monotonic() - began
    return SearchResult(first, judged[last_good], all_judged, () if first else tuple(between), seconds, what="version")


def last_good_and_first_bad(names: Sequence[str], judged: dict[str, JudgedRevision]) -> tuple[str, str]:
    """Return two names: the last good version before the first bad one, and the first bad one. Both must exist.

    judged: revisions with verdicts, by name.
    """
    verdicts = {name: revision.verdict for name, revision in judged.items()}
    first_bad = next(name for name in names if verdicts.get(name) == "bad")
    names_before = names[: names.index(first_bad)]
    return next(name for name in reversed(names_before) if verdicts.get(name) == "good"), first_bad


def next_to_judge(names: Sequence[str], judged: dict[str, JudgedRevision]) -> str | None:
    """Return the name of the version to judge next: nearest to the middle between last good and first bad, and not judged yet.

    None if all between them are judged.
    """
    last_good, first_bad = (names.index(name) for name in last_good_and_first_bad(names, judged))
    unjudged = [index for index in range(last_good + 1, first_bad) if names[index] not in judged]
    return names[min(unjudged, key=lambda index: abs(2 * index - last_good - first_bad))] if unjudged else None


@dataclass(frozen=True)
class VersionJudge:
    """A judge of versions: it runs the cases with an interpreter that has the version installed."""

    version_by_name: dict[str, Version]
    cases: Sequence[Case]
    case_folder: Path
    options: Options
    print_progress: PrintProgress
    revision_kind: str = "version"

    def judge_revision(self, name: str) -> JudgedRevision:
        """Run the cases with the version of this name. Return the revision; its verdict is still empty, the search sets it.

        `problem` is set if the version cannot be installed, or by the first case that cannot be judged, which ends it.
        """
        began = time.monotonic()
        version = self.version_by_name[name]
        revision = JudgedRevision(name, "", str(version.python or ""), "")
        try:
            python = interpreter_with(version, self.options.out / ".environments", self.print_progress)
        except BisectError as error:
            return dataclasses.replace(revision, problem=str(error), seconds=time.monotonic() - began)
        for case in self.cases:
            revision = self._add_case(revision, case, python)
            if revision.problem:
                break
        return dataclasses.replace(revision, seconds=time.monotonic() - began)

    def _add_case(self, revision: JudgedRevision, case: Case, python: Path) -> JudgedRevision:
        """Run one case by an interpreter.

        Return the revision with its broken checks and cause, or with `problem` if no evidence is left.
        """
        options = dataclasses.replace(self.options, out=self.options.out / "bisect" / revision.commit)
        folder = folder_of(case, options)
        make_fresh_folder(folder).rmdir()
        process = run_python(
            python, ["-m", "harness", "run", case.name, "--cases", str(self.case_folder), *run_option_words(options)]
        )
        try:
            return with_judgement(revision, case, folder, judge_folder(folder))
        except EvidenceError as error:
            error_lines = process.stderr.strip().splitlines()
            reason = error_lines[-1].removeprefix("harness: ") if error_lines else str(error)
            return dataclasses.replace(revision, problem=f"{case.name}: {reason}")


def run_option_words(options: Options) -> list[str]:
    """Return the command-line words of `harness run` that repeat these options. Empty values are left out."""
    trainer = TrainerSpec.parse(options.trainer)
    values = {"trainer": trainer.name, "source": trainer.source, "launcher": options.launcher, "device": options.device}
    values |= {"out": str(options.out.resolve()), "timeout": str(options.timeout), "server": "own"}
    values |= {"fault": options.fault or ""}
    words: list[str] = []
    for key, value in values.items():
        if value:
            words += [f"--{key}", value]
    return words


def interpreter_with(version: Version, folder: Path, tell: PrintProgress) -> Path:
    """Return the path of an interpreter that has this version: the prepared one, or that of an environment made in `folder`.

    Raises BisectError if the environment cannot be made, or the interpreter has another version.
    """
    try:
        python = version.python or environment(str(version), (folder / str(version)).absolute(), tell)
    except EnvironmentFailed as error:
        raise BisectError(str(error)) from error
    process = run_python(python, ["-c", f"import importlib.metadata as m; print(m.version({version.package!r}))"])
    installed = process.stdout.strip().partition("+")[0]
    if installed != version.number.partition("+")[0]:
        raise BisectError(f"{python} has {version.package} {installed or 'not installed'}, not {version.number}")
    return python
