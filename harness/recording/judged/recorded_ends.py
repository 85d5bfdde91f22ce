"""How the ranks of a recorded job ended, as far as they, their launcher or the command's exit code report it."""

from __future__ import annotations

from dataclasses import replace

from harness.core.evidence.lost_peer import lost_a_peer
from harness.core.evidence.records import Exit
from harness.core.evidence.summary import Summary
from harness.core.evidence.text import ranks_text
from harness.recording.judged.recorded_waits import issued_otherwise
from harness.recording.judged.stored_recording import Recording, exit_text, only_waited, recorder_failed

NOTHING_HEARD = "how it ended is unknown"
BY_HAND = "KeyboardInterrupt"
"""What ranks of a job raise that somebody ended."""


def exits_of(recording: Recording, world: int) -> tuple[Exit, ...]:
    """Return all exits. A rank that only lost a peer is not to blame if another is, or if another vanished without an end.
    If one rank issued what none of its peers did, it is the one to blame of those that lost each other."""
    found = [_exit(rank, recording.summaries.get(rank), recording) for rank in range(world)]
    if any(one.blamed and not one.error.startswith(BY_HAND) for one in found):
        return tuple(found)
    odd = issued_otherwise(recording) if any(one.how != "ok" for one in found) else {}
    found = [replace(one, reason=odd.get(one.rank, ""), diverged=one.rank in odd) for one in found]
    if len(odd) == 1:
        return tuple(replace(one, blamed=one.rank in odd) for one in found)
    gone = [one.rank for one in found if one.how == "killed" and not only_waited(recording, one.rank)]
    return tuple(replace(one, blamed=one.rank in gone or (not gone and one.how == "raised")) for one in found)


def not_heard(exits: tuple[Exit, ...], recording: Recording) -> str:
    """Why it is not known that all ranks ended well and left their evidence, though none is known not to; empty if it is
    known."""
    if any(one.how != "ok" for one in exits):
        return ""
    if failed := recorder_failed(recording.summaries.values()):
        return failed
    if recording.code:
        return f"the command ended with {exit_text(recording.code)}, and of no rank it is known that it ended so"
    unheard = [
        rank
        for rank, one in sorted(recording.summaries.items())
        if not one.progress.ended and rank not in recording.exits
    ]
    if not unheard:
        return ""
    return f"the exit of ranks {ranks_text(unheard)} is not reported; the command ended with exit code 0"


def _exit(rank: int, left: Summary | None, recording: Recording) -> Exit:
    code = recording.exits.get(rank)
    if left is not None and left.progress.ended == "raised":
        return Exit(rank, "raised", 1, error=left.progress.error, blamed=not lost_a_peer(left.progress.error))
    if code is not None and code < 0:
        signal, last = exit_text(code), _last(rank, recording)
        if only_waited(recording, rank):
            return Exit(rank, "killed", signal=signal, error=f"{signal} after another had ended", last_collective=last)
        return Exit(rank, "signal", signal=signal, error=_reached(left), last_collective=last, blamed=True)
    if code:
        return Exit(rank, "raised", code, error=f"exited with code {code}", blamed=True)
    if left is None:
        return Exit(rank, "lost", error="it left no evidence")
    if left.progress.ended or code == 0 or recording.code == 0:
        return Exit(rank, "ok", 0)
    how = ", ".join(filter(None, (NOTHING_HEARD, _reached(left))))
    return Exit(rank, "killed", error=how, last_collective=_last(rank, recording))


def _reached(left: Summary | None) -> str:
    return left.progress.reached.text if left is not None and left.progress.reached is not None else ""


def _last(rank: int, recording: Recording) -> str:
    return recording.last[rank].text if rank in recording.last else ""
