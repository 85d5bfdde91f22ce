"""The records a rank leaves behind, and how they are saved and loaded.

Every record is a frozen dataclass of plain values; arrays are numpy. A rank's evidence is one file, complete or absent:
it is written under another name, flushed to disk and renamed. Its parts carry checksums (zip), so damage is noticed.

bfloat16 has no numpy dtype: such values are stored as float32, which holds every bfloat16 exactly; the field `dtype`
keeps the true one.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np

from harness.core.evidence.checkpoint_index import Checkpoint
from harness.core.evidence.format import (
    field_name,
    is_inlined,
    other_version_text,
    record_name,
    stored_items,
    version_of,
)
from harness.core.evidence.reading import MAX_FILE_BYTES, open_regular_file, parse_json, read_json
from harness.core.evidence.records import Exit, RankEvidence, Run
from harness.core.evidence.unsettled import with_settled_gradients
from harness.core.evidence.whole_file import open_whole_file

T = TypeVar("T")


class EvidenceError(Exception):
    """An evidence file is missing, damaged or of another version. The message names the file and the remedy."""


def save_stored(path: Path, record: Any) -> None:
    """Write any of the records (or another dataclass of plain values and arrays): complete or not at all.

    Raises EvidenceError.
    """
    arrays: list[np.ndarray] = []
    kind = type(record)
    header = json.dumps({"format": version_of(kind), "type": record_name(kind), "record": _encode(record, arrays)})
    if len(header) > MAX_FILE_BYTES:
        raise EvidenceError(
            f"{path}: {len(header)} bytes of records, at most {MAX_FILE_BYTES} are read; train fewer steps"
        )
    try:
        with open_whole_file(path) as file:
            np.savez(file, header=np.frombuffer(header.encode(), np.uint8), blob=_join_arrays(arrays))
    except OSError as error:
        raise EvidenceError(_unwritable_text(path, error)) from error


def load_stored(path: Path, kind: type[T], *, values: bool = True) -> T:
    """Read a record that save_stored wrote; without values arrays have their shapes alone.

    Raises EvidenceError for any other file.
    """
    try:
        with open_regular_file(path) as file:
            _refuse_compressed_parts(file)
            with np.load(file, allow_pickle=False) as parts:
                header = parse_json(parts["header"].tobytes())
                blob = parts["blob"].tobytes() if values else None
        stored_name = str(header["type"])
        version_problem = other_version_text(str(header["format"]), kind)
        arrays = _NoValues() if blob is None else _Blob(blob)
        read: Callable[[Any, _Blob | _NoValues], T] = _reader(kind)  # type: ignore[arg-type]
        is_readable = stored_name == record_name(kind) and not version_problem
        record = read(header["record"], arrays) if is_readable else None
    except FileNotFoundError as error:
        raise EvidenceError(f"{path}: no such evidence; run the case again") from error
    except Exception as error:  # one flipped byte makes zipfile and numpy raise almost anything
        raise EvidenceError(f"{path}: damaged evidence ({error}); delete it and run the case again") from error
    if record is None:
        problem = version_problem
        if stored_name != record_name(kind):
            problem = f"holds {stored_name}, expected {record_name(kind)}"
        raise EvidenceError(f"{path}: {problem}; run the case again")
    return record


def _refuse_compressed_parts(file: BinaryIO) -> None:
    """Raise ValueError for a zip file with compressed parts, which could hold far more than its size.

    This harness compresses none. The file is at its start afterwards.
    """
    with zipfile.ZipFile(file) as parts:
        for part in parts.filelist:
            if part.compress_type != zipfile.ZIP_STORED or part.file_size > part.compress_size:
                raise ValueError("its parts are compressed")
    file.seek(0)


def _unwritable_text(path: Path, error: OSError) -> str:
    return f"{path}: cannot be written: {error.strerror or error}; free the disk or choose another --out"


def encoded_without_values(record: Any) -> Any:
    """Return a record as plain values of JSON. Arrays keep only their types and shapes."""
    return _encode(record, None)


def decoded_without_values(kind: type[T], plain: Any) -> T:
    """Return the record that encoded_without_values encoded.

    Its arrays have the right shape, take no memory and hold zeros, which are not their values.
    """
    read: Callable[[Any, _NoValues], T] = _reader(kind)  # type: ignore[arg-type]
    return read(plain, _NoValues())


class _NoValues:
    """A source of arrays whose values are not kept."""

    def take(self, dtype: str, shape: list[int]) -> np.ndarray:
        return array_without_values(tuple(shape), dtype)


def array_without_values(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Return an array of this shape and dtype that takes no memory. Its zeros are not the values, which are not kept."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def _join_arrays(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([a.view(np.uint8).reshape(-1) for a in arrays]) if arrays else np.zeros(0, np.uint8)


def _encode(value: Any, arrays: list[np.ndarray] | None) -> Any:
    """Return a value as plain values of JSON, an array as its dtype and shape.

    Each array is appended to `arrays`. None: values of arrays are not kept.
    """
    if dataclasses.is_dataclass(value):
        return {name: _encode(item, arrays) for name, item in stored_items(value)}
    if isinstance(value, np.ndarray):
        if arrays is not None:
            arrays.append(np.ascontiguousarray(value).reshape(-1))
        return [str(value.dtype), list(value.shape)]
    if isinstance(value, dict):
        return [[key, _encode(item, arrays)] for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [_encode(item, arrays) for item in value]
    return value


class _Blob:
    """The arrays of a file, taken in the order in which they were encoded."""

    def __init__(self, blob: bytes) -> None:
        self.blob = blob
        self.position = 0

    def take(self, dtype: str, shape: list[int]) -> np.ndarray:
        count = math.prod(shape)
        array = np.frombuffer(self.blob, dtype, count, self.position) if count else np.zeros(0, dtype)
        self.position += array.nbytes
        return array.reshape(shape)


@functools.cache
def _reader(kind: Any) -> Callable[[Any, _Blob | _NoValues], Any]:
    """Return the function that builds a value of this annotated type from plain values of JSON and a source of arrays.

    It is made once a type, for a run has tens of thousands of values.
    """
    origin = typing.get_origin(kind)
    args = typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        inner = _reader(next(arg for arg in args if arg is not type(None)))
        return lambda record, blob: None if record is None else inner(record, blob)
    if dataclasses.is_dataclass(kind):
        return _record_reader(kind)
    if kind is np.ndarray:
        return lambda record, blob: blob.take(*record)
    if origin is dict:
        read = _reader(args[1])
        key_of = _key_reader(args[0])
        return lambda record, blob: {key_of(key): read(item, blob) for key, item in record}
    if origin is tuple:
        each = _reader(args[0])
        return lambda record, blob: tuple([each(item, blob) for item in record])
    return lambda record, blob: record


def _record_reader(kind: Any) -> Callable[[Any, _Blob | _NoValues], Any]:
    """Return the function that rebuilds a record, with the parts whose fields lie among its own.

    Values are read in the order of the file, in which arrays are taken from the blob.
    """
    fields = dataclasses.fields(kind)
    hints = typing.get_type_hints(kind)
    readers = {}
    for field in fields:
        if not is_inlined(field):
            readers[field_name(field)] = ("", field.name, _reader(hints[field.name]))
    parts = {field.name: hints[field.name] for field in fields if is_inlined(field)}
    for part, kind_of_part in parts.items():
        fields_of_part = dataclasses.fields(kind_of_part)
        assert not any(map(is_inlined, fields_of_part)), f"{kind_of_part}: records are inlined once"
        hints_of_part = typing.get_type_hints(kind_of_part)
        for field in fields_of_part:
            readers[field_name(field)] = (part, field.name, _reader(hints_of_part[field.name]))

    def rebuilt(record: Any, blob: _Blob | _NoValues) -> Any:
        own_values: dict[str, Any] = {}
        values_by_part: dict[str, dict[str, Any]] = {part: {} for part in parts}
        for stored, item in record.items():
            part, name, read = readers[stored]
            values = values_by_part[part] if part else own_values
            values[name] = read(item, blob)
        for part, values in values_by_part.items():
            own_values[part] = parts[part](**values)
        return kind(**own_values)

    return rebuilt


def _key_reader(kind: Any) -> Callable[[Any], Any]:
    """Return the function that builds a key of a dict. Keys are words, or NamedTuples of words, which JSON makes lists of."""
    return kind._make if hasattr(kind, "_make") else lambda key: key


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
    try:
        record = read_json(path)
        if problem := other_version_text(str(record["format"]), Exit):
            raise EvidenceError(f"{path}: {problem}; run the case again")
        exits = tuple(decoded_without_values(Exit, exit) for exit in record["exits"])
        if len(exits) != record["world_size"]:
            raise ValueError(f"exits of {len(exits)} ranks, world_size {record['world_size']!r}")
        run = Run(str(directory), len(exits), exits, {}, record["seconds"], fault=record["fault"])
        run = dataclasses.replace(run, trainer=record.get("trainer", run.trainer), made=record.get("made", run.made))
    except FileNotFoundError as error:
        remedy = "`harness check` wants the folder that `harness run` wrote"
        if directory.exists():
            remedy = "this launch did not end, or still runs; run the case again"
        raise EvidenceError(f"{path}: no such file; {remedy}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EvidenceError(f"{path}: damaged ({error}); run the case again") from error
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
        raise EvidenceError(f"{path}: belongs to another launch (it is of {ids}); run the case again")
    return evidence


def evidence_file(directory: Path, rank: int) -> Path:
    """Return the file of a rank's evidence: ranks/rank_00.npz below the launch's folder."""
    return directory / "ranks" / f"rank_{rank:02d}.npz"


def write_text(path: Path, text: str) -> None:
    """Write a small text file, complete or not at all. Raises EvidenceError."""
    try:
        with open_whole_file(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise EvidenceError(_unwritable_text(path, error)) from error
