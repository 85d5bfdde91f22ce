"""The mean loss over all valid tokens of the step, recomputed from every rank's local losses, is the reference's."""

from __future__ import annotations

import math
from collections import defaultdict

from harness import tolerance
from harness.checks import no_bound, verdict_of
from harness.trial import Finding, Result, Trial, Verdict

STAGE = "numbers"


def check(trial: Trial) -> Result:
    if not trial.case.exact:
        return no_bound("loss")
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
        findings += _odd_peers(trial, step.step, bounds[step.step])
    return verdict_of("loss", findings, len(trial.reference.steps), f"largest difference {worst:.1e}")


def global_loss(trial: Trial, step: int) -> float | None:
    """Sum of local losses over sum of valid tokens. Ranks fed the same tokens (tp peers) count once between them."""
    seen = [peers[0] for peers in _by_tokens(trial, step).values()]
    tokens = sum(count for _, _, count in seen)
    return math.fsum(loss for _, loss, _ in seen) / tokens if tokens else None


def _by_tokens(trial: Trial, step: int) -> dict[bytes, list[tuple[int, float, int]]]:
    """(rank, sum of losses, valid tokens) of every forward pass whose loss was seen, by what it was fed."""
    seen: dict[bytes, list[tuple[int, float, int]]] = defaultdict(list)
    for rank, evidence in sorted(trial.ranks.items()):
        for record in evidence.steps:
            for part in record.microbatches if record.step == step else ():
                if part.loss_sum is not None and part.valid_tokens is not None:
                    seen[part.tokens.tobytes()].append((rank, part.loss_sum, part.valid_tokens))
    return seen


def _odd_peers(trial: Trial, step: int, bound: float) -> list[Finding]:
    """Ranks that computed another loss from the tokens that another rank was fed as well."""
    findings = []
    for (first, loss, count), *others in _by_tokens(trial, step).values():
        for rank, other, other_count in others:
            if not abs(other - loss) <= bound * abs(loss) or count != other_count:
                expected = f"rank {first}'s for the same tokens: {loss!r} over {count}"
                found = f"{other!r} over {other_count}"
                findings.append(Finding(f"rank {rank}, step {step}", expected, found, f"{bound:.1e}"))
    return findings


def _relative(observed: float, expected: float) -> float:
    return abs(observed - expected) / abs(expected) if math.isfinite(observed) else math.inf
