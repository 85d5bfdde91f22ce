"""Sketches are read as they were written, and so are files of the version before; others are refused with the remedy."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.core.evidence.format import version_of
from harness.core.evidence.store import EvidenceError
from harness.recording.sketches import (
    BUCKETS,
    GRADIENT,
    HEADER,
    WEIGHTS,
    RankSketches,
    Sketch,
    load_sketches,
    save_sketches,
)

OF_VERSION_4 = (
    "c-kw@PAy5!NG<-sz`#(!=sMwHUW<Z2%l*{)$!?ajx9s6EoNjycvJ4YrPv+ab)$C`s+WVwU&rdJ2&G=OK)Mu5j$W2?1txaX}Z#}%YHtpG&sOCD2W$Daj"
    "&n0|GK~Y`n>bayoU$396_S!OD<)LDMm-^kNYilR$y)b>>nUwzq>m(elpM?7doW1>fb@A8BB}@~Gw;uGCy0LEye`VzKd||^i)sD^ahuJ>uvRKodJ2!rk"
    "W$K2QU97idx(+_rB~<sA<B38_{URCV_YbmS#oh8}+`OypFC=EMH%?%I^u<FLKSq^Z+A{m8-Sd`=W7jo)US84Xkg_lGNCr=Wi^s=C`-}fx{`<+jVRo4="
    "0~oM4Am{`31B)B%1`-1RwQ;s("
)
"""The file that save_sketches wrote of `left` when its version was 4, compressed."""


def sketch(step: int, value: float) -> Sketch:
    return Sketch(step, WEIGHTS, "a", "0:2|0:4", 8, 2.5, np.full(BUCKETS, value))


def left() -> RankSketches:
    """Return what a rank left, with a value in a field of each type."""
    return RankSketches(
        rank=1,
        world=2,
        launch="l",
        shapes={"a": (2, 4)},
        dtypes={"a": "float32"},
        sketches=(sketch(0, 1.5), sketch(1, 1.75)),
        passes={1: ((1, 2), (3,))},
        norms={1: 0.5},
        bare={1: 9},
        changed={2: ("a",)},
        drawn={1: (1, 2)},
        tp=(0, 1),
    )


def read(path: Path) -> RankSketches:
    sketches = load_sketches(path)
    assert sketches is not None
    return sketches


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rank.sketches"
    exact = replace(sketch(1, 0.1), kind=GRADIENT, fqn="b")  # which float32 has no room for
    written = replace(left(), dtypes={"a": "float32", "b": "float64"})
    written = replace(written, sketches=(*written.sketches, exact))
    save_sketches(path, written)
    assert repr(read(path)) == repr(written)


def test_a_file_of_version_4_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rank.sketches"
    path.write_bytes(zlib.decompress(base64.b85decode(OF_VERSION_4)))
    assert repr(read(path)) == repr(left())


def test_a_rank_without_a_file_left_nothing(tmp_path: Path) -> None:
    assert load_sketches(tmp_path / "rank.sketches") is None


def with_version(version: str) -> Callable[[bytes], bytes]:
    """Return what changes the version in the bytes of a file."""

    def changed(data: bytes) -> bytes:
        magic, size = HEADER.unpack_from(data)
        head = json.loads(zlib.decompress(data[HEADER.size : HEADER.size + size]))
        packed = zlib.compress(json.dumps(head | {"format": version}).encode())
        return HEADER.pack(magic, len(packed)) + packed + data[HEADER.size + size :]

    return changed


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda data: data[:-1], "damaged ("),
        (lambda data: data[:40], "damaged ("),
        (lambda data: data[:3], "damaged ("),
        (lambda data: b"x" + data[1:], "damaged (not a file of sketches)"),
        (with_version("3"), "written by an older version of the harness (records 3, here "),
        (with_version("99-01234567"), "written by a newer version of the harness (records 99-01234567, here "),
    ],
)
def test_a_file_that_is_not_whole_or_of_another_version_is_refused(
    damage: Callable[[bytes], bytes], problem: str, tmp_path: Path
) -> None:
    path = tmp_path / "rank.sketches"
    save_sketches(path, left())
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(EvidenceError) as error:
        load_sketches(path)
    assert str(error.value).startswith(f"{path}: {problem}")
    assert str(error.value).endswith("; record the job again")


def test_the_version_is_that_of_the_fields() -> None:
    """Whoever adds or drops a field alters this line, and says whether files of before are read."""
    assert version_of(RankSketches) == "2-94b94c12"
