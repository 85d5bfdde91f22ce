"""Lines on a recording judged by a layout: the cause first, as of a case of the matrix, then each check in a line."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from harness.core.case.dims import ParallelDims
from harness.core.judge.result import EXPLAINS, Diagnosis, Result, Verdict, verdict_of_all
from harness.core.report.cause_text import diagnosis_line, evidence_rows
from harness.core.report.finding_text import finding_sentence
from harness.core.report.text import WIDTH, check_line, label_lines, wrap_text

JudgedJob = tuple[Sequence[Result], Diagnosis | None]
"""What the checks of one job say, and the cause of what fails."""


def results_of(jobs: Sequence[JudgedJob]) -> list[Result]:
    """Return the results of all jobs."""
    return list(itertools.chain.from_iterable(results for results, _ in jobs))


def jobs_report(dims: ParallelDims, jobs: Sequence[JudgedJob]) -> list[str]:
    """Return the lines on the only job; of several, the verdict of all, a line for each, and the report of the first."""
    if len(jobs) == 1:
        return layout_report(dims, *jobs[0])
    rows = [(f"job {number}", _verdict_text(job)) for number, job in enumerate(jobs, start=1)]
    head = f"{verdict_of_all(results_of(jobs))} layout {_degrees_text(dims)} for each of {len(jobs)} jobs"
    return [head, *label_lines(rows), f"job 1: {layout_report(dims, *jobs[0])[0]}", *layout_report(dims, *jobs[0])[1:]]


def _verdict_text(job: JudgedJob) -> str:
    """Return a job's verdict. If it is not PASS, with the cause, or else the first result that has this verdict."""
    results, diagnosis = job
    verdict = verdict_of_all(results)
    telling = next(result for result in results if result.verdict is verdict)
    if verdict is Verdict.PASS:
        return str(verdict)
    reason = (
        diagnosis_line(diagnosis)
        or f"{telling.check}: {_first_finding_text(telling) if telling.findings else telling.note}"
    )
    return f"{verdict}, {reason}"


def _degrees_text(dims: ParallelDims) -> str:
    """Return the degrees above 1, in words."""
    return ", ".join(f"{axis} {degree}" for axis, degree in vars(dims).items() if degree > 1) or "one rank"


def layout_report(dims: ParallelDims, results: Sequence[Result], diagnosis: Diagnosis | None) -> list[str]:
    """Return the lines on one job: the verdict, the cause, or the first failing check's finding, then a line for each
    check.

    The first finding of a check that the cause does not explain goes below its line. If no check fails, what is unknown
    comes before what passes. Checks that do not apply come last.
    """
    verdict = verdict_of_all(results)
    lines = [f"{verdict} layout {_degrees_text(dims)}"]
    if verdict is Verdict.UNKNOWN:
        results = sorted(results, key=lambda result: result.verdict is not Verdict.UNKNOWN)
    failing = (result for result in results if result.verdict is Verdict.FAIL and result.findings)
    explaining_result = None
    if diagnosis is not None:
        lines += [*wrap_text(diagnosis_line(diagnosis), "  "), *label_lines(evidence_rows(diagnosis.evidence))]
    elif explaining_result := next(failing, None):
        lines += wrap_text(f"{explaining_result.check}: {_first_finding_text(explaining_result)}", "  ")
    explained = diagnosis is not None and any(label == EXPLAINS for label, _ in diagnosis.evidence)
    for result in results:
        if result.verdict is not Verdict.NOT_APPLICABLE:
            lines += _check_lines(result, with_finding=not explained and result is not explaining_result)
    return lines + label_lines([("not applicable", text) for text in not_applicable_texts(results)])


def not_applicable_texts(results: Sequence[Result]) -> list[str]:
    """Return a text for each reason why checks do not apply, with these checks; empty if all apply."""
    checks_by_reason: dict[str, list[str]] = {}
    for result in results:
        if result.verdict is Verdict.NOT_APPLICABLE:
            checks_by_reason.setdefault(result.note, []).append(result.check)
    return [f"{', '.join(checks)}: {note}" for note, checks in checks_by_reason.items()]


def _check_lines(result: Result, *, with_finding: bool) -> list[str]:
    """Return a check's line.

    Below it comes the first finding, if asked for and there is one; of UNKNOWN the whole note follows.
    """
    if result.verdict is Verdict.UNKNOWN:
        first, *rest = wrap_text(check_line(result).strip(), "  ", " " * 18)
        return [first, *rest]
    line = check_line(dataclasses.replace(result, note=""))[:WIDTH].rstrip()
    return [line, *(wrap_text(_first_finding_text(result), "    ", "  ") if with_finding and result.findings else ())]


def _first_finding_text(result: Result) -> str:
    """Return the first finding, and how many more there are: without their number a reader takes other ranks to be
    right.

    Precondition: the result has a finding.
    """
    first, *other_findings = result.findings
    return finding_sentence(first) + (f" (and {len(other_findings)} more)" if other_findings else "")
