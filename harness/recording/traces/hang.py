"""Why a job hung, by its Flight Recorder dumps alone: by the rules that blame ranks of the harness's own launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from harness.core.judge.result import Verdict
from harness.core.launch.inflight import Issued
from harness.core.launch.rank_exit import RankExit
from harness.core.launch.sequences import GroupKey, find_disagreeing, find_waited_for, group_key
from harness.recording.traces.dumps import Dump


@dataclass(frozen=True)
class StuckGroup:
    """A group in which a collective is not over."""

    call: Issued
    """The first one that is not over, as one of its ranks issued it."""
    issued: tuple[int, ...]
    """Ranks that have issued it."""
    behind: tuple[int, ...]
    """Members with a dump that have not."""
    unknown_ranks: tuple[int, ...]
    """Members of which it is not known: they left no dump, or their recorder has overwritten it."""


@dataclass(frozen=True)
class Hang:
    """What the dumps of a job say."""

    dumped: tuple[int, ...]
    """Ranks with a dump."""
    missing: tuple[int, ...]
    """Ranks that a group lists, and that left no dump."""
    blamed: Mapping[int, str]
    """Rank to blame -> why."""
    stuck: tuple[StuckGroup, ...]
    """Groups that wait, the earliest first."""

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
    stuck = _stuck_groups(dumps)
    blamed = find_disagreeing([_exit_of_dump(dump, dump.issued) for dump in dumps])
    blamed = blamed or find_waited_for([_exit_of_dump(dump, _calls_reached(dump, stuck)) for dump in dumps])
    stuck_groups = tuple(sorted(stuck.values(), key=lambda group: group.call.time))
    return Hang(ranks, tuple(sorted(member_ranks - {*ranks})), dict(sorted(blamed.items())), stuck_groups)


def _exit_of_dump(dump: Dump, issued: Sequence[Issued]) -> RankExit:
    """Return the rank as if it had been killed as it was dumped."""
    return RankExit(dump.rank, None, kill_reason="its job hung", issued=tuple(issued))


def _stuck_groups(dumps: Sequence[Dump]) -> dict[GroupKey, StuckGroup]:
    """Return, by group, the first collective that is not over."""
    last: dict[tuple[int, GroupKey], int] = {}
    for dump in dumps:
        for call in dump.issued:
            if call.peer is None:
                key = dump.rank, group_key(call)
                last[key] = max(call.seq, last.get(key, call.seq))
    by_rank = {dump.rank: dump for dump in dumps}
    first_stuck = dict[GroupKey, StuckGroup]()
    for dump in dumps:
        for call in sorted(dump.issued, key=lambda call: call.seq):
            group = group_key(call)
            number = call.seq
            is_later = group in first_stuck and first_stuck[group].call.seq <= number
            if call.peer is not None or (group, number) in dump.completed or is_later:
                continue
            candidate = _build_stuck_group(call, group, last, by_rank)
            if (group, number) not in dump.retired or candidate.behind:
                first_stuck[group] = candidate
    return first_stuck


def _build_stuck_group(
    call: Issued, group: GroupKey, last: Mapping[tuple[int, GroupKey], int], dumps: Mapping[int, Dump]
) -> StuckGroup:
    """Return which members of a group have issued the call, which have not, and of which it is not known."""
    issued: list[int] = []
    behind: list[int] = []
    untold: list[int] = []
    for rank in call.ranks:
        is_known = rank in dumps and (dumps[rank].is_complete or (rank, group) in last)
        if last.get((rank, group), -1) >= call.seq:
            issued.append(rank)
        elif is_known:
            behind.append(rank)
        else:
            untold.append(rank)
    return StuckGroup(call, tuple(issued), tuple(behind), tuple(untold))


def _calls_reached(dump: Dump, stuck: Mapping[GroupKey, StuckGroup]) -> list[Issued]:
    """Return the rank's last call in each group that waits, and its last sends and receives.

    Calls behind the collective that is not over only wait with it. A rank of which it is not known how far it came is not
    blamed.
    """
    last_calls: dict[object, Issued] = {}
    for call in dump.issued:
        if call.peer is not None:
            last_calls[group_key(call), call.op, call.peer] = call
        elif group_key(call) in stuck and call.seq < stuck[group_key(call)].call.seq:
            last_calls[group_key(call)] = call
    for group, waiting in stuck.items():
        if dump.rank in (*waiting.issued, *waiting.unknown_ranks):
            later_calls = (call for call in dump.issued if group_key(call) == group and call.seq >= waiting.call.seq)
            order = next((call.order for call in later_calls), 0)
            last_calls[group] = replace(waiting.call, order=order)
    return sorted(last_calls.values(), key=lambda call: call.order)
