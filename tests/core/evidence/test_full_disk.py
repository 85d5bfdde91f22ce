"""On a full disk a file is there whole or not at all, and the message says what to do."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from same_records import assert_same

from harness import ROOT
from harness.core.evidence.records import Group, RankEvidence, TensorEvidence
from harness.core.evidence.step import Microbatch
from harness.core.evidence.store import EvidenceError, load_stored, save_stored, write_text

SMALL = RankEvidence(
    rank=0,
    world_size=1,
    parameters=(TensorEvidence("w", (2,), "float64", [[0]], ("Shard(0)",), np.array([0.1, -0.0])),),
    groups=(Group("0", (0,), "gloo"),),
    collectives=(),
    steps=(),
)


FULL = "cannot be written: No space left on device; free the disk or choose another --out"


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_nothing_half_written_stays_on_a_full_disk(tmp_path: Path, monkeypatch, call: str) -> None:
    save_stored(tmp_path / "rank.npz", SMALL)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    with pytest.raises(EvidenceError) as error:
        save_stored(tmp_path / "rank.npz", replace(SMALL, rank=5))
    assert str(error.value) == f"{tmp_path}/rank.npz: {FULL}"
    assert os.listdir(tmp_path) == ["rank.npz"]
    assert load_stored(tmp_path / "rank.npz", RankEvidence).rank == 0  # the old one is whole


def test_no_half_written_text_stays_on_a_full_disk(tmp_path: Path, monkeypatch) -> None:
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(EvidenceError) as error:
        write_text(tmp_path / "a.json", "{}")
    assert str(error.value) == f"{tmp_path}/a.json: {FULL}"
    assert os.listdir(tmp_path) == []


FILE_TOO_LARGE = """
import resource, sys
sys.dont_write_bytecode = True  # what is imported under the limit would leave it truncated
from pathlib import Path
import numpy as np
from harness.core.evidence.step import Microbatch
from harness.core.evidence.store import EvidenceError, save_stored
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
try:
    save_stored(Path(sys.argv[1]), Microbatch(np.zeros((100, 100), np.int64), None, None, None))
except EvidenceError as error:
    print(error)
"""


def test_nothing_half_written_stays_when_the_kernel_refuses_more_bytes(tmp_path: Path) -> None:
    """A real refusal in the middle of the file, in a process of its own: the limit cannot be raised again."""
    path = tmp_path / "rank.npz"
    command = [sys.executable, "-c", FILE_TOO_LARGE, str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == f"{path}: cannot be written: File too large; free the disk or choose another --out\n"
    assert os.listdir(tmp_path) == []


@pytest.fixture
def tiny_disk(tmp_path: Path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("this machine does not let tests mount a tmpfs; the limit on file size stands in for it")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_nothing_half_written_stays_on_a_really_full_disk(tiny_disk: Path) -> None:
    save_stored(tiny_disk / "small.npz", SMALL)
    with pytest.raises(EvidenceError) as error:
        save_stored(tiny_disk / "rank.npz", Microbatch(np.zeros((100, 200), np.int64), None, None, None))
    assert str(error.value) == f"{tiny_disk}/rank.npz: {FULL}"
    assert os.listdir(tiny_disk) == ["small.npz"]
    assert_same(load_stored(tiny_disk / "small.npz", RankEvidence), SMALL)


def test_a_folder_that_cannot_be_made_is_answered(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EvidenceError, match="cannot be written: (Not a directory|File exists); free the disk"):
        save_stored(tmp_path / "file" / "rank.npz", SMALL)
