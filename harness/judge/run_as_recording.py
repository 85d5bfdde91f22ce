"""A run of a case in the words of a recording: what its ranks held and moved, with nothing of what was requested.

So runs and recordings are compared alike. What only a recorder looks at, optimizers' settings and classes of models, is empty.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from harness.evidence.recording import Fed, RankRecord, RecordedStep
from harness.evidence.records import RankEvidence, Run, StepEvidence
from harness.evidence.summary import summary_of
from harness.judge.stored_recording import Recording


def as_recording(run: Run) -> Recording:
    how = {one.rank: one.how for one in run.exits}
    summaries = {rank: summary_of(_record(one, how.get(rank, ""))) for rank, one in run.ranks.items()}
    return Recording(Path(run.directory), summaries, requested=run.world_size, unreadable=dict(run.unreadable))


def _record(evidence: RankEvidence, how: str) -> RankRecord:
    steps = tuple(_step(one) for one in evidence.steps)
    return RankRecord(evidence, steps, ended=how, steps_seen=len(steps))


def _step(step: StepEvidence) -> RecordedStep:
    fed = tuple(_fed(batch.tokens) for batch in step.microbatches if batch.tokens is not None)
    peak = (step.allocator or {}).get("peak allocated", 0)
    return RecordedStep(step.step, {}, fed=fed, seconds=step.seconds or 0.0, peak=peak)


def _fed(tokens: np.ndarray) -> Fed:
    digest = hashlib.blake2b(np.ascontiguousarray(tokens).tobytes(), digest_size=8).digest()
    return Fed(int.from_bytes(digest), tokens.shape, str(tokens.dtype))
