"""Folders and files that the harness may replace: those that it wrote, in every entry.

A name that a person might choose as well (case.json, processes) proves nothing alone. So each entry below a folder must have a
name and a kind that the harness writes there, and the file that names the folder must have our text. A symbolic link is
never ours. Whatever lies in a trainer's own folders (checkpoints, exports) is ours if the launch listed it as it ended, or if
it is a file of torch's checkpoint format.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.core.evidence.reading import parse_json, read_bytes
from harness.core.evidence.store import CASE_FILE, EvidenceError, write_text

TRAINER_FILES = "trainer_files.json"
"""The name of the file that lists all files of the trainer itself. It lies beside the case."""


@dataclass(frozen=True)
class FolderKind:
    """The files and folders that a folder of one kind may hold, by paths relative to it."""

    files: re.Pattern[str]
    folders: re.Pattern[str]
    mark: str  # the file that names the folder
    keys: frozenset[str]  # of that file
    needs_mark: bool  # whether the folder is ours only with that file
    remedy: str


def any_pattern(*lines: str) -> re.Pattern[str]:
    """Return the pattern that matches whatever one of the lines matches."""
    return re.compile("|".join(lines))


_RANK = r"rank_\d+"
_HOST = r"[^/]+-\d+"
_LAUNCH = r"((unwatched/)?(run|repeat|saved_\d+)(/checkpoint)?|job_\d+)"
_LOGS = rf"{_LAUNCH}/logs/torchrun"
_SAVED = r"(unwatched/)?checkpoint"
_STEP = rf"{_SAVED}/(step[_-]\d+|iter_\d+)"
_JOB = r"(jobs/\d+/)?"

CASE_FOLDER = FolderKind(
    files=any_pattern(
        r"(case|traits|verdict|trainer_files)\.json|reference(_model_only)?\.npz|report\.txt|picture\.png",
        r"rank_\d+\.json|unable_\d+\.txt",  # a preflight's
        rf"{_LAUNCH}/((job|run|parameters|losses)\.json|store|checkpoint\.npz)",
        rf"{_LAUNCH}/(logs/({_RANK}|torchrun)\.log|(failures|exits)/{_RANK}\.json|stacks/{_RANK}\.txt)",
        rf"{_LAUNCH}/(inflight/{_RANK}\.(bin|groups)|ranks/{_RANK}\.(npz|started|fired|functions\.json))",
        rf"{_LOGS}/[^/]+/attempt_\d+/\d+/(stdout\.log|stderr\.log|error\.json)",
        rf"{_STEP}/(\.metadata|\.metadata\.tmp|__\d+_\d+\.distcp)",
    ),
    folders=any_pattern(
        r"unwatched",
        rf"{_LAUNCH}(/(logs|failures|exits|stacks|inflight|ranks|export))?",
        rf"{_LOGS}(/[^/]+(/attempt_\d+(/\d+)?)?)?",
        rf"{_SAVED}|{_STEP}",
    ),
    mark=CASE_FILE,
    keys=frozenset({"name", "dims", "model", "training", "features"}),
    needs_mark=True,
    remedy="choose another --out",
)
RECORDING_FOLDER = FolderKind(
    files=any_pattern(
        rf"recording\.json|{_RANK}\.log",  # the logs are a preflight's
        rf"{_JOB}processes/(job|\.{_HOST}|{_RANK}\.(\d+|ends|error|failed|unable))",
        rf"{_JOB}processes/{_HOST}\.(started|torch|called|failed|raised|launcher|ends|code)",
        rf"{_JOB}ranks/{_RANK}\.(record|sketches|last|beside)",
        rf"{_JOB}chrome/{_RANK}\.json\.gz",
    ),
    folders=any_pattern(rf"jobs(/\d+)?|{_JOB}(processes|ranks|chrome)"),
    mark="recording.json",
    keys=frozenset({"launch", "command", "code", "steps"}),
    needs_mark=False,
    remedy="choose another -o",
)
REFERENCE_FOLDER = FolderKind(
    files=any_pattern(
        r"((job|run|whole)\.json|store|(reference|weights)\.npz)",
        rf"logs/{_RANK}\.log|(failures|exits)/{_RANK}\.json|stacks/{_RANK}\.txt|inflight/{_RANK}\.(bin|groups)",
    ),
    folders=any_pattern("logs|failures|exits|stacks|inflight"),
    mark="job.json",
    keys=frozenset({"directory", "world_size", "entry"}),
    needs_mark=False,
    remedy="choose another --out",
)


def empty_own_folder(folder: Path, kind: FolderKind) -> Path:
    """Delete all entries of a folder, or make it, and return it. Raises EvidenceError, also for an entry that is not
    ours.

    Nothing is deleted if an entry is not ours, or if the folder is a symbolic link. The files that prove that the
    others are ours are deleted last: a process that is killed in between leaves a folder that the next one accepts.
    """
    try:
        if folder.is_symlink():
            raise EvidenceError(f"{folder}: a symbolic link, which is not replaced; name the folder itself")
        folder.mkdir(parents=True, exist_ok=True)
        refuse_foreign_entries(folder, kind)
        proofs = [folder / TRAINER_FILES, *folder.glob(f".{kind.mark}.*.partial"), folder / kind.mark]
        for path in folder.iterdir():
            if path not in proofs:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for path in proofs:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise EvidenceError(f"{folder}: cannot be written: {error.strerror}; {kind.remedy}") from error
    return folder


def refuse_foreign_entries(folder: Path, kind: FolderKind) -> None:
    """Raise EvidenceError with the name of the first entry that the harness does not write. Raises OSError as well."""
    if (foreign := foreign_entry(folder, kind)) is not None:
        raise EvidenceError(
            f"{folder}: holds {foreign}, which this harness did not write; nothing is deleted; {kind.remedy}"
        )


def foreign_entry(folder: Path, kind: FolderKind) -> str | None:
    """Return the first entry, relative to the folder, that is not ours; None where all are. Raises OSError.

    The file that names the folder is looked at first. Without it every entry is foreign, if the kind needs it.
    """
    mark = folder / kind.mark
    if os.path.lexists(mark) and not (is_plain_file(mark) and has_keys(_decoded_text(mark), kind.keys)):
        return kind.mark
    listed = _listed_trainer_paths(folder)
    for path, entry in entries_below(folder):
        name = path.relative_to(folder).as_posix()
        written_whole = re.sub(r"(^|/)\.([^/]+?)(\.\d+)?\.partial$", r"\1\2", name)
        if entry.is_dir(follow_symlinks=False):
            is_ours = bool(kind.folders.fullmatch(name)) or f"{name}/" in listed
        else:
            is_ours = entry.is_file(follow_symlinks=False) and (
                bool(kind.files.fullmatch(name) or kind.files.fullmatch(written_whole)) or name in listed
            )
        unnamed = kind.needs_mark and not mark.exists() and written_whole != kind.mark
        if not is_ours or unnamed:
            return name
    return None


def entries_below(folder: Path) -> Iterator[tuple[Path, os.DirEntry[str]]]:
    """Yield all that is below a folder, in the order of names. Symbolic links are not followed. Raises OSError."""
    with os.scandir(folder) as unordered:
        ordered = sorted(unordered, key=lambda entry: entry.name)
    for entry in ordered:
        yield Path(entry.path), entry
        if entry.is_dir(follow_symlinks=False):
            yield from entries_below(Path(entry.path))


def list_trainer_files(folder: Path) -> None:
    """Write the list of what the trainer wrote below a case's folder: checkpoints and exports. Raises EvidenceError.

    Without any, no list is written.
    """
    trainer_folders = [*folder.glob("checkpoint"), *folder.glob("*/export"), *folder.glob("unwatched/checkpoint")]
    trainer_folders += folder.glob("unwatched/*/export")
    listed = []
    for trainer_folder in trainer_folders:
        for path, entry in entries_below(trainer_folder):
            mark = "/" if entry.is_dir(follow_symlinks=False) else ""
            listed.append(path.relative_to(folder).as_posix() + mark)
    if listed:
        write_text(folder / TRAINER_FILES, json.dumps(sorted(listed), indent=1))


def _listed_trainer_paths(folder: Path) -> set[str]:
    """Return the list's paths that lie in a trainer's folder, whatever else a damaged list has.

    Empty without a list, and for one that cannot be read.
    """
    try:
        paths = parse_json(read_bytes(folder / TRAINER_FILES))
    except (OSError, ValueError):
        return set()
    if not isinstance(paths, list):
        return set()
    in_trainer_folder = any_pattern(r"(unwatched/)?checkpoint/.+", r"[^/]+/export/.+", r"unwatched/[^/]+/export(/.+)?")
    return {path for path in paths if isinstance(path, str) and in_trainer_folder.fullmatch(path)}


# ---- single files


def replace_own(path: Path, text: str, is_ours: Callable[[str], bool]) -> None:
    """Write a small text file, complete or not at all. Raises EvidenceError if a file that is not ours lies there."""
    refuse_foreign_file(path, is_ours)
    write_text(path, text)


def refuse_foreign_file(path: Path, is_ours: Callable[[str], bool]) -> None:
    """Raise EvidenceError if the path exists and is not a plain file of ours, by its text. An empty file may be
    replaced.
    """
    if not os.path.lexists(path):
        return
    try:
        text = _decoded_text(path) if is_plain_file(path) else None
    except OSError as error:
        raise EvidenceError(f"{path}: cannot be read: {error.strerror}; name another file") from error
    if text is None or (text and not is_ours(text)):
        raise EvidenceError(f"{path}: is there, and this harness did not write it; move it away, or name another")


def is_drawing(text: str) -> bool:
    """Return whether a file is a picture that matplotlib drew. text: the file's, however its bytes decode."""
    return text[1:4] == "PNG" and "Matplotlib version" in text[:500]


def is_plain_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def has_keys(text: str, keys: frozenset[str]) -> bool:
    """Return whether the text is a JSON object with all of these keys. False for a text that is no JSON."""
    value: Any = parse_json(text) if is_json(text) else None
    return isinstance(value, Mapping) and keys <= value.keys()


def is_json(text: str) -> bool:
    """Return whether the text is one whole JSON value."""
    try:
        parse_json(text)
    except ValueError:
        return False
    return True


def _decoded_text(path: Path) -> str:
    """Return the text of a file; bytes that are not UTF-8 are replaced. Raises OSError as read_bytes does."""
    return read_bytes(path).decode("utf-8", errors="replace")
