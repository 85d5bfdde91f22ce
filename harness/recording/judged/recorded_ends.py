"""How the ranks of a recorded job ended, as far as they, their launcher or the command's exit code report it."""

from __future__ import annotations

from dataclasses import replace

from harness.core.blame.culprits import blame_of, manner_of_exit
from harness.core.blame.rank_exit import RankExit
from harness.core.evidence.records import Exit
from harness.core.evidence.summary import Summary
from harness.core.evidence.text import ranks_text
from harness.recording.judged.recorded_calls import NOTHING_HEARD, rank_exits_of
from harness.recording.judged.stored_recording import Recording, exit_text, recorder_failure_text


def exits_of(recording: Recording, world: int) -> tuple[Exit, ...]:
    """Return the exit record of each of `world` ranks, the culprits blamed, with the reason."""
    rank_exits = rank_exits_of(recording, world)
    blame = blame_of(rank_exits)
    exits = []
    for rank_exit in rank_exits:
        exit_record = _exit(rank_exit, recording)
        if rank_exit.rank in blame.reasons:
            reason = blame.reasons[rank_exit.rank]
            exit_record = replace(exit_record, blamed=True, reason=reason, diverged=blame.diverged)
        exits.append(exit_record)
    return tuple(exits)


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


def _exit(rank_exit: RankExit, recording: Recording) -> Exit:
    """Return the exit record of a rank, without blame."""
    rank = rank_exit.rank
    left = recording.summaries.get(rank)
    if left is not None and left.progress.ended == "raised":
        return Exit(rank, "raised", 1, error=left.progress.error)
    how = manner_of_exit(rank_exit)
    if how == "raised":
        return Exit(rank, how, rank_exit.status, error=f"exited with code {rank_exit.status}")
    if how == "lost":
        return Exit(rank, how, error=rank_exit.launcher_trouble)
    if how == "ok":
        return Exit(rank, how, 0)
    signal = None if rank_exit.status is None else exit_text(rank_exit.status)
    error = rank_exit.kill_reason or _progress_text(left)
    if rank_exit.is_vanished:
        error = ", ".join(filter(None, (NOTHING_HEARD, _progress_text(left))))
    return Exit(rank, how, signal=signal, error=error, last_collective=_last_collective_text(rank, recording))


def _progress_text(left: Summary | None) -> str:
    return left.progress.reached.text if left is not None and left.progress.reached is not None else ""


def _last_collective_text(rank: int, recording: Recording) -> str:
    return recording.last[rank].text if rank in recording.last else ""
