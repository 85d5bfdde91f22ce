"""Which ranks of a recorded job waited for which others, and where they issued different collectives, as it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harness.core.evidence.recording import Last
from harness.core.evidence.summary import POINT_TO_POINT, WITHOUT_PLACE
from harness.core.evidence.text import ranks_text
from harness.recording.judged.stored_recording import Recording


@dataclass(frozen=True)
class Wait:
    """Ranks that others waited for."""

    behind: tuple[int, ...]
    """Ranks that had issued fewer collectives over a group."""
    ahead: tuple[int, ...]
    """Ranks that waited in the last one of it."""
    last: Last
    """That collective."""


@dataclass(frozen=True)
class DifferentCalls:
    """One place of a group at which its members issued different collectives."""

    number: int
    """Position, from 1, among the collectives of the group."""
    members: tuple[int, ...]
    """Global ranks of the group."""
    issued: tuple[tuple[str, tuple[int, ...]], ...]
    """What was issued and by which ranks; by the fewest ranks first."""


def find_waits(recording: Recording) -> list[Wait]:
    """Return whom others waited for: the others had issued more in one group. A member that issued nothing over any group is
    waited for, too, and one that went on to another group."""
    all_waits = []
    lasts = _last_collectives(recording)
    issued = {rank: lasts.get(rank) for rank in recording.summaries}
    for members in _lasts_by_group(lasts):
        latest = max(members.values(), key=lambda last: last.seq)
        ahead = [rank for rank, last in members.items() if last.seq == latest.seq]
        counts = {
            rank: last.issued_over(latest.group) if last else 0
            for rank, last in issued.items()
            if rank in latest.ranks and (rank in members or last is None or last.group != latest.group)
        }
        if behind := [rank for rank, count in counts.items() if count is not None and count < latest.seq]:
            all_waits.append(Wait(tuple(sorted(behind)), tuple(sorted(ahead)), latest))
    return all_waits


def find_different_calls(recording: Recording) -> list[DifferentCalls]:
    """Return the first place of each group at which members issued different collectives under one number. The two ends of a
    send rightly differ, and are left out."""
    all_calls = []
    for members in _lasts_by_group(_last_collectives(recording)):
        texts_of_ranks = {rank: _texts_by_number(last) for rank, last in members.items()}
        for number in sorted(set.intersection(*map(set, texts_of_ranks.values()))):
            issued = ranks_by_text({rank: texts[number] for rank, texts in texts_of_ranks.items()})
            if len(issued) > 1 and not any(map(_has_point_to_point, texts_of_ranks.values())):
                all_calls.append(DifferentCalls(number, next(iter(members.values())).ranks, issued))
                break
    return all_calls


def _has_point_to_point(texts: Mapping[int, str]) -> bool:
    """Return whether any of these collectives is a send or a receive."""
    return any(map(_is_point_to_point, texts.values()))


def diverging_ranks(recording: Recording) -> dict[int, str]:
    """Return the rank that issued what none of its peers did, where all of these issued one thing; with both, in words.

    Two ranks of which each issued something else are both returned: neither is known to be right. Empty for all else.
    """
    for calls in find_different_calls(recording):
        if len(calls.issued) != 2:
            continue
        first, second = calls.issued
        if sorted((*first[1], *second[1])) == sorted(calls.members):
            return _divergence_texts(first, second)
    return next(filter(None, (_lone_divergence(recording, wait) for wait in find_waits(recording))), {})


def _lone_divergence(recording: Recording, wait: Wait) -> dict[int, str]:
    """Return the rank that waits for all others, while these wait for it in one collective over another group of the same
    ranks; with both collectives, in words. Empty if there is none."""
    lasts = _last_collectives(recording)
    lasts_of_others = {rank: lasts[rank] for rank in wait.behind if rank in lasts}
    if len(wait.ahead) != 1 or {*wait.ahead, *lasts_of_others} != {*wait.last.ranks}:
        return {}
    (lone_rank,) = wait.ahead
    last_of_others = next(iter(lasts_of_others.values()))
    group = next((last.ranks for last in lasts_of_others.values() if last.ranks), ())
    over = ranks_text(group)
    count = lasts[lone_rank].issued_over(last_of_others.group)
    alone = last_of_others.group != wait.last.group and count is not None and count < last_of_others.seq
    if not alone or {*group} != {*wait.last.ranks}:
        return {}
    if _is_point_to_point(last_of_others.text) or _is_point_to_point(wait.last.text):
        return {}
    if len({(last.group, last.seq, last.text) for last in lasts_of_others.values()}) > 1:
        return {}
    text = f"{wait.last.text} over {ranks_text(wait.last.ranks)}"
    return _divergence_texts((text, wait.ahead), (f"{last_of_others.text} over {over}", tuple(lasts_of_others)))


def _divergence_texts(first: tuple[str, tuple[int, ...]], second: tuple[str, tuple[int, ...]]) -> dict[int, str]:
    """Return by rank what each side issued: of the smaller one if it is one rank, of both if both are."""
    texts = {}
    for (text, ranks), (other_text, other_ranks) in ((first, second), (second, first)):
        if len(ranks) == 1:
            who = f"rank {other_ranks[0]}" if len(other_ranks) == 1 else f"ranks {ranks_text(other_ranks)}"
            texts[ranks[0]] = f"issued {text} where {who} issued {other_text}"
    return texts


def ranks_by_text(texts: Mapping[int, str]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return each text with its ranks, ascending; that of the fewest ranks first."""
    by_text: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        by_text.setdefault(text, []).append(rank)
    return tuple((text, tuple(ranks)) for text, ranks in sorted(by_text.items(), key=lambda item: len(item[1])))


def _last_collectives(recording: Recording) -> dict[int, Last]:
    """Return the last collective of each rank that issued any."""
    lasts = {rank: recording.last.get(rank) or summary.progress.last for rank, summary in recording.summaries.items()}
    return {rank: last for rank, last in lasts.items() if last is not None}


def _lasts_by_group(lasts: Mapping[int, Last]) -> list[dict[int, Last]]:
    """Return the last collective of each rank, by the group that it ran over."""
    by_group: dict[tuple[str, tuple[int, ...]], dict[int, Last]] = {}
    for rank, last in lasts.items():
        by_group.setdefault((last.group, last.ranks), {})[rank] = last
    return list(by_group.values())


def _texts_by_number(last: Last) -> dict[int, str]:
    """Return what a rank issued over a group, as far as it is known; of a broadcast not in which step or pass."""
    texts = ((last.seq - back, text) for back, text in enumerate((last.text, *last.before)))
    return {seq: WITHOUT_PLACE if text.startswith(WITHOUT_PLACE) else text for seq, text in texts}


def _is_point_to_point(text: str) -> bool:
    return text.split()[0] in POINT_TO_POINT
