"""cases/*.yaml as pytest items: FILE.yaml::CASE::LAW. No logic of its own: harness.run runs and judges.

A case runs once, when the first of its laws is requested. Under `pytest -n` all laws of a case go to one worker.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import trainers
from harness.checks import all_checks
from harness.evidence.store import EvidenceError, load
from harness.judge import golden
from harness.judge.golden import GoldenError
from harness.judge.judgement import Judgement
from harness.judge.result import Verdict
from harness.launch import LaunchError, default_server
from harness.reference.record import ReferenceRun
from harness.report.text import check_text
from harness.run.options import Options, Unsupported
from harness.run.reference_cache import reference_folder
from harness.run.run_case import run_case
from harness.run.selection import ALL_TIERS
from harness.spec.case import TIERS, Case, CaseError
from harness.spec.loading import load_cases

ENDS = ("skipped", "passed", "failed", "error", "xfailed", "xpassed")
EXPECTED = (CaseError, EvidenceError, GoldenError, LaunchError)


class Broken(Exception):
    """A law that did not pass. The message is all a person needs; a traceback would only show how pytest called us."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("harness", "the cases in cases/*.yaml")
    group.addoption("--trainer", default="llama3", help="the trainer under test")
    group.addoption(
        "--source",
        metavar="PATH|VERSION",
        help="a checkout of that trainer, or a release that pip brings; as --source=PATH",
    )
    group.addoption("--launcher", default="local", choices=("local", "torchrun"))
    group.addoption("--device", default="cpu", choices=("cpu", "cuda"))
    group.addoption(
        "--case-timeout", type=float, default=120.0, metavar="S", help="seconds for one launch; default 120"
    )
    group.addoption("--out", default="out", metavar="DIR", help="where evidence goes; default out; as --out=DIR")
    group.addoption("--tier", default="default", choices=(*TIERS, ALL_TIERS), help="which cases; see `harness matrix`")
    group.addoption("--accept-golden", action="store_true", help="golden items rewrite the golden, and fail")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--case-timeout") <= 0:
        raise pytest.UsageError(f"--case-timeout must be above 0, got {config.getoption('--case-timeout'):g}")
    try:
        trainers.load(trainer_of(config))
    except ValueError as error:
        raise pytest.UsageError(f"--trainer: {error}") from error


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if file_path.suffix == ".yaml" and file_path.parent.name == "cases":
        return CaseFile.from_parent(parent, path=file_path)
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Cases of other tiers are deselected, unless an argument names a case: FILE.yaml::CASE."""
    tier = config.getoption("--tier")
    if tier == ALL_TIERS or any(_is_law(argument) for argument in config.args):
        return
    left_out = [item for item in items if isinstance(item, Law) and item.parent.case.tier != tier]
    config.hook.pytest_deselected(items=left_out)
    gone = set(left_out)
    items[:] = [item for item in items if item not in gone]


def pytest_collection_finish(session: pytest.Session) -> None:
    """The rank server needs 3 s to start; other tests may run meanwhile."""
    local = session.config.getoption("--launcher") == "local" and not session.config.getoption("collectonly")
    if local and not session.testsfailed and any(isinstance(item, Law) for item in session.items):
        default_server(trainers.load(trainer_of(session.config)).preload)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`pytest -n`: all laws of a case on one worker, as they share a run; every other test wherever there is room."""
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    class ByCase(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid.rpartition("::")[0] if _is_law(nodeid) else nodeid

    return ByCase(config, log) if config.getvalue("dist") == "load" else None


# ---- collection: a file, its cases, their laws


class CaseFile(pytest.File):
    def collect(self) -> Iterator[CaseNode]:
        try:
            cases = load_cases(self.path)
        except CaseError as error:
            raise self.CollectError(str(error)) from None
        for case in cases:
            yield CaseNode.from_parent(self, name=case.name, case=case)


class CaseNode(pytest.Collector):
    """One case. Holds what came of its run, be it a judgement or the reason why there is none."""

    def __init__(self, *, case: Case, **rest: Any) -> None:
        super().__init__(**rest)
        self.case = case
        self.outcome: Judgement | Exception | None = None

    def collect(self) -> Iterator[Law]:
        for check in all_checks():
            yield Law.from_parent(self, name=check)

    def judgement(self) -> Judgement:
        if self.outcome is None:
            try:
                self.outcome = run_case(self.case, options(self.config))
            except (Unsupported, *EXPECTED) as error:
                self.outcome = error
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class Law(pytest.Item):
    parent: CaseNode

    def runtest(self) -> None:
        if self.name == "golden" and self.config.getoption("--accept-golden"):
            raise Broken(accept_golden(self.parent.case, options(self.config)))
        try:
            judgement = self.parent.judgement()
        except Unsupported as reason:
            pytest.skip(f"not run: {reason}")
        result = next(result for result in judgement.results if result.check == self.name)
        expected = self.parent.case.expected_failure
        if judgement.verdict is Verdict.XFAIL and result.verdict in (Verdict.FAIL, Verdict.UNKNOWN) and expected:
            pytest.xfail(f"{expected.because}; see {expected.script}")
        if expected and judgement.verdict is Verdict.FAIL and self.name in expected.laws.split():
            raise Broken(check_text(judgement, result))
        if result.verdict is Verdict.NOT_APPLICABLE:
            pytest.skip(f"{self.name} not applicable: {result.note}")
        if result.verdict is not Verdict.PASS:
            raise Broken(check_text(judgement, result))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, (Broken, *EXPECTED)):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[os.PathLike[str], int | None, str]:
        return self.path, None, f"{self.parent.name}::{self.name}"


def trainer_of(config: pytest.Config) -> str:
    """Raises ValueError."""
    return trainers.spec(config.getoption("--trainer"), config.getoption("--source"), Path(config.getoption("--out")))


def options(config: pytest.Config) -> Options:
    return Options(
        out=Path(config.getoption("--out")),
        trainer=trainer_of(config),
        launcher=config.getoption("--launcher"),
        device=config.getoption("--device"),
        timeout=config.getoption("--case-timeout"),
    )


def accept_golden(case: Case, options: Options) -> str:
    """Rewrites the golden and says what changed. Raises GoldenError in CI."""
    reference = load(reference_folder(case, options) / "reference.npz", ReferenceRun)
    return f"{golden.accept(case, reference)}\naccepted, not a pass: review `{golden.review_command(case)}`"


# ---- the end: skips alone are not green


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.exitstatus == pytest.ExitCode.OK and _only_skips(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if what := _only_skips(config):
        terminalreporter.write_line(f"nothing was judged: {what} skipped, which is not a pass", red=True)


def _only_skips(config: pytest.Config) -> str:
    """Which of the two kinds of items, cases and tests, took part with skips alone; "" if neither did."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    stats = reporter.stats if reporter else {}
    ended = {key: {_is_law(report.nodeid) for report in stats.get(key, [])} for key in ENDS}
    names = {True: "all laws of all cases", False: "all tests"}
    skipped = ended.pop("skipped")
    return " and ".join(names[kind] for kind in sorted(skipped - set().union(*ended.values())))


def _is_law(nodeid: str) -> bool:
    return ".yaml::" in nodeid
