"""How the ranks of a recorded job ended, as far as they, their launcher or the command's exit code report it."""

from __future__ import annotations

from dataclasses import replace

from harness.core.evidence.lost_peer import is_lost_peer_error
from harness.core.evidence.records import Exit
from harness.core.evidence.summary import Summary
from harness.core.evidence.text import ranks_text
from harness.recording.judged.recorded_waits import diverging_ranks
from harness.recording.judged.stored_recording import Recording, exit_text, is_ended_by_launcher, recorder_failure_text

NOTHING_HEARD = "how it ended is unknown"
BY_HAND = "KeyboardInterrupt"
"""What ranks of a job raise that somebody ended."""


def exits_of(recording: Recording, world: int) -> tuple[Exit, ...]:
    """Return all exits. A rank that only lost a peer is not to blame if another is, or if another vanished without an end.
    If one rank issued what none of its peers did, it is the one to blame of those that lost each other."""
    exits = [_exit(rank, recording.summaries.get(rank), recording) for rank in range(world)]
    if any(rank_exit.blamed and not rank_exit.error.startswith(BY_HAND) for rank_exit in exits):
        return tuple(exits)
    has_failed = any(rank_exit.how != "ok" for rank_exit in exits)
    reasons = diverging_ranks(recording) if has_failed else {}
    exits = [
        replace(rank_exit, reason=reasons.get(rank_exit.rank, ""), diverged=rank_exit.rank in reasons)
        for rank_exit in exits
    ]
    if len(reasons) == 1:
        return tuple(replace(rank_exit, blamed=rank_exit.rank in reasons) for rank_exit in exits)
    gone = [
        rank_exit.rank
        for rank_exit in exits
        if rank_exit.how == "killed" and not is_ended_by_launcher(recording, rank_exit.rank)
    ]
    if gone:
        return tuple(replace(rank_exit, blamed=rank_exit.rank in gone) for rank_exit in exits)
    return tuple(replace(rank_exit, blamed=rank_exit.how == "raised") for rank_exit in exits)


def why_exits_unknown(exits: tuple[Exit, ...], recording: Recording) -> str:
    """Return why it is not known that all ranks ended well and left their evidence, though none is known not to; empty if it is
    known."""
    if any(rank_exit.how != "ok" for rank_exit in exits):
        return ""
    if failed := recorder_failure_text(recording.summaries.values()):
        return failed
    if recording.code:
        return f"the command ended with {exit_text(recording.code)}, and of no rank it is known that it ended so"
    unheard = [
        rank
        for rank, summary in sorted(recording.summaries.items())
        if not summary.progress.ended and rank not in recording.exits
    ]
    if not unheard:
        return ""
    return f"the exit of ranks {ranks_text(unheard)} is not reported; the command ended with exit code 0"


def _exit(rank: int, left: Summary | None, recording: Recording) -> Exit:
    code = recording.exits.get(rank)
    if left is not None and left.progress.ended == "raised":
        return Exit(rank, "raised", 1, error=left.progress.error, blamed=not is_lost_peer_error(left.progress.error))
    if code is not None and code < 0:
        signal = exit_text(code)
        last = _last_collective_text(rank, recording)
        if is_ended_by_launcher(recording, rank):
            return Exit(rank, "killed", signal=signal, error=f"{signal} after another had ended", last_collective=last)
        return Exit(rank, "signal", signal=signal, error=_progress_text(left), last_collective=last, blamed=True)
    if code:
        return Exit(rank, "raised", code, error=f"exited with code {code}", blamed=True)
    if left is None:
        return Exit(rank, "lost", error="it left no evidence")
    if left.progress.ended or code == 0 or recording.code == 0:
        return Exit(rank, "ok", 0)
    how = ", ".join(filter(None, (NOTHING_HEARD, _progress_text(left))))
    return Exit(rank, "killed", error=how, last_collective=_last_collective_text(rank, recording))


def _progress_text(left: Summary | None) -> str:
    return left.progress.reached.text if left is not None and left.progress.reached is not None else ""


def _last_collective_text(rank: int, recording: Recording) -> str:
    return recording.last[rank].text if rank in recording.last else ""
