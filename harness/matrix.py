"""Many cases at once: choosing them, running them side by side, and the grid of cases and laws at the end."""

from __future__ import annotations

import re
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass

from harness.case import Case, CaseError
from harness.checks import all_checks
from harness.evidence import EvidenceError
from harness.launch import LaunchError, default_server
from harness.line import Judgement, Options, Unsupported, run_case
from harness.progress import INTERVAL, Progress
from harness.report import MARKS, case_report
from harness.trial import Verdict

ALL_TIERS = "all"
PROBLEMS = (CaseError, EvidenceError, LaunchError)
"""What a case can meet that is no verdict on the trainer. The message says what to do."""


@dataclass(frozen=True)
class Outcome:
    """What became of one case: judged; or skipped, with the reason; or a problem kept it from being judged."""

    case: Case
    seconds: float
    judgement: Judgement | None = None
    skipped: str = ""
    problem: str = ""

    @property
    def verdict(self) -> str:
        if self.judgement:
            return str(self.judgement.verdict)
        return "SKIPPED" if self.skipped else "ERROR"


def matching(cases: Iterable[Case], expression: str) -> list[Case]:
    """The cases that `-k` means: words of a name, any case of letters, joined by and, or, not. Raises CaseError."""
    chosen = [case for case in cases if holds(expression, case.name)]
    if not chosen:
        raise CaseError(f"-k {expression!r} selects no case; `harness matrix --list` lists them")
    return chosen


def of_tier(cases: Sequence[Case], tier: str) -> list[Case]:
    """The cases of a tier, or of all. Raises CaseError where there is none, and says where there are some."""
    chosen = [case for case in cases if tier in (ALL_TIERS, case.tier)]
    if not chosen:
        others = Counter(case.tier for case in cases)
        found = ", ".join(f"{count} of tier {name}" for name, count in others.items())
        raise CaseError(
            f"no case of tier {tier} is selected, but {found}; add --tier {next(iter(others))} or --tier all"
        )
    return chosen


def holds(expression: str, name: str) -> bool:
    """Each word becomes True or False; nothing but these, and, or, not and parentheses is ever evaluated."""
    words = re.findall(r"\w+|\S", expression)
    terms = [w if w in ("and", "or", "not", "(", ")") else str(w.lower() in name.lower()) for w in words]
    try:
        return not terms or bool(eval(" ".join(terms), {}))
    except SyntaxError as error:
        raise CaseError(f"-k {expression!r}: expected words joined by and, or, not and parentheses") from error


def weight(case: Case) -> int:
    """How many processes the case takes."""
    return 1 + case.dims.world_size * case.runs


def run_all(cases: Sequence[Case], options: Options, *, jobs: int, progress: Progress) -> list[Outcome]:
    """Every case, `jobs` at a time; outcomes in the order of `cases`. KeyboardInterrupt leaves ranks still alive."""
    if options.launcher == "local":
        default_server()
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
    progress.started(case.name)
    began = time.monotonic()
    try:
        return Outcome(case, judgement=run_case(case, options), seconds=time.monotonic() - began)
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


# ---- what is shown


def matrix_report(outcomes: Sequence[Outcome], seconds: float) -> str:
    """The grid, why laws were not applicable, the report of every case that is not green, and one line that counts."""
    judged = [outcome.judgement for outcome in outcomes if outcome.judgement]
    reports = [case_report(judgement) for judgement in judged if judgement.verdict not in (Verdict.PASS, Verdict.XFAIL)]
    told = [not_applicable(judged), *replaced(judged)] if judged else []
    parts = [grid(outcomes), *told, *reports, summary(outcomes, seconds)]
    return "\n\n".join(parts)


def grid(outcomes: Sequence[Outcome]) -> str:
    width = max(len(outcome.case.name) for outcome in outcomes)
    checks = list(all_checks())
    header = [" " * (width + 2) + "| " * column + check for column, check in enumerate(checks)]
    legend = (
        " ".join([" " * (width + 1), *("|" for _ in checks)])
        + "  P pass  F fail  ? could not be judged  - not applicable"
    )
    return "\n".join([*header, legend, *(f"{outcome.case.name:<{width}}  {_row(outcome)}" for outcome in outcomes)])


def _row(outcome: Outcome) -> str:
    if outcome.judgement is None:
        return f"{outcome.verdict}: {outcome.skipped or outcome.problem}"
    marks = " ".join(MARKS[result.verdict] for result in outcome.judgement.results)
    return f"{marks}  {outcome.verdict:<7} {outcome.seconds:5.1f} s"


def replaced(judged: Sequence[Judgement]) -> list[str]:
    """What of the trainer did not run as its users run it, and in how many cases: of that no verdict tells."""
    parts = Counter(text for one in judged for text in one.replaced)
    lines = [f"  {count:3} x  {text}" for text, count in parts.items()]
    return ["\n".join(["replaced, so that it runs here:", *lines])] if lines else []


def not_applicable(judged: Sequence[Judgement]) -> str:
    """Which laws had nothing to say, for what reason and in how many cases: what is green by them was not looked at."""
    silent = Verdict.NOT_APPLICABLE
    reasons = Counter((r.check, r.note) for one in judged for r in one.results if r.verdict is silent)
    shares = [sum(r.verdict is not silent for r in one.results) for one in judged]
    found = f"{min(shares)} to {max(shares)}" if len(set(shares)) > 1 else str(shares[0])
    lines = [f"{found} of {len(all_checks())} laws were judged in a case; not applicable were:"]
    width = max((len(check) for check, _ in reasons), default=0)
    return "\n".join(
        lines + [f"  {check:<{width}}  {count:>3} x  {note}" for (check, note), count in sorted(reasons.items())]
    )


def summary(outcomes: Sequence[Outcome], seconds: float) -> str:
    counts = Counter(outcome.verdict for outcome in outcomes)
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    return f"{len(outcomes)} case{'s' * (len(outcomes) > 1)} in {seconds:.1f} s: {said}"
