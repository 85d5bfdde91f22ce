"""Which rank caused the failure, and which only waited for it. These are pure functions of plain data; the first rule counts.

failed_alone   it died by a signal that was not ours, or was stopped, or raised something else than "my peer is gone".
disagreeing    at one place of a group's sequence it issued another collective than the others.
aborted        C++ ended it for an exception, which is gloo's way of finding out about the above.
none           all lost their peers, one of them in what every member of the group had issued: nothing came through between
               them. A rank that is ahead received, before the link went down, what others still wait for.
waited_for     others are ahead of it in a group's sequence, while it waits for none. In a cycle it left out what most issued,
               or made groups in another order, or it is elsewhere than most; else all are named.
left_early     it exited 0 before the others lost their connection.
stuck          it was killed while computing, the others while waiting; without a stack, all that were killed.
none           the first to fail timed out in what every member of the group had issued, or those that were killed waited
               in that: nothing came through.
first_failed   it raised first.
"""

from __future__ import annotations

import re
import signal
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from harness.core.evidence.records import AT_WORK, Exit
from harness.core.evidence.text import ranks_text
from harness.core.launch.inflight import GROUP_CREATION
from harness.core.launch.rank_exit import (
    RankExit,
    cpp_exception_text,
    failure_time,
    frames_of,
    has_failed,
    has_lost_peer,
    has_timed_out,
    is_busy,
    is_in_collective,
    is_winding_up,
    last_log_line,
    stack_text,
    useful_frames,
)
from harness.core.launch.sequences import (
    POINT_TO_POINT,
    describe_call,
    find_disagreeing,
    find_waited_for,
    group_key,
    has_begun_creation,
    last_seq_issued,
    participants,
    time_of_giving_up,
)


def assign_blame(fates: Sequence[RankExit]) -> list[Exit]:
    """Return one Exit per rank, the culprits blamed, with the reason."""
    blamed = find_culprits(fates)
    between = "" if blamed else undelivered_text(fates)
    diverged = bool(blamed) and blamed == find_disagreeing(fates)
    return [replace(make_exit(fate, blamed.get(fate.rank), diverged), undelivered=between) for fate in fates]


def make_exit(fate: RankExit, reason: str | None, diverged: bool = False) -> Exit:
    """Return the exit record of a rank. reason: None if the rank is not to blame, "" if its own error says it all."""
    manner = manner_of_exit(fate)
    return Exit(
        rank=fate.rank,
        how=manner,
        code=fate.status if fate.status is not None and fate.status >= 0 else None,
        signal=signal_name(fate.status) if manner in ("signal", "killed") else None,
        error=error_text(fate),
        stack="" if manner == "ok" else stack_text(useful_frames(frames_of(fate))),
        last_collective=describe_call(fate.issued[-1]) if fate.issued else "",
        blamed=reason is not None,
        reason=reason or "",
        diverged=diverged and bool(reason),
        log=fate.log,
        left=fate.surviving_processes,
    )


def manner_of_exit(fate: RankExit) -> str:
    if fate.kill_reason:
        return "killed"
    if fate.status is None:
        return "lost"
    return "ok" if fate.status == 0 else "raised" if fate.status > 0 else "signal"


def signal_name(status: int | None) -> str | None:
    return signal.Signals(-status).name if status in {-number for number in signal.Signals} else f"signal {status}"


def error_text(fate: RankExit) -> str:
    """Return how a rank ended, in one line; empty for one that exited 0."""
    manner = manner_of_exit(fate)
    if manner == "raised" and fate.failure:
        return exception_text(fate.failure)
    if manner == "raised":
        return f"exited with code {fate.status} without an exception"
    if manner == "signal":
        return shorten_to_line(f"died by {signal_name(fate.status)}, not sent by the harness. {last_log_line(fate)}")
    return {"ok": "", "killed": fate.kill_reason, "lost": f"how it ended is unknown. {fate.launcher_trouble}".strip()}[
        manner
    ]


def exception_text(failure: dict[str, Any]) -> str:
    """Return the exception that came first, then what it was raised again as: that may hide it."""
    text = f"{failure['type']}: {failure['message']}"
    where = failure.get("module")
    kind, message = failure.get("cause") or (failure["type"], failure["message"])
    first = shorten_to_line(f"{kind}: {message}") + (f" (in {where})" if where else "")
    return f"{first}; raised again as {shorten_to_line(text)}" if failure.get("cause") else first


GLOO_PADDING = re.compile(r"\[(enforce fail at )?\S+/(gloo/\S+?:\d+)\]|This is typically caused.*|GLHF.*")


def shorten_to_line(text: str) -> str:
    """Return a text as one line of at most 300 characters, without the builder's paths and the good wishes of gloo."""
    line = " ".join(GLOO_PADDING.sub(r"\2", " ".join(without_tracebacks(text).split())).split())
    return line if len(line) <= 300 else f"{line[:297]}..."


def without_tracebacks(text: str) -> str:
    """Return what was raised in each traceback that a message quotes, as torch's about a checkpoint quotes all ranks'."""
    if "Traceback (most recent call last)" not in text:
        return text
    lines = (line for line in text.splitlines() if line.strip() and not line[0].isspace())
    return ": ".join(dict.fromkeys(line for line in lines if not line.startswith("Traceback")))


# --- the rules -------------------------------------------------------------------------------------------------------


def find_culprits(fates: Sequence[RankExit]) -> dict[int, str]:
    """Ranks to blame and why. {} when all is well, or nothing is known, or they only were slow."""
    if all(fate.status == 0 for fate in fates) or any(AT_WORK in fate.kill_reason for fate in fates):
        return {}
    return (
        find_failed_alone(fates)
        or find_disagreeing(fates)
        or find_aborted(fates)
        or ({} if all(map(has_lost_peer, fates)) and undelivered_text(fates) else find_lagging(fates))
    )


def find_lagging(fates: Sequence[RankExit]) -> dict[int, str]:
    return (
        find_waited_for(fates)
        or find_left_early(fates)
        or find_stuck(fates)
        or ({} if undelivered_text(fates) else find_first_failed(fates))
    )


def find_failed_alone(fates: Sequence[RankExit]) -> dict[int, str]:
    """Deaths first: what is raised after one may be what came of it, in whatever words."""
    dead_or_stopped = [fate for fate in fates if is_killed_by_signal(fate) or fate.is_stopped]
    first = min((0.0 if fate.is_stopped else fate.end_time for fate in dead_or_stopped), default=float("inf"))
    raised = [fate for fate in fates if has_failed(fate) and fate.status > 0 and not has_lost_peer(fate)]  # type: ignore[operator]
    alone = {fate.rank for fate in [*dead_or_stopped, *(fate for fate in raised if failure_time(fate) < first)]}
    return {fate.rank: stopped_text(fate) for fate in fates if fate.rank in alone}


def is_killed_by_signal(fate: RankExit) -> bool:
    """Return whether a signal ended it, from outside or by its own doing."""
    return has_failed(fate) and fate.status < 0 and not has_lost_peer(fate) and not cpp_exception_text(fate)  # type: ignore[operator]


def stopped_text(fate: RankExit) -> str:
    return "it had been stopped (SIGSTOP or a debugger) and did not go on" if fate.is_stopped else ""


def find_aborted(fates: Sequence[RankExit]) -> dict[int, str]:
    return {fate.rank: "" for fate in fates if cpp_exception_text(fate) and not has_lost_peer(fate)}


def undelivered_text(fates: Sequence[RankExit]) -> str:
    """In words, where all had issued what timed out and still nothing came: the network, not a rank. "" where that was not
    seen."""
    if any(fate.status == 0 or is_killed_by_signal(fate) for fate in fates):
        return ""
    failed_fates = sorted(filter(has_failed, fates), key=failure_time)
    killed = [fate for fate in fates if fate.kill_reason]
    asked_fates = failed_fates if all(map(has_lost_peer, fates)) else failed_fates[:1]
    waiting_fates = (
        list(filter(has_timed_out, asked_fates)) if failed_fates else killed * all(map(is_in_collective, killed))
    )
    issued = next((fate.issued[-1] for fate in waiting_fates if is_issued_by_all(fate, fates)), None)
    if issued is None:
        return ""
    hosts: dict[str, list[int]] = defaultdict(list)
    for fate in participants(issued, fates):
        hosts[fate.host].append(fate.rank)
    ends = " and ".join(f"{host} (ranks {ranks_text(ranks)})" for host, ranks in sorted(hosts.items()))
    between = f"between {ends}" if len(hosts) > 1 else "between them"
    return f"nothing came through {between} in {describe_call(issued)}, which all of them had issued"


def is_issued_by_all(fate: RankExit, fates: Sequence[RankExit]) -> bool:
    """Return whether all members had issued what this rank issued last, before the first of all gave up.

    False if that was a send or receive."""
    if not fate.issued or fate.issued[-1].op in POINT_TO_POINT:
        return False
    last_issued = fate.issued[-1]
    first = min(map(time_of_giving_up, fates))
    if last_issued.op in GROUP_CREATION:
        return all(has_begun_creation(peer, last_issued, first) for peer in participants(last_issued, fates))
    return all(
        last_seq_issued(peer, group_key(last_issued), first) >= last_issued.seq
        for peer in participants(last_issued, fates)
    )


def find_first_failed(fates: Sequence[RankExit]) -> dict[int, str]:
    first = min(filter(has_failed, fates), key=failure_time, default=None)
    return {first.rank: "the first to fail"} if first else {}


def find_left_early(fates: Sequence[RankExit]) -> dict[int, str]:
    """A rank that exits closes its connections; those that still wanted something of it fail."""
    first = min(map(failure_time, filter(has_lost_peer, fates)), default=0.0)
    early_leavers = [fate for fate in fates if fate.status == 0 and fate.end_time < first]
    return {fate.rank: "exited while others still waited for a collective" for fate in early_leavers}


def find_stuck(fates: Sequence[RankExit]) -> dict[int, str]:
    killed = [fate for fate in fates if fate.kill_reason]
    stuck_fates = [fate for fate in killed if is_busy(fate)]
    if not stuck_fates and not any(map(has_failed, fates)) and not undelivered_text(fates):
        stuck_fates = killed
    return {fate.rank: stuck_text(fate) for fate in stuck_fates}


def stuck_text(fate: RankExit) -> str:
    if is_winding_up(fate):
        return "its work was done, and a thread or something registered with atexit kept it from exiting"
    return "still running, and no other rank is known to be the cause"
