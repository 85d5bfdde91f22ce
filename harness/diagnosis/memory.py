"""Memory that no number shows: what is kept more from step to step, and copies of weights within a step."""

from __future__ import annotations

from harness.checks import memory
from harness.diagnosis.words import Broken, finding_line, on_ranks
from harness.evidence.text import bytes_text
from harness.judge.result import Diagnosis, one_cause
from harness.judge.trial import Trial


def growing(trial: Trial, broken: Broken) -> Diagnosis | None:
    rates = {rank: memory.growth(evidence) for rank, evidence in sorted(trial.ranks.items())}
    ranks = [rank for rank, rate in rates.items() if rate > trial.plan.table_bytes]
    if "memory" not in broken or not ranks:
        return None
    kinds = ", ".join(list(memory.grown(trial.ranks[ranks[0]]))[:3])
    cause = f"{bytes_text(rates[ranks[0]])} more are kept after every step{on_ranks(trial, ranks)}: {kinds}"
    return one_cause(cause, (finding_line("memory", broken["memory"]),))


def copies_made(trial: Trial, broken: Broken) -> Diagnosis | None:
    most = {rank: memory.copied_too_much(trial, rank) for rank in sorted(trial.ranks)}
    ranks = [rank for rank, found in most.items() if found]
    if "memory" not in broken or not ranks:
        return None
    size, step, phase = most[ranks[0]][0]
    where = "outside of forward and backward" if phase in ("other", "optimizer") else f"in {phase}"
    cause = f"{bytes_text(size)} of copies of weights exist at once {where} in step {step}, and are given up again"
    return one_cause(cause + on_ranks(trial, ranks), (finding_line("memory", broken["memory"]),))
