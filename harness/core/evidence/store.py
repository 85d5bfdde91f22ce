"""The files that a launch leaves, and the one error of all evidence that cannot be read or written.

A rank's evidence is one file, complete or absent: it is written under another name, flushed to disk and renamed. Its parts
carry checksums (zip), so damage is noticed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np

from harness.core.evidence.checkpoint_index import Checkpoint
from harness.core.evidence.codec import (
    ArraysWithoutValues,
    JoinedArrays,
    decode,
    decoded_without_values,
    encode,
    encoded_without_values,
    join_arrays,
)
from harness.core.evidence.format import OtherVersion, record_name, refuse_other_version, version_of
from harness.core.evidence.reading import MAX_FILE_BYTES, open_regular_file, parse_json, read_json
from harness.core.evidence.records import Exit, RankEvidence, Run
from harness.core.evidence.unsettled import with_settled_gradients
from harness.core.evidence.whole_file import open_whole_file

T = TypeVar("T")
RUN_AGAIN = "run the case again"
RECORD_AGAIN = "record the job again"
"""Remedies for files that `harness run` and `harness record` wrote."""


class EvidenceError(Exception):
    """An evidence file is missing, damaged or of another version. The message names the file, what is wrong, and the remedy."""


@contextlib.contextmanager
def reading_evidence(path: Path, remedy: str, *, missing: str = "") -> Iterator[None]:
    """Raise EvidenceError "PATH: what is wrong; remedy" instead of whatever reading this file in the block raises.

    An EvidenceError stays as it is. missing: the remedy where there is no such file, if it is another one.
    """
    try:
        yield
    except EvidenceError:
        raise
    except OtherVersion as error:
        raise EvidenceError(f"{path}: {error}; {remedy}") from error
    except FileNotFoundError as error:
        raise EvidenceError(f"{path}: no such file; {missing or remedy}") from error
    except Exception as error:  # one flipped byte makes zipfile, zlib, json and numpy raise almost anything
        reason = str(error) if isinstance(error, (OSError, ValueError)) else repr(error)
        raise EvidenceError(f"{path}: damaged ({reason}); {remedy}") from error


@contextlib.contextmanager
def _open_evidence_to_write(path: Path) -> Iterator[BinaryIO]:
    """Open a file to write it, complete or not at all. Raises EvidenceError where that fails."""
    try:
        with open_whole_file(path) as file:
            yield file
    except OSError as error:
        reason = error.strerror or error
        raise EvidenceError(f"{path}: cannot be written: {reason}; free the disk or choose another --out") from error


def save_stored(path: Path, record: Any) -> None:
    """Write any of the records (or another dataclass of plain values and arrays): complete or not at all.

    Raises EvidenceError, also for a record that is too large to be read again.
    """
    arrays: list[np.ndarray] = []
    kind = type(record)
    header = json.dumps({"format": version_of(kind), "type": record_name(kind), "record": encode(record, arrays)})
    if len(header) > MAX_FILE_BYTES:
        raise EvidenceError(
            f"{path}: {len(header)} bytes of records, at most {MAX_FILE_BYTES} are read; train fewer steps"
        )
    with _open_evidence_to_write(path) as file:
        np.savez(file, header=np.frombuffer(header.encode(), np.uint8), blob=join_arrays(arrays))


def load_stored(path: Path, kind: type[T], *, values: bool = True) -> T:
    """Read a record that save_stored wrote; without values arrays have their shapes alone.

    Raises EvidenceError for any other file.
    """
    with reading_evidence(path, RUN_AGAIN), open_regular_file(path) as file:
        _refuse_compressed_parts(file)
        with np.load(file, allow_pickle=False) as parts:
            header = parse_json(parts["header"].tobytes())
            arrays = JoinedArrays(parts["blob"].tobytes()) if values else ArraysWithoutValues()
        if header["type"] != record_name(kind):
            raise EvidenceError(f"{path}: holds {header['type']}, expected {record_name(kind)}; {RUN_AGAIN}")
        refuse_other_version(header["format"], kind)
        return decode(kind, header["record"], arrays)


def _refuse_compressed_parts(file: BinaryIO) -> None:
    """Raise ValueError for a zip file with compressed parts, which could hold far more than its size.

    This harness compresses none. The file is at its start afterwards.
    """
    with zipfile.ZipFile(file) as parts:
        for part in parts.filelist:
            if part.compress_type != zipfile.ZIP_STORED or part.file_size > part.compress_size:
                raise ValueError("its parts are compressed")
    file.seek(0)


RUN_FILE = "run.json"
CASE_FILE = "case.json"
TRAITS_FILE = "traits.json"
CHECKPOINT_FILE = "checkpoint.npz"


def save_run(run: Run) -> None:
    """Write run.json: the part of a Run that is not in the ranks' own files. Raises EvidenceError."""
    record: dict[str, Any] = {"format": version_of(Exit), "world_size": run.world_size}
    record |= {"seconds": run.seconds, "fault": run.fault, "trainer": run.trainer, "made": run.made}
    record["exits"] = [encoded_without_values(exit) for exit in run.exits]
    write_text(Path(run.directory) / RUN_FILE, json.dumps(record, indent=1))


def load_run(directory: Path, *, values: bool = True) -> Run:
    """Read a stored launch; values: as in `load_stored`. Raises EvidenceError.

    A rank file that is damaged or missing is not fatal: `unreadable` has the reason, and checks judge it.
    """
    path = directory / RUN_FILE
    missing = "`harness check` wants the folder that `harness run` wrote"
    if directory.exists():
        missing = f"this launch did not end, or still runs; {RUN_AGAIN}"
    if (directory / "run" / RUN_FILE).exists():
        missing = f"the launch is in {directory / 'run'}"
    with reading_evidence(path, RUN_AGAIN, missing=missing):
        record = read_json(path)
        refuse_other_version(record["format"], Exit)
        exits = tuple(decoded_without_values(Exit, exit) for exit in record["exits"])
        if len(exits) != record["world_size"]:
            raise ValueError(f"exits of {len(exits)} ranks, world_size {record['world_size']!r}")
        run = Run(str(directory), len(exits), exits, {}, record["seconds"], fault=record["fault"])
        run = dataclasses.replace(run, trainer=record.get("trainer", run.trainer), made=record.get("made", run.made))
    for rank in range(run.world_size):
        if not evidence_file(directory, rank).exists():
            continue
        try:
            run.ranks[rank] = _refuse_other_launch(
                run, load_stored(evidence_file(directory, rank), RankEvidence, values=values)
            )
        except EvidenceError as error:
            run.unreadable[rank] = str(error)
    run.ranks.update(with_settled_gradients(run.ranks))
    if (directory / CHECKPOINT_FILE).exists():
        run = dataclasses.replace(run, checkpoint=load_stored(directory / CHECKPOINT_FILE, Checkpoint))
    return run


def _refuse_other_launch(run: Run, evidence: RankEvidence) -> RankEvidence:
    """Return the evidence. Raises EvidenceError if it is of another launch: copied there, or left by one that was killed."""
    if evidence.launch != run.made.get("launch", ""):
        ids = f"{evidence.launch or 'none'}, and run.json of {run.made.get('launch') or 'none'}"
        path = evidence_file(Path(run.directory), evidence.rank)
        raise EvidenceError(f"{path}: belongs to another launch (it is of {ids}); {RUN_AGAIN}")
    return evidence


def evidence_file(directory: Path, rank: int) -> Path:
    """Return the file of a rank's evidence: ranks/rank_00.npz below the launch's folder."""
    return directory / "ranks" / f"rank_{rank:02d}.npz"


def write_text(path: Path, text: str) -> None:
    """Write a small text file, complete or not at all. Raises EvidenceError."""
    with _open_evidence_to_write(path) as file:
        file.write(text.encode())
