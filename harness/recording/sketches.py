"""Sketches of a rank's slices of gradients, weights and optimizer state, and the file that has them.

A sketch of a tensor is 32 sums of its elements, each with a sign. Bucket and sign follow from the element's index in
the whole tensor. So the sketches of slices add up to the sketch of the whole, whatever the layout, and those of tensors
of one shape can be compared. The length of the difference of two sketches estimates the distance of two tensors. This
is a count sketch (Charikar, Chen and Farach-Colton, 2002); buckets follow from row and column separately (Pham and
Pagh, 2013).
"""

from __future__ import annotations

import functools
import json
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from harness.core.evidence.codec import decoded_without_values, encoded_without_values
from harness.core.evidence.format import refuse_other_version, version_of
from harness.core.evidence.reading import decompress, parse_json, read_bytes
from harness.core.evidence.store import RECORD_AGAIN, reading_evidence
from harness.core.evidence.whole_file import open_whole_file

BUCKETS = 32
"""Sums of a sketch."""
WEIGHTS = "weights"
GRADIENT = "gradient"
"""Kinds of tensors; an optimizer's state has the optimizer's own keys."""
AFTER_PASS = "gradient after pass "
"""With the number of a pass from 1, the kind of what was accumulated until then."""
BY_ROWS = "gradient rows "
"""With an interval of rows, as in 0:16, the kind of a part of a gradient."""
MOST_BYTES = 400_000_000  # bytes of one rank's file
HEADER = struct.Struct("<8sI")
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
    slice_text: str
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

    EARLIER_VERSION = "4"

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
    """Return the file of a rank's sketches, below the folder of a recording."""
    return directory / "ranks" / f"rank_{rank:05d}.sketches"


def save_sketches(path: Path, rank_sketches: RankSketches) -> None:
    """Write what a rank leaves of numbers. Raises OSError.

    The file is a compressed head of JSON, the squares, then the sums: of float64 parameters as they are, of others rounded to
    float32. The head has all other fields, the sketches as a table, and the texts that the table names by their numbers.
    """
    names: dict[str, int] = {}
    table = []
    for sketch in rank_sketches.sketches:
        name_numbers = [names.setdefault(text, len(names)) for text in (sketch.kind, sketch.fqn, sketch.slice_text)]
        table.append([sketch.step, *name_numbers, sketch.elements])
    fields = encoded_without_values(replace(rank_sketches, sketches=()))
    head = {"format": version_of(RankSketches), **fields, "names": [*names], "table": table}
    packed = zlib.compress(json.dumps(head, separators=(",", ":")).encode(), 1)
    exact: list[np.ndarray] = []
    rounded: list[np.ndarray] = []
    weights_before = _WeightDeltas()
    for sketch in rank_sketches.sketches:
        if rank_sketches.dtypes.get(sketch.fqn) == "float64":
            exact.append(sketch.sums)
        else:
            rounded.append(weights_before.sums_to_store(sketch.kind, sketch.fqn, sketch.slice_text, sketch.sums))
    with open_whole_file(path) as file:
        file.write(HEADER.pack(MAGIC, len(packed)) + packed)
        file.write(np.array([sketch.squares for sketch in rank_sketches.sketches], "<f8").tobytes())
        file.write(np.array(exact, "<f8").tobytes() + np.array(rounded, "<f4").tobytes())


class _WeightDeltas:
    """The weights after the step before, by parameter and slice. A file has what each step added to them: float32 has
    room for that, and too little for the weights.
    """

    def __init__(self) -> None:
        self._weights: dict[tuple[str, str], np.ndarray] = {}

    def sums_to_store(self, kind: str, fqn: str, slice_text: str, sums: np.ndarray) -> np.ndarray:
        """Return what the file keeps of a sketch's sums: of weights, what the step added to them. float32 [BUCKETS]"""
        if kind != WEIGHTS:
            return sums.astype(np.float32)
        stored = (sums - self._weights.get((fqn, slice_text), 0.0)).astype(np.float32)
        self.restore_sums(kind, fqn, slice_text, stored.astype(np.float64))
        return stored

    def restore_sums(self, kind: str, fqn: str, slice_text: str, stored: np.ndarray) -> np.ndarray:
        """Return the sums of a sketch from what the file keeps of them, as float64. Call it in the order of the file."""
        if kind == WEIGHTS:
            stored = stored + self._weights.get((fqn, slice_text), 0.0)
            if np.isfinite(stored).all():  # or all later ones would not be, either
                self._weights[fqn, slice_text] = stored
        return stored


def load_sketches(path: Path) -> RankSketches | None:
    """Return what a rank left of numbers; None if there is no such file.

    Raises EvidenceError for a file that is damaged, larger than MOST_BYTES, or of a version that is not read.
    """
    if not path.exists():
        return None
    with reading_evidence(path, RECORD_AGAIN):
        return _unpack(read_bytes(path, MOST_BYTES))


def _unpack(data: bytes) -> RankSketches:
    """Return the sketches of a file's bytes. Raises OtherVersion, or almost anything for damaged bytes."""
    magic, size = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise ValueError("not a file of sketches")
    head = parse_json(decompress(data[HEADER.size : HEADER.size + size]))
    refuse_other_version(head.pop("format"), RankSketches)
    names = head.pop("names")
    table = head.pop("table")
    rank_sketches = decoded_without_values(RankSketches, head)
    is_float64 = [rank_sketches.dtypes.get(names[fqn]) == "float64" for _, _, fqn, _, _ in table]
    offset = HEADER.size + size
    squares = _read_array(data, offset, "<f8", len(table))
    offset += 8 * len(table)
    exact = _read_array(data, offset, "<f8", BUCKETS * sum(is_float64))
    offset += 8 * BUCKETS * sum(is_float64)
    rounded = _read_array(data, offset, "<f4", BUCKETS * (len(is_float64) - sum(is_float64))).astype(np.float64)
    exact_rows = iter(exact.reshape(-1, BUCKETS))
    rounded_rows = iter(rounded.reshape(-1, BUCKETS))
    weights_before = _WeightDeltas()
    sketches = []
    for (step, *name_numbers, elements), square, is_exact in zip(table, squares.tolist(), is_float64, strict=True):
        kind, fqn, slice_text = (names[name_index] for name_index in name_numbers)
        sums = next(exact_rows) if is_exact else weights_before.restore_sums(kind, fqn, slice_text, next(rounded_rows))
        sketches.append(Sketch(step, kind, fqn, slice_text, elements, square, sums))
    return replace(rank_sketches, sketches=tuple(sketches))


def _read_array(data: bytes, offset: int, dtype: str, count: int) -> np.ndarray:
    """Return `count` numbers from an offset in bytes. Raises ValueError if there are fewer."""
    return np.frombuffer(data, dtype, count, offset)


@dataclass(frozen=True)
class Box:
    """Elements of a whole parameter, as a matrix of shape[0] rows: those at these rows and columns."""

    rows: tuple[tuple[int, int], ...]
    """Half-open intervals of rows, in the order in which the slice has them."""
    columns: tuple[tuple[int, int], ...]
    """The same of columns, which count the elements of one row."""

    @functools.cached_property
    def size(self) -> tuple[int, int]:
        """Return the number of rows and of columns."""
        return _length_of(self.rows), _length_of(self.columns)

    @functools.cached_property
    def text(self) -> str:
        """Return rows and columns in words: 0:2,4:6|0:16."""
        return f"{_intervals_text(self.rows)}|{_intervals_text(self.columns)}"


def _length_of(intervals: Iterable[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in intervals)


def _intervals_text(intervals: Iterable[tuple[int, int]]) -> str:
    return ",".join(f"{start}:{stop}" for start, stop in intervals)


def boxes_of_text(text: str) -> tuple[Box, ...]:
    """Return the boxes that a slice's text names. Raises ValueError for a text with an addend."""

    def intervals(interval_texts: str) -> tuple[tuple[int, int], ...]:
        pairs = (interval_text.split(":") for interval_text in interval_texts.split(",") if interval_text)
        return tuple((int(start), int(stop)) for start, stop in pairs)

    rows_and_columns = (box.split("|") for box in text.split(";") if box)
    return tuple(Box(intervals(rows), intervals(columns)) for rows, columns in rows_and_columns)


def text_of_boxes(boxes: Iterable[Box], addend: str = "") -> str:
    """Return the boxes as a text, as Box.text writes each, with ";" between them and "+ADDEND" behind them.

    addend: which part of a sum it is, where ranks hold addends of the same elements; empty: no part.
    """
    text = ";".join(box.text for box in boxes)
    return f"{text}+{addend}" if addend else text
