"""`harness faults`: every fault of the catalogue on real ranks, what became of it, and what weaker tests would have said.

The baseline comes first. A fault is only tried on a case that passes without it, run now or stored as evidence of the very
same sources (harness/faults/run_catalogue.py). A fault is CAUGHT if all the checks that it names are broken and the first line
names its cause. The control, which fires and changes nothing, must come out MISSED.

Weaker tests are measured, not guessed. Beside the judged run, the faulty trainer runs once more for ten steps without the
probe, as a user would run it. The losses that its rank 0 reports are compared with those of the same case without the fault.
Any of these tests notices a run that crashes or hangs.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness import ROOT
from harness.core import trainers
from harness.core.case import traits
from harness.core.case.case import Case, CaseError, to_json
from harness.core.case.loading import find_case
from harness.core.checks import all_checks
from harness.core.evidence.own_folders import list_trainer_files
from harness.core.evidence.reading import read_json
from harness.core.evidence.store import CASE_FILE, EvidenceError
from harness.core.judge.judgement import Judgement
from harness.core.judge.result import Verdict
from harness.core.launch import default_server
from harness.core.report.cause_text import diagnosis_line
from harness.core.report.progress import INTERVAL, Progress
from harness.core.run.communication import backend
from harness.core.run.folders import folder_of
from harness.core.run.judging import judge_folder
from harness.core.run.launches import reported_losses
from harness.core.run.locks import only_one
from harness.core.run.matrix import PROBLEMS, unexpected
from harness.core.run.options import Options, Unsupported
from harness.core.run.run_case import run_case
from harness.core.run.selection import holds
from harness.core.run.sources import digest
from harness.faults import Fault, FaultError, load_fault
from harness.faults.attempt import STEPS, Attempt, Outcome

# ---- A run whose evidence lies there already: of the same case, sources and packages, it is judged again, not made again


def judged_again(case: Case, options: Options) -> Judgement | None:
    """What the stored evidence says now. None if there is none, or if it is of another case, source, package or machine."""
    folder = folder_of(case, options)
    sources = digest(options)
    if case.training.data is not None or not sources or not (folder / CASE_FILE).exists():
        return None
    with only_one(options.out / ".locks" / f"{folder.name}.lock"):
        try:
            stored = read_json(folder / CASE_FILE)
            settled = traits.settled(case, trainers.traits_by_launch(case, options.trainer))
            if stored != json.loads(json.dumps(to_json(settled))):
                return None
            judgement = judge_folder(folder)
        except (EvidenceError, OSError, ValueError):  # of a run that was cut short
            return None
    same = {"sources": sources, "device": options.device, "launcher": options.launcher}
    same |= {"backend": backend(options)} if options.device == "cuda" else {}
    return judgement if same.items() <= judgement.made.items() and judgement.fault == options.fault else None


# ---- the catalogue


HANG_LIMIT = 15.0  # seconds for a launch that only the time limit can end
HANGING_AT_ONCE = 3  # such launches cost no core while they wait


@dataclass(frozen=True)
class Baseline:
    """A case without a fault. problem: why no fault can be tried on it. losses: of ten steps; empty if not measured.

    stored: not run for this, as evidence of the same sources lay there.
    """

    case: Case
    problem: str = ""
    losses: tuple[float, ...] = ()
    stored: bool = False

    @property
    def outcome(self) -> str:
        return self.problem or ("PASS" if not self.stored else "PASS, as stored,")


def matching(faults: Iterable[Fault], expression: str) -> list[Fault]:
    """The faults that `-k` means, by words of name, case, bug, kind of bug and checks. Raises CaseError."""
    chosen = [f for f in faults if holds(expression, " ".join((f.name, f.case, f.bug, f.family, *f.caught_by)))]
    if not chosen:
        raise CaseError(f"-k {expression!r} selects no fault; `harness faults --list` lists them")
    return chosen


CONTROL = "nothing_is_wrong"


def with_control(faults: Sequence[Fault]) -> tuple[Fault, list[Fault]]:
    """What fires and changes nothing, of the file where it has one, for a trainer that does not call what ours calls; and all
    others. Were it CAUGHT, a catch would prove nothing."""
    others = [fault for fault in faults if fault.name != CONTROL]
    own = next((fault for fault in faults if fault.name == CONTROL), None)
    return own or load_fault(f"{ROOT / 'harness' / 'faults' / 'control.py'}:{CONTROL}"), others


# ---- running


def needed(faults: Sequence[Fault], cases: Sequence[Case]) -> list[Case]:
    """The cases of the faults, each once. Raises CaseError for one that there is not, FaultError for a check likewise."""
    for fault in faults:
        if unknown := set(fault.caught_by) - set(all_checks()):
            raise FaultError(
                f"{fault.spec}: caught_by {' '.join(unknown)!r}: no such check; known: {', '.join(all_checks())}"
            )
    return [find_case(name, cases) for name in dict.fromkeys(fault.case for fault in faults)]


def baselines(
    needed: Sequence[Case], options: Options, *, jobs: int, curves: bool, progress: Progress
) -> dict[str, Baseline]:
    """The cases without any fault, by name."""
    default_server(trainers.load(options.trainer).preload, device=options.device)
    tasks = {case.name: _baseline_of(case, options, curves) for case in needed}
    return _side_by_side(tasks, {}, jobs, progress, lambda baseline: baseline.outcome)


def attempts(
    faults: Sequence[Fault],
    based: dict[str, Baseline],
    options: Options,
    *,
    jobs: int,
    progress: Progress,
) -> list[Attempt]:
    """Every fault, in the order given. Faults that hang wait beside the others, from the start."""
    tasks = {fault.name: _to_attempt(fault, based[fault.case], options) for fault in faults}
    hanging = {fault.name: tasks.pop(fault.name) for fault in faults if fault.hangs}
    done = _side_by_side(tasks, hanging, jobs, progress, lambda attempt: attempt.outcome)
    return [done[fault.name] for fault in faults]


def _baseline_of(case: Case, options: Options, curves: bool) -> Callable[[], Baseline]:
    return lambda: baseline_of(case, options, curves)


def _to_attempt(fault: Fault, baseline: Baseline, options: Options) -> Callable[[], Attempt]:
    return lambda: attempt_of(fault, baseline, options)


def _side_by_side(
    tasks: dict[str, Callable[[], Any]],
    waiting: dict[str, Callable[[], Any]],
    jobs: int,
    progress: Progress,
    ended: Callable[[Any], str],
) -> dict[str, Any]:
    """What each task returned, by name; `jobs` at a time, and beside them those that only wait."""
    began: dict[str, float] = {}

    def timed(name: str, task: Callable[[], Any]) -> tuple[str, Any]:
        progress.started(name)
        began[name] = time.monotonic()
        return name, task()

    pools = (ThreadPoolExecutor(HANGING_AT_ONCE), waiting), (ThreadPoolExecutor(jobs), tasks)
    pending: set[Future] = {pool.submit(timed, *item) for pool, some in pools for item in some.items()}
    results: dict[str, Any] = {}
    while pending:
        done, pending = wait(pending, timeout=INTERVAL, return_when=FIRST_COMPLETED)
        for name, result in (future.result() for future in done):
            results[name] = result
            progress.finished(name, ended(result), time.monotonic() - began[name])
        progress.draw()
    progress.clear()
    return results


def baseline_of(case: Case, options: Options, curves: bool) -> Baseline:
    try:
        if not curves and (stored := judged_again(case, options)) and stored.verdict is Verdict.PASS:
            return Baseline(case, stored=True)
        judgement = run_case(case, options)
        if judgement.verdict is not Verdict.PASS:
            return Baseline(case, f"case {case.name} is {judgement.verdict} without a fault; see {judgement.folder}")
        if not curves:
            return Baseline(case)
        losses = _curve(judgement, options)
        problem = "" if len(losses) == STEPS else f"case {case.name} does not report {STEPS} losses unwatched"
        return Baseline(case, problem, losses)
    except (Unsupported, *PROBLEMS) as problem:
        return Baseline(case, f"case {case.name} cannot run: {problem}")
    except (Exception, SystemExit) as error:
        return Baseline(case, f"case {case.name} cannot run: {unexpected(error)}")


def attempt_of(fault: Fault, baseline: Baseline, options: Options) -> Attempt:
    name = Attempt(fault.name, fault.bug, fault.family, fault.real, fault.case, Outcome.NOT_TRIED)
    if baseline.problem:
        return replace(name, note=baseline.problem)
    timeout = min(HANG_LIMIT, options.timeout) if fault.hangs else options.timeout
    options = replace(options, fault=spec_of(fault), timeout=timeout, waits=fault.hangs)
    try:
        stored = None if baseline.losses else stored_if_caught(fault, baseline.case, options)
        judgement = stored or run_case(baseline.case, options)
        found = replace(name, cause=_cause(judgement), kinds=_kinds(judgement), broken=_broken(judgement))
        found = replace(found, outcome=outcome_of(fault, judgement))
        found = replace(found, note=_not_judged(judgement) or _lacking(fault, found))
        if not baseline.losses:
            return found
        losses = _curve(judgement, options) if _ended_well(judgement) else ()
    except PROBLEMS as problem:
        return replace(name, note=str(problem))
    except (Exception, SystemExit) as error:  # one fault's, which no other need suffer from
        return replace(name, note=unexpected(error))
    return replace(
        found, weaker=what_weaker_tests_say(found, baseline.losses, losses), off=off(baseline.losses, losses)
    )


def stored_if_caught(fault: Fault, case: Case, options: Options) -> Judgement | None:
    """Return what is said of stored evidence in which the fault is caught; None if there is none, and the fault is made.

    Whatever else became of it may have come from a machine that was busy.
    """
    stored = judged_again(case, options)
    return stored if stored is not None and outcome_of(fault, stored) is Outcome.CAUGHT else None


def _cause(judgement: Judgement) -> str:
    """Return the cause without the evidence's folder, which differs between machines."""
    cause = diagnosis_line(judgement.diagnosis)
    return cause.replace(f"{judgement.folder.resolve()}/", "")


def _kinds(judgement: Judgement) -> tuple[str, ...]:
    return judgement.diagnosis.kinds if judgement.diagnosis else ()


def spec_of(fault: Fault) -> str:
    """Return the fault as ranks can load it, from whatever folder they run in."""
    return f"{Path(fault.file).resolve()}:{fault.name}"


def _curve(judgement: Judgement, options: Options) -> tuple[float, ...]:
    try:
        return reported_losses(judgement.case, options, judgement.folder / "unwatched", steps=STEPS)
    finally:
        list_trainer_files(judgement.folder)


# ---- judging


def outcome_of(fault: Fault, judgement: Judgement) -> Outcome:
    """What became of a fault: it must fire, fail all checks that it names, and be named by a cause of its kind. Only checks
    that looked can miss it: where the disk was full, say, it counts as not tried."""
    broken, kinds = _broken(judgement), _kinds(judgement)
    if not judgement.fired:
        return Outcome.UNFIRED
    if broken and set(fault.caught_by) <= set(broken) and (not fault.named or fault.named in kinds):
        return Outcome.CAUGHT
    if not fault.hangs and any("time limit" in exit["error"] for exit in _exits(judgement)):
        return Outcome.TIMEOUT
    if broken:
        return Outcome.OTHERWISE
    return Outcome.NOT_TRIED if _not_judged(judgement) else Outcome.MISSED


def _not_judged(judgement: Judgement) -> str:
    """Why the whole run was not judged, if it was not; with where it lies."""
    completed = next((result for result in judgement.results if result.check == "completed"), None)
    if completed is None or completed.verdict is not Verdict.UNKNOWN:
        return ""
    return f"not judged: {completed.note}; see {judgement.folder}"


def _lacking(fault: Fault, found: Attempt) -> str:
    """What is not as the fault expects."""
    checks = [check for check in fault.caught_by if check not in found.broken]
    parts = [f"not broken: {', '.join(checks)}"] if checks else []
    named = not fault.named or fault.named in found.kinds
    return "; ".join(
        parts + ([] if named else [f"not named: {fault.named!r}, but {', '.join(found.kinds) or 'nothing'}"])
    )


def _broken(judgement: Judgement) -> tuple[str, ...]:
    return tuple(result.check for result in judgement.results if result.verdict is Verdict.FAIL)


def _exits(judgement: Judgement) -> Sequence[Any]:
    """How the ranks of all launches ended."""
    folders = [judgement.folder / name for name in judgement.case.launches]
    return [exit for folder in folders for exit in read_json(folder / "run.json")["exits"]]


def _ended_well(judgement: Judgement) -> bool:
    return all(exit["how"] == "ok" for exit in _exits(judgement))


def what_weaker_tests_say(found: Attempt, right: Sequence[float], seen: Sequence[float]) -> dict[str, bool]:
    """Whether each method notices. `seen` is empty where a rank failed, which all of them notice. A curve that lacks steps is
    noticed as a curve only."""
    worst, failed = off(right, seen), not seen
    return {
        "exit_code": failed,
        "within_1_percent": worst is None or not worst <= 1e-2,
        "within_1e_5": worst is None or not worst <= 1e-5,
        "process_groups": failed or "process_groups" in found.broken,
    }


def off(right: Sequence[float], seen: Sequence[float | None]) -> float | None:
    """Largest relative difference of two curves, two digits; what is NaN or not reported counts as infinite, None if one
    lacks steps."""
    if len(right) != len(seen):
        return None
    pairs = zip(seen, right, strict=True)
    differences = [abs(a - b) / abs(b) if a is not None and math.isfinite(a) else math.inf for a, b in pairs]
    return float(f"{max(differences):.1e}")
