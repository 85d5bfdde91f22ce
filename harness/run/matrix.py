"""Many cases at once: choosing them, running them side by side, and the grid of cases and laws at the end."""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

from harness import trainers
from harness.evidence.store import EvidenceError
from harness.launch import LaunchError, default_server
from harness.report.grid import Outcome
from harness.report.progress import INTERVAL, Progress
from harness.run.options import Options, Unsupported
from harness.run.run_case import run_case
from harness.spec.case import Case, CaseError

PROBLEMS = (CaseError, EvidenceError, LaunchError)
"""What a case can meet that is no verdict on the trainer. The message says what to do."""


def run_all(cases: Sequence[Case], options: Options, *, jobs: int, progress: Progress) -> list[Outcome]:
    """Every case, `jobs` at a time; outcomes in the order of `cases`. KeyboardInterrupt leaves ranks still alive."""
    if options.launcher == "local":
        default_server(trainers.load(options.trainer).preload, device=options.device)
    outcomes: dict[str, Outcome] = {}
    pool = ThreadPoolExecutor(jobs)
    pending = {pool.submit(attempt, case, options, progress) for case in cases}
    while pending:
        done, pending = wait(pending, timeout=INTERVAL, return_when=FIRST_COMPLETED)
        for outcome in (future.result() for future in done):
            outcomes[outcome.case.name] = outcome
            progress.finished(outcome.case.name, outcome.verdict, outcome.seconds)
        progress.draw()
    progress.clear()
    return [outcomes[case.name] for case in cases]


def attempt(case: Case, options: Options, progress: Progress) -> Outcome:
    """One case to its end, whatever that is: only KeyboardInterrupt passes through."""
    progress.started(case.name)
    began = time.monotonic()
    try:
        judgement = run_case(case, options)
        return Outcome(case, judgement=judgement, seconds=judgement.seconds)
    except Unsupported as reason:
        return Outcome(case, skipped=str(reason), seconds=time.monotonic() - began)
    except PROBLEMS as problem:
        return Outcome(case, problem=str(problem), seconds=time.monotonic() - began)
    except (Exception, SystemExit) as error:  # one case's, which no other need suffer from
        return Outcome(case, problem=unexpected(error), seconds=time.monotonic() - began)


def unexpected(error: BaseException) -> str:
    """What nobody foresaw, and where it was raised."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"a mistake of the harness or of an adapter: {error!r} in {where.name}, {where.filename}:{where.lineno}"
