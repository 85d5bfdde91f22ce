"""The file of one rank of a recorded job: a summary, and behind it the evidence of some of its steps.

The summary is a line of JSON, the rest is packed. If a job has thousands of ranks, the summaries alone are read. A file is
written complete or not at all.
"""

from __future__ import annotations

import errno
import functools
import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from harness.core.evidence.codec import decoded_without_values, encoded_without_values
from harness.core.evidence.format import LATER, refuse_other_version, version_of
from harness.core.evidence.reading import MAX_FILE_BYTES, decompress, open_regular_file, parse_json
from harness.core.evidence.records import BACKGROUND, RankEvidence
from harness.core.evidence.store import RECORD_AGAIN, reading_evidence
from harness.core.evidence.whole_file import open_whole_file

S = TypeVar("S")
PAGE_BYTES = 4096
"""Bytes of the file that a killed process leaves: the last collective, and from SECOND_PART_OFFSET on how far the rank came."""
SECOND_PART_OFFSET = 3072
"""Byte at which the second part of that file begins."""
MAX_OTHER_GROUPS = 8
"""Number of other groups for which a rank leaves how many collectives it had issued."""
BESIDE_SUFFIX = ".beside"
"""The end of the name of the file that a running rank writes about two threads on one group."""
MAX_RANGE = 2**20  # of any job, and steps that are named as one range


@dataclass(frozen=True)
class Fed:
    """The inputs of one forward pass."""

    digest: int
    """Digest of the first tensor, which has the samples."""
    shape: tuple[int, ...]
    """Its shape."""
    dtype: str
    """Its dtype."""
    others: tuple[int, ...] = ()
    """Digests of the other tensors, without masks and positions."""


@dataclass(frozen=True)
class RecordedStep:
    """The record of a step beside its StepEvidence; step 0 is before the first one."""

    step: int
    """Number of the step."""
    digests: dict[str, int]
    """Fqn -> a digest of this rank's part of each parameter after the step."""
    not_finite: tuple[str, ...] = ()
    """Parameters with infinite numbers or NaN."""
    fed: tuple[Fed, ...] = ()
    """Inputs of each forward pass."""
    seconds: float = 0.0
    """Seconds until the next step began; 0 if none did."""
    peak: int = 0
    """Most bytes of memory that were in use so far."""
    ungraded: tuple[str, ...] = ()
    """Parameters that had no gradient when an optimizer stepped."""
    constant: tuple[str, ...] = ()
    """Parameters of step 0 whose numbers are all the same."""
    began: float = field(default=0.0, metadata=LATER)
    """When its first pass began, in seconds since 1970 on the clock of its machine; 0 if that was not seen."""


def issued_text(op: str, step: int, phase: str) -> str:
    """Return a collective as a text: "all_reduce in step 1, backward"."""
    if phase == BACKGROUND:
        return f"{op} in the background"
    return f"{op} in step {step}, {phase}"


@dataclass(frozen=True)
class Last:
    """The last collective that a rank issued over a group."""

    text: str
    """Name, step and phase."""
    ranks: tuple[int, ...]
    """Global ranks of the group."""
    group: str
    """Name of the group."""
    seq: int
    """Position, from 1, among this rank's collectives of the group."""
    before: tuple[str, ...] = ()
    """Texts of a few collectives that it issued over the group before, the latest first."""
    elsewhere: dict[str, int] | None = field(default=None, metadata=LATER)
    """Group -> how many it had issued over each of the other groups that it used last; None where that is not on record."""

    def issued_over(self, group: str) -> int | None:
        """Return how many collectives the rank had issued over a group; 0 if none. None if that is not on record."""
        if group == self.group:
            return self.seq
        if self.elsewhere is None:
            return None
        # With fewer than MAX_OTHER_GROUPS entries all groups in use are listed, so a group that is missing has none.
        is_complete = len(self.elsewhere) < MAX_OTHER_GROUPS
        return self.elsewhere.get(group, 0 if is_complete else None)


@dataclass(frozen=True)
class Reached:
    """The last phase that a rank began."""

    step: int
    """The training step, 0 before the first."""
    phase: str
    """"forward", "backward", "optimizer" or "evaluation": the last one that it began."""
    over: bool = False
    """Whether that one ended."""

    @property
    def text(self) -> str:
        """Return a text: "in the optimizer's step of step 1", "after backward of step 3"."""
        phase = "the optimizer's step" if self.phase == "optimizer" else self.phase
        preposition = "after" if self.over else "in"
        return f"{preposition} {phase} of step {self.step}"


@dataclass(frozen=True)
class Beside:
    """Collectives of other threads over one group while the thread that trains was in a pass or in an optimizer's step.

    The thread that trains did not wait for another thread meanwhile.
    """

    group: str
    """Name of the group."""
    ranks: tuple[int, ...]
    """Global ranks of its members."""
    ops: tuple[str, ...]
    """Collectives that other threads issued."""
    threads: tuple[str, ...]
    """Names of these threads."""
    trains: tuple[str, ...]
    """Collectives that the thread that trains issued over it."""


@dataclass(frozen=True)
class RankRecord:
    """The whole record of one rank of a recorded job."""

    evidence: RankEvidence
    """Evidence of the recorded steps, without values."""
    steps: tuple[RecordedStep, ...]
    """What is recorded beside it of each step."""
    parts: tuple[str, ...] = ()
    """Classes of its models."""
    optimizers: tuple[str, ...] = ()
    """Optimizers, each in one line."""
    stepped: tuple[str, ...] = ()
    """Parameters that an optimizer has."""
    argv: tuple[str, ...] = ()
    """Command line of the process."""
    left_out: tuple[str, ...] = ()
    """Models that are not recorded, and why."""
    failed: tuple[str, ...] = ()
    """What the recorder itself raised, after which it records nothing more."""
    ended: str = ""
    """Word for how it ended: ok, raised, or empty while it runs and if it was killed."""
    error: str = ""
    """What it raised, in one line; empty if nothing."""
    steps_seen: int = 0
    """Number of all steps that it trained to their end."""
    last: Last | None = None
    """Last collective that it issued; None if it issued none."""
    host: str = ""
    """Name of its machine."""
    own: float = 0.0
    """Seconds that the recorder took."""
    reached: Reached | None = None
    """How far it came when this was saved; None before the first pass."""
    beside: tuple[Beside, ...] = ()
    """What other threads issued over groups of the thread that trains."""
    drawn: tuple[int, ...] = field(default=(), metadata=LATER)
    """Digests of the indices of its samples, a batch each, as far as its data loaders draw by index."""
    buffers: int = field(default=0, metadata=LATER)
    """Number of its models' buffers of floating-point numbers, which are not compared."""
    samples: dict[int, tuple[int, ...]] = field(default_factory=dict, metadata=LATER)
    """Step -> digests of single samples that it was fed, in order: the smallest ones of many."""

    @property
    def ended_steps(self) -> tuple[int, ...]:
        """Return the recorded steps that ended, in order. A step that raised in its optimizer left evidence, too."""
        return tuple(step.step for step in self.evidence.steps if step.step <= self.steps_seen)


def record_file(directory: Path, rank: int) -> Path:
    """Return the file of a rank's record, below the folder of a recording."""
    return directory / "ranks" / f"rank_{rank:05d}.record"


def save_record(path: Path, summary: object, record: RankRecord) -> None:
    """Write the file of a rank's record, complete or not at all. Raises OSError."""
    with open_whole_file(path) as file:
        file.write(record_bytes(summary, record))


def record_bytes(summary: object, record: RankRecord) -> bytes:
    """Return the bytes of the file of a rank's record: the summary's line, then the packed record without values.

    Raises OSError for more bytes than would be read again.
    """
    meshes: list[Any] = []
    encoded = encoded_without_values(_with_mesh_indices(record, meshes))
    body = json.dumps([encoded, [*map(_shorten_mesh, meshes)]], separators=(",", ":")).encode()
    if len(body) > MAX_FILE_BYTES:
        raise OSError(
            errno.EFBIG, f"{len(body)} bytes of records, at most {MAX_FILE_BYTES} are read; choose fewer --steps"
        )
    return summary_line(summary) + zlib.compress(body, 1)


def summary_line(summary: object) -> bytes:
    """Return the first line of the file of a rank's record: version and summary, as JSON with a line break."""
    version_and_summary = {"format": version_of(type(summary), RankRecord), "summary": encoded_without_values(summary)}
    return json.dumps(version_and_summary, separators=(",", ":")).encode() + b"\n"


RANGE_PATTERN = re.compile(rb'"(\d+)-(\d+)(?::\d+)?"')


def refuse_endless_ranges(line: bytes) -> None:
    """Raise ValueError if a range of ranks or steps in the line is longer than any job's.

    ranks_from_key would build all its numbers.
    """
    if any(int(last) - int(first) > MAX_RANGE for first, last in RANGE_PATTERN.findall(line)):
        raise ValueError(f"a range of more than {MAX_RANGE} numbers")


def load_summary(path: Path, kind: type[S]) -> S:
    """Read the summary in a rank's file. Raises EvidenceError. kind: Summary."""
    with reading_evidence(path, RECORD_AGAIN), open_regular_file(path) as file:
        line = file.readline(MAX_FILE_BYTES + 1)
        refuse_endless_ranges(line)
        head = parse_json(line)
        refuse_other_version(head["format"], kind, RankRecord)
        return decoded_without_values(kind, head["summary"])


def load_record(path: Path) -> RankRecord:
    """Read the record in a rank's file; arrays have their shapes, no values. Raises EvidenceError.

    Precondition: load_summary read the file before, for the version is in the first line, which is skipped here.
    """
    with reading_evidence(path, RECORD_AGAIN), open_regular_file(path) as file:
        file.readline(MAX_FILE_BYTES + 1)
        plain, meshes = parse_json(decompress(file.read(MAX_FILE_BYTES + 1)))
        return _with_meshes(decoded_without_values(RankRecord, plain), [*map(_restore_mesh, meshes)])


def _with_mesh_indices(record: RankRecord, meshes: list[Any]) -> RankRecord:
    """Return the record with each mesh replaced by its index in `meshes`, to which the meshes are appended.

    A mesh has all ranks, and most parameters are on the same one, so each is stored once.
    """
    index_of: dict[int, int] = {}
    parameters = []
    for tensor in record.evidence.parameters:
        if tensor.mesh is not None and id(tensor.mesh) not in index_of:
            index_of[id(tensor.mesh)] = len(meshes)
            meshes.append(tensor.mesh)
        parameters.append(replace(tensor, mesh=None if tensor.mesh is None else index_of[id(tensor.mesh)]))
    return replace(record, evidence=replace(record.evidence, parameters=tuple(parameters)))


def _with_meshes(record: RankRecord, meshes: list[Any]) -> RankRecord:
    """Return the record with each index replaced by its mesh: the inverse of _with_mesh_indices."""
    parameters = tuple(
        replace(tensor, mesh=None if tensor.mesh is None else meshes[tensor.mesh])
        for tensor in record.evidence.parameters
    )
    return replace(record, evidence=replace(record.evidence, parameters=parameters))


def _shorten_mesh(mesh: Any) -> Any:
    """Return a mesh whose ranks lie evenly along each axis as shape, first rank and steps; any other as it is."""
    array = np.array(mesh)
    steps = []
    for axis, degree in enumerate(array.shape):
        steps.append(int(np.take(array, 1, axis).flat[0] - array.flat[0]) if degree > 1 else 0)
    description: dict[str, Any] = {"shape": array.shape, "first": int(array.flat[0]), "steps": steps}
    return description if np.array_equal(_even_mesh(**description), array) else mesh


def _restore_mesh(kept: Any) -> Any:
    """Return the mesh that _shorten_mesh stored. Equal meshes are one object, for the many ranks of a job lie on few meshes."""
    if not isinstance(kept, dict):
        return kept
    return _cached_even_mesh(tuple(kept["shape"]), kept["first"], tuple(kept["steps"]))


@functools.lru_cache(maxsize=64)
def _cached_even_mesh(shape: tuple[int, ...], first: int, steps: tuple[int, ...]) -> Any:
    return _even_mesh(shape=shape, first=first, steps=steps).tolist()


def _even_mesh(*, shape: Sequence[int], first: int, steps: Sequence[int]) -> np.ndarray:
    """Return the mesh whose ranks begin with `first` and rise by one of the steps along each axis."""
    return first + np.tensordot(np.array(steps, np.int64), np.indices(shape), 1)
