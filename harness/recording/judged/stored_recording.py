"""Reader of a recording's folder: summaries of its ranks, and how the command and each process ended."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.core.evidence.codec import decoded_without_values
from harness.core.evidence.keys import ranks_from_key
from harness.core.evidence.lost_peer import is_lost_peer_error
from harness.core.evidence.provided import RECORDED, Provided
from harness.core.evidence.reading import read_json
from harness.core.evidence.recording import (
    BESIDE_SUFFIX,
    MAX_RANGE,
    SECOND_PART_OFFSET,
    Beside,
    Last,
    Reached,
    load_summary,
    record_file,
)
from harness.core.evidence.store import RECORD_AGAIN, EvidenceError, reading_evidence
from harness.core.evidence.summary import Summary
from harness.recording.folders import JOB_FILE, JOBS_FOLDER, job_folders
from harness.recording.injection import PROCESSES_FOLDER

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

    @functools.cached_property
    def has_raised(self) -> bool:
        """Whether a rank raised an error of its own, and not of a peer that it had lost."""
        return any(
            summary.progress.ended == "raised" and not is_lost_peer_error(summary.progress.error)
            for summary in self.summaries.values()
        )

    @property
    def is_one_of_several(self) -> bool:
        """Whether the command has other jobs with rank numbers of their own."""
        return bool(self.others) or self.directory.parent.name == JOBS_FOLDER

    @property
    def world(self) -> int:
        """Return the world size of its ranks, else the requested one."""
        sizes = [summary.world for summary in self.summaries.values()]
        return max(sizes, default=self.requested or 0)


def holds_recording(directory: Path) -> bool:
    """Return whether a recording, or one job of a recording, lies there. It may be damaged, or of no rank."""
    return bool(_rank_files(directory)) or (_command_folder(directory) / STARTED).exists()


def _rank_files(directory: Path) -> list[Path]:
    """Return the files of ranks' records, in the order of ranks. Empty without any."""
    return sorted((directory / "ranks").glob("rank_*.record"))


def _command_folder(directory: Path) -> Path:
    """Return the folder of all jobs of the command: that of the recording, for a folder of one of several jobs."""
    return directory.parent.parent if directory.parent.name == JOBS_FOLDER else directory


def load_recording(directory: Path) -> Recording:
    """Return the recording of a folder, with the other jobs of its command. Raises EvidenceError where nothing was
    recorded.

    A rank's file that cannot be read, or is of another launch, is in `unreadable`. Raises EvidenceError for other files
    that are damaged.
    """
    files = _rank_files(directory)
    whole = _command_folder(directory)
    command_info = load_command_info(whole)
    if not files and not command_info:
        raise EvidenceError(f"{directory}: no recording; `harness record -o {directory} -- COMMAND` makes one")
    summaries: dict[int, Summary] = {}
    unreadable = {}
    launch = ""
    for file in files:
        try:
            summary = load_summary(file, Summary)
            if not 0 <= summary.rank < summary.world <= MAX_RANGE or file != record_file(directory, summary.rank):
                raise EvidenceError(f"{file}: damaged: rank {summary.rank} of {summary.world}; {RECORD_AGAIN}")
            launch = command_info.get("launch", launch or summary.environment.launch)
            if summary.environment.launch != launch:
                ids = f"{summary.environment.launch or 'none'}, the recording is {launch or 'none'}"
                raise EvidenceError(f"{file}: belongs to another recording (it is of {ids}); {RECORD_AGAIN}")
            summaries[summary.rank] = _with_last_state(directory, summary)
        except EvidenceError as error:
            unreadable[int(file.stem.removeprefix("rank_"))] = str(error)
    lasts = {}
    for rank, summary in summaries.items():
        if not summary.progress.ended and (last := _load_last(directory, summary)):
            lasts[rank] = last
    return Recording(
        directory,
        summaries,
        command=command_info.get("command", ""),
        code=command_info.get("code"),
        requested=command_info.get("ranks"),
        nothing=command_info.get("nothing", ""),
        last=lasts,
        unreadable=unreadable,
        exits=_load_exits(directory, whole),
        same_as=command_info.get("same_as", "") if directory == whole else "",
        after=command_info.get("after", 0) if directory == whole else 0,
        job=_job_words(directory),
        others=tuple(load_recording(folder) for folder in _folders_of_jobs(whole)[1:]) if directory == whole else (),
    )


def unrecorded_model_text(summaries: Iterable[Summary]) -> str:
    """Return which model, or the beginning of which, is not on record, of the first such rank; empty if all are."""
    for summary in summaries:
        if summary.recorder.left_out:
            return f"not recorded: {summary.recorder.left_out[0]}"
    return ""


def recorder_failure_text(summaries: Iterable[Summary]) -> str:
    """Return where the recorder itself raised, and what, of the first such rank; empty if nowhere."""
    for summary in summaries:
        if summary.recorder.failed:
            return f"rank {summary.rank} is not recorded to its end: {summary.recorder.failed[0]}"
    return ""


def exit_text(code: int) -> str:
    """Return an exit code in words: "exit code 1"; for minus a signal its name, "SIGTERM", or "signal 99" if it has
    none.
    """
    if code >= 0:
        return f"exit code {code}"
    return signal.Signals(-code).name if -code in [*signal.Signals] else f"signal {-code}"


def is_ended_by_launcher(recording: Recording, rank: int) -> bool:
    """Return whether a rank died by SIGTERM, which launchers send to all others where one did not end well, and one did
    not.
    """
    others = any(code not in (0, -signal.SIGTERM) for code in recording.exits.values())
    raised = any(summary.progress.ended == "raised" for summary in recording.summaries.values())
    return recording.exits.get(rank) == -signal.SIGTERM and (others or raised)


def _folders_of_jobs(whole: Path) -> list[Path]:
    """Return the folders of all jobs of a command: `whole` itself first, then those that exist."""
    return list(itertools.takewhile(lambda folder: folder == whole or folder.exists(), job_folders(whole)))


def _job_words(directory: Path) -> str:
    """Return the words that a job's processes have in common; empty without a file that says them."""
    file = directory / PROCESSES_FOLDER / JOB_FILE
    return file.read_text(encoding="utf-8") if file.exists() else ""


def _load_exits(directory: Path, whole: Path) -> dict[int, int]:
    """Return, by rank, the exit code that it left as it ended, or that the launcher or parent wrote that waited for it.

    Ranks of which none says are left out. Where there are several jobs, a launcher's report counts for its own ranks
    alone. Raises EvidenceError for a damaged file.
    """
    processes = _processes_of_ranks(directory / PROCESSES_FOLDER)
    several = len(_folders_of_jobs(whole)) > 1
    exits = _exits_of_children(processes, whole / PROCESSES_FOLDER)
    for file in sorted({*(directory / PROCESSES_FOLDER).glob("*.ends"), *(whole / PROCESSES_FOLDER).glob("*.ends")}):
        if file.parent.parent != directory and file.name.startswith("rank_"):
            continue
        with reading_evidence(file, RECORD_AGAIN):
            codes = {int(rank): int(code) for rank, code in read_json(file).items()}
        own = not several or file.name.startswith("rank_")
        for rank, code in codes.items():
            if own or processes.get(rank, ("", ""))[1] == file.stem:
                exits[rank] = code
    return exits


def _processes_of_ranks(folder: Path) -> dict[int, tuple[str, str]]:
    """Return, by rank, its process and the one that started it, as HOST-PID. A restarted rank has its last process.

    Raises EvidenceError for a damaged file.
    """
    processes = {}
    files = (file for file in folder.glob("rank_*.*") if file.suffix[1:].isdecimal())
    for file in sorted(files, key=lambda file: int(file.suffix[1:])):
        with reading_evidence(file, RECORD_AGAIN):
            claim = read_json(file)
            own_and_parent = (f"{claim['host']}-{claim['pid']}", f"{claim['host']}-{claim['parent']}")
        processes[int(file.stem.removeprefix("rank_"))] = own_and_parent
    return processes


def _exits_of_children(processes: dict[int, tuple[str, str]], folder: Path) -> dict[int, int]:
    """Return, by rank, the exit code of a process that multiprocessing started and waited for. Others are left out."""
    exits = {}
    for rank, (process, _) in processes.items():
        with contextlib.suppress(
            FileNotFoundError, ValueError
        ):  # its process was not waited for, or the file is not complete
            exits[rank] = int((folder / f"{process}.code").read_text())
    return exits


def load_command_info(directory: Path) -> dict[str, Any]:
    """Return what recording.json says of the command: launch, command, ranks, code, same_as, after, nothing, as far as
    known.

    Empty without that file. Raises EvidenceError for a damaged one.
    """
    file = directory / STARTED
    if not file.exists():
        return {}
    with reading_evidence(file, RECORD_AGAIN):
        return read_json(file)


def _with_last_state(directory: Path, summary: Summary) -> Summary:
    """Return the summary with what a rank left later than its record. One of a rank that ended by itself is returned
    unchanged.

    This is the error with which os._exit was called, how far it came, and what other threads issued meanwhile. Where it
    did not write how far it came, or half of it, the record's stays. Raises EvidenceError if what it left of threads is
    damaged.
    """
    if summary.progress.ended:
        return summary
    beside = summary.groups.beside or _load_beside(record_file(directory, summary.rank))
    error_file = directory / PROCESSES_FOLDER / f"rank_{summary.rank:05d}.error"
    reached = summary.progress.reached
    with contextlib.suppress(OSError, ValueError, TypeError):  # it was killed before it wrote, or as it did
        reached = Reached(*json.loads(_last_page(directory, summary)[SECOND_PART_OFFSET:].split(b"\n")[0]))
    progress = replace(summary.progress, reached=reached)
    if error_file.exists():
        progress = replace(progress, ended="raised", error=error_file.read_text())
    return replace(summary, progress=progress, groups=replace(summary.groups, beside=beside))


def _last_page(directory: Path, summary: Summary) -> bytes:
    """Return the bytes of the page that a running process maps. Raises OSError without it."""
    return (directory / "ranks" / f"rank_{summary.rank:05d}.last").read_bytes()


def _load_beside(file: Path) -> tuple[Beside, ...]:
    """Return what a killed process left of threads that issued over one group; empty if it left nothing.

    file: its record. Raises EvidenceError if what it left is damaged.
    """
    beside_file = file.with_suffix(BESIDE_SUFFIX)
    if not beside_file.exists():
        return ()
    with reading_evidence(beside_file, RECORD_AGAIN):
        return decoded_without_values(tuple[Beside, ...], read_json(beside_file))


def _load_last(directory: Path, summary: Summary) -> Last | None:
    """Return the last collective of a killed process, as it left it later than its record.

    If that cannot be read, it is the one of its record, or None if that has none.
    """
    try:
        first_line = _last_page(directory, summary)[:SECOND_PART_OFFSET].split(b"\n")[0]
        text, group, number, before, *elsewhere = json.loads(first_line)
    except (OSError, ValueError):  # it had not got so far, or was killed as it wrote
        return summary.progress.last
    ranks = next((issued.ranks for issued in summary.groups.issued if issued.group == group), "")
    return Last(text, ranks_from_key(ranks), group, number, tuple(before), *elsewhere)
