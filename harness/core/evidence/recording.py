"""What one rank of a recorded job leaves: the evidence of some of its steps, and in front of it a summary.

The summary is a line of JSON, the rest is packed. If a job has thousands of ranks, the summaries alone are read. A file is
written complete or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from harness.core.evidence.format import LATER, version_of
from harness.core.evidence.reading import MOST, decompressed, json_of, regular
from harness.core.evidence.records import BACKGROUND, RankEvidence
from harness.core.evidence.store import EvidenceError, decoded_without_values, encoded_without_values
from harness.core.evidence.whole_file import whole_file

S = TypeVar("S")
PAGE, SECOND_PART = 4096, 3072
"""Bytes of the file that a killed process leaves: the last collective, and from this place how far it came."""
GROUPS = 8
"""Other groups of which a rank leaves how many collectives it had issued."""
BESIDE = ".beside"
"""The end of the name of what a rank leaves of two threads on one group before it has ended."""
RANKS = 2**20  # of any job, and steps that are named as one range


@dataclass(frozen=True)
class Fed:
    """What a forward pass was called with."""

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
    """What is recorded of a step beside its StepEvidence; step 0 is before the first one."""

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
    """Return all_reduce in step 1, backward."""
    return f"{op} in the background" if phase == BACKGROUND else f"{op} in step {step}, {phase}"


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
        """How many collectives it had issued over a group; None if that is not known."""
        if group == self.group:
            return self.seq
        known = self.elsewhere if self.elsewhere is not None else dict[str, int]()
        return known.get(group, 0 if self.elsewhere is not None and len(known) < GROUPS else None)


@dataclass(frozen=True)
class Reached:
    """How far a rank came."""

    step: int
    """The training step, 0 before the first."""
    phase: str
    """"forward", "backward", "optimizer" or "evaluation": the last one that it began."""
    over: bool = False
    """Whether that one ended."""

    @property
    def text(self) -> str:
        """In the optimizer's step of step 1; after backward of step 3."""
        phase = "the optimizer's step" if self.phase == "optimizer" else self.phase
        return f"{'after' if self.over else 'in'} {phase} of step {self.step}"


@dataclass(frozen=True)
class Beside:
    """What other threads issued over one group while the thread that trains was in a pass or in an optimizer's step, and did
    not wait for another thread."""

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
    """All that one rank of a recorded job leaves."""

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
        """Recorded steps that came to their end, in order: one that raised in its optimizer has left evidence, too."""
        return tuple(step.step for step in self.evidence.steps if step.step <= self.steps_seen)


def record_file(directory: Path, rank: int) -> Path:
    return directory / "ranks" / f"rank_{rank:05d}.record"


def save_record(path: Path, summary: object, record: RankRecord) -> None:
    """Raises OSError."""
    with whole_file(path) as file:
        file.write(packed(summary, record))


def packed(summary: object, record: RankRecord) -> bytes:
    """Raises OSError for more than would be read again."""
    meshes: list[Any] = []
    body = json.dumps(
        [encoded_without_values(_with_numbers(record, meshes)), [*map(_short, meshes)]], separators=(",", ":")
    ).encode()
    if len(body) > MOST:
        raise OSError(errno.EFBIG, f"{len(body)} bytes of records, at most {MOST} are read; choose fewer --steps")
    return head(summary) + zlib.compress(body, 1)


def head(summary: object) -> bytes:
    """The line in front."""
    told = {"format": _version(type(summary)), "summary": encoded_without_values(summary)}
    return json.dumps(told, separators=(",", ":")).encode() + b"\n"


RANGE = re.compile(rb'"(\d+)-(\d+)(?::\d+)?"')


def refuse_endless(line: bytes) -> None:
    """Raises ValueError where a range of ranks or steps is longer than any job's: each would be written out."""
    if any(int(last) - int(first) > RANKS for first, last in RANGE.findall(line)):
        raise ValueError(f"a range of more than {RANKS} numbers")


def load_summary(path: Path, kind: type[S]) -> S:
    """Raises EvidenceError."""
    with _said(path), regular(path) as file:
        line = file.readline(MOST + 1)
        refuse_endless(line)
        head = json_of(line)
        if head["format"] != _version(kind):
            raise EvidenceError(f"{path}: written by another version of the harness; record the job again")
        return decoded_without_values(kind, head["summary"])


def load_record(path: Path) -> RankRecord:
    """Raises EvidenceError. The caller has read the summary, which has the version."""
    with _said(path), regular(path) as file:
        file.readline(MOST + 1)
        plain, meshes = json_of(decompressed(file.read(MOST + 1)))
        return _with_meshes(decoded_without_values(RankRecord, plain), [*map(_long, meshes)])


def _with_numbers(record: RankRecord, meshes: list[Any]) -> RankRecord:
    """A mesh has all ranks, and most parameters are on the same one: each is kept once."""
    known: dict[int, int] = {}
    parameters = []
    for tensor in record.evidence.parameters:
        if tensor.mesh is not None and id(tensor.mesh) not in known:
            known[id(tensor.mesh)] = len(meshes)
            meshes.append(tensor.mesh)
        parameters.append(replace(tensor, mesh=None if tensor.mesh is None else known[id(tensor.mesh)]))
    return replace(record, evidence=replace(record.evidence, parameters=tuple(parameters)))


def _with_meshes(record: RankRecord, meshes: list[Any]) -> RankRecord:
    """The inverse."""
    told = record.evidence.parameters
    parameters = tuple(replace(t, mesh=None if t.mesh is None else meshes[t.mesh]) for t in told)
    return replace(record, evidence=replace(record.evidence, parameters=parameters))


def _short(mesh: Any) -> Any:
    """Shorten a mesh whose ranks lie evenly along each axis to shape, first rank and steps; another has all ranks."""
    array = np.array(mesh)
    steps = [int(np.take(array, 1, axis).flat[0] - array.flat[0]) if n > 1 else 0 for axis, n in enumerate(array.shape)]
    told: dict[str, Any] = {"shape": array.shape, "first": int(array.flat[0]), "steps": steps}
    return told if np.array_equal(_even(**told), array) else mesh


def _long(kept: Any) -> Any:
    """The inverse. Ranks of a job lie on few meshes: those alike are one object, however many ranks are read."""
    if not isinstance(kept, dict):
        return kept
    return _long_once(tuple(kept["shape"]), kept["first"], tuple(kept["steps"]))


@functools.lru_cache(maxsize=64)
def _long_once(shape: tuple[int, ...], first: int, steps: tuple[int, ...]) -> Any:
    return _even(shape=shape, first=first, steps=steps).tolist()


def _even(*, shape: Sequence[int], first: int, steps: Sequence[int]) -> np.ndarray:
    return first + np.tensordot(np.array(steps, np.int64), np.indices(shape), 1)


def _version(kind: type) -> str:
    return f"{version_of(kind)} {version_of(RankRecord)}"


@contextlib.contextmanager
def _said(path: Path) -> Iterator[None]:
    try:
        yield
    except EvidenceError:
        raise
    except Exception as error:  # one flipped byte makes zlib and json raise almost anything
        raise EvidenceError(f"{path}: damaged recording ({error!r}); record the job again") from error
