"""A file of cases, its cases and their checks as pytest's nodes, without further logic: harness.core.run runs and judges.

A case runs once, when the first of its checks is requested.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from typing import Any

import pytest

from harness.core.case.case import Case, CaseError
from harness.core.case.case_files import path_of
from harness.core.case.loading import load_all, load_cases
from harness.core.checks import all_checks
from harness.core.evidence.store import EvidenceError
from harness.core.evidence.text import escape_control_characters
from harness.core.judge import golden
from harness.core.judge.golden import GoldenError
from harness.core.judge.judgement import Judgement
from harness.core.judge.result import Verdict
from harness.core.launch import LaunchError
from harness.core.report.text import check_text
from harness.core.run.accepting import accept_golden_of
from harness.core.run.options import Options, Unsupported
from harness.core.run.run_case import run_case

EXPECTED_ERRORS = (CaseError, EvidenceError, GoldenError, LaunchError)
MARK = "harness"  # of every check; and with a tier behind it, of those of that tier


class Broken(Exception):
    """The failure of a check. The message is all a person needs; a traceback would only show how pytest called us."""


class CaseFile(pytest.File):
    """A YAML file of cases, as pytest collects it."""

    def __init__(self, *, options: Options, **rest: Any) -> None:
        super().__init__(**rest)
        self.options = options

    def collect(self) -> Iterator[CaseNode]:
        """Yield a node for each case of the file. Raises CollectError if the file is wrong."""
        try:
            cases = load_cases(self.path)
        except CaseError as error:
            raise self.CollectError(str(error)) from None
        for case in cases:
            yield CaseNode.from_parent(self, name=case.name, case=case, options=self.options)


class CaseNode(pytest.Collector):
    """One case, whose checks are its items. `outcome` is the judgement of its run, or the reason why there is none."""

    def __init__(self, *, case: Case, options: Options, **rest: Any) -> None:
        super().__init__(**rest)
        self.case = case
        self.options = options
        self.outcome: Judgement | Exception | None = None
        self.add_marker(MARK)
        self.add_marker(tier_mark(case.tier))

    def collect(self) -> Iterator[Check]:
        for check in all_checks():
            yield Check.from_parent(self, name=check)

    def judgement(self) -> Judgement:
        """Return the judgement of the case, which runs at the first call.

        Raises, each time, what kept it from being judged.
        """
        if self.outcome is None:
            try:
                self.outcome = run_case(self.case, self.options)
            except (Unsupported, *EXPECTED_ERRORS) as error:
                self.outcome = error
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class Check(pytest.Item):
    """One check of one case, named as the check is."""

    parent: CaseNode
    not_applicable = False
    """Whether the check, once it ran, turned out not to apply to the case."""

    def runtest(self) -> None:
        """Run the case if no check did so before, and raise Broken unless this check passes.

        It is skipped if the case cannot run here or the check does not apply, and xfails as the case expects. With
        --harness-accept-golden the check `golden` rewrites the goldens, and then raises Broken with what changed.
        """
        if self.name == "golden" and self.config.getoption("--harness-accept-golden"):
            selected = {item.parent.case.name for item in self.session.items if isinstance(item, Check)}
            raise Broken(accept_goldens(self.parent.case, self.parent.options, selected))
        try:
            judgement = self.parent.judgement()
        except Unsupported as reason:
            pytest.skip(escape_control_characters(f"not run: {reason}"))
        result = next(result for result in judgement.results if result.check == self.name)
        expected = self.parent.case.expected_failure
        if judgement.verdict is Verdict.XFAIL and result.verdict in (Verdict.FAIL, Verdict.UNKNOWN) and expected:
            pytest.xfail(escape_control_characters(f"{expected.because}; see {expected.script}"))
        if expected and judgement.verdict is Verdict.FAIL and self.name in expected.checks.split():
            raise Broken(escape_control_characters(check_text(judgement, result)))
        if result.verdict is Verdict.NOT_APPLICABLE:
            self.not_applicable = True
            pytest.skip(escape_control_characters(f"{self.name} not applicable: {result.note}"))
        if result.verdict is not Verdict.PASS:
            raise Broken(escape_control_characters(check_text(judgement, result)))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Return the message alone for a check that failed or a case that could not be judged; pytest's traceback for
        other errors."""
        if isinstance(excinfo.value, (Broken, *EXPECTED_ERRORS)):
            return escape_control_characters(str(excinfo.value))
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[os.PathLike[str], int | None, str]:
        return self.path, None, f"{self.parent.name}::{self.name}"


def tier_mark(tier: str) -> str:
    return f"{MARK}_{tier}"


def accept_goldens(case: Case, options: Options, selected: Collection[str]) -> str:
    """Write anew the goldens of all recipes that judge a case, and return lines on what changed.

    There are two recipes if a launch starts from weights alone, else one. Lines name other cases that use the golden
    and are not selected; the last line has the command that reviews the change. A reference that is not cached is
    trained first. Raises GoldenError in CI, or for a loss or norm that is not finite.

    selected: names of the cases that are selected in this session.
    """
    all_cases = load_all(path_of(case.file).parent)
    lines: list[str] = []
    for recipe_case in golden.launches_with_reference(case):
        lines += accept_golden_of(recipe_case, options, all_cases, selected)
    return "\n".join([*lines, f"accepted, not a pass: review `{golden.review_command(case)}`"])
