"""Every rank exited by itself with code 0, left evidence of every requested step and parameter, and left no process behind.

A failure of the harness is no verdict on the trainer. Examples: a disk that could not take evidence, a file that was damaged
later, ranks that were lost together with their launcher. For ranks that ran alone, it is no verdict either that a tensor has no
contents.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from functools import partial

from harness.core.evidence.records import Exit, RankEvidence, Run
from harness.core.evidence.store import EvidenceError
from harness.core.judge.finding import Finding
from harness.core.judge.result import Result, Verdict, verdict_of
from harness.core.judge.trial import Trial
from harness.core.plan.slices import numel
from harness.core.trainers import CannotStart
from harness.reference.config import is_trainable

STAGE = "process"
NEEDS = frozenset({"ends"})
NO_SPACE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What a write meets where the machine, and no trainer, has set a limit."""


def check(trial: Trial) -> Result:
    """Return the result, with findings on ranks that did not end well or left no evidence. UNKNOWN if the harness failed.

    UNKNOWN also if nothing fails, and evidence cannot be read or a rank cannot run alone. If only a layout is requested, ranks
    may leave any steps.
    """
    ended = sorted(trial.run.exits, key=lambda exit: not exit.blamed)
    if note := _harness_failure_text(trial.run):
        return Result("completed", Verdict.UNKNOWN, trial.run.world_size, note=note)
    unable = {exit.rank: exit.error for exit in ended if exit.how == "unable"}
    failed = [exit for exit in ended if (exit.how != "ok" or exit.blamed) and exit.rank not in unable]
    findings = [_exit_finding(trial, exit) for exit in failed]
    findings += [
        Finding.at(exit.rank, None, exit.left, kind="process", quantity="processes left behind")
        for exit in ended
        if exit.left
    ]
    if trial.run.world_size != trial.plan.dims.world_size:
        requested = trial.plan.dims.world_size
        started = trial.run.world_size
        findings.append(Finding(quantity="launch", expected=requested, observed=started, unit="ranks started"))
    exited = {exit.rank for exit in trial.run.exits}
    for rank in trial.expected_ranks:
        if rank not in exited:
            findings.append(Finding.at(rank, "exit code 0", "exit not reported", kind="process"))
        if rank in trial.ranks:
            findings += _identity_findings(trial, rank)
            findings += _evidence_findings(trial, trial.ranks[rank]) if trial.case.is_complete else []
        elif not any(exit.rank == rank and (exit.how != "ok" or rank in trial.run.unreadable) for exit in ended):
            findings.append(Finding.at(rank, "an evidence file", None, kind="process"))
    if trial.run.unreadable and not findings:
        rank, damage = min(trial.run.unreadable.items())
        note = f"the evidence of rank {rank} cannot be read: {damage}"
        return Result("completed", Verdict.UNKNOWN, trial.run.world_size, note=note)
    if unable and not findings:
        rank, reason = min(unable.items())
        note = f"rank {rank} could not be run alone: {reason}"
        return Result("completed", Verdict.UNKNOWN, trial.run.world_size, note=note)
    return verdict_of("completed", findings, examined=len(trial.run.started_ranks))


def _harness_failure_text(run: Run) -> str:
    """Return what the harness lacked, so that nothing is known of the trainer. Empty where some rank failed by itself."""
    blamed = [exit for exit in run.exits if exit.blamed]
    for exit in blamed:
        if _was_ended_by(EvidenceError, exit):
            return f"rank {exit.rank} could not leave its evidence: {exit.error}"
        if any(os.strerror(number) in exit.error for number in NO_SPACE_ERRORS):
            return f"rank {exit.rank} could not write: {exit.error}; free the disk, or raise the quota or ulimit -f"
    if unable := _unable_to_start(run):
        return f"rank {unable[0].rank} ran nothing of the trainer: {unable[0].error}"
    failed = [exit for exit in run.exits if exit.how != "ok" or exit.blamed]
    if failed and all(exit.how == "lost" for exit in failed):
        return f"rank {failed[0].rank} was lost: {failed[0].error}"
    return ""


def _unable_to_start(run: Run) -> list[Exit]:
    """Return the exits of ranks that could not start. Empty if another rank got further.

    In that case, what they lack may be the trainer's own mistake.
    """
    unable = [exit for exit in run.exits if _was_ended_by(CannotStart, exit)]
    reached = {"", *(exit.last_collective for exit in unable)}
    other_exits = [exit for exit in run.exits if exit not in unable]
    further = [
        exit
        for exit in other_exits
        if exit.how == "ok" or exit.rank in run.ranks or exit.last_collective not in reached
    ]
    return [] if further or any(exit.blamed for exit in other_exits) else unable


def _was_ended_by(kind: type[Exception], exit: Exit) -> bool:
    """Return whether an error of this class ended the rank, maybe raised again as another one."""
    return re.match(rf"(.*; raised again as )?{kind.__name__}: ", exit.error) is not None


def early_exit_text(trial: Trial, rank: int) -> str:
    """Return the text on a rank that exited with 0 while others waited for it: it may have run all steps that are requested."""
    steps_done = {step.step for step in trial.run.ranks[rank].steps} if rank in trial.run.ranks else set()
    ran_all = trial.case.is_complete and {*trial.case.steps} <= steps_done
    return ENDED_AFTER_LAST_STEP if ran_all else "left early"


def _exit_finding(trial: Trial, exit: Exit) -> Finding:
    """Return the finding on a rank that did not end well: how it ended, its error, its last collective, and a known remedy.

    A rank that is to blame has its stack as well. The quantity of another one says that it only waited.
    """
    text_by_exit = {"signal": f"died by {exit.signal}", "ok": early_exit_text(trial, exit.rank)}
    ended = text_by_exit.get(exit.how, exit.how)
    observed = (
        exit.error
        if exit.error.startswith((ended, "exited with code"))
        else ": ".join(text for text in (ended, exit.error) if text)
    )
    if exit.reason:
        observed = f"{observed}; {exit.reason}"
    if exit.last_collective:
        observed += f"; last collective {exit.last_collective}"
    if reason := remedy_text(exit.error):
        observed += f"\n{reason}"
    if exit.blamed and exit.stack:
        observed += "\n" + exit.stack.rstrip()
    expected = "to take part in what its peers wait for" if exit.how == "ok" else "exit code 0"
    return Finding.at(exit.rank, expected, observed, kind="process", quantity="" if exit.blamed else ONLY_WAITED)


UNSEEN_OPTIMIZER = (
    "no torch.optim.Optimizer stepped, and one of another class is not seen: let the trainer's derive from torch's"
)
VALUE_AT_START = "value at the start"
ENDED_AFTER_LAST_STEP = "ended after the last step"
ONLY_WAITED = "only waited"
"""Of a rank that is not to blame."""


def remedy_text(error: str) -> str:
    """Return reason and remedy of an error of torch's that has neither; empty for any other."""
    if re.search(r"linalg\.vector_norm: .*\(Double\).* without narrowing to .*\(Float\)", error) is None:
        return ""
    return (
        "clip_grad_norm_ of FSDP1 computes this norm in float32 only: judge the trainer by --dtype float32; for that the"
        ' adapter has dtypes = ("float32",), and where it has KNOWN, dtype in it'
    )


def _identity_findings(trial: Trial, rank: int) -> list[Finding]:
    """Return a finding if the rank took itself for another one, or for one of another world size.

    Ranks that never met each train alone, each the whole batch, and all agree.
    """
    evidence = trial.ranks[rank]
    world_size = trial.plan.dims.world_size
    if (evidence.rank, evidence.world_size) == (rank, world_size):
        return []
    expected = f"rank {rank} of {world_size}"
    observed = f"rank {evidence.rank} of {evidence.world_size}"
    return [Finding.at(rank, expected, observed, kind="process", quantity="its own place")]


def _evidence_findings(trial: Trial, evidence: RankEvidence) -> list[Finding]:
    """Return a finding for each step, parameter, gradient and update that a rank should have left and has not.

    Also for each that it left and should not have. Parameters without elements need no gradient.
    """
    findings = []
    steps = [step.step for step in evidence.steps]
    wanted = list(trial.case.steps)
    ended_well = {exit.rank for exit in trial.run.exits if exit.how == "ok"}
    if steps != wanted:
        note = ""
        if evidence.rank in ended_well and len(steps) < len(wanted):
            note = f"{len(steps)} in all: passes that no optimizer's step follows count to the next one"
            if not any(step.parameters or step.lr is not None for step in evidence.steps):
                note += f"; {UNSEEN_OPTIMIZER}"
        findings.append(Finding.at(evidence.rank, tuple(wanted), tuple(steps), quantity="optimizer steps", note=note))
    held_fqns = {tensor.fqn for tensor in evidence.parameters}
    planned_fqns = set(trial.plan.slices.get(evidence.rank, {}))
    findings += _presence_findings(partial(Finding.at, evidence.rank, quantity=VALUE_AT_START), planned_fqns, held_fqns)
    without_elements = {
        tensor.fqn for tensor in evidence.parameters if tensor.value.size == 0
    }  # FSDP1 gives them no gradient
    without_elements |= {
        fqn for fqn, part in trial.plan.gradient_slices.get(evidence.rank, {}).items() if not numel(part)
    }
    trained = {fqn for fqn in held_fqns if is_trainable(trial.case.training, fqn)}
    for step in evidence.steps:
        gradients = set(step.gradients) | without_elements & trained
        updates = set(step.parameters)
        for quantity, due, observed in (("gradient", trained, gradients), ("update", held_fqns, updates)):
            findings += _presence_findings(
                partial(Finding.at, evidence.rank, step=step.step, quantity=quantity), due, observed
            )
    return findings


def _presence_findings(finding_of: Callable[..., Finding], wanted: set[str], observed: set[str]) -> list[Finding]:
    """Return a finding of each parameter that is missing, then of each that is there and not wanted."""
    if wanted == observed:
        return []
    findings = [finding_of("one", None, kind="parameter", name=fqn) for fqn in sorted(wanted - observed)]
    return findings + [finding_of(None, "one", kind="parameter", name=fqn) for fqn in sorted(observed - wanted)]
