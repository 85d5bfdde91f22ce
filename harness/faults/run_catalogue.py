"""The runner of `harness faults`: it tries every fault of the catalogue on real ranks, and what weaker tests would have said.

The baseline comes first. A fault is only tried on a case that passes without it, run now or stored as evidence of the
very same sources. A fault is CAUGHT if all the checks that it names are broken and the first line names its cause. The
control, which fires and changes nothing, must come out MISSED.

Weaker tests are measured, not guessed. Beside the judged run, the faulty trainer runs once more for ten steps without
the probe, as a user would run it. The losses that its rank 0 reports are compared with those of the same case without
the fault. Any of these tests notices a run that crashes or hangs.
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
from harness.core.judge.result import Firing, Verdict
from harness.core.launch import default_server
from harness.core.report.cause_text import diagnosis_line
from harness.core.report.progress import DRAWING_INTERVAL, Progress
from harness.core.run.communication import backend_of
from harness.core.run.folders import folder_of
from harness.core.run.judging import judge_folder
from harness.core.run.launches import measure_reported_losses
from harness.core.run.locks import exclusive_lock
from harness.core.run.matrix import CASE_PROBLEMS, unexpected_error_text
from harness.core.run.options import Options, Unsupported
from harness.core.run.run_case import run_case
from harness.core.run.selection import matches_expression
from harness.core.run.sources import digest_of_run
from harness.faults import Fault, FaultError, load_fault
from harness.faults.attempt import STEPS, Attempt, Outcome

# ---- A run whose evidence lies there already: of the same case, sources and packages, it is judged again, not made again


def judge_stored(case: Case, options: Options) -> Judgement | None:
    """Return the judgement, made now, of the case's stored evidence. Nothing is run.

    None if there is none, if it is incomplete, or if case, sources, packages, machine, options or fault differ. None as
    well for any trainer but the harness's own, and for data of one's own, as it is not known whether they changed.
    """
    folder = folder_of(case, options)
    sources = digest_of_run(options)
    if case.training.data is not None or not sources or not (folder / CASE_FILE).exists():
        return None
    with exclusive_lock(options.out / ".locks" / f"{folder.name}.lock"):
        try:
            stored = read_json(folder / CASE_FILE)
            settled = traits.with_trainer_choices(case, trainers.traits_by_launch(case, options.trainer))
            if stored != json.loads(json.dumps(to_json(settled))):
                return None
            judgement = judge_folder(folder)
        except (EvidenceError, OSError, ValueError):  # of a run that was cut short
            return None
    required = {"sources": sources, "device": options.device, "launcher": options.launcher}
    if options.device == "cuda":
        required["backend"] = backend_of(options)
    is_same_run = required.items() <= judgement.made.items() and judgement.fault == options.fault
    return judgement if is_same_run else None


# ---- the catalogue


HANG_LIMIT = 15.0  # seconds for a launch that only the time limit can end
HANGING_AT_ONCE = 3  # such launches cost no core while they wait


@dataclass(frozen=True)
class Baseline:
    """The result of a case without a fault: whether faults can be tried on it, and the losses to compare with."""

    case: Case
    problem: str = ""
    """Why no fault can be tried on it; empty if faults can."""
    losses: tuple[float, ...] = ()
    """Reported losses of ten steps; empty if not measured."""
    is_stored: bool = False
    """Whether it was not run for this, because evidence of the same sources was stored."""

    @property
    def outcome(self) -> str:
        """Return "PASS", also with "as stored", or the problem."""
        return self.problem or ("PASS" if not self.is_stored else "PASS, as stored,")


def select_faults(faults: Iterable[Fault], expression: str) -> list[Fault]:
    """Return the faults that `-k` selects, by words of name, case, bug, kind of bug and checks. Raises CaseError."""
    selected = [
        fault
        for fault in faults
        if matches_expression(expression, " ".join((fault.name, fault.case, fault.bug, fault.family, *fault.caught_by)))
    ]
    if not selected:
        raise CaseError(f"-k {expression!r} selects no fault; `harness faults --list` lists them")
    return selected


CONTROL = "nothing_is_wrong"


def split_control(faults: Sequence[Fault]) -> tuple[Fault, list[Fault]]:
    """Return (the control, all other faults). The control fires and changes nothing; it is the fault named CONTROL, else ours.

    A file of faults has its own control if its trainer does not call what ours calls. If the control were CAUGHT, a
    catch would prove nothing.
    """
    others = [fault for fault in faults if fault.name != CONTROL]
    own_control = next((fault for fault in faults if fault.name == CONTROL), None)
    return own_control or load_fault(f"{ROOT / 'harness' / 'faults' / 'control.py'}:{CONTROL}"), others


# ---- running


def cases_of_faults(faults: Sequence[Fault], cases: Sequence[Case]) -> list[Case]:
    """Return the cases that the faults name, each once.

    Raises CaseError for an unknown case, and FaultError for an unknown check in `caught_by`.
    """
    for fault in faults:
        if unknown := set(fault.caught_by) - set(all_checks()):
            raise FaultError(
                f"{fault.spec}: caught_by {' '.join(unknown)!r}: no such check; known: {', '.join(all_checks())}"
            )
    names = dict.fromkeys(fault.case for fault in faults)
    return [find_case(name, cases) for name in names]


def run_baselines(
    needed: Sequence[Case], options: Options, *, jobs: int, curves: bool, progress: Progress
) -> dict[str, Baseline]:
    """Run the cases without any fault, `jobs` at a time. Return their baselines, by name of the case.

    curves: whether losses of ten steps without the probe are measured too.
    """
    default_server(trainers.load_adapter(options.trainer).preload, device=options.device)
    tasks = {case.name: _baseline_task(case, options, curves) for case in needed}
    return _run_side_by_side(tasks, {}, jobs, progress, lambda baseline: baseline.outcome)


def try_all(
    faults: Sequence[Fault],
    baselines_by_case: dict[str, Baseline],
    options: Options,
    *,
    jobs: int,
    progress: Progress,
) -> list[Attempt]:
    """Try every fault on its case, `jobs` at a time. Return the attempts, in the order of the faults.

    Faults that hang run beside the others, from the start: they take no core while they wait.
    """
    tasks = {fault.name: _attempt_task(fault, baselines_by_case[fault.case], options) for fault in faults}
    hanging = {fault.name: tasks.pop(fault.name) for fault in faults if fault.hangs}
    done = _run_side_by_side(tasks, hanging, jobs, progress, lambda attempt: attempt.outcome)
    return [done[fault.name] for fault in faults]


def _baseline_task(case: Case, options: Options, curves: bool) -> Callable[[], Baseline]:
    """Return the task that makes a baseline."""
    return lambda: make_baseline(case, options, curves)


def _attempt_task(fault: Fault, baseline: Baseline, options: Options) -> Callable[[], Attempt]:
    """Return the task that tries a fault."""
    return lambda: try_fault(fault, baseline, options)


def _run_side_by_side(
    tasks: dict[str, Callable[[], Any]],
    waiting: dict[str, Callable[[], Any]],
    jobs: int,
    progress: Progress,
    ended: Callable[[Any], str],
) -> dict[str, Any]:
    """Run tasks, `jobs` at a time, and beside them those that only wait. Return what each returned, by name.

    ended: result -> outcome in words, for the progress. Raises what a task raises.
    """
    start_times: dict[str, float] = {}

    def run_timed(name: str, task: Callable[[], Any]) -> tuple[str, Any]:
        """Run a task, after noting its start. Return (its name, its result)."""
        progress.note_start(name)
        start_times[name] = time.monotonic()
        return name, task()

    waiting_pool = ThreadPoolExecutor(HANGING_AT_ONCE)
    pool = ThreadPoolExecutor(jobs)
    pending: set[Future] = {waiting_pool.submit(run_timed, name, task) for name, task in waiting.items()}
    pending |= {pool.submit(run_timed, name, task) for name, task in tasks.items()}
    results: dict[str, Any] = {}
    while pending:
        done, pending = wait(pending, timeout=DRAWING_INTERVAL, return_when=FIRST_COMPLETED)
        for name, result in (future.result() for future in done):
            results[name] = result
            progress.note_end(name, ended(result), time.monotonic() - start_times[name])
        progress.draw()
    progress.clear()
    return results


def make_baseline(case: Case, options: Options, curves: bool) -> Baseline:
    """Run a case without a fault, or judge its stored evidence. Return the baseline, with a problem if it does not pass.

    curves: whether losses of ten steps are measured too; then the case is always run. Never raises for a case that
    cannot run.
    """
    try:
        if not curves and (stored := judge_stored(case, options)) and stored.verdict is Verdict.PASS:
            return Baseline(case, is_stored=True)
        judgement = run_case(case, options)
        if judgement.verdict is not Verdict.PASS:
            return Baseline(case, f"case {case.name} is {judgement.verdict} without a fault; see {judgement.folder}")
        if not curves:
            return Baseline(case)
        losses = _losses_without_probe(judgement, options)
        problem = "" if len(losses) == STEPS else f"case {case.name} does not report {STEPS} losses unwatched"
        return Baseline(case, problem, losses)
    except (Unsupported, *CASE_PROBLEMS) as problem:
        return Baseline(case, f"case {case.name} cannot run: {problem}")
    except (Exception, SystemExit) as error:
        return Baseline(case, f"case {case.name} cannot run: {unexpected_error_text(error)}")


def try_fault(fault: Fault, baseline: Baseline, options: Options) -> Attempt:
    """Run the case with the fault, or judge stored evidence in which it is caught.

    Return the attempt, with weaker tests if measured. NOT_TRIED, with the reason, if the baseline has a problem or the
    run raises. Weaker tests are measured if the baseline has losses.
    """
    untried = Attempt(fault.name, fault.bug, fault.family, fault.is_real, fault.case, Outcome.NOT_TRIED)
    if baseline.problem:
        return replace(untried, note=baseline.problem)
    timeout = min(HANG_LIMIT, options.timeout) if fault.hangs else options.timeout
    options = replace(options, fault=spec_of(fault), timeout=timeout, waits=fault.hangs)
    try:
        stored = None if baseline.losses else stored_if_caught(fault, baseline.case, options)
        judgement = stored or run_case(baseline.case, options)
        attempt = replace(untried, cause=_cause(judgement), kinds=_kinds(judgement), broken=_failing_checks(judgement))
        attempt = replace(attempt, outcome=outcome_of(fault, judgement))
        attempt = replace(attempt, note=_unjudged_text(judgement) or _lacking_text(fault, attempt))
        if not baseline.losses:
            return attempt
        losses = _losses_without_probe(judgement, options) if _ended_well(judgement) else ()
    except CASE_PROBLEMS as problem:
        return replace(untried, note=str(problem))
    except (Exception, SystemExit) as error:  # one fault's, which no other need suffer from
        return replace(untried, note=unexpected_error_text(error))
    weaker = weaker_test_results(attempt, baseline.losses, losses)
    return replace(attempt, weaker=weaker, off=curve_error(baseline.losses, losses))


def stored_if_caught(fault: Fault, case: Case, options: Options) -> Judgement | None:
    """Return the judgement of stored evidence in which the fault is caught. None if there is none: then the case has to be run.

    Any other outcome may have come from a machine that was busy.
    """
    stored = judge_stored(case, options)
    return stored if stored is not None and outcome_of(fault, stored) is Outcome.CAUGHT else None


def _cause(judgement: Judgement) -> str:
    """Return the diagnosis' first line, without the evidence's folder, which differs between machines."""
    cause = diagnosis_line(judgement.diagnosis)
    return cause.replace(f"{judgement.folder.resolve()}/", "")


def _kinds(judgement: Judgement) -> tuple[str, ...]:
    """Return the kinds of the causes that the diagnosis names."""
    return judgement.diagnosis.kinds if judgement.diagnosis else ()


def spec_of(fault: Fault) -> str:
    """Return FILE:NAME of the fault with an absolute path, by which ranks can load it from whatever folder they run in."""
    return f"{Path(fault.file).resolve()}:{fault.name}"


def _losses_without_probe(judgement: Judgement, options: Options) -> tuple[float, ...]:
    """Run the trainer, with the judged run's options and fault, once more without the probe. Return the losses of ten steps.

    Evidence lies in "unwatched" beside that of the judged run.
    """
    try:
        return measure_reported_losses(judgement.case, options, judgement.folder / "unwatched", steps=STEPS)
    finally:
        list_trainer_files(judgement.folder)


# ---- judging


def outcome_of(fault: Fault, judgement: Judgement) -> Outcome:
    """Return the outcome of a fault. The first that holds counts.

    UNFIRED: it did not fire. CAUGHT: all its checks fail, and a cause of its kind is named if it has one. TIMEOUT: a rank
    reached the time limit, and the fault is none that hangs. OTHERWISE: any check fails. NOT_TRIED: the run was not judged,
    for example as the disk was full. MISSED: else.
    """
    broken = _failing_checks(judgement)
    kinds = _kinds(judgement)
    if judgement.firing is not Firing.FIRED:
        return Outcome.UNFIRED
    if broken and set(fault.caught_by) <= set(broken) and (not fault.named or fault.named in kinds):
        return Outcome.CAUGHT
    if not fault.hangs and any("time limit" in exit["error"] for exit in _exits(judgement)):
        return Outcome.TIMEOUT
    if broken:
        return Outcome.OTHERWISE
    return Outcome.NOT_TRIED if _unjudged_text(judgement) else Outcome.MISSED


def _unjudged_text(judgement: Judgement) -> str:
    """Return why the whole run was not judged, with its folder. Empty if it was judged."""
    completed = next((result for result in judgement.results if result.check == "completed"), None)
    if completed is None or completed.verdict is not Verdict.UNKNOWN:
        return ""
    return f"not judged: {completed.note}; see {judgement.folder}"


def _lacking_text(fault: Fault, attempt: Attempt) -> str:
    """Return in words what is not as the fault expects. Empty if all is."""
    texts = []
    unbroken = [check for check in fault.caught_by if check not in attempt.broken]
    if unbroken:
        texts.append(f"not broken: {', '.join(unbroken)}")
    if fault.named and fault.named not in attempt.kinds:
        texts.append(f"not named: {fault.named!r}, but {', '.join(attempt.kinds) or 'nothing'}")
    return "; ".join(texts)


def _failing_checks(judgement: Judgement) -> tuple[str, ...]:
    """Return the names of the checks that fail."""
    return tuple(result.check for result in judgement.results if result.verdict is Verdict.FAIL)


def _exits(judgement: Judgement) -> Sequence[Any]:
    """Return the exit records of the ranks of all launches, as run.json has them: "how" and "error" among their keys."""
    exits = []
    for name in judgement.case.launches:
        exits += read_json(judgement.folder / name / "run.json")["exits"]
    return exits


def _ended_well(judgement: Judgement) -> bool:
    """Return whether all ranks ended without an error."""
    return all(exit["how"] == "ok" for exit in _exits(judgement))


def weaker_test_results(attempt: Attempt, right: Sequence[float], seen: Sequence[float]) -> dict[str, bool]:
    """Return, by method of METHODS, whether it notices the fault.

    right: losses without the fault. seen: losses with it, empty if a rank failed, which all methods notice. A curve
    that lacks steps is noticed by the two curve methods only.
    """
    worst = curve_error(right, seen)
    has_failed = not seen
    return {
        "exit_code": has_failed,
        "within_1_percent": worst is None or not worst <= 1e-2,
        "within_1e_5": worst is None or not worst <= 1e-5,
        "process_groups": has_failed or "process_groups" in attempt.broken,
    }


def curve_error(right: Sequence[float], seen: Sequence[float | None]) -> float | None:
    """Return the largest relative difference of two loss curves, rounded to two digits. None if they differ in length.

    A loss that is NaN or not reported counts as infinitely far off.
    """
    if len(right) != len(seen):
        return None
    differences = []
    for observed, expected in zip(seen, right, strict=True):
        if observed is None or not math.isfinite(observed):
            differences.append(math.inf)
        else:
            differences.append(abs(observed - expected) / abs(expected))
    return float(f"{max(differences):.1e}")
