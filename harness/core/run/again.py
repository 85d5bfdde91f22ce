"""Reruns of failing cases in fresh ranks. A failure that does not come again depends on timing, or on the hardware."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from harness.core.case.case import Case
from harness.core.evidence.store import EvidenceError, load_run
from harness.core.judge.result import Verdict
from harness.core.judge.twice import FirstDifference, find_first_difference
from harness.core.report.outcome import GREEN_VERDICTS, Outcome
from harness.core.report.repeats_text import repeats_text
from harness.core.report.text import wrap_text
from harness.core.run.folders import folder_of
from harness.core.run.options import Options

RERUNS_PER_CAUSE = 3
"""Cases of one cause that are rerun in a run: rerunning a few of many identical failures is enough."""


@dataclass
class Reruns:
    """The reruns of one run's failing cases, with a count of cases by cause. Any thread may use it."""

    reruns_per_case: int
    """How often each failing case is rerun; 0 for never."""
    _cases_by_cause: Counter[str] = field(default_factory=Counter)
    """Cause -> cases with it so far."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Lock of the counter, for cases end in several threads."""

    def outcome_with_reruns(self, case: Case, options: Options, make: Callable[[Case, Options], Outcome]) -> Outcome:
        """Run the case by `make` and return its outcome; if it fails, rerun it and return the outcome with those of its
        reruns.

        A planted fault is not rerun, nor more than RERUNS_PER_CAUSE cases with one cause.
        """
        first = make(case, options)
        if (
            options.fault
            or not self.reruns_per_case
            or first.verdict != Verdict.FAIL
            or not self._is_rerun_wanted(first)
        ):
            return first
        rerun_options = [dataclasses.replace(options, nth=number) for number in range(1, self.reruns_per_case + 1)]
        return _with_rerun_results(first, _rerun_results(case, first, options, rerun_options, make))

    def _is_rerun_wanted(self, outcome: Outcome) -> bool:
        """Count the case under its cause. Return whether it is among the first RERUNS_PER_CAUSE with that cause."""
        cause = " ".join(outcome.diagnosis.get("kinds", ())) or outcome.cause or outcome.reason
        with self._lock:
            self._cases_by_cause[cause] += 1
            return self._cases_by_cause[cause] <= RERUNS_PER_CAUSE


def _with_rerun_results(first: Outcome, repeats: dict[str, Any]) -> Outcome:
    """Return the outcome with a sentence on its reruns in the report. repeats: what `_rerun_results` returned.

    A mistake of the code would show each time. So if no rerun fails and one is green, the sentence takes the place of
    the cause and its diagnosis.
    """
    summary = repeats_text(repeats)
    verdicts = repeats["verdicts"]
    has_not_repeated = Verdict.FAIL not in verdicts and any(verdict in GREEN_VERDICTS for verdict in verdicts)
    head, *lines = _report_lines_without_cause(first) if has_not_repeated else first.report.splitlines()
    with_report = dataclasses.replace(
        first, repeats=repeats, report="\n".join([head, *wrap_text(summary, "  "), *lines])
    )
    return dataclasses.replace(with_report, cause=summary, diagnosis={}) if has_not_repeated else with_report


def _report_lines_without_cause(outcome: Outcome) -> list[str]:
    """Return the lines of an outcome's report without those on the cause, which are all before the first empty line.

    The verdict and the command that runs it again are put in their place.
    """
    lines = outcome.report.splitlines()
    rest = lines[lines.index("") :] if "" in lines else []
    return [f"{outcome.verdict} {outcome.case}", f"  again             {outcome.again}", *rest]


def _rerun_results(
    case: Case, first: Outcome, options: Options, rerun_options: list[Options], make: Callable[[Case, Options], Outcome]
) -> dict[str, Any]:
    """Run the case once with each of the options, and return the results as Outcome.repeats keeps them.

    "verdicts" are those of the reruns, "alike" is how many of them failed with the first one's cause, "folders" are
    those of all runs. "differs" is the first difference between the evidence of the first run and a rerun; absent if
    there is none.
    """
    reruns = [make(case, each) for each in rerun_options]
    repeats: dict[str, Any] = {
        "verdicts": [rerun.verdict for rerun in reruns],
        "alike": sum(rerun.verdict == Verdict.FAIL and rerun.cause == first.cause for rerun in reruns),
        "folders": [str(folder_of(case, each)) for each in (options, *rerun_options)],
    }
    differences = (_first_difference(case, options, each) for each in rerun_options)
    if difference := next(filter(None, differences), None):
        repeats["differs"] = dataclasses.asdict(difference)
    return repeats


def _first_difference(case: Case, first: Options, second: Options) -> FirstDifference | None:
    """Return the first number in which the evidence of two runs differs.

    None if nothing differs, or if one left no evidence.
    """
    try:
        return find_first_difference(
            *(load_run(folder_of(case, run_options) / "run") for run_options in (first, second))
        )
    except EvidenceError:
        return None
