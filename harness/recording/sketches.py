"""What one rank of a recorded job leaves of numbers: sketches of its slices of gradients, weights and optimizer state.

A sketch of a tensor is 32 sums of its elements, each with a sign. Bucket and sign follow from the element's index in the whole
tensor. So the sketches of slices add up to the sketch of the whole, whatever the layout, and those of tensors of one shape can
be compared. The length of the difference of two sketches estimates the distance of two tensors. This is a count sketch
(Charikar, Chen and Farach-Colton, 2002); buckets follow from row and column separately (Pham and Pagh, 2013).
"""

from __future__ import annotations

import functools
import json
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from harness.core.evidence.reading import decompressed, json_of, regular
from harness.core.evidence.store import EvidenceError
from harness.core.evidence.whole_file import whole_file

BUCKETS = 32
"""Sums of a sketch."""
FORMAT = 4
WEIGHTS, GRADIENT = "weights", "gradient"
"""Kinds of tensors; an optimizer's state has the optimizer's own keys."""
AFTER_PASS = "gradient after pass "
"""With the number of a pass from 1, the kind of what was accumulated until then."""
BY_ROWS = "gradient rows "
"""With an interval of rows, as in 0:16, the kind of a part of a gradient."""
MOST = 400_000_000  # bytes of one rank's file
HEAD = struct.Struct("<8sI")
MAGIC = b"sketches"


@dataclass(frozen=True)
class Sketch:
    """One rank's slice of one tensor in one step."""

    step: int
    """Training step; 0 before the first one."""
    kind: str
    """"weights" after the step, "gradient" that the optimizer received or a part of it, or a key of the optimizer's state."""
    fqn: str
    """Name of the parameter."""
    place: str
    """Which elements of the whole parameter these are, in the words of `Box.text`; slices with equal places are replicas."""
    elements: int
    """Number of elements."""
    squares: float
    """Sum of the squares of the elements."""
    sums: np.ndarray
    """The sketch. float64 [BUCKETS]"""


@dataclass(frozen=True)
class RankSketches:
    """All that a rank leaves of numbers."""

    rank: int
    """Global rank."""
    world: int
    """Number of ranks of the job."""
    launch: str = ""
    """Id of the recording."""
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Parameter -> shape of the whole one."""
    dtypes: dict[str, str] = field(default_factory=dict)
    """Parameter -> its dtype."""
    sketches: tuple[Sketch, ...] = ()
    """The sketches of all recorded steps."""
    passes: dict[int, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    """Step -> for each pass that trained, digests of the rows of samples that the rank was fed."""
    tokens: dict[int, int] = field(default_factory=dict)
    """Step -> one number for all tokens that the rank was fed, in whatever order; none of inputs that are no integers."""
    norms: dict[int, float] = field(default_factory=dict)
    """Step -> the gradient norm that torch's clipping function returned last."""
    scales: dict[int, float] = field(default_factory=dict)
    """Step -> what torch's GradScaler multiplied the loss by."""
    rates: dict[int, float] = field(default_factory=dict)
    """Step -> learning rate of the first group of the optimizer."""
    norms_off: dict[int, float] = field(default_factory=dict)
    """Step -> by which part torch's own norm of one gradient was off, at most. On CPU, that of many elements is."""
    optimizers: tuple[str, ...] = ()
    """Optimizers, each in one line."""
    computes_in: str = ""
    """Dtype of the forward pass, where parameters are cast; empty for that of the parameters."""
    noise: str = ""
    """Dtype by one rounding of which the first weights were altered; empty if they were not."""
    plain: tuple[str, ...] = ()
    """Parameters that are plain tensors, which nothing claims to be cut."""
    unplaced: dict[str, str] = field(default_factory=dict)
    """Parameter -> why it is not known which elements of it the rank holds."""
    bare: dict[int, int] = field(default_factory=dict)
    """Digest of a row -> that of the row without the equal tokens that it ends with."""
    changed: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Step -> parameters that are others as it begins than they were after the step before."""
    drawn: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Step -> digests of torch's generators before and after its first pass that trained."""
    tp: tuple[int, ...] = ()
    """Ranks among which a parameter is claimed or declared to be cut for tensor parallelism; empty where none is."""


def sketch_file(directory: Path, rank: int) -> Path:
    return directory / "ranks" / f"rank_{rank:05d}.sketches"


def save_sketches(path: Path, of: RankSketches) -> None:
    """Raises OSError."""
    names: dict[str, int] = {}
    table = [
        [one.step, *(names.setdefault(text, len(names)) for text in (one.kind, one.fqn, one.place)), one.elements]
        for one in of.sketches
    ]
    plain = {name: getattr(of, name) for name in PLAIN}
    head = json.dumps({"format": FORMAT, **plain, "names": [*names], "table": table}, separators=(",", ":")).encode()
    packed = zlib.compress(head, 1)
    exact: list[np.ndarray] = []
    rounded: list[np.ndarray] = []
    before = _Before()
    for one in of.sketches:
        if of.dtypes.get(one.fqn) == "float64":
            exact.append(one.sums)
        else:
            rounded.append(before.added(one.kind, one.fqn, one.place, one.sums))
    with whole_file(path) as file:
        file.write(HEAD.pack(MAGIC, len(packed)) + packed)
        file.write(np.array([one.squares for one in of.sketches], "<f8").tobytes())
        file.write(np.array(exact, "<f8").tobytes() + np.array(rounded, "<f4").tobytes())


PLAIN = (
    *("rank", "world", "launch", "shapes", "dtypes", "passes", "tokens", "norms", "norms_off", "rates"),
    *("scales", "optimizers", "computes_in", "noise", "plain", "unplaced", "bare", "drawn", "changed", "tp"),
)
"""Fields that JSON keeps."""
OF_STEPS = ("passes", "tokens", "norms", "norms_off", "scales", "rates", "drawn", "changed")


class _Before:
    """A file has what each step added to the weights. float32 has room for that, and too little for the weights."""

    def __init__(self) -> None:
        self._weights: dict[tuple[str, str], np.ndarray] = {}

    def added(self, kind: str, fqn: str, place: str, sums: np.ndarray) -> np.ndarray:
        """Return what is kept. float32 [BUCKETS]"""
        if kind != WEIGHTS:
            return sums.astype(np.float32)
        kept = (sums - self._weights.get((fqn, place), 0.0)).astype(np.float32)
        self.whole(kind, fqn, place, kept.astype(np.float64))
        return kept

    def whole(self, kind: str, fqn: str, place: str, kept: np.ndarray) -> np.ndarray:
        """The inverse, of what is kept as float64."""
        if kind == WEIGHTS:
            kept = kept + self._weights.get((fqn, place), 0.0)
            if np.isfinite(kept).all():  # or all later ones would not be, either
                self._weights[fqn, place] = kept
        return kept


def load_sketches(path: Path) -> RankSketches | None:
    """Return what a rank left; None where it left nothing. Raises EvidenceError for a damaged file."""
    try:
        with regular(path) as file:
            data = file.read(MOST + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise EvidenceError(f"{path}: cannot be read ({error})") from error
    try:
        return _unpacked(data)
    except EvidenceError:
        raise EvidenceError(f"{path}: written by another version of the harness; record the job again") from None
    except Exception as error:  # one flipped byte makes zlib, json and numpy raise almost anything
        raise EvidenceError(f"{path}: damaged recording ({error!r}); record the job again") from error


def _unpacked(data: bytes) -> RankSketches:
    magic, size = HEAD.unpack_from(data)
    if magic != MAGIC:
        raise ValueError("not a file of sketches")
    head = json_of(decompressed(data[HEAD.size : HEAD.size + size]))
    if head["format"] != FORMAT:
        raise EvidenceError
    names, table, dtypes = head["names"], head["table"], head["dtypes"]
    kinds = [dtypes.get(names[fqn]) == "float64" for _, _, fqn, _, _ in table]
    at = HEAD.size + size
    squares, at = _read(data, at, "<f8", len(table)), at + 8 * len(table)
    exact, at = _read(data, at, "<f8", BUCKETS * sum(kinds)), at + 8 * BUCKETS * sum(kinds)
    rest = _read(data, at, "<f4", BUCKETS * (len(kinds) - sum(kinds))).astype(np.float64)
    wide, narrow, before, sketches = iter(exact.reshape(-1, BUCKETS)), iter(rest.reshape(-1, BUCKETS)), _Before(), []
    for (step, *named, elements), square, is_exact in zip(table, squares.tolist(), kinds, strict=True):
        kind, fqn, place = (names[at] for at in named)
        sums = next(wide) if is_exact else before.whole(kind, fqn, place, next(narrow))
        sketches.append(Sketch(step, kind, fqn, place, elements, square, sums))
    plain: dict[str, Any] = {name: head[name] for name in PLAIN if name in head}
    plain |= {name: _by_step(plain.get(name, {})) for name in OF_STEPS}
    plain["passes"] = {step: tuple(map(tuple, of)) for step, of in plain["passes"].items()}
    plain |= {name: {step: tuple(of) for step, of in plain[name].items()} for name in ("drawn", "changed")}
    plain["bare"] = {int(row): bare for row, bare in head["bare"].items()}
    plain["shapes"] = {fqn: tuple(shape) for fqn, shape in plain["shapes"].items()}
    return RankSketches(
        **plain
        | {"sketches": tuple(sketches), **{name: tuple(plain.get(name, ())) for name in ("optimizers", "plain", "tp")}}
    )


def _by_step(of: dict[str, Any]) -> dict[int, Any]:
    return {int(step): value for step, value in of.items()}


def _read(data: bytes, at: int, dtype: str, count: int) -> np.ndarray:
    return np.frombuffer(data, dtype, count, at)


@dataclass(frozen=True)
class Box:
    """Elements of a whole parameter, as a matrix of shape[0] rows: those at these rows and columns."""

    rows: tuple[tuple[int, int], ...]
    """Half-open intervals of rows, in the order in which the slice has them."""
    columns: tuple[tuple[int, int], ...]
    """The same of columns, which count the elements of one row."""

    @functools.cached_property
    def size(self) -> tuple[int, int]:
        """Number of rows and of columns."""
        return tuple(sum(stop - start for start, stop in of) for of in (self.rows, self.columns))  # type: ignore[return-value]

    @functools.cached_property
    def text(self) -> str:
        return "|".join(",".join(f"{start}:{stop}" for start, stop in of) for of in (self.rows, self.columns))


def boxes_of(text: str) -> tuple[Box, ...]:
    """Return the boxes that a place names: the inverse of `place_text`."""

    def intervals(of: str) -> tuple[tuple[int, int], ...]:
        pairs = (one.split(":") for one in of.split(",") if one)
        return tuple((int(start), int(stop)) for start, stop in pairs)

    both = (box.split("|") for box in text.split(";") if box)
    return tuple(Box(intervals(rows), intervals(columns)) for rows, columns in both)


def place_text(boxes: Iterable[Box], addend: str = "") -> str:
    """Return the boxes in words. addend: which part of a sum it is, where ranks hold addends of the same elements."""
    text = ";".join(box.text for box in boxes)
    return f"{text}+{addend}" if addend else text
