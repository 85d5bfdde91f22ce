"""What somebody else may have written is read bounded: no pipe, no device, no bomb."""

from __future__ import annotations

import io
import json
import os
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from harness.core.evidence.reading import MAX_FILE_BYTES, decompress, parse_json, read_bytes, read_json
from harness.core.evidence.records import RankEvidence
from harness.core.evidence.store import EvidenceError, load_run, load_stored, save_stored


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    yield path


def test_a_pipe_a_device_and_a_folder_are_refused(pipe: Path, tmp_path: Path) -> None:
    for path in (pipe, Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError):
            read_bytes(path)
        with pytest.raises(EvidenceError):
            load_stored(path, RankEvidence)


def test_no_more_is_read_than_the_bound(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_bytes(path, 5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_bytes(path, 4)


@pytest.mark.parametrize("text", ["[" * 200_000, '{"a":' * 200_000, "", "[1", "\x00"])
def test_what_is_no_json_of_usual_depth_is_a_value_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(ValueError):
        read_json(tmp_path / "file")


def test_what_is_compressed_may_not_grow_without_end() -> None:
    assert decompress(zlib.compress(b"1" * 100), largest=100) == b"1" * 100
    for wrong in (zlib.compress(b"1" * 101), zlib.compress(b"1" * 100)[:-8], b"x"):
        with pytest.raises(ValueError):
            decompress(wrong, largest=100)


def test_compressed_evidence_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path, header = tmp_path / "rank_00.npz", io.BytesIO()
    np.lib.format.write_array(header, np.zeros(100_000, np.uint8))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("header.npy", header.getvalue())
    with pytest.raises(EvidenceError, match="compressed"):
        load_stored(path, RankEvidence)


@pytest.mark.parametrize("world", [10**9, -1, 1, "2", None])
def test_a_launch_has_as_many_ranks_as_it_has_exits(world: object, tmp_path: Path) -> None:
    from harness.core.evidence.format import version_of
    from harness.core.evidence.records import Exit

    record = {"format": version_of(Exit), "world_size": world, "exits": [], "seconds": 1.0, "fault": None}
    (tmp_path / "run.json").write_text(json.dumps(record))
    with pytest.raises(EvidenceError, match=r"run\.json: damaged"):
        load_run(tmp_path)


def test_what_would_not_be_read_again_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.core.evidence import store
    from harness.core.evidence.step import Call

    assert parse_json(b"1" * 9) == 111111111 and MAX_FILE_BYTES > 1_000_000
    monkeypatch.setattr(store, "MAX_FILE_BYTES", 10)
    with pytest.raises(EvidenceError, match="train fewer steps"):
        save_stored(tmp_path / "record.npz", Call("forward", "layers.0"))
    assert list(tmp_path.iterdir()) == []
