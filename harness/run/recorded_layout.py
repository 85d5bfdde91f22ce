"""A recording, judged by the layout that somebody says it has: the laws, and the cause where one is broken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.checks import OF_RECORDED, all_checks, completed, run_check
from harness.diagnosis import diagnose
from harness.diagnosis.layout import other_layouts
from harness.evidence.recording import RankRecord, load_record, record_file
from harness.evidence.summary import Summary
from harness.judge.observed_laws import observed_laws
from harness.judge.recorded import trial_of
from harness.judge.result import Diagnosis, Result
from harness.judge.stored_recording import Recording
from harness.spec.dims import ParallelDims


def judged(recording: Recording, dims: ParallelDims) -> tuple[tuple[Result, ...], Diagnosis | None]:
    """Raises EvidenceError."""
    records = {rank: load_record(record_file(recording.directory, rank)) for rank in recording.summaries}
    return judged_records(records, list(recording.summaries.values()), dims, recording)


def judged_records(
    records: Mapping[int, RankRecord], summaries: Sequence[Summary], dims: ParallelDims, recording: Recording
) -> tuple[tuple[Result, ...], Diagnosis | None]:
    """recording: where they are from, and of how many ranks it is."""
    trial = trial_of(records, dims, str(recording.directory), recording.world)
    if recording.world != dims.world_size:  # of another job, then
        return (run_check("completed", completed.check, trial),), None
    laws = {name: module for name, module in all_checks().items() if name in OF_RECORDED}
    results = tuple(run_check(name, module.check, trial) for name, module in laws.items())
    diagnosis = diagnose(trial, results, (other_layouts,), ())
    return (*results, *observed_laws(summaries, dims)), diagnosis
