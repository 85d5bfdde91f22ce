"""Which ranks of a recorded job waited for which others, and where they issued different collectives, as it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harness.core.evidence.recording import Last
from harness.core.evidence.summary import POINT_TO_POINT, WITHOUT_PLACE
from harness.core.evidence.text import ranks_text
from harness.recording.judged.stored_recording import Recording


@dataclass(frozen=True)
class Waited:
    """Ranks that others waited for."""

    behind: tuple[int, ...]
    """Ranks that had issued fewer collectives over a group."""
    ahead: tuple[int, ...]
    """Ranks that waited in the last one of it."""
    last: Last
    """That collective."""


@dataclass(frozen=True)
class Apart:
    """One place of a group at which its members issued different collectives."""

    number: int
    """Position, from 1, among the collectives of the group."""
    members: tuple[int, ...]
    """Global ranks of the group."""
    issued: tuple[tuple[str, tuple[int, ...]], ...]
    """What was issued and by which ranks; by the fewest ranks first."""


def waits(recording: Recording) -> list[Waited]:
    """Return whom others waited for: the others had issued more in one group. A member that issued nothing over any group is
    waited for, too, and one that went on to another group."""
    found = []
    every = _last_of(recording)
    issued = {rank: every.get(rank) for rank in recording.summaries}
    for members in _by_group(every):
        most = max(members.values(), key=lambda last: last.seq)
        ahead = [rank for rank, last in members.items() if last.seq == most.seq]
        counts = {
            rank: last.issued_over(most.group) if last else 0
            for rank, last in issued.items()
            if rank in most.ranks and (rank in members or last is None or last.group != most.group)
        }
        if behind := [rank for rank, count in counts.items() if count is not None and count < most.seq]:
            found.append(Waited(tuple(sorted(behind)), tuple(sorted(ahead)), most))
    return found


def different_calls(recording: Recording) -> list[Apart]:
    """Return the first place of each group at which members issued different collectives under one number. The two ends of a
    send rightly differ, and are left out."""
    found = []
    for members in _by_group(_last_of(recording)):
        known = {rank: _by_number(last) for rank, last in members.items()}
        for number in sorted(set.intersection(*map(set, known.values()))):
            issued = alike({rank: texts[number] for rank, texts in known.items()})
            if len(issued) > 1 and not any(_is_sent(text) for texts in known.values() for text in texts.values()):
                found.append(Apart(number, next(iter(members.values())).ranks, issued))
                break
    return found


def issued_otherwise(recording: Recording) -> dict[int, str]:
    """Return the rank that issued what none of its peers did, where all of these issued one thing; with both, in words.

    Two ranks of which each issued something else are both returned: neither is known to be right. Empty for all else.
    """
    for one in different_calls(recording):
        sides = [(text, ranks) for text, ranks in one.issued]
        if len(sides) == 2 and sorted(rank for _, ranks in sides for rank in ranks) == sorted(one.members):
            return _against(*sides)
    return next(filter(None, (_went_on_alone(recording, wait) for wait in waits(recording))), {})


def _went_on_alone(recording: Recording, wait: Waited) -> dict[int, str]:
    """The same of one rank that waits for all others, while these wait for it in one collective over another group of the same
    ranks."""
    lasts = _last_of(recording)
    others = {rank: lasts[rank] for rank in wait.behind if rank in lasts}
    if len(wait.ahead) != 1 or {*wait.ahead, *others} != {*wait.last.ranks}:
        return {}
    (odd,), theirs = wait.ahead, next(iter(others.values()))
    group = next((each.ranks for each in others.values() if each.ranks), ())
    over, count = ranks_text(group), lasts[odd].issued_over(theirs.group)
    alone = theirs.group != wait.last.group and count is not None and count < theirs.seq
    if not alone or {*group} != {*wait.last.ranks} or _is_sent(theirs.text) or _is_sent(wait.last.text):
        return {}
    if len({(each.group, each.seq, each.text) for each in others.values()}) > 1:
        return {}
    mine = f"{wait.last.text} over {ranks_text(wait.last.ranks)}"
    return _against((mine, wait.ahead), (f"{theirs.text} over {over}", tuple(others)))


def _against(one: tuple[str, tuple[int, ...]], other: tuple[str, tuple[int, ...]]) -> dict[int, str]:
    """Return by rank what each side issued: of the smaller one if it is one rank, of both if both are."""
    found = {}
    for (text, ranks), (theirs, others) in ((one, other), (other, one)):
        if len(ranks) == 1:
            who = f"rank {others[0]}" if len(others) == 1 else f"ranks {ranks_text(others)}"
            found[ranks[0]] = f"issued {text} where {who} issued {theirs}"
    return found


def alike(texts: Mapping[int, str]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return each text with its ranks, ascending; that of the fewest ranks first."""
    found: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        found.setdefault(text, []).append(rank)
    return tuple((text, tuple(ranks)) for text, ranks in sorted(found.items(), key=lambda item: len(item[1])))


def _last_of(recording: Recording) -> dict[int, Last]:
    """Return the last collective of each rank that issued any."""
    lasts = {rank: recording.last.get(rank) or one.progress.last for rank, one in recording.summaries.items()}
    return {rank: last for rank, last in lasts.items() if last is not None}


def _by_group(lasts: Mapping[int, Last]) -> list[dict[int, Last]]:
    """Return the last collective of each rank, by the group that it ran over."""
    found: dict[tuple[str, tuple[int, ...]], dict[int, Last]] = {}
    for rank, last in lasts.items():
        found.setdefault((last.group, last.ranks), {})[rank] = last
    return list(found.values())


def _by_number(last: Last) -> dict[int, str]:
    """Return what a rank issued over a group, as far as it is known; of a broadcast not in which step or pass."""
    texts = ((last.seq - back, text) for back, text in enumerate((last.text, *last.before)))
    return {seq: WITHOUT_PLACE if text.startswith(WITHOUT_PLACE) else text for seq, text in texts}


def _is_sent(text: str) -> bool:
    return text.split()[0] in POINT_TO_POINT
