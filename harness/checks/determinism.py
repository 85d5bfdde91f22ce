"""The same case run twice gives the same bytes: local losses, gradients and parameters of every step on every rank."""

from __future__ import annotations

from typing import Any

from harness.evidence.records import Run
from harness.evidence.step import StepEvidence
from harness.judge.finding import Finding
from harness.judge.result import Result, Verdict, not_applicable, verdict_of
from harness.judge.trial import Trial

STAGE = "numbers"
NEEDS = frozenset({"values"})
DIFFERING = "results that differ from the first run"


def check(trial: Trial) -> Result:
    if trial.case.runs < 2:
        return not_applicable("determinism", "the case requests one run (runs: 2 repeats it)")
    if trial.repeat is None or set(trial.repeat.ranks) != set(trial.ranks) or _failed(trial.repeat):
        return Result("determinism", Verdict.UNKNOWN, note="the repeat left no complete evidence")
    findings, examined = [], 0
    for rank, evidence in sorted(trial.ranks.items()):
        for one, other in zip(evidence.steps, trial.repeat.ranks[rank].steps, strict=True):
            examined += 1
            differing = _differing(one, other)
            if differing:
                what: dict[str, Any] = {"step": one.step, "quantity": DIFFERING, "note": ", ".join(differing[:3])}
                findings.append(Finding.at(rank, 0, len(differing), **what))
    return verdict_of("determinism", findings, examined)


def _failed(run: Run) -> bool:
    return any(exit.how != "ok" for exit in run.exits)


def _differing(one: StepEvidence, other: StepEvidence) -> list[str]:
    pairs = enumerate(zip(one.microbatches, other.microbatches, strict=True))
    names = [f"loss of microbatch {i}" for i, (a, b) in pairs if a.loss_sum != b.loss_sum]
    for what in ("gradients", "parameters"):
        mine, theirs = getattr(one, what), getattr(other, what)
        names += [f"{what} of {fqn}" for fqn in mine if mine[fqn].tobytes() != theirs[fqn].tobytes()]
    return names
