"""Which version of an installed package failed a check: each in its own environment, judged by the checks.

Environments are made in OUT/.environments; a prepared interpreter may be named instead. The search is that over commits,
over a list.
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
from harness.core.run.folders import folder_of, fresh_folder
from harness.core.run.judging import judge_folder
from harness.core.run.options import Options
from harness.core.trainers.support.environments import EnvironmentFailed, environment, run
from harness.nights.bisect import BisectError
from harness.nights.bisect.search import Found, Judged, Tell, both_sides, line_of, read, relative


@dataclass(frozen=True)
class Version:
    """python: the interpreter that has it; None: one is made."""

    package: str
    number: str
    python: Path | None = None

    def __str__(self) -> str:
        return f"{self.package}=={self.number}"


def versions(text: str) -> list[Version]:
    """Read torch==2.11.0,2.12.0@/path/to/python,2.13.0; from the good one to the bad one. Raises BisectError."""
    package, _, numbers = text.partition("==")
    found = []
    for entry in numbers.split(","):
        number, _, python = entry.removeprefix(f"{package}==").partition("@")
        found.append(Version(package, number, Path(python).absolute() if python else None))
    if not package or len(found) < 2 or not all(re.fullmatch(r"[\w.+!-]+", v.number) for v in found):
        raise BisectError(f"--over {text}: expected PACKAGE==GOOD,..,BAD, as in torch==2.11.0,2.12.0@PYTHON,2.13.0")
    for version in found:
        if version.python and not version.python.is_file():
            raise BisectError(f"--over {version}: no interpreter at {version.python}")
    return found


def search(wanted: Sequence[Version], cases: Sequence[Case], cases_at: Path, options: Options, tell: Tell) -> Found:
    """Raises BisectError. Leaves each version's evidence in OUT/bisect/PACKAGE==VERSION/."""
    began = time.monotonic()
    judge = Judge({str(version): version for version in wanted}, cases, cases_at, options, tell)
    names = [str(version) for version in wanted]
    good, bad = both_sides(judge, names[0], names[-1], tell)
    judged = {names[0]: good, names[-1]: bad}
    while (name := halfway(names, judged)) is not None:
        judged[name] = relative(judge.look(name), good, bad)
        tell(line_of(judged[name]))
    last_good, first_bad = border(names, judged)
    between = names[names.index(last_good) + 1 : names.index(first_bad) + 1]
    first = judged[first_bad] if len(between) == 1 else None
    done = tuple(judged.values())
    seconds = time.monotonic() - began
    return Found(first, judged[last_good], done, () if first else tuple(between), seconds, what="version")


def border(names: Sequence[str], judged: dict[str, Judged]) -> tuple[str, str]:
    """The first bad one, and the last good one before it."""
    verdicts = {name: found.verdict for name, found in judged.items()}
    first_bad = next(name for name in names if verdicts.get(name) == "bad")
    before = names[: names.index(first_bad)]
    return next(name for name in reversed(before) if verdicts.get(name) == "good"), first_bad


def halfway(names: Sequence[str], judged: dict[str, Judged]) -> str | None:
    """Return the one next to the middle of those between last good and first bad that are not judged yet."""
    last_good, first_bad = (names.index(name) for name in border(names, judged))
    left = [at for at in range(last_good + 1, first_bad) if names[at] not in judged]
    return names[min(left, key=lambda at: abs(2 * at - last_good - first_bad))] if left else None


@dataclass(frozen=True)
class Judge:
    wanted: dict[str, Version]
    cases: Sequence[Case]
    cases_at: Path
    options: Options
    tell: Tell
    what: str = "version"

    def look(self, name: str) -> Judged:
        """Its verdict is still open."""
        began, version = time.monotonic(), self.wanted[name]
        found = Judged(name, "", str(version.python or ""), "")
        try:
            python = interpreter(version, self.options.out / ".environments", self.tell)
        except BisectError as error:
            return dataclasses.replace(found, problem=str(error), seconds=time.monotonic() - began)
        for case in self.cases:
            found = self._with_case(found, case, python)
            if found.problem:
                break
        return dataclasses.replace(found, seconds=time.monotonic() - began)

    def _with_case(self, found: Judged, case: Case, python: Path) -> Judged:
        options = dataclasses.replace(self.options, out=self.options.out / "bisect" / found.commit)
        folder = folder_of(case, options)
        fresh_folder(folder).rmdir()
        ended = run(python, ["-m", "harness", "run", case.name, "--cases", str(self.cases_at), *typed(options)])
        try:
            return read(found, case, folder, judge_folder(folder))
        except EvidenceError as error:
            said = ended.stderr.strip().splitlines()
            why = said[-1].removeprefix("harness: ") if said else str(error)
            return dataclasses.replace(found, problem=f"{case.name}: {why}")


def typed(options: Options) -> list[str]:
    """Options as one types them."""
    trainer = TrainerSpec.parse(options.trainer)
    given = {"trainer": trainer.name, "source": trainer.source, "launcher": options.launcher, "device": options.device}
    given |= {"out": str(options.out.resolve()), "timeout": str(options.timeout), "server": "own"}
    given |= {"fault": options.fault or ""}
    return [word for key, value in given.items() if value for word in (f"--{key}", value)]


def interpreter(version: Version, folder: Path, tell: Tell) -> Path:
    """One that has this version: the prepared one, or that of an environment made now. Raises BisectError."""
    try:
        python = version.python or environment(str(version), (folder / str(version)).absolute(), tell)
    except EnvironmentFailed as error:
        raise BisectError(str(error)) from error
    answer = run(python, ["-c", f"import importlib.metadata as m; print(m.version({version.package!r}))"])
    there = answer.stdout.strip().partition("+")[0]
    if there != version.number.partition("+")[0]:
        raise BisectError(f"{python} has {version.package} {there or 'not installed'}, not {version.number}")
    return python
