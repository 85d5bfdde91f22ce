"""A recording, read: its ranks' summaries, and what the command became of."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.evidence.keys import ranks_of
from harness.evidence.reading import read_json
from harness.evidence.recording import RANKS, SECOND_PART, Last, Reached, load_summary, record_file
from harness.evidence.store import EvidenceError
from harness.evidence.summary import Summary
from harness.record.injection import PROCESSES

STARTED = "recording.json"


@dataclass(frozen=True)
class Recording:
    """requested: how many ranks the command says that it starts, None where it does not say. code: of its exit, None while
    nobody knows. nothing: why no rank left evidence. last: of ranks that were killed, the last collective. unreadable: why.
    exits: by rank the exit code of its process, or minus the signal that ended it, where somebody told."""

    directory: Path
    summaries: dict[int, Summary]
    command: str = ""
    code: int | None = None
    requested: int | None = None
    nothing: str = ""
    last: dict[int, Last] = field(default_factory=dict)
    unreadable: dict[int, str] = field(default_factory=dict)
    exits: dict[int, int] = field(default_factory=dict)

    @property
    def world(self) -> int:
        """As most ranks say; else as requested."""
        sizes = [one.world for one in self.summaries.values()]
        return max(sizes, default=self.requested or 0)


def load_recording(directory: Path) -> Recording:
    """Raises EvidenceError where nothing was recorded."""
    files = sorted((directory / "ranks").glob("rank_*.record"))
    told = _started(directory)
    if not files and not told:
        raise EvidenceError(f"{directory}: no recording; `harness record -o {directory} -- COMMAND` makes one")
    summaries, unreadable, launch = {}, {}, ""
    for file in files:
        try:
            one = load_summary(file, Summary)
            if not 0 <= one.rank < one.world <= RANKS or file != record_file(directory, one.rank):
                raise EvidenceError(f"{file}: damaged: rank {one.rank} of {one.world}; record the job again")
            if one.launch != (launch := told.get("launch", launch or one.launch)):
                ids = f"{one.launch or 'none'}, the recording is {launch or 'none'}"
                raise EvidenceError(f"{file}: belongs to another recording (it is of {ids}); record the job again")
            summaries[one.rank] = _as_it_ended(directory, one)
        except EvidenceError as error:
            unreadable[int(file.stem.removeprefix("rank_"))] = str(error)
    last = {rank: found for rank, one in summaries.items() if not one.ended and (found := _trace(directory, one))}
    return Recording(
        directory,
        summaries,
        command=told.get("command", ""),
        code=told.get("code"),
        requested=told.get("ranks"),
        nothing=told.get("nothing", ""),
        last=last,
        unreadable=unreadable,
        exits=_exits(directory / PROCESSES),
    )


def not_recorded(summaries: Iterable[Summary]) -> str:
    """Which models, or the beginning of which, are not on record; empty if all are."""
    return next((f"not recorded: {one.left_out[0]}" for one in summaries if one.left_out), "")


def recorder_failed(summaries: Iterable[Summary]) -> str:
    """Where the recorder itself raised, and what; empty if nowhere."""
    return next((f"rank {one.rank} is not recorded to its end: {one.failed[0]}" for one in summaries if one.failed), "")


def exit_text(code: int) -> str:
    """Of an exit code, or of minus the signal."""
    if code >= 0:
        return f"exit code {code}"
    return signal.Signals(-code).name if -code in [*signal.Signals] else f"signal {-code}"


def only_waited(recording: Recording, rank: int) -> bool:
    """Whether it died by the signal that launchers send to all others where one did not end well, and there is one."""
    others = any(code not in (0, -signal.SIGTERM) for code in recording.exits.values())
    raised = any(one.ended == "raised" for one in recording.summaries.values())
    return recording.exits.get(rank) == -signal.SIGTERM and (others or raised)


def _exits(folder: Path) -> dict[int, int]:
    """What ranks left as they ended, and the launchers and parents that waited for them."""
    found = _exits_of_children(folder)
    for file in sorted(folder.glob("*.ends")):
        try:
            found |= {int(rank): int(code) for rank, code in read_json(file).items()}
        except (OSError, ValueError) as error:
            raise EvidenceError(f"{file}: damaged ({error}); record the job again") from error
    return found


def _exits_of_children(folder: Path) -> dict[int, int]:
    """Of ranks that multiprocessing started. After a restart the last process is the rank's."""
    found = {}
    claims = (file for file in folder.glob("rank_*.*") if file.suffix[1:].isdecimal())
    for file in sorted(claims, key=lambda file: int(file.suffix[1:])):
        rank = int(file.stem.removeprefix("rank_"))
        try:
            found[rank] = int((folder / f"{file.read_text()}.code").read_text())
        except (OSError, ValueError):  # nobody waited for it
            found.pop(rank, None)
    return found


def _started(directory: Path) -> dict[str, Any]:
    try:
        return read_json(directory / STARTED)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise EvidenceError(f"{directory / STARTED}: damaged ({error}); record the job again") from error


def _as_it_ended(directory: Path, one: Summary) -> Summary:
    """With what a rank left later than its record: the error with which os._exit was called, and how far it came."""
    if one.ended:
        return one
    error, reached = directory / PROCESSES / f"rank_{one.rank:05d}.error", one.reached
    with contextlib.suppress(OSError, ValueError, TypeError):  # it was killed before it wrote, or as it did
        reached = Reached(*json.loads(_page(directory, one)[SECOND_PART:].split(b"\n")[0]))
    one = replace(one, reached=reached)
    return replace(one, ended="raised", error=error.read_text()) if error.exists() else one


def _page(directory: Path, one: Summary) -> bytes:
    return (directory / "ranks" / f"rank_{one.rank:05d}.last").read_bytes()


def _trace(directory: Path, one: Summary) -> Last | None:
    """What a killed process left of its last collective, later than its record."""
    try:
        op, group, place, step, phase = json.loads(_page(directory, one)[:SECOND_PART].split(b"\n")[0])
    except (OSError, ValueError):  # it had not got so far, or was killed as it wrote
        return one.last
    ranks = next((i.ranks for i in one.issued if i.group == group), "")
    return Last(f"{op} in step {step}, {phase}", ranks_of(ranks), group, place)
