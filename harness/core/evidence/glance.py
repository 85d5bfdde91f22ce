"""The Summary of a rank that left values, as a recorder writes it of a rank that left digests."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

from harness.core.evidence.recording import Fed, RankRecord, RecordedStep
from harness.core.evidence.records import RankEvidence
from harness.core.evidence.step import StepEvidence
from harness.core.evidence.summary import Summary, summary_without_class


def summary_from_values(evidence: RankEvidence) -> Summary:
    """Return the summary of a rank, with one number for the contents of parameters before the first step and after
    each.

    It says that the rank ended well, and has no class of ranks.
    """
    before = {tensor.fqn: tensor.value for tensor in evidence.parameters}
    steps = (_contents_record(0, before), *(_contents_record(step.step, step.parameters) for step in evidence.steps))
    return summary_without_class(RankRecord(evidence, steps, ended="ok", steps_seen=_last_step(evidence)))


def record_without_digests(evidence: RankEvidence, how: str) -> RankRecord:
    """Return the record that a recorder would have left of structure, inputs, times and memory, without digests of
    parameters.

    how: the word for how the rank ended.
    """
    steps = tuple(_inputs_record(step) for step in evidence.steps)
    return RankRecord(evidence, steps, ended=how, steps_seen=_last_step(evidence))


def _last_step(evidence: RankEvidence) -> int:
    """Return the number of the rank's last step, 0 without any. A resumed run does not count from 1."""
    return max((step.step for step in evidence.steps), default=0)


def _contents_record(step: int, parameters: Mapping[str, np.ndarray]) -> RecordedStep:
    """Return the record of a step with digests of these local parameters."""
    not_finite = tuple(fqn for fqn, value in parameters.items() if not np.isfinite(value).all())
    return RecordedStep(step, {fqn: _digest(value) for fqn, value in parameters.items()}, not_finite)


def _inputs_record(step: StepEvidence) -> RecordedStep:
    """Return the record of a step with digests of its tokens, its seconds and its memory."""
    token_arrays = (batch.tokens for batch in step.microbatches if batch.tokens is not None)
    fed = tuple(Fed(_digest(tokens), tokens.shape, str(tokens.dtype)) for tokens in token_arrays)
    peak = (step.allocator or {}).get("peak allocated", 0)
    return RecordedStep(step.step, {}, fed=fed, seconds=step.seconds or 0.0, peak=peak)


def _digest(value: np.ndarray) -> int:
    """Return a number of 64 bits for the bytes of an array; shape and dtype do not count."""
    return int.from_bytes(hashlib.blake2b(np.ascontiguousarray(value).tobytes(), digest_size=8).digest())
