"""A recording, read: its ranks' summaries, and what the command became of."""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.core.evidence.keys import ranks_of
from harness.core.evidence.provided import RECORDED, Provided
from harness.core.evidence.reading import read_json
from harness.core.evidence.recording import (
    BESIDE,
    RANKS,
    SECOND_PART,
    Beside,
    Last,
    Reached,
    load_summary,
    record_file,
)
from harness.core.evidence.store import EvidenceError, decoded_without_values
from harness.core.evidence.summary import Summary
from harness.recording.folders import JOB, JOBS, job_folders
from harness.recording.injection import PROCESSES

STARTED = "recording.json"


@dataclass(frozen=True)
class Recording:
    """What the ranks of one job left."""

    directory: Path
    """Folder of the recording."""
    summaries: dict[int, Summary]
    """Rank that left a record -> its summary."""
    command: str = ""
    """Command line that was recorded."""
    code: int | None = None
    """Exit code of the command; None while it is not known."""
    requested: int | None = None
    """Number of ranks that the command says it starts; None where it does not say."""
    nothing: str = ""
    """Reason why no rank left evidence; empty where one did."""
    last: dict[int, Last] = field(default_factory=dict)
    """Rank that was killed -> the last collective that it issued."""
    unreadable: dict[int, str] = field(default_factory=dict)
    """Rank -> why its file cannot be read."""
    exits: dict[int, int] = field(default_factory=dict)
    """Rank -> the exit code of its process, or minus the signal that ended it, where it was reported."""
    same_as: str = ""
    """Folder of the recording of the same training that judges its numbers, where one was named; empty where none was."""
    after: int = 0
    """Step of that recording from whose checkpoint this job went on; 0 if it began anew."""
    job: str = ""
    """Words that its processes have in common, such as a replica group's id."""
    provides: Provided = RECORDED
    """What this kind of evidence provides to checks."""
    chosen: tuple[int, ...] = ()
    """Ranks of which there is evidence, where it was not to be expected of all; empty where it was."""
    others: tuple[Recording, ...] = ()
    """Jobs of the same command that have rank numbers of their own, such as replica groups."""

    @property
    def jobs(self) -> tuple[Recording, ...]:
        """All jobs of the command, this one first."""
        return (self, *self.others)

    @property
    def is_one_of_several(self) -> bool:
        """Whether the command has other jobs with rank numbers of their own."""
        return bool(self.others) or self.directory.parent.name == JOBS

    @property
    def world(self) -> int:
        """Return the world size of its ranks, else the requested one."""
        sizes = [one.world for one in self.summaries.values()]
        return max(sizes, default=self.requested or 0)


def holds_recording(directory: Path) -> bool:
    """Return whether a recording, or one job of a recording, lies there. It may be damaged."""
    return bool(_rank_files(directory)) or (_whole(directory) / STARTED).exists()


def _rank_files(directory: Path) -> list[Path]:
    return sorted((directory / "ranks").glob("rank_*.record"))


def _whole(directory: Path) -> Path:
    """Return the folder of all jobs of the command."""
    return directory.parent.parent if directory.parent.name == JOBS else directory


def load_recording(directory: Path) -> Recording:
    """Raises EvidenceError where nothing was recorded."""
    files, whole = _rank_files(directory), _whole(directory)
    told = started(whole)
    if not files and not told:
        raise EvidenceError(f"{directory}: no recording; `harness record -o {directory} -- COMMAND` makes one")
    summaries, unreadable, launch = {}, {}, ""
    for file in files:
        try:
            one = load_summary(file, Summary)
            if not 0 <= one.rank < one.world <= RANKS or file != record_file(directory, one.rank):
                raise EvidenceError(f"{file}: damaged: rank {one.rank} of {one.world}; record the job again")
            if one.environment.launch != (launch := told.get("launch", launch or one.environment.launch)):
                ids = f"{one.environment.launch or 'none'}, the recording is {launch or 'none'}"
                raise EvidenceError(f"{file}: belongs to another recording (it is of {ids}); record the job again")
            summaries[one.rank] = _as_it_ended(directory, one)
        except EvidenceError as error:
            unreadable[int(file.stem.removeprefix("rank_"))] = str(error)
    last = {
        rank: found for rank, one in summaries.items() if not one.progress.ended and (found := _trace(directory, one))
    }
    return Recording(
        directory,
        summaries,
        command=told.get("command", ""),
        code=told.get("code"),
        requested=told.get("ranks"),
        nothing=told.get("nothing", ""),
        last=last,
        unreadable=unreadable,
        exits=_exits(directory, whole),
        same_as=told.get("same_as", "") if directory == whole else "",
        after=told.get("after", 0) if directory == whole else 0,
        job=_job(directory),
        others=tuple(load_recording(folder) for folder in _folders(whole)[1:]) if directory == whole else (),
    )


def not_recorded(summaries: Iterable[Summary]) -> str:
    """Which models, or the beginning of which, are not on record; empty if all are."""
    return next((f"not recorded: {one.recorder.left_out[0]}" for one in summaries if one.recorder.left_out), "")


def recorder_failed(summaries: Iterable[Summary]) -> str:
    """Say where the recorder itself raised, and what; empty if nowhere."""
    return next(
        (
            f"rank {one.rank} is not recorded to its end: {one.recorder.failed[0]}"
            for one in summaries
            if one.recorder.failed
        ),
        "",
    )


def exit_text(code: int) -> str:
    """Name an exit code, or minus the signal."""
    if code >= 0:
        return f"exit code {code}"
    return signal.Signals(-code).name if -code in [*signal.Signals] else f"signal {-code}"


def only_waited(recording: Recording, rank: int) -> bool:
    """Whether it died by the signal that launchers send to all others where one did not end well, and there is one."""
    others = any(code not in (0, -signal.SIGTERM) for code in recording.exits.values())
    raised = any(one.progress.ended == "raised" for one in recording.summaries.values())
    return recording.exits.get(rank) == -signal.SIGTERM and (others or raised)


def _folders(whole: Path) -> list[Path]:
    """Return the folders of all its jobs."""
    return list(itertools.takewhile(lambda folder: folder == whole or folder.exists(), job_folders(whole)))


def _job(directory: Path) -> str:
    file = directory / PROCESSES / JOB
    return file.read_text(encoding="utf-8") if file.exists() else ""


def _exits(directory: Path, whole: Path) -> dict[int, int]:
    """What ranks left as they ended, and the launchers and parents that waited for them: where there are several jobs, its own
    one."""
    claims, several = _claims(directory / PROCESSES), len(_folders(whole)) > 1
    found = _exits_of_children(claims, whole / PROCESSES)
    for file in sorted({*(directory / PROCESSES).glob("*.ends"), *(whole / PROCESSES).glob("*.ends")}):
        if file.parent.parent != directory and file.name.startswith("rank_"):
            continue
        try:
            ended = {int(rank): int(code) for rank, code in read_json(file).items()}
        except (OSError, ValueError) as error:
            raise EvidenceError(f"{file}: damaged ({error}); record the job again") from error
        own = not several or file.name.startswith("rank_")
        found |= {rank: code for rank, code in ended.items() if own or claims.get(rank, ("", ""))[1] == file.stem}
    return found


def _claims(folder: Path) -> dict[int, tuple[str, str]]:
    """Return, by rank, its process and the one that started it, as HOST-PID. A restarted rank has its last process."""
    found = {}
    files = (file for file in folder.glob("rank_*.*") if file.suffix[1:].isdecimal())
    for file in sorted(files, key=lambda file: int(file.suffix[1:])):
        try:
            told = read_json(file)
            its = (f"{told['host']}-{told['pid']}", f"{told['host']}-{told['parent']}")
        except (OSError, ValueError, KeyError) as error:
            raise EvidenceError(f"{file}: damaged ({error}); record the job again") from error
        found[int(file.stem.removeprefix("rank_"))] = its
    return found


def _exits_of_children(claims: dict[int, tuple[str, str]], folder: Path) -> dict[int, int]:
    """Return the exit codes of ranks that multiprocessing started."""
    found = {}
    for rank, (process, _) in claims.items():
        with contextlib.suppress(
            FileNotFoundError, ValueError
        ):  # its process was not waited for, or the file is not complete
            found[rank] = int((folder / f"{process}.code").read_text())
    return found


def started(directory: Path) -> dict[str, Any]:
    """Return what the command was started with; empty where nothing says. Raises EvidenceError."""
    try:
        return read_json(directory / STARTED)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise EvidenceError(f"{directory / STARTED}: damaged ({error}); record the job again") from error


def _as_it_ended(directory: Path, one: Summary) -> Summary:
    """With what a rank left later than its record: the error with which os._exit was called, how far it came, and
    what other threads issued meanwhile."""
    if one.progress.ended:
        return one
    beside = one.groups.beside or _beside(record_file(directory, one.rank))
    error, reached = directory / PROCESSES / f"rank_{one.rank:05d}.error", one.progress.reached
    with contextlib.suppress(OSError, ValueError, TypeError):  # it was killed before it wrote, or as it did
        reached = Reached(*json.loads(_page(directory, one)[SECOND_PART:].split(b"\n")[0]))
    progress = replace(one.progress, reached=reached)
    if error.exists():
        progress = replace(progress, ended="raised", error=error.read_text())
    return replace(one, progress=progress, groups=replace(one.groups, beside=beside))


def _page(directory: Path, one: Summary) -> bytes:
    return (directory / "ranks" / f"rank_{one.rank:05d}.last").read_bytes()


def _beside(file: Path) -> tuple[Beside, ...]:
    """What a killed process left of threads that issued over one group."""
    try:
        return decoded_without_values(tuple[Beside, ...], read_json(file.with_suffix(BESIDE)))
    except FileNotFoundError:
        return ()
    except Exception as error:
        raise EvidenceError(f"{file.with_suffix(BESIDE)}: damaged ({error}); record the job again") from error


def _trace(directory: Path, one: Summary) -> Last | None:
    """What a killed process left of its last collective, later than its record."""
    try:
        text, group, place, before, *elsewhere = json.loads(_page(directory, one)[:SECOND_PART].split(b"\n")[0])
    except (OSError, ValueError):  # it had not got so far, or was killed as it wrote
        return one.progress.last
    ranks = next((i.ranks for i in one.groups.issued if i.group == group), "")
    return Last(text, ranks_of(ranks), group, place, tuple(before), *elsewhere)
