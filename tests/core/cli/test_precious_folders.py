"""Each command that writes, on a folder of somebody's own that resembles ours: nothing is lost, and the exit code is 2."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from literal import tiny_case

from harness.core.case.case import to_json
from harness.core.cli import main
from harness.core.evidence.own_folders import CASE_FOLDER, RECORDING_FOLDER, empty_own_folder, list_trainer_files
from harness.core.evidence.store import EvidenceError

CASES = """
cases:
  pair:
    dims: {dp_shard: 2}
    why: a test
"""
OURS = json.dumps(to_json(tiny_case("fsdp_2")))
PRECIOUS = {
    "case.json": '{"name": "my own"}',
    "recording.json": '{"pages": 3}',
    "processes/notes.txt": "mine",
    "ranks/table.csv": "mine",
    "run/ranks/thesis.tex": "mine",
    "checkpoint/model.pt": "mine",
    "src/a.py": "x = 1",
}
FILES = {
    "verdicts.jsonl": '{"mine": 1}\n',
    "page.html": "<!doctype html><title>my harness</title>",
    "history.txt": "mine",
    "summary.md": "mine",
    "faults.json": '["mine"]',
    "culprits.jsonl": "mine",
    "snapshot.yaml": "ranks: mine\n",
}


def fill(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which every name that a command would write is taken by something of somebody's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CI", raising=False)
    fill(tmp_path, {"cases/some.yaml": CASES, "train.py": "pass", "train_adapter.py": "mine"})
    taken = (".", "pair", "preflight_pair", "preflight_command", "recording", "bisect/torch==1/pair", ".trainer")
    for name in taken:
        fill(tmp_path / "out" / name, PRECIOUS | FILES)
    subprocess.run(["git", "init", "--quiet", "out"], check=True)
    return tmp_path


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


COMMANDS = {
    "run": "run pair --out out",
    "matrix": "matrix --out out",
    "nightly": "nightly nights --out out",
    "nightly --repo": "nightly nights --out out --trainer train_adapter.py",
    "faults": "faults -k hsdp_runs_as_fsdp --out out",
    "preflight": "preflight pair --ranks 0 --trainer llama3 --out out",
    "preflight command": "preflight --world 2 --layout dp_shard=2 --ranks 0 --out out -- true",
    "record": "record -o out -- true",
    "record --force": "record --force -o out/recording -- true",
    "record .": "record -o . -- true",
    "record onto a file": "record -o out/page.html -- true",
    "compare --with": "compare --with out -o out/pair -- true",
    "compare --accept": "compare out/snapshot.yaml out/recording --accept",
    "init": "init train.py --adapter train_adapter.py",
    "report --html": "report out/nights --html out/page.html",
    "check": "check out/pair",
    "report": "report out/pair",
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_nothing_of_somebodys_own_is_lost(command: str, desk: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = content(desk)
    words = command.split()
    own = ["--cases", "cases"] if words[0] in ("run", "matrix", "nightly", "faults") or words[1] == "pair" else []
    assert main([*words[:2], *own, *words[2:]] if own else words) == 2
    after = content(desk)
    assert {name: after.get(name) for name in before} == before
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "foreign",
    ["notes.md", "run/notes.md", "run/ranks/rank_00.txt", "checkpoint/notes.md", "checkpoint/step_3/a", ".git/HEAD"],
)
def test_one_foreign_file_in_a_case_of_ours_is_named(foreign: str, tmp_path: Path) -> None:
    fill(tmp_path, {"case.json": OURS, "run/ranks/rank_00.npz": "", foreign: "mine"})
    with pytest.raises(EvidenceError) as error:
        empty_own_folder(tmp_path, CASE_FOLDER)
    assert f"holds {foreign.split('/HEAD')[0]}" in str(error.value)
    assert (tmp_path / foreign).read_text() == "mine"
    assert (tmp_path / "case.json").exists()


def test_what_a_trainer_wrote_is_ours_once_the_launch_has_listed_it(tmp_path: Path) -> None:
    fill(tmp_path, {"case.json": OURS, "checkpoint/mine/model.pt": "", "run/export/weights.bin": ""})
    list_trainer_files(tmp_path)
    (tmp_path / "checkpoint" / "later.txt").write_text("mine")
    with pytest.raises(EvidenceError, match=r"holds checkpoint/later\.txt"):
        empty_own_folder(tmp_path, CASE_FOLDER)
    (tmp_path / "checkpoint" / "later.txt").unlink()
    assert list(empty_own_folder(tmp_path, CASE_FOLDER).iterdir()) == []


@pytest.mark.parametrize(
    "foreign", ["processes/notes.txt", "ranks/data.csv", "jobs/2/mine", "chrome/mine.json", ".git/HEAD"]
)
def test_one_foreign_file_in_a_recording_is_named(foreign: str, tmp_path: Path) -> None:
    fill(tmp_path, {"processes/host-7.started": "", "ranks/rank_00000.record": "", foreign: "mine"})
    with pytest.raises(EvidenceError, match="which this harness did not write"):
        empty_own_folder(tmp_path, RECORDING_FOLDER)
    assert (tmp_path / foreign).read_text() == "mine"


def test_a_symbolic_link_is_not_replaced(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path / "there", {"processes/host-7.started": ""})
    (tmp_path / "link").symlink_to("there")
    assert main(["record", "-o", str(tmp_path / "link"), "--", "true"]) == 2
    assert "symbolic link" in capfd.readouterr().err
    assert (tmp_path / "there" / "processes" / "host-7.started").exists()
