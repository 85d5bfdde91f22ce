"""What is seen at a glance of a rank that left values: a Summary, as a recorder writes it of one that left digests."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

from harness.core.evidence.recording import Fed, RankRecord, RecordedStep
from harness.core.evidence.records import RankEvidence
from harness.core.evidence.step import StepEvidence
from harness.core.evidence.summary import Summary, summary_of


def glance(evidence: RankEvidence) -> Summary:
    """Return it with the contents of parameters, before the first step and after each."""
    before = {tensor.fqn: tensor.value for tensor in evidence.parameters}
    steps = (_contents(0, before), *(_contents(step.step, step.parameters) for step in evidence.steps))
    return summary_of(RankRecord(evidence, steps, ended="ok", steps_seen=_last(evidence)), places=False)


def record_of(evidence: RankEvidence, how: str) -> RankRecord:
    """Return what a recorder would have left of structure and inputs, with nothing of what was computed."""
    steps = tuple(_inputs(step) for step in evidence.steps)
    return RankRecord(evidence, steps, ended=how, steps_seen=_last(evidence))


def _last(evidence: RankEvidence) -> int:
    """Return the number of its last step, which a resumed run does not count from 1."""
    return max((step.step for step in evidence.steps), default=0)


def _contents(step: int, held: Mapping[str, np.ndarray]) -> RecordedStep:
    bad = tuple(fqn for fqn, value in held.items() if not np.isfinite(value).all())
    return RecordedStep(step, {fqn: _digest(value) for fqn, value in held.items()}, bad)


def _inputs(step: StepEvidence) -> RecordedStep:
    tokens = (batch.tokens for batch in step.microbatches if batch.tokens is not None)
    fed = tuple(Fed(_digest(one), one.shape, str(one.dtype)) for one in tokens)
    peak = (step.allocator or {}).get("peak allocated", 0)
    return RecordedStep(step.step, {}, fed=fed, seconds=step.seconds or 0.0, peak=peak)


def _digest(value: np.ndarray) -> int:
    return int.from_bytes(hashlib.blake2b(np.ascontiguousarray(value).tobytes(), digest_size=8).digest())
