"""The mean loss over all valid tokens of the step, recomputed from every rank's local losses, is the reference's."""

from __future__ import annotations

import math

from harness import tolerance
from harness.checks import not_applicable, verdict_of
from harness.trial import Finding, Result, Trial, Verdict

STAGE = "numbers"


def check(trial: Trial) -> Result:
    if not trial.case.exact:
        return not_applicable("loss", "only float64 cases have a derived bound so far")
    bounds = tolerance.bounds(trial.case, trial.reference).loss
    findings, worst = [], 0.0
    for step in trial.reference.steps:
        observed = global_loss(trial, step.step)
        if observed is None:
            return Result("loss", Verdict.UNKNOWN, note=f"step {step.step}: no rank's loss was seen")
        difference = _relative(observed, step.loss)
        worst = max(worst, difference)
        if not difference <= bounds[step.step]:
            found = f"{observed!r} (off by {difference:.2e})"
            findings.append(Finding(f"step {step.step}", repr(step.loss), found, f"{bounds[step.step]:.1e}"))
    return verdict_of("loss", findings, len(trial.reference.steps), f"largest difference {worst:.1e}")


def global_loss(trial: Trial, step: int) -> float | None:
    """Sum of local losses over sum of valid tokens. Ranks fed the same tokens (tp peers) count once between them."""
    seen: dict[bytes, tuple[float, int]] = {}
    for _, evidence in sorted(trial.ranks.items()):
        for record in evidence.steps:
            for part in record.microbatches if record.step == step else ():
                if part.loss_sum is not None and part.valid_tokens is not None:
                    seen.setdefault(part.tokens.tobytes(), (part.loss_sum, part.valid_tokens))
    tokens = sum(count for _, count in seen.values())
    return math.fsum(loss for loss, _ in seen.values()) / tokens if tokens else None


def _relative(observed: float, expected: float) -> float:
    return abs(observed - expected) / abs(expected) if math.isfinite(observed) else math.inf
