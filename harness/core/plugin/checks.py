"""The plugin of a repository that names its cases: which checks are collected, selected and run, and the summary at the
end.

Under `pytest -n` all checks of a case go to one worker. Checks that do not apply to a case are only counted: nothing
was looked at, and nothing was left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from harness.core import trainers
from harness.core.case.case import TIERS
from harness.core.case.launching import LONGEST_SECONDS
from harness.core.case.usual_trainer import CONFIGURATION_KEY, default_trainer, trainer_of_value
from harness.core.launch import default_server, resident_client
from harness.core.plugin.items import MARK, CaseFile, Check, tier_mark
from harness.core.run.options import Options

NOT_APPLICABLE_KEY = "harness_not_applicable"


class Checks:
    """A plugin of pytest: hooks that collect, select and run the checks of cases, and write the summary at the end.

    folders: those with YAML files of cases, absolute. Making one reads the run's options, chooses the kind of rank
    server, registers the marks, and adds the folders to what pytest collects if `testpaths` decides that. It raises
    pytest.UsageError for a folder that is not there, and for wrong options.
    """

    def __init__(self, config: pytest.Config, folders: Sequence[Path]) -> None:
        self.config = config
        self.folders = folders
        self.not_applicable_ids: set[str] = set()  # of node ids, as are the next two
        self.judged_ids: set[str] = set()
        self.skipped_ids: set[str] = set()
        for folder in folders:
            if not folder.is_dir():
                raise pytest.UsageError(f"harness_cases: no folder {folder}; name one that has YAML files of cases")
        self.options = options_of_config(config)
        add_to_testpaths(config, folders)
        config.addinivalue_line("markers", f"{MARK}: a check of a case, of whatever tier")
        for tier in TIERS:
            config.addinivalue_line("markers", f"{tier_mark(tier)}: a check of a case of tier {tier}")

    # ---- collection

    def pytest_collect_file(self, file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        """Return a collector for a YAML file that lies directly in a folder of cases; None for any other file."""
        if file_path.suffix == ".yaml" and file_path.parent in self.folders:
            return CaseFile.from_parent(parent, path=file_path, options=self.options)
        return None

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Deselect cases of other tiers than the default, unless -m names one of our marks or an argument a case:
        FILE.yaml::CASE."""
        named = set(re.findall(r"\w+", self.config.getoption("markexpr", "")))
        if named & {MARK, *map(tier_mark, TIERS)} or any(".yaml::" in argument for argument in self.config.args):
            return
        other_tiers = [item for item in items if isinstance(item, Check) and item.parent.case.tier != "default"]
        self.config.hook.pytest_deselected(items=other_tiers)
        deselected = set(other_tiers)
        items[:] = [item for item in items if item not in deselected]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Start the rank server if checks of local ranks will run. It needs 3 s to start; other tests may run meanwhile."""
        is_local_run = self.options.launcher == "local" and not self.config.getoption("collectonly")
        if is_local_run and not session.testsfailed and any(isinstance(item, Check) for item in session.items):
            default_server(trainers.load_adapter(self.options.trainer).preload, device=self.options.device)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """Return a scheduler for `pytest -n` that keeps all checks of a case on one worker, as they share a run; other
        tests go anywhere.

        None, which leaves it to xdist, if another --dist was typed.
        """
        from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

        class ByCase(LoadScopeScheduling):
            def _split_scope(self, nodeid: str) -> str:
                return nodeid.rpartition("::")[0] if ".yaml::" in nodeid else nodeid

        return ByCase(config, log) if config.getvalue("dist") == "load" else None

    # ---- running

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        """Run a check as pytest does, but hold its reports back until it is known whether it applies; if not, only
        count it.

        Return True, which tells pytest that the item was run. None, so that pytest runs it, for other items, and for
        all with --harness-not-applicable.
        """
        if not isinstance(item, Check) or self.config.getoption("--harness-not-applicable"):
            return None
        runs_now = item.parent.outcome is None
        if runs_now:
            item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
        if item.not_applicable and not any(report.failed for report in reports):
            self.not_applicable_ids.add(item.nodeid)
            return True
        if not runs_now:
            item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note by node id whether a check was judged or skipped. Reports of other tests are ignored."""
        if MARK not in report.keywords:
            return
        if report.skipped and not hasattr(report, "wasxfail"):
            self.skipped_ids.add(report.nodeid)
        elif report.when == "call" or report.failed:
            self.judged_ids.add(report.nodeid)

    # ---- the end: what was not judged is said, and is not green

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Add the checks that a worker of `pytest -n` found not applicable to those counted here."""
        self.not_applicable_ids |= set(getattr(node, "workeroutput", {}).get(NOT_APPLICABLE_KEY, ()))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Make a session fail that passed although all its checks of cases were skipped or did not apply.

        A worker of `pytest -n` sends what it counted instead.
        """
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput[NOT_APPLICABLE_KEY] = sorted(self.not_applicable_ids)
        elif session.exitstatus == pytest.ExitCode.OK and self._nothing_judged():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Write how many checks did not apply, and whether nothing was judged; nothing if neither is the case."""
        if self.not_applicable_ids:
            checks = len(self.not_applicable_ids)
            cases = len({name.rpartition("::")[0] for name in self.not_applicable_ids})
            checks_text = "1 check" if checks == 1 else f"{checks} checks"
            cases_text = "1 case" if cases == 1 else f"{cases} cases"
            terminalreporter.write_line(
                f"{checks_text} in {cases_text} did not apply and were not judged: "
                "--harness-not-applicable shows each, with its reason"
            )
        if self._nothing_judged():
            terminalreporter.write_line(
                "nothing was judged: all checks of all cases skipped or not applicable, which is not a pass", red=True
            )

    def _nothing_judged(self) -> bool:
        """Return whether checks were skipped or did not apply, and none was judged. False without any check."""
        return bool(self.skipped_ids | self.not_applicable_ids) and not self.judged_ids


def add_to_testpaths(config: pytest.Config, folders: Sequence[Path]) -> None:
    """Add the folders of cases to what pytest collects, if `testpaths` decides that. Those in it already are not added."""
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        named_paths = {config.invocation_params.dir / argument for argument in config.args}
        config.args += [str(folder) for folder in folders if not named_paths & {folder, *folder.parents}]


def options_of_config(config: pytest.Config) -> Options:
    """Return the options of a run, as pytest's options give them, with the trainer's adapter loaded.

    It also chooses the kind of rank server. Raises pytest.UsageError for a trainer that cannot be loaded, or a wrong
    number.
    """
    timeout = config.getoption("--harness-timeout")
    out = Path(config.getoption("--harness-out"))
    if not 0 < timeout <= LONGEST_SECONDS:
        raise pytest.UsageError(f"--harness-timeout must be above 0 and at most {LONGEST_SECONDS:g}, got {timeout:g}")
    try:
        trainer = trainers.absolute_spec(trainer_of_config(config), config.getoption("--harness-source"), out)
        trainers.load_adapter(trainer)
    except ValueError as error:
        raise pytest.UsageError(f"--harness-trainer: {error}") from error
    resident_client.choose_server_kind(config.getoption("--harness-server"))
    launcher = config.getoption("--harness-launcher")
    device = config.getoption("--harness-device")
    shared = config.getoption("--harness-ranks-per-gpu")
    if shared < 1 or (shared > 1 and device == "cpu"):
        raise pytest.UsageError(f"--harness-ranks-per-gpu {shared}: at least 1, and 1 on CPU")
    return Options(out=out, trainer=trainer, launcher=launcher, device=device, timeout=timeout, ranks_per_gpu=shared)


def trainer_of_config(config: pytest.Config) -> str:
    """Return the trainer that is typed, else the configuration's, else `default_trainer`. Raises ValueError if it
    cannot be used.

    A path in the configuration is relative to its file.
    """
    typed = config.getoption("--harness-trainer")
    written = config.getini(CONFIGURATION_KEY)
    if typed or not written:
        return typed or default_trainer().name
    return trainer_of_value(written, config.inipath or config.rootpath / "x").name
