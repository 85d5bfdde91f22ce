"""A recording judged by the layout that somebody says it has: the checks, and the cause where one fails."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from harness.core.case.dims import ParallelDims
from harness.core.causes import diagnose
from harness.core.causes.request import neighbours
from harness.core.checks import judge
from harness.core.evidence.recording import RankRecord, load_record, record_file
from harness.core.evidence.text import count_text
from harness.core.judge.result import Diagnosis, Result, Verdict
from harness.core.judge.trial import Trial
from harness.recording.judged.recorded import trial_of
from harness.recording.judged.stand_ins import disagreeing_ranks, find_representatives, split_by_plan
from harness.recording.judged.stored_recording import Recording

ResultsAndDiagnosis = tuple[tuple[Result, ...], Diagnosis | None]


def judge_recording(recording: Recording, dims: ParallelDims) -> ResultsAndDiagnosis:
    """Return the results of all checks of this layout on a recording, and the diagnosis, None if there is none.

    The one result is `completed` UNKNOWN if no rank left evidence. So it is if the command has several jobs and this
    one has another number of ranks: the layout may be that of all together. Of ranks that are alike one record is read.
    Raises EvidenceError if a record is damaged.
    """
    if not recording.summaries:
        return (Result("completed", Verdict.UNKNOWN, note="no rank of it left evidence"),), None
    if recording.is_one_of_several and recording.world != dims.world_size:
        why = f"it has {count_text(recording.world, 'rank')}, the layout {dims.world_size}: give a layout of one job's ranks"
        return (Result("completed", Verdict.UNKNOWN, note=why),), None
    return judge_records(recording, dims, lambda rank: load_record(record_file(recording.directory, rank)))


def judge_records(recording: Recording, dims: ParallelDims, load: Callable[[int], RankRecord]) -> ResultsAndDiagnosis:
    """Return the results of all checks on the records that load(rank) returns, and the diagnosis, None if there is
    none.

    Neighbouring layouts are tried as causes only if the job has as many ranks as the layout.
    """
    trial = _trial_of_representatives(recording, dims, load)
    results = judge(trial)
    suspects = (neighbours,) if recording.world == dims.world_size else ()
    return results, diagnose(trial, results, suspects, ())


def _trial_of_representatives(recording: Recording, dims: ParallelDims, load: Callable[[int], RankRecord]) -> Trial:
    """Return the trial of a recording, from the records of one rank for each class of ranks that are alike.

    More ranks are read, one after the other, as it turns out that those read before do not represent them. If the job
    has another number of ranks than the layout, that is not looked for.
    """
    summaries = recording.summaries
    records: dict[int, RankRecord] = {}

    def trial(representatives: dict[int, int]) -> Trial:
        records.update(_load_records(set(representatives.values()) - set(records), load))
        return trial_of(
            records, dims, str(recording.directory), recording.world, recording=recording, like=representatives
        )

    representatives = find_representatives(summaries, dims)
    first_trial = trial(representatives)
    if recording.world != dims.world_size:
        return first_trial
    representatives = split_by_plan(representatives, first_trial)
    records.update(_load_records(set(representatives.values()) - set(records), load))
    representatives |= {rank: rank for rank in disagreeing_ranks(summaries, records, representatives)}
    return trial(representatives) if set(representatives.values()) != set(first_trial.ranks) else first_trial


def _load_records(ranks: Iterable[int], load: Callable[[int], RankRecord]) -> Mapping[int, RankRecord]:
    return {rank: load(rank) for rank in sorted(ranks)}
