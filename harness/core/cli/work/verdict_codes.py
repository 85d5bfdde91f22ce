"""The exit codes that follow from verdicts."""

from __future__ import annotations

from harness.core.cli.exit_codes import BROKEN, NOT_JUDGED, PASSED
from harness.core.judge.judgement import Judgement
from harness.core.judge.result import Firing, Verdict


def exit_code(judgement: Judgement) -> int:
    return NOT_JUDGED if judgement.firing is Firing.NOT_FIRED else exit_code_of_verdict(judgement.verdict)


def exit_code_of_verdict(verdict: str) -> int:
    codes: dict[str, int] = {Verdict.PASS: PASSED, Verdict.XFAIL: PASSED, Verdict.FAIL: BROKEN}
    return codes.get(verdict, NOT_JUDGED)
