"""Which rank caused the failure of a job, and which only waited for it: pure functions of plain data; the first rule counts.

failed_alone   it died by a signal that was not ours, or was stopped, or raised something else than "my peer is gone".
disagreeing    at one place of a group's sequence it issued another collective than the others.
aborted        C++ ended it for an exception, as gloo does when ranks disagree about a collective.
vanished       it left no word of its end, and another lost a peer; of several, those that others waited for.
none           all lost their peers, one of them in what every member of the group had issued: nothing came through between
               them. A rank that is ahead received, before the link went down, what others still wait for.
waited_for     others are ahead of it in a group's sequence, while it waits for none. If most of the group exited 0, those that
               wait for these are blamed instead. In a cycle it left out what most issued, or made groups in another order,
               or sent to a wrong peer, or it is elsewhere than most; else all are named.
left_early     it exited 0 before the others lost their connection.
stuck          it was killed while computing, the others while waiting; all that were killed if none is seen to compute, no
               rank failed, and nothing is undelivered.
none           the first to fail timed out in what every member of the group had issued, or those that were killed waited
               in that: nothing came through.
first_failed   it raised first; all that raised if the times are not on record.
"""

from __future__ import annotations

import re
import signal
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.core.blame.awaited import find_waited_for
from harness.core.blame.calls import GROUP_CREATION, POINT_TO_POINT, Issued, describe_call
from harness.core.blame.divergence import find_disagreeing
from harness.core.blame.rank_exit import (
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
from harness.core.blame.waits import JobCalls, has_begun_creation, time_of_giving_up
from harness.core.evidence.records import AT_WORK, Exit
from harness.core.evidence.text import ranks_text


@dataclass(frozen=True)
class Blame:
    """The ranks that caused the failure of a job."""

    reasons: dict[int, str]
    """Rank to blame -> why, as a text; empty where its own error shows it. No ranks if all is well or nothing tells."""
    diverged: bool = False
    """Whether the reasons are collectives that differ from those of other members of the group."""
    undelivered: str = ""
    """What did not come through between ranks, where none is to blame; empty if that was not seen."""


def blame_of(exits: Sequence[RankExit]) -> Blame:
    """Return the ranks to blame for the failure of a job, by any kind of evidence.

    No ranks if all ended well, nothing is known, or one was still at work when the time was over.
    """
    if all(rank_exit.status == 0 for rank_exit in exits) or any(AT_WORK in each.kill_reason for each in exits):
        return Blame({})
    if alone := find_failed_alone(exits):
        return Blame(alone)
    job = JobCalls(exits)
    if disagreeing := find_disagreeing(job):
        return Blame(disagreeing, diverged=True)
    reasons = find_aborted(exits) or find_vanished(job)
    undelivered = undelivered_text(job)
    if not reasons and not (undelivered and all(map(has_lost_peer, exits))):
        reasons = find_lagging(job, undelivered)
    return Blame(reasons, undelivered="" if reasons else undelivered)


def assign_blame(exits: Sequence[RankExit]) -> list[Exit]:
    """Return one exit record per rank of a launch, the culprits blamed, with the reason."""
    blame = blame_of(exits)
    exit_records = []
    for rank_exit in exits:
        exit_record = make_exit(rank_exit, blame.reasons.get(rank_exit.rank), blame.diverged)
        exit_records.append(replace(exit_record, undelivered=blame.undelivered))
    return exit_records


def make_exit(rank_exit: RankExit, reason: str | None, diverged: bool = False) -> Exit:
    """Return the exit record of a rank. reason: None if the rank is not to blame, "" if its own error says it all."""
    manner = manner_of_exit(rank_exit)
    return Exit(
        rank=rank_exit.rank,
        how=manner,
        code=rank_exit.status if rank_exit.status is not None and rank_exit.status >= 0 else None,
        signal=signal_name(rank_exit.status) if manner in ("signal", "killed") else None,
        error=error_text(rank_exit),
        stack="" if manner == "ok" else stack_text(useful_frames(frames_of(rank_exit))),
        last_collective=describe_call(rank_exit.issued[-1]) if rank_exit.issued else "",
        blamed=reason is not None,
        reason=reason or "",
        diverged=diverged and bool(reason),
        log=rank_exit.log,
        left=rank_exit.surviving_processes,
    )


def manner_of_exit(rank_exit: RankExit) -> str:
    if rank_exit.kill_reason:
        return "killed"
    if rank_exit.status is None:
        return "lost"
    return "ok" if rank_exit.status == 0 else "raised" if rank_exit.status > 0 else "signal"


def signal_name(status: int | None) -> str | None:
    """Return the name of the signal that a negative exit status stands for, such as "SIGKILL". None for other statuses."""
    if status is None or status >= 0:
        return None
    number = -status
    return signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"


def error_text(rank_exit: RankExit) -> str:
    """Return how a rank ended, in one line; empty for one that exited 0."""
    manner = manner_of_exit(rank_exit)
    if manner == "raised" and rank_exit.failure:
        return exception_text(rank_exit.failure)
    if manner == "raised":
        return f"exited with code {rank_exit.status} without an exception"
    if manner == "signal":
        return shorten_to_line(
            f"died by {signal_name(rank_exit.status)}, not sent by the harness. {last_log_line(rank_exit)}"
        )
    return {
        "ok": "",
        "killed": rank_exit.kill_reason,
        "lost": f"how it ended is unknown. {rank_exit.launcher_trouble}".strip(),
    }[manner]


def exception_text(failure: dict[str, Any]) -> str:
    """Return the exception that came first, then what it was raised again as: that may hide it."""
    text = f"{failure['type']}: {failure['message']}"
    where = failure.get("module")
    kind, message = failure.get("cause") or (failure["type"], failure["message"])
    first = shorten_to_line(f"{kind}: {message}") + (f" (in {where})" if where else "")
    return f"{first}; raised again as {shorten_to_line(text)}" if failure.get("cause") else first


GLOO_PADDING = re.compile(r"\[(enforce fail at )?\S+/(gloo/\S+?:\d+)\]|This is typically caused.*|GLHF.*")


def shorten_to_line(text: str) -> str:
    """Return a text as one line of at most 300 characters, without the parts of gloo's messages that say nothing."""
    line = " ".join(GLOO_PADDING.sub(r"\2", " ".join(without_tracebacks(text).split())).split())
    return line if len(line) <= 300 else f"{line[:297]}..."


def without_tracebacks(text: str) -> str:
    """Return the error of each traceback in a message, joined by ": "; a message without any as it is.

    torch's error of a checkpoint quotes the tracebacks of all ranks.
    """
    if "Traceback (most recent call last)" not in text:
        return text
    lines = (line for line in text.splitlines() if line.strip() and not line[0].isspace())
    return ": ".join(dict.fromkeys(line for line in lines if not line.startswith("Traceback")))


# --- the rules -------------------------------------------------------------------------------------------------------


def find_lagging(job: JobCalls, undelivered: str) -> dict[int, str]:
    """Return the ranks that are behind others, left early or are stuck, with the reason; else the first to fail.

    Empty if none of these tells, and something was undelivered. undelivered: what did not come through between ranks, as
    a text.
    """
    reasons = find_waited_for(job) or find_left_early(job.exits) or find_stuck(job, undelivered)
    return reasons if reasons or undelivered else find_first_failed(job.exits)


def find_failed_alone(exits: Sequence[RankExit]) -> dict[int, str]:
    """Return the ranks that died, were stopped, or raised an error of their own, with the reason.

    An error that is raised after the first death may be what came of it, so it counts only where times are not on record.
    """
    dead_or_stopped = [rank_exit for rank_exit in exits if is_killed_by_signal(rank_exit) or rank_exit.is_stopped]
    first = min(
        (0.0 if rank_exit.is_stopped else rank_exit.end_time for rank_exit in dead_or_stopped), default=float("inf")
    )
    alone = {rank_exit.rank for rank_exit in dead_or_stopped}
    for rank_exit in exits:
        has_raised = has_failed(rank_exit) and (rank_exit.status or 0) > 0 and not has_lost_peer(rank_exit)
        if has_raised and (not rank_exit.is_timed or failure_time(rank_exit) < first):
            alone.add(rank_exit.rank)
    return {rank_exit.rank: stopped_text(rank_exit) for rank_exit in exits if rank_exit.rank in alone}


def is_killed_by_signal(rank_exit: RankExit) -> bool:
    """Return whether a signal ended the rank, from outside or by its own doing.

    False if the harness or its launcher sent it, if C++ aborted it for an exception, and if it lost a peer.
    """
    is_signal = has_failed(rank_exit) and (rank_exit.status or 0) < 0
    return is_signal and not has_lost_peer(rank_exit) and not cpp_exception_text(rank_exit)


def stopped_text(rank_exit: RankExit) -> str:
    return "it had been stopped (SIGSTOP or a debugger) and did not go on" if rank_exit.is_stopped else ""


def find_aborted(exits: Sequence[RankExit]) -> dict[int, str]:
    return {rank_exit.rank: "" for rank_exit in exits if cpp_exception_text(rank_exit) and not has_lost_peer(rank_exit)}


def find_vanished(job: JobCalls) -> dict[int, str]:
    """Return the ranks that left no word of their end while another rank lost a peer, with the reason; empty if none did.

    Of several, those that others waited for: a launcher kills the rest when one has died.
    """
    vanished = [rank_exit.rank for rank_exit in job.exits if rank_exit.is_vanished]
    if not vanished or not any(map(has_lost_peer, job.exits)):
        return {}
    waited_for = find_waited_for(job)
    return {rank: waited_for[rank] for rank in vanished if rank in waited_for} or dict.fromkeys(vanished, "")


def undelivered_text(job: JobCalls) -> str:
    """Return what did not come through, as a text, where all had issued what timed out: the network, not a rank.

    Empty where that was not seen, and where times are not on record: a rank may have come late.
    """
    exits = job.exits
    if any(rank_exit.status == 0 or is_killed_by_signal(rank_exit) or not rank_exit.is_timed for rank_exit in exits):
        return ""
    failed_exits = sorted(filter(has_failed, exits), key=failure_time)
    killed = [rank_exit for rank_exit in exits if rank_exit.kill_reason]
    asked_exits = failed_exits if all(map(has_lost_peer, exits)) else failed_exits[:1]
    if failed_exits:
        waiting_exits = list(filter(has_timed_out, asked_exits))
    else:
        waiting_exits = killed if all(map(is_in_collective, killed)) else []
    issued = next((rank_exit.issued[-1] for rank_exit in waiting_exits if is_issued_by_all(rank_exit, job)), None)
    return "" if issued is None else _undelivered_call_text(issued, job)


def _undelivered_call_text(issued: Issued, job: JobCalls) -> str:
    """Return the sentence on a call in which nothing came through, with the machines of its ranks if there are several."""
    hosts: dict[str, list[int]] = defaultdict(list)
    for rank_exit in job.participants(issued):
        hosts[rank_exit.host].append(rank_exit.rank)
    ends = " and ".join(f"{host} (ranks {ranks_text(ranks)})" for host, ranks in sorted(hosts.items()))
    between = f"between {ends}" if len(hosts) > 1 else "between them"
    return f"nothing came through {between} in {describe_call(issued)}, which all of them had issued"


def is_issued_by_all(rank_exit: RankExit, job: JobCalls) -> bool:
    """Return whether all members had issued what this rank issued last, before the first of all gave up.

    False if that was a send or receive, or if it is not known of a member."""
    if not rank_exit.issued or rank_exit.issued[-1].op in POINT_TO_POINT:
        return False
    last_issued = rank_exit.issued[-1]
    first = min(map(time_of_giving_up, job.exits))
    if last_issued.op in GROUP_CREATION:
        return all(has_begun_creation(peer, last_issued, first) for peer in job.participants(last_issued))
    for peer in job.participants(last_issued):
        seq = job.last_seq(peer.rank, last_issued, first)
        if seq is None or seq < last_issued.seq:
            return False
    return True


def find_first_failed(exits: Sequence[RankExit]) -> dict[int, str]:
    """Return the rank that failed first; all that failed, without a reason, if times are not on record."""
    failed_exits = list(filter(has_failed, exits))
    if any(not rank_exit.is_timed for rank_exit in failed_exits):
        return {rank_exit.rank: "" for rank_exit in failed_exits}
    first = min(failed_exits, key=failure_time, default=None)
    return {first.rank: "the first to fail"} if first else {}


def find_left_early(exits: Sequence[RankExit]) -> dict[int, str]:
    """Return the ranks that exited 0 before another lost a peer, with the reason. Empty if times are not on record.

    A rank that exits closes its connections; those that still wanted something of it fail.
    """
    first = min(map(failure_time, filter(has_lost_peer, exits)), default=0.0)
    early_leavers = [each for each in exits if each.status == 0 and each.is_timed and each.end_time < first]
    return {rank_exit.rank: "exited while others still waited for a collective" for rank_exit in early_leavers}


def find_stuck(job: JobCalls, undelivered: str) -> dict[int, str]:
    """Return the killed ranks that computed, with the reason.

    If none did, return all that were killed, unless another rank failed or something was undelivered.
    """
    killed = [rank_exit for rank_exit in job.exits if rank_exit.kill_reason]
    stuck_exits = [rank_exit for rank_exit in killed if is_busy(rank_exit)]
    if not stuck_exits and not any(map(has_failed, job.exits)) and not undelivered:
        stuck_exits = killed
    return {rank_exit.rank: stuck_text(rank_exit) for rank_exit in stuck_exits}


def stuck_text(rank_exit: RankExit) -> str:
    """Return why a killed rank is to blame that is not known to have waited; empty if it left no word of its end."""
    if rank_exit.is_vanished:
        return ""
    if is_winding_up(rank_exit):
        return "its work was done, and a thread or something registered with atexit kept it from exiting"
    return "still running, and no other rank is known to be the cause"
