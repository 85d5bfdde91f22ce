"""Relations of waiting: which ranks a rank waits for and in which call, and how far the members of each group came.

A rank's record may lack calls. Then it is not known how far the rank came, and no rank is said to wait for it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from harness.core.blame.calls import (
    GROUP_CREATION,
    POINT_TO_POINT,
    GroupKey,
    Issued,
    group_key,
    is_collective,
    is_same_call,
)
from harness.core.blame.rank_exit import RankExit, failure_time, has_timed_out

BARRIER_MISSED = re.compile(r"Ranks? ([\d, ]+) failed to pass monitoredBarrier")


@dataclass(frozen=True)
class GroupWait:
    """A collective that some members of its group have issued and others have not."""

    call: Issued
    """The collective, as one of its ranks issued it."""
    issued: tuple[int, ...]
    """Members that have issued it."""
    behind: tuple[int, ...]
    """Members that have not."""
    unknown_ranks: tuple[int, ...]
    """Members of which it is not known: they left no record, or theirs lacks the calls of this group."""
    waiting: tuple[int, ...] = ()
    """Members of which it is the last call on record."""


class JobCalls:
    """How the ranks of one job ended and what they issued, with the questions about one rank or one group that this answers."""

    def __init__(self, exits: Sequence[RankExit]) -> None:
        self.exits = tuple(exits)
        self.by_rank = {rank_exit.rank: rank_exit for rank_exit in exits}
        self._group_numbers: dict[GroupKey, int] = {}
        self._numbers_by_identity: dict[tuple[str, int], int] = {}
        self._calls: dict[int, dict[int, list[Issued]]] = {}  # rank -> group number -> its collectives
        for rank_exit in exits:
            by_group: dict[int, list[Issued]] = defaultdict(list)
            for call in filter(is_collective, rank_exit.issued):
                number = self.group_number(call)
                self._numbers_by_identity[call.group, id(call.ranks)] = number
                by_group[number].append(call)
            self._calls[rank_exit.rank] = by_group
        self._behind: dict[tuple[int, int, float], dict[int, Issued]] = {}

    def group_number(self, call: Issued) -> int:
        """Return a number of the call's group, the same for all of its calls.

        It stands for name and members: a tuple of thousands of ranks is slow as a key. `exits` keep the tuples alive, so one
        that is found by its identity is the same.
        """
        number = self._numbers_by_identity.get((call.group, id(call.ranks)))
        if number is None:
            number = self._group_numbers.setdefault(group_key(call), len(self._group_numbers))
        return number

    @cached_property
    def waits(self) -> Mapping[int, Mapping[int, Issued]]:
        """Rank -> the ranks that it waits for, each with the call in which it does; empty if it waits for none."""
        return {rank: self._calls_waited_for(rank_exit) for rank, rank_exit in self.by_rank.items()}

    @cached_property
    def ranks_by_waits(self) -> Sequence[tuple[list[int], Mapping[int, Issued]]]:
        """Ranks that wait for the same ranks in the same call, with these as in `waits`; without ranks that wait for none."""
        ranks_of: dict[int, list[int]] = defaultdict(list)
        for rank, peers in self.waits.items():
            if peers:
                ranks_of[id(peers)].append(rank)
        return [(ranks, self.waits[ranks[0]]) for ranks in ranks_of.values()]

    def collectives_over(self, rank: int, call: Issued) -> Sequence[Issued]:
        """Return what a rank issued over the group of a call, without sends and receives; empty if nothing is on record."""
        return self._calls.get(rank, {}).get(self.group_number(call), [])

    def last_calls_of(self, rank: int) -> list[Issued]:
        """Return the last collective of a rank over each group of which any is on record, the group used first first."""
        return [max(calls, key=lambda call: call.seq) for calls in self._calls[rank].values()]

    def participants(self, issued: Issued) -> list[RankExit]:
        """Return the ranks that take part in a call: its group's, and in init_process_group all.

        Ranks without a record are left out.
        """
        if issued.op == GROUP_CREATION[0]:
            return list(self.exits)
        return [self.by_rank[rank] for rank in issued.ranks if rank in self.by_rank]

    def last_seq(self, rank: int, call: Issued, until: float = float("inf")) -> int | None:
        """Return the position of the last collective that a rank had issued over the group of a call by a time.

        That is the position before the first if it had issued none, and None if it is not known.
        """
        calls = self.collectives_over(rank, call)
        if not calls:
            return self.by_rank[rank].unlisted_count(call.group) if rank in self.by_rank else None
        first = min(each.seq for each in calls)
        return max((each.seq for each in calls if each.time <= until), default=first - 1)

    def members_behind(self, call: Issued, until: float = float("inf")) -> dict[int, Issued]:
        """Return members of the call's group that had not issued it by a time, each with the call."""
        key = self.group_number(call), call.seq, until
        if key not in self._behind:
            behind: dict[int, Issued] = {}
            for peer in self.participants(call):
                seq = self.last_seq(peer.rank, call, until)
                if seq is not None and seq < call.seq:
                    behind[peer.rank] = call
            self._behind[key] = behind
        return self._behind[key]

    def group_wait(self, call: Issued) -> GroupWait:
        """Return which members of the call's group have issued it, which have not, and of which it is not known."""
        issued: list[int] = []
        behind: list[int] = []
        unknown: list[int] = []
        for rank in sorted(call.ranks):
            seq = self.last_seq(rank, call)
            if seq is None:
                unknown.append(rank)
            elif seq >= call.seq:
                issued.append(rank)
            else:
                behind.append(rank)
        waiting = (rank for rank in issued if self._has_last_issued(rank, call))
        return GroupWait(call, tuple(issued), tuple(behind), tuple(unknown), tuple(waiting))

    def _has_last_issued(self, rank: int, call: Issued) -> bool:
        """Return whether a call is the last one that a rank has on record."""
        issued = self.by_rank[rank].issued
        return bool(issued) and is_same_call(call, issued[-1])

    def group_waits(self) -> list[GroupWait]:
        """Return the last call of each group that some members have not issued; groups in the order of ranks."""
        last_calls: dict[int, Issued] = {}
        for rank in self.by_rank:
            for call in self.last_calls_of(rank):
                group = self.group_number(call)
                if group not in last_calls or call.seq > last_calls[group].seq:
                    last_calls[group] = call
        return [wait for wait in map(self.group_wait, last_calls.values()) if wait.behind]

    def calls_of_peer(self, rank: int, issued: Issued) -> list[Issued]:
        """Return what the peer received of a send by this rank over that group, or the other way round; oldest first."""
        peer = self.by_rank.get(issued.peer) if issued.peer is not None else None
        answer = POINT_TO_POINT[issued.op]
        issued_by_peer = peer.issued if peer else ()
        return [
            call
            for call in issued_by_peer
            if call.op == answer and group_key(call) == group_key(issued) and call.peer in (rank, None)
        ]

    def _calls_waited_for(self, rank_exit: RankExit) -> Mapping[int, Issued]:
        """Return the ranks that this one waits for, each with the call. One that exited 0 waits for none."""
        if rank_exit.status == 0:
            return {}
        absent = {rank: call for rank, call in absent_from_barrier(rank_exit).items() if rank in self.by_rank}
        waits = [absent, self.unanswered_calls(rank_exit), self._possible_senders(rank_exit)]
        for last_call in self.last_calls_of(rank_exit.rank):
            waits.append(self.members_behind(last_call, time_of_giving_up(rank_exit)))
        waits.append(self._absent_from_creation(rank_exit))
        waits = [peers for peers in waits if peers]
        if len(waits) == 1:  # one object for all that wait in one call of a job of thousands
            return waits[0]
        merged: dict[int, Issued] = {}
        for peers in waits:
            merged |= peers
        return merged

    def unanswered_calls(self, rank_exit: RankExit) -> dict[int, Issued]:
        """Return, by peer, the first send or receive that the peer has yet to receive or send.

        Peers that received from any rank are left out, and those whose record may lack calls.
        """
        unanswered_by_peer: dict[int, Issued] = {}
        for call in rank_exit.issued:
            if call.op not in POINT_TO_POINT or call.peer not in self.by_rank:
                continue
            answers = self.calls_of_peer(rank_exit.rank, call)
            is_unknown = not self.by_rank[call.peer].is_complete or any(answer.peer is None for answer in answers)
            if not is_unknown and max((answer.seq for answer in answers), default=-1) < call.seq:
                unanswered_by_peer.setdefault(call.peer, call)
        return unanswered_by_peer

    def _possible_senders(self, rank_exit: RankExit) -> dict[int, Issued]:
        """Return the ranks that may have to send what a rank receives from any source, if that is its last call on record.

        Those are the members of the group that have sent to it before, and all other members if none has. Empty if as much was
        sent to it as it receives.
        """
        receive = rank_exit.issued[-1] if rank_exit.issued else None
        if receive is None or receive.op != "recv" or receive.peer is not None:
            return {}
        group = group_key(receive)
        sent: dict[int, int] = {}
        for peer in self.participants(receive):
            for call in peer.issued:
                if call.op == "send" and call.peer == rank_exit.rank and group_key(call) == group:
                    sent[peer.rank] = max(call.seq + 1, sent.get(peer.rank, 0))
        named: dict[int, int] = {}
        for call in rank_exit.issued:
            if call.op == "recv" and call.peer is not None and group_key(call) == group:
                named[call.peer] = max(call.seq + 1, named.get(call.peer, 0))
        if sum(sent.values()) - sum(named.values()) > receive.seq:
            return {}
        others = [peer.rank for peer in self.participants(receive) if peer.rank != rank_exit.rank]
        return dict.fromkeys(sorted(sent) or others, receive)

    def _absent_from_creation(self, rank_exit: RankExit) -> dict[int, Issued]:
        """Return the ranks that this one waits for in the making of a group, if that is the last call that it began."""
        making = rank_exit.issued[-1] if rank_exit.issued else None
        if making is None or making.op not in GROUP_CREATION:
            return {}
        until = time_of_giving_up(rank_exit)
        absent = (peer.rank for peer in self.participants(making) if not has_begun_creation(peer, making, until))
        return dict.fromkeys(absent, making)


def absent_from_barrier(rank_exit: RankExit) -> dict[int, Issued]:
    """Return the ranks that torch's monitored_barrier named as not having come, each with the barrier. Empty if it named none.

    It names them by their position in the group.
    """
    named = BARRIER_MISSED.search(rank_exit.failure["message"]) if rank_exit.failure else None
    barriers = [call for call in rank_exit.issued if call.op == "barrier"]
    if not named or not barriers:
        return {}
    ranks = barriers[-1].ranks
    positions = [int(number) for number in re.findall(r"\d+", named.group(1))]
    return {ranks[position]: barriers[-1] for position in positions if position < len(ranks)}


def has_begun_creation(peer: RankExit, making: Issued, until: float = float("inf")) -> bool:
    """Return whether a rank had begun to make a group by a time.

    All ranks make groups in one order, or else only their members do. So a rank that made later ones may have come, unless it
    is making one of the same ranks by another name.
    """
    made_groups = [call for call in peer.issued if call.op in GROUP_CREATION and call.time <= until]
    if any(group_key(call) == group_key(making) for call in made_groups):
        return True
    return any(call.seq > making.seq for call in made_groups) and not is_same_call(made_groups[-1], making)


def time_of_giving_up(rank_exit: RankExit) -> float:
    """Return when a rank that timed out raised, in seconds since 1970: what others issue after that comes too late.

    Infinity for a rank that did not time out, or whose times are not known.
    """
    return failure_time(rank_exit) if rank_exit.is_timed and has_timed_out(rank_exit) else float("inf")
