"""A recording, judged by the layout that somebody says it has: the checks, and the cause where one is broken."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from harness.core.case.dims import ParallelDims
from harness.core.causes import diagnose
from harness.core.causes.request import neighbours
from harness.core.checks import judge
from harness.core.evidence.recording import RankRecord, load_record, record_file
from harness.core.evidence.text import counted
from harness.core.judge.result import Diagnosis, Result, Verdict
from harness.core.judge.trial import Trial
from harness.recording.judged.recorded import trial_of
from harness.recording.judged.stand_ins import apart_by_plan, disagreeing, stand_ins
from harness.recording.judged.stored_recording import Recording

Judged = tuple[tuple[Result, ...], Diagnosis | None]


def judged(recording: Recording, dims: ParallelDims) -> Judged:
    """Judge a recording; of ranks that are alike one record is read. If the command has several jobs, a layout of other ranks
    than one has may be that of all together, which cannot be judged. Raises EvidenceError."""
    if not recording.summaries:
        return (Result("completed", Verdict.UNKNOWN, note="no rank of it left evidence"),), None
    if recording.is_one_of_several and recording.world != dims.world_size:
        why = (
            f"it has {counted(recording.world, 'rank')}, the layout {dims.world_size}: give a layout of one job's ranks"
        )
        return (Result("completed", Verdict.UNKNOWN, note=why),), None
    return judged_by(recording, dims, lambda rank: load_record(record_file(recording.directory, rank)))


def judged_by(recording: Recording, dims: ParallelDims, load: Callable[[int], RankRecord]) -> Judged:
    trial = _trial_of_stand_ins(recording, dims, load)
    results = judge(trial)
    suspects = (neighbours,) if recording.world == dims.world_size else ()
    return results, diagnose(trial, results, suspects, ())


def _trial_of_stand_ins(recording: Recording, dims: ParallelDims, load: Callable[[int], RankRecord]) -> Trial:
    """Read are more ranks, one after the other, as it turns out that those read before do not stand for them."""
    summaries = recording.summaries
    records: dict[int, RankRecord] = {}

    def trial(like: dict[int, int]) -> Trial:
        records.update(_read(set(like.values()) - set(records), load))
        return trial_of(records, dims, str(recording.directory), recording.world, recording=recording, like=like)

    like = stand_ins(summaries, dims)
    found = trial(like)
    if recording.world != dims.world_size:
        return found
    like = apart_by_plan(like, found)
    records.update(_read(set(like.values()) - set(records), load))
    like |= {rank: rank for rank in disagreeing(summaries, records, like)}
    return trial(like) if set(like.values()) != set(found.ranks) else found


def _read(ranks: Iterable[int], load: Callable[[int], RankRecord]) -> Mapping[int, RankRecord]:
    return {rank: load(rank) for rank in sorted(ranks)}
