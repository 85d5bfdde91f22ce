"""Nodes without a disk in common, as folders of this machine: what of a launch the first one has, and the others."""

from __future__ import annotations

import json
import mmap
import shutil
import time
from pathlib import Path

import pytest

from harness.core.launch import LaunchError
from harness.nights import gang_files
from harness.nights.gang_files import FirstNode, files_to_send, join_launch


@pytest.fixture
def first(tmp_path: Path) -> FirstNode:
    """On which a launch has begun."""
    out = tmp_path / "first"
    folder, weights = out / "case" / "run", out / ".reference" / "weights.npz"
    for made in (folder, weights.parent):
        made.mkdir(parents=True)
    weights.write_bytes(b"weights")
    options = {"weights": str(weights), "directory": str(folder)}
    job = {"directory": str(folder), "torchrun_args": ["--rdzv-id", "abc"], "options": options}
    (folder / "job.json").write_text(json.dumps(job))
    return FirstNode(out, folder, "abc")


def test_another_node_has_the_job_with_its_own_paths_and_the_weights(first: FirstNode, tmp_path: Path) -> None:
    own = tmp_path / "other"
    with join_launch(first, own, 1.0) as folder:
        job = json.loads((folder / "job.json").read_text())
        assert (folder, job["directory"], job["options"]["directory"]) == (
            own / "case" / "run",
            str(folder),
            str(folder),
        )
        assert Path(job["options"]["weights"]).read_bytes() == b"weights"
        assert job["options"]["weights"].startswith(str(own))


def test_what_ranks_of_another_node_write_is_on_the_first_when_they_have_ended(
    first: FirstNode, tmp_path: Path
) -> None:
    with join_launch(first, tmp_path / "other", 1.0) as folder:
        for name in ("ranks/rank_04.npz", "logs/rank_04.log", "exits/rank_04.json"):
            (folder / name).write_text(name)
    found = {path.relative_to(first.folder).as_posix(): path.read_text() for path in first.folder.glob("*/*")}
    assert found == {name: name for name in ("ranks/rank_04.npz", "logs/rank_04.log", "exits/rank_04.json")}


def test_how_a_rank_ended_is_read_first_and_written_last(
    first: FirstNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ranks/rank_04.npz", "exits/rank_04.json", "logs/rank_04.log"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(name)
    found = files_to_send(tmp_path, {})
    assert next(iter(found)) == "exits/rank_04.json"
    written: list[str] = []
    monkeypatch.setattr(gang_files, "write_atomically", lambda path, data: written.append(path.name))
    first.receive_files(found)
    assert written[-1] == "rank_04.json"


def test_only_what_changed_is_sent_again_and_mapped_memory_is_seen_to_change(tmp_path: Path) -> None:
    for kind, name in (("logs", "rank_00.log"), ("inflight", "rank_00.bin")):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / name).write_bytes(bytes(100))
    sent: dict[str, object] = {}
    with open(tmp_path / "inflight" / "rank_00.bin", "r+b") as file, mmap.mmap(file.fileno(), 100) as memory:
        assert len(files_to_send(tmp_path, sent)) == 2
        assert files_to_send(tmp_path, sent) == {}
        memory[50] = 1
        assert list(files_to_send(tmp_path, sent)) == ["inflight/rank_00.bin"]


@pytest.mark.parametrize("gone", [False, True])
def test_the_end_of_the_launch_reaches_the_other_nodes_also_where_nothing_is_left_of_it(
    first: FirstNode, tmp_path: Path, gone: bool
) -> None:
    with join_launch(first, tmp_path / "other", 1.0) as folder:
        if gone:
            shutil.rmtree(first.folder)
        else:
            (first.folder / "run.json").write_text("ended")
        eventually(folder / "run.json")
    assert (folder / "run.json").read_text() == ("{}" if gone else "ended")
    assert first.folder.exists() is not gone


def test_a_first_node_that_dies_ends_the_others_and_is_told(first: FirstNode, tmp_path: Path) -> None:
    class Dead(FirstNode):
        def receive_files(self, files: gang_files.CompressedFiles) -> str | None:
            raise ConnectionError("the first node died")

    dead = Dead(first.out, first.folder, first.launch)
    with (
        pytest.raises(ConnectionError, match="the first node died"),
        join_launch(dead, tmp_path / "other", 1.0) as folder,
    ):
        eventually(folder / "run.json")


def test_an_earlier_launch_in_the_same_folder_is_not_joined(first: FirstNode, tmp_path: Path) -> None:
    later = FirstNode(first.out, first.folder, "def")
    with (
        pytest.raises(LaunchError, match=r"the first node began no launch in 0\.05 s"),
        join_launch(later, tmp_path, 0.05),
    ):
        pass
    assert later.receive_files({"logs/rank_04.log": b""}) == gang_files.NOTHING


def eventually(path: Path) -> None:
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.02)
