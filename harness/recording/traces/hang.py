"""Why a job hung, by its Flight Recorder dumps alone: by the rules that blame ranks of the harness's own launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from harness.core.blame.awaited import find_waited_for
from harness.core.blame.calls import GroupKey, Issued, group_key
from harness.core.blame.divergence import find_disagreeing
from harness.core.blame.rank_exit import RankExit
from harness.core.blame.waits import GroupWait, JobCalls
from harness.core.judge.result import Verdict
from harness.recording.traces.dumps import Dump


@dataclass(frozen=True)
class Hang:
    """What Flight Recorder dumps say of a hung job: whom to blame, where groups wait, and which dumps are missing."""

    dumped: tuple[int, ...]
    """Global ranks with a dump, ascending."""
    missing: tuple[int, ...]
    """Global ranks that a group lists, and that left no dump, ascending."""
    blamed: Mapping[int, str]
    """Rank to blame -> why, in words, by rank; empty if calls do not differ and no rank is waited for."""
    stuck: tuple[GroupWait, ...]
    """Of each group with a collective that is not over, the first such one, the earliest issued first.

    Empty if no group waits."""

    @property
    def verdict(self) -> Verdict:
        """Return FAIL if a rank is blamed or groups wait, PASS if neither, and UNKNOWN if too little is known.

        It is UNKNOWN if no rank is blamed, and a dump is missing or a waiting group has unknown ranks.
        """
        if self.blamed:
            return Verdict.FAIL
        if self.missing or any(group.unknown_ranks for group in self.stuck):
            return Verdict.UNKNOWN
        return Verdict.FAIL if self.stuck else Verdict.PASS


def hang_of(dumps: Sequence[Dump]) -> Hang:
    """Return why the job hung: members of a group issued different collectives, or else some rank is waited for."""
    ranks = tuple(dump.rank for dump in dumps)
    member_ranks = set[int]()
    for dump in dumps:
        for call in dump.issued:
            member_ranks.update(call.ranks)
    job = JobCalls([_exit_of_dump(dump, dump.issued) for dump in dumps])
    stuck = _stuck_groups(dumps, job)
    blamed = find_disagreeing(job)
    if not blamed:
        blamed = find_waited_for(JobCalls([_exit_of_dump(dump, _calls_reached(dump, stuck)) for dump in dumps]))
    stuck_groups = tuple(sorted(stuck.values(), key=lambda wait: wait.call.time))
    return Hang(ranks, tuple(sorted(member_ranks - {*ranks})), dict(sorted(blamed.items())), stuck_groups)


def _exit_of_dump(dump: Dump, issued: Sequence[Issued]) -> RankExit:
    """Return the rank as if it had been killed as it was dumped, with these of its calls."""
    return RankExit(
        dump.rank, None, kill_reason="its job hung", issued=tuple(issued), is_complete=dump.is_complete, is_timed=False
    )


def _stuck_groups(dumps: Sequence[Dump], job: JobCalls) -> dict[GroupKey, GroupWait]:
    """Return, by group, the first collective that is not over. Groups of which all are over are left out.

    One that a recorder follows no more counts only if some member has not issued it.
    """
    first_stuck = dict[GroupKey, GroupWait]()
    for dump in dumps:
        for call in sorted(dump.issued, key=lambda call: call.seq):
            group = group_key(call)
            is_later = group in first_stuck and first_stuck[group].call.seq <= call.seq
            if call.peer is not None or (group, call.seq) in dump.completed or is_later:
                continue
            candidate = job.group_wait(call)
            if (group, call.seq) not in dump.retired or candidate.behind:
                first_stuck[group] = candidate
    return first_stuck


def _calls_reached(dump: Dump, stuck: Mapping[GroupKey, GroupWait]) -> list[Issued]:
    """Return the rank's last call in each group that waits, and its last sends and receives.

    Calls behind the collective that is not over only wait with it.
    """
    last_calls: dict[object, Issued] = {}
    for call in dump.issued:
        if call.peer is not None:
            last_calls[group_key(call), call.op, call.peer] = call
        elif group_key(call) in stuck and call.seq < stuck[group_key(call)].call.seq:
            last_calls[group_key(call)] = call
    for group, waiting in stuck.items():
        if dump.rank in waiting.issued:
            later_calls = (call for call in dump.issued if group_key(call) == group and call.seq >= waiting.call.seq)
            order = next((call.order for call in later_calls), 0)
            last_calls[group] = replace(waiting.call, order=order)
    return sorted(last_calls.values(), key=lambda call: call.order)
