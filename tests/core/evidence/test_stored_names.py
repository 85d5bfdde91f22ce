"""Names in files are data: what is renamed in Python is read as before, and writes what it wrote."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from harness.core.evidence.checkpoint_index import Checkpoint
from harness.core.evidence.codec import encoded_without_values
from harness.core.evidence.format import INLINED, LATER, stored_as, version_of
from harness.core.evidence.recording import RankRecord
from harness.core.evidence.records import Exit, RankEvidence
from harness.core.evidence.store import load_stored, save_stored
from harness.core.evidence.summary import Summary
from harness.reference.record import ReferenceRun


@dataclass(frozen=True)
class Inner:
    lr: float


@dataclass(frozen=True)
class Before:
    rank: int
    value: np.ndarray
    steps: tuple[Inner, ...] = ()


@dataclass(frozen=True)
class RenamedInner:
    STORED = "Inner"
    learning_rate: float = field(metadata=stored_as("lr"))


@dataclass(frozen=True)
class Today:
    STORED = "Before"
    global_rank: int = field(metadata=stored_as("rank"))
    contents: np.ndarray = field(metadata=stored_as("value"))
    steps: tuple[RenamedInner, ...] = ()


def test_a_file_of_before_is_read_by_a_record_that_was_renamed_and_its_files_are_the_same(tmp_path: Path) -> None:
    value = np.arange(6.0).reshape(2, 3)
    save_stored(tmp_path / "before", Before(3, value, (Inner(0.5),)))
    today = load_stored(tmp_path / "before", Today)
    assert (today.global_rank, today.steps[0].learning_rate) == (3, 0.5)
    assert np.array_equal(today.contents, value)
    assert version_of(Before) == version_of(Today)
    save_stored(tmp_path / "today", today)
    with np.load(tmp_path / "before") as one, np.load(tmp_path / "today") as other:
        assert all(np.array_equal(one[part], other[part]) for part in ("header", "blob"))
    assert encoded_without_values(Inner(0.5)) == encoded_without_values(RenamedInner(0.5)) == {"lr": 0.5}


@dataclass(frozen=True)
class Values:
    last: np.ndarray = field(metadata=stored_as("after"))
    first: np.ndarray = field(metadata=stored_as("value"))
    note: str = field(default="", metadata=LATER)


@dataclass(frozen=True)
class Composed:
    STORED = "Flat"
    STORED_ORDER = ("rank", "value", "lr", "after")

    values: Values = field(metadata=INLINED)
    rank: int
    optimizer: RenamedInner = field(metadata=INLINED)


@dataclass(frozen=True)
class Flat:
    rank: int
    value: np.ndarray
    lr: float
    after: np.ndarray


def test_a_file_of_before_is_read_by_a_record_whose_fields_moved_into_parts_of_it(tmp_path: Path) -> None:
    """Arrays lie in the file in the order in which they were written, whatever part has them now."""
    save_stored(tmp_path / "before", Flat(3, np.arange(6.0), 0.5, np.arange(2)))
    today = load_stored(tmp_path / "before", Composed)
    assert (today.rank, today.optimizer.learning_rate, today.values.note) == (3, 0.5, "")
    assert (today.values.first.tolist(), today.values.last.tolist()) == ([0, 1, 2, 3, 4, 5], [0, 1])
    assert version_of(Flat) == version_of(Composed)
    assert encoded_without_values(today).keys() == {"rank", "value", "lr", "after", "note"}
    save_stored(tmp_path / "today", today)
    again = load_stored(tmp_path / "today", Composed)
    assert (again.values.first.tolist(), again.values.last.tolist()) == ([0, 1, 2, 3, 4, 5], [0, 1])


@pytest.mark.parametrize(
    ("kind", "version"),
    [
        (RankEvidence, "2-8f8407bf"),
        (Exit, "2-e39d38ad"),
        (ReferenceRun, "2-a51ac0a9"),
        (Checkpoint, "2-dae48b64"),
        (RankRecord, "2-a6514fc6"),
        (Summary, "2-0dcff686"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_records_have_the_names_in_files_that_they_had(kind: type, version: str) -> None:
    """Whoever renames a class or a field gives it its old name in files; whoever adds or drops one alters this line."""
    assert version_of(kind) == version
