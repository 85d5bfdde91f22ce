"""Why a job hung, by its Flight Recorder dumps alone: by the rules that blame ranks of the harness's own launches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from harness.core.judge.result import Verdict
from harness.core.launch.inflight import Issued
from harness.core.launch.rank_exit import Fate
from harness.core.launch.sequences import Place, disagreeing, place, waited_for
from harness.recording.traces.dumps import Dump


@dataclass(frozen=True)
class Stuck:
    """A group in which a collective is not over."""

    call: Issued
    """The first one that is not over, as one of its ranks issued it."""
    issued: tuple[int, ...]
    """Ranks that have issued it."""
    behind: tuple[int, ...]
    """Members with a dump that have not."""
    untold: tuple[int, ...]
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
    stuck: tuple[Stuck, ...]
    """Groups that wait, the earliest first."""

    @property
    def verdict(self) -> Verdict:
        if self.blamed:
            return Verdict.FAIL
        if self.missing or any(group.untold for group in self.stuck):
            return Verdict.UNKNOWN
        return Verdict.FAIL if self.stuck else Verdict.PASS


def hang_of(dumps: Sequence[Dump]) -> Hang:
    """Return why the job hung: members of a group issued different collectives, or else some rank is waited for."""
    ranks = tuple(dump.rank for dump in dumps)
    member_ranks = set[int]()
    for dump in dumps:
        for call in dump.issued:
            member_ranks.update(call.ranks)
    stuck = _stuck(dumps)
    blamed = disagreeing([_fate(dump, dump.issued) for dump in dumps])
    blamed = blamed or waited_for([_fate(dump, _reached(dump, stuck)) for dump in dumps])
    stuck_groups = tuple(sorted(stuck.values(), key=lambda group: group.call.time))
    return Hang(ranks, tuple(sorted(member_ranks - {*ranks})), dict(sorted(blamed.items())), stuck_groups)


def _fate(dump: Dump, issued: Sequence[Issued]) -> Fate:
    """Return the rank as if it had been killed as it was dumped."""
    return Fate(dump.rank, None, killed="its job hung", issued=tuple(issued))


def _stuck(dumps: Sequence[Dump]) -> dict[Place, Stuck]:
    """Return, by group, the first collective that is not over."""
    last: dict[tuple[int, Place], int] = {}
    for dump in dumps:
        for call in dump.issued:
            if call.peer is None:
                key = dump.rank, place(call)
                last[key] = max(call.seq, last.get(key, call.seq))
    by_rank = {dump.rank: dump for dump in dumps}
    first_stuck = dict[Place, Stuck]()
    for dump in dumps:
        for call in sorted(dump.issued, key=lambda call: call.seq):
            group = place(call)
            number = call.seq
            is_later = group in first_stuck and first_stuck[group].call.seq <= number
            if call.peer is not None or (group, number) in dump.over or is_later:
                continue
            candidate = _members(call, group, last, by_rank)
            if (group, number) not in dump.given_up or candidate.behind:
                first_stuck[group] = candidate
    return first_stuck


def _members(call: Issued, group: Place, last: Mapping[tuple[int, Place], int], dumps: Mapping[int, Dump]) -> Stuck:
    """Return which members of a group have issued the call, which have not, and of which it is not known."""
    issued: list[int] = []
    behind: list[int] = []
    untold: list[int] = []
    for rank in call.ranks:
        is_known = rank in dumps and (dumps[rank].whole or (rank, group) in last)
        if last.get((rank, group), -1) >= call.seq:
            issued.append(rank)
        elif is_known:
            behind.append(rank)
        else:
            untold.append(rank)
    return Stuck(call, tuple(issued), tuple(behind), tuple(untold))


def _reached(dump: Dump, stuck: Mapping[Place, Stuck]) -> list[Issued]:
    """Return the rank's last call in each group that waits, and its last sends and receives.

    Calls behind the collective that is not over only wait with it. A rank of which it is not known how far it came is not
    blamed.
    """
    last_calls: dict[object, Issued] = {}
    for call in dump.issued:
        if call.peer is not None:
            last_calls[place(call), call.op, call.peer] = call
        elif place(call) in stuck and call.seq < stuck[place(call)].call.seq:
            last_calls[place(call)] = call
    for group, waiting in stuck.items():
        if dump.rank in (*waiting.issued, *waiting.untold):
            later_calls = (call for call in dump.issued if place(call) == group and call.seq >= waiting.call.seq)
            order = next((call.order for call in later_calls), 0)
            last_calls[group] = replace(waiting.call, order=order)
    return sorted(last_calls.values(), key=lambda call: call.order)
