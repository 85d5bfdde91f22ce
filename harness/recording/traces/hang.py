"""Why a job hung, by its Flight Recorder dumps alone: by the rules that blame ranks of the harness's own launches."""

from __future__ import annotations

from collections import defaultdict
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
        if self.missing or any(one.untold for one in self.stuck):
            return Verdict.UNKNOWN
        return Verdict.FAIL if self.stuck else Verdict.PASS


def hang_of(dumps: Sequence[Dump]) -> Hang:
    """Look first for members of a group that issued different collectives, and then for who is waited for."""
    ranks = tuple(dump.rank for dump in dumps)
    named = {rank for dump in dumps for call in dump.issued for rank in call.ranks}
    stuck = _stuck(dumps)
    blamed = disagreeing([_fate(dump, dump.issued) for dump in dumps])
    blamed = blamed or waited_for([_fate(dump, _reached(dump, stuck)) for dump in dumps])
    found = tuple(sorted(stuck.values(), key=lambda one: one.call.time))
    return Hang(ranks, tuple(sorted(named - {*ranks})), dict(sorted(blamed.items())), found)


def _fate(dump: Dump, issued: Sequence[Issued]) -> Fate:
    """Return the rank as if it had been killed as it was dumped."""
    return Fate(dump.rank, None, killed="its job hung", issued=tuple(issued))


def _stuck(dumps: Sequence[Dump]) -> dict[Place, Stuck]:
    last: dict[tuple[int, Place], int] = {}
    for dump in dumps:
        for call in dump.issued:
            if call.peer is None:
                key = dump.rank, place(call)
                last[key] = max(call.seq, last.get(key, call.seq))
    by_rank, first = {dump.rank: dump for dump in dumps}, dict[Place, Stuck]()
    for dump in dumps:
        for call in sorted(dump.issued, key=lambda call: call.seq):
            here, number = place(call), call.seq
            if (
                call.peer is not None
                or (here, number) in dump.over
                or (here in first and first[here].call.seq <= number)
            ):
                continue
            found = _members(call, here, last, by_rank)
            if (here, number) not in dump.given_up or found.behind:
                first[here] = found
    return first


def _members(call: Issued, here: Place, last: Mapping[tuple[int, Place], int], dumps: Mapping[int, Dump]) -> Stuck:
    come: dict[str, list[int]] = defaultdict(list)
    for rank in call.ranks:
        told = rank in dumps and (dumps[rank].whole or (rank, here) in last)
        come["issued" if last.get((rank, here), -1) >= call.seq else "behind" if told else "untold"].append(rank)
    return Stuck(call, tuple(come["issued"]), tuple(come["behind"]), tuple(come["untold"]))


def _reached(dump: Dump, stuck: Mapping[Place, Stuck]) -> list[Issued]:
    """Return how far it came in each group that waits, and its last sends and receives. What it issued behind the collective
    that is not over only waits with it. Where it is not known how far it came, it is not blamed."""
    found: dict[object, Issued] = {}
    for call in dump.issued:
        if call.peer is not None:
            found[place(call), call.op, call.peer] = call
        elif place(call) in stuck and call.seq < stuck[place(call)].call.seq:
            found[place(call)] = call
    for here, one in stuck.items():
        if dump.rank in (*one.issued, *one.untold):
            own = (call for call in dump.issued if place(call) == here and call.seq >= one.call.seq)
            order = next((call.order for call in own), 0)
            found[here] = replace(one.call, order=order)
    return sorted(found.values(), key=lambda call: call.order)
