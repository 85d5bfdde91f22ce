"""Conversion of a recording to what the rules of blame take: how each rank ended and what it issued, as far as on record.

A rank leaves its last collective with a few before it over the same group, and how many it had issued over other groups that it
used last. Bytes, roots and times are not on record, nor the other side of a send.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from harness.core.blame.calls import POINT_TO_POINT, UNKNOWN_STEP, Issued
from harness.core.blame.rank_exit import RankExit
from harness.core.evidence.recording import MAX_OTHER_GROUPS, Last
from harness.core.evidence.records import BACKGROUND
from harness.core.evidence.summary import Summary
from harness.recording.judged.stored_recording import Recording, exit_text, is_ended_by_launcher

NOTHING_HEARD = "how it ended is unknown"
BY_HAND = "KeyboardInterrupt"
"""What ranks of a job raise that somebody ended."""
CALL_TEXT = re.compile(r"(\S+) in (?:the background|step (\d+)(?:, (.*))?)")
"""What evidence.recording.issued_text writes."""


def rank_exits_of(recording: Recording, world: int) -> list[RankExit]:
    """Return how each of `world` ranks ended and what it issued. Times are not on record.

    Groups over which sends or receives are on record are left out: their numbers count those, too, and differ rightly. If all
    ranks ended well, what they issued is left out.
    """
    ends = [_end_of(rank, recording.summaries.get(rank), recording) for rank in range(world)]
    if all(end["status"] == 0 for end in ends):
        return [RankExit(rank, **end, is_complete=False, is_timed=False) for rank, end in enumerate(ends)]
    lasts = _lasts_with_ranks(recording)
    unnumbered = {(last.group, id(last.ranks)): last for last in lasts.values() if _has_point_to_point(last)}
    exits = []
    for rank, end in enumerate(ends):
        calls = _issued_fields(rank, lasts.get(rank), unnumbered, is_recorded=rank in recording.summaries)
        exits.append(RankExit(rank, **end, **calls, is_timed=False))
    return exits


def last_collectives(recording: Recording) -> dict[int, Last]:
    """Return the last collective of each rank that issued any."""
    lasts = {rank: recording.last.get(rank) or summary.progress.last for rank, summary in recording.summaries.items()}
    return {rank: last for rank, last in lasts.items() if last is not None}


def _lasts_with_ranks(recording: Recording) -> dict[int, Last]:
    """Return the last collective of each rank that issued any, with the members of its group, one tuple for all of a group.

    If they are not on record, those of the one group of that name that another rank has and that this one is in; none if there
    is no such group, or more than one.
    """
    groups: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = defaultdict(dict)
    with_ranks = {}
    for rank, last in last_collectives(recording).items():
        members = groups[last.group].setdefault(last.ranks, last.ranks)
        with_ranks[rank] = replace(last, ranks=members)
    for rank, last in with_ranks.items():
        if not last.ranks:
            own_groups = [ranks for ranks in groups[last.group] if rank in ranks]
            with_ranks[rank] = replace(last, ranks=own_groups[0] if len(own_groups) == 1 else ())
    return with_ranks


def _has_point_to_point(last: Last) -> bool:
    """Return whether any of the collectives on record is a send or a receive."""
    return any(_parsed_call(text)[0] in POINT_TO_POINT for text in (last.text, *last.before))


@functools.lru_cache(maxsize=4096)
def _parsed_call(text: str) -> tuple[str, int, str]:
    """Return operator, step and phase of a collective's text. The whole text is the operator if it is not in that form."""
    match = CALL_TEXT.fullmatch(text)
    if match is None:
        return text, UNKNOWN_STEP, ""
    op, step, phase = match.groups()
    return (op, UNKNOWN_STEP, BACKGROUND) if step is None else (op, int(step), phase or "")


def _end_of(rank: int, left: Summary | None, recording: Recording) -> dict[str, Any]:
    """Return the fields of RankExit on how a rank ended, as far as it, its launcher or the command's exit code report it."""
    code = recording.exits.get(rank)
    if left is not None and left.progress.ended == "raised":
        error = left.progress.error
        if error.startswith(BY_HAND):
            return {"status": None, "kill_reason": error}
        kind, _, message = error.partition(": ")
        return {"status": 1, "failure": {"type": kind, "message": message, "time": 0.0, "inside": []}}
    if code is not None and code < 0 and is_ended_by_launcher(recording, rank):
        return {"status": code, "kill_reason": f"{exit_text(code)} after another had ended"}
    if code:
        return {"status": code}
    if left is None:
        return {"status": None, "launcher_trouble": "it left no evidence"}
    if left.progress.ended or code == 0 or recording.code == 0:
        return {"status": 0}
    return {"status": None, "kill_reason": NOTHING_HEARD, "is_vanished": True}


def _issued_fields(
    rank: int, last: Last | None, unnumbered: Mapping[tuple[str, int], Last], *, is_recorded: bool
) -> dict[str, Any]:
    """Return the fields of RankExit on what a rank issued: `issued`, `counts` and `is_complete`. If `last` is None, only
    `is_complete`.

    `issued` is empty if the last collective was over a group with sends; the count of such groups is None.
    last: None if it issued nothing or left no record. unnumbered: name and identity of the members of a group with sends -> a
    collective over it. is_recorded: whether the rank left a summary.
    """
    if last is None:
        return {"is_complete": is_recorded}
    counts: dict[str, int | None] = {**(last.elsewhere or {}), last.group: None}
    for with_sends in unnumbered.values():
        if rank in with_sends.ranks:
            counts[with_sends.group] = None
    # With fewer than MAX_OTHER_GROUPS entries all groups in use are listed.
    is_complete = last.elsewhere is not None and len(last.elsewhere) < MAX_OTHER_GROUPS
    issued = () if (last.group, id(last.ranks)) in unnumbered else _issued_calls(last)
    return {"issued": issued, "counts": counts, "is_complete": is_complete}


def _issued_calls(last: Last) -> tuple[Issued, ...]:
    """Return the last collective of a rank and those before it over the same group, the oldest first."""
    texts = (last.text, *last.before)
    calls = []
    for back, text in enumerate(texts):
        op, step, phase = _parsed_call(text)
        order = len(texts) - back
        calls.append(Issued(last.group, last.ranks, last.seq - back, op, None, step, phase, order=order))
    return tuple(reversed(calls))


def ranks_by_text(texts: Mapping[int, str]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return each text with its ranks, ascending; that of the fewest ranks first."""
    by_text: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        by_text.setdefault(text, []).append(rank)
    return tuple((text, tuple(ranks)) for text, ranks in sorted(by_text.items(), key=lambda item: len(item[1])))
