"""Many cases at once: choosing them, running them side by side, and the grid of cases and checks at the end."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Protocol

from harness.core import trainers
from harness.core.case.case import Case, CaseError
from harness.core.evidence.store import EvidenceError
from harness.core.judge.judgement import Judgement
from harness.core.launch import LaunchError, default_server
from harness.core.report import outcome as became
from harness.core.report.outcome import Outcome
from harness.core.report.progress import DRAWING_INTERVAL, Progress
from harness.core.run.again import Reruns
from harness.core.run.options import Options, Unsupported
from harness.core.run.run_case import run_case

CASE_PROBLEMS = (CaseError, EvidenceError, LaunchError)
"""What a case can meet that is no verdict on the trainer. The message says what to do."""


class Machines(Protocol):
    """Other machines than this one."""

    def carries(self) -> Sequence[int]:
        """Return how many ranks each of them takes."""

    def run_case(self, case: Case, options: Options) -> Judgement:
        """Return the verdict of a case that was run there."""


def run_all(
    cases: Sequence[Case],
    options: Options,
    *,
    jobs: int,
    progress: Progress,
    ended: Callable[[Outcome], None],
    max_failures: int | None = None,
    how: Callable[[Case, Options], Judgement] | None = None,
    again: int = 0,
) -> list[Outcome]:
    """Run cases in this order, `jobs` at a time, each as soon as it has its slots. Return outcomes in the order of
    their ends.

    ended: called with each outcome, by any thread. max_failures: so many failures after which no other case begins;
    those that did not begin have no outcome. how: in place of run_case. again: how often a failing case is rerun.
    KeyboardInterrupt leaves ranks alive.
    """

    def run_one(case: Case) -> Outcome | None:
        """Run a case and its reruns, and return the outcome; None, without running it, after max_failures."""
        if max_failures is not None and len(failed) >= max_failures:
            return None
        progress.note_start(case.name)
        outcome = reruns.outcome_with_reruns(case, options, functools.partial(attempt_case, run_one=how))
        ended(outcome)
        failed.extend([case.name] if outcome.failed else [])
        return outcome

    if options.launcher == "local" and how is None:
        default_server(trainers.load_adapter(options.trainer).preload, device=options.device)
    failed: list[str] = []
    reruns = Reruns(again)
    pool = ThreadPoolExecutor(jobs)
    return _collect_outcomes(pool, {pool.submit(run_one, case) for case in cases}, progress)


def _collect_outcomes(
    pool: ThreadPoolExecutor, pending: set[Future[Outcome | None]], progress: Progress
) -> list[Outcome]:
    """Wait for all futures, showing progress, and return their outcomes in the order of their ends.

    A future with None has none.
    """
    outcomes: list[Outcome] = []
    try:
        while pending:
            done, pending = wait(pending, timeout=DRAWING_INTERVAL, return_when=FIRST_COMPLETED)
            for outcome in filter(None, (future.result() for future in done)):
                outcomes.append(outcome)
                progress.note_end(outcome.case, outcome.verdict, outcome.seconds)
            progress.draw()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    progress.clear()
    return outcomes


def attempt_case(case: Case, options: Options, run_one: Callable[[Case, Options], Judgement] | None = None) -> Outcome:
    """Run one case and return its outcome: SKIPPED if it is unsupported, ERROR for any error. Only KeyboardInterrupt is
    raised.

    run_one: in place of run_case.
    """
    try:
        return became.judged_outcome((run_one or run_case)(case, options))
    except Unsupported as reason:
        return became.skipped_outcome(case, str(reason))
    except CASE_PROBLEMS as problem:
        return became.error_outcome(case, str(problem))
    except (Exception, SystemExit) as error:  # one case's, which no other need suffer from
        return became.error_outcome(case, unexpected_error_text(error))


def unexpected_error_text(error: BaseException) -> str:
    """Return an unexpected error, and where it was raised."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"a mistake of the harness or of an adapter: {error!r} in {where.name}, {where.filename}:{where.lineno}"
