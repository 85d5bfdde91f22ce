"""What one check finds in a trial, and trials with one thing altered: what several tests of checks use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from literal import (
    cause_of,
    judged,
    with_step,
)

from harness.core.causes import diagnose
from harness.core.judge import tolerance
from harness.core.judge.finding import Finding, Value
from harness.core.judge.result import Verdict
from harness.core.judge.trial import Trial


class like:
    """Equals a finding with these fields, whatever it has in others; launch, step and name that are not said are none."""

    def __init__(
        self, ranks: int | tuple[int, ...], expected: Value | object, observed: Value | object, **fields: Any
    ) -> None:
        nothing: dict[str, Any] = {"launch": "", "step": None, "name": ""}
        ranks = (ranks,) if isinstance(ranks, int) else ranks
        self.fields = nothing | {"ranks": ranks, "expected": expected, "observed": observed} | fields

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Finding) and all(getattr(other, key) == one for key, one in self.fields.items())

    def __hash__(self) -> int:
        return hash(self.fields["ranks"])

    def __repr__(self) -> str:
        return f"like({', '.join(f'{key}={one!r}' for key, one in self.fields.items())})"


EMBEDDING, NORM, WQ = "tok_embeddings.weight", "norm.weight", "layers.0.attention.wq.weight"


def findings(check: str, trial) -> tuple[Finding, ...]:
    """Those of a check that must be broken."""
    result = judged(check, trial)
    assert result.verdict == Verdict.FAIL, result
    return result.findings


def bounds_of(trial) -> tolerance.Bounds:
    return tolerance.bounds_of_recipe(trial.case, trial.reference)


def with_loss(trial, rank: int, step: int, change):
    microbatches = trial.ranks[rank].steps[step - 1].microbatches
    changed = tuple(replace(m, loss_sum=change(m.loss_sum)) for m in microbatches)
    return with_step(trial, rank, step, microbatches=changed)


def where(finding: Finding) -> tuple[object, ...]:
    """Rank or ranks, step if it is of one, and what it is about."""
    place = finding.ranks[0] if len(finding.ranks) == 1 else finding.ranks
    return tuple(one for one in (place, finding.step, finding.name or finding.quantity) if one not in (None, (), ""))


def found(trial: Trial) -> list[Finding]:
    return list(judged("features", trial).findings)


def cause(trial: Trial) -> object:
    """What of the request is another, by field and value; where nothing is proven, which finding is told."""
    named = diagnose(trial, [judged("features", trial)])
    assert cause_of(named) and named is not None
    (first, *_) = named.causes
    return dict(first.details) or first.finding


def with_activity(trial: Trial, rank: int, step: int, **changes: Any) -> Trial:
    record = trial.ranks[rank].steps[step - 1]
    return with_step(trial, rank, step, activity=replace(record.activity, **changes))
