"""Which cases a change can affect: in a repository with a trainer of one's own, recorded by real ranks, and by literal maps."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path, PurePath
from typing import Any

import pytest

from harness.core.case import case as requested
from harness.core.case.case import Case
from harness.nights.affected.maps import CaseMap
from harness.nights.affected.selecting import reason_for
from harness.nights.affected.sources import SourceChanges

OWN = Path(__file__).resolve().parents[2] / "own_trainer.py"
CASES = """
cases:
  pair:
    dims: {dp_replicate: 2}
    training: {all_valid: true}
    features: {wrapper: ddp}
    why: a test
  never_asked:
    dims: {dp_shard: 2}
    why: the trainer has no such option
"""
STEPS = """
def scaled(loss):
    return loss

def unused(loss):
    return 2 * loss
"""


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", str(folder), "-c", "user.name=x", "-c", "user.email=x@y", *arguments], check=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with a trainer, one module of which has a function that runs and one that does not."""
    text = OWN.read_text(encoding="utf-8").replace("import contextlib\n", "import contextlib\nimport sys\n")
    text = text.replace(
        "from harness.core.case.case", "sys.path.insert(0, os.path.dirname(__file__))\nfrom harness.core.case.case"
    )
    text = text.replace(
        "        assert weights is not None\n",
        "        from steps_of_mine import scaled\n\n        scaled(1)\n        assert weights is not None\n",
    )
    assert "scaled(1)" in text
    (tmp_path / "trainer.py").write_text(text, encoding="utf-8")
    (tmp_path / "steps_of_mine.py").write_text(STEPS, encoding="utf-8")
    (tmp_path / "mine.yaml").write_text(CASES, encoding="utf-8")
    (tmp_path / ".gitignore").write_text("out/\n__pycache__/\n", encoding="utf-8")
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "x")
    return tmp_path


def harness(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "harness", "matrix", "--cases", ".", "--trainer", "trainer.py", "--tier", "all"]
    return subprocess.run([*command, *arguments], cwd=folder, capture_output=True, text=True, check=False)


def listed(folder: Path) -> tuple[int, bool]:
    """Return the exit code of --changed HEAD --list, and whether the case is listed."""
    done = harness(folder, "--changed", "HEAD", "--list")
    assert "never_asked" not in done.stdout
    return done.returncode, "  pair " in done.stdout


@pytest.mark.slow("ten commands in a repository; test_what_is_not_known_counts selects by literal maps")
def test_a_change_selects_the_cases_whose_ranks_run_it(repository: Path) -> None:
    made = harness(repository, "--map", "out/map")
    path = repository / "out" / "map" / "pair.json"
    assert path.exists(), made.stdout + made.stderr
    found = CaseMap.load(path)
    assert found.functions["steps_of_mine.py"] == {"scaled"}
    assert "trainer.py" in found.shared  # the harness asks an adapter, too
    steps = repository / "steps_of_mine.py"
    for old, new, selected in (
        ("2 * loss", "3 * loss", False),
        ("return loss", "return +loss", True),
        ("def scaled(loss)", "LIMIT = 1\n\ndef scaled(loss)", True),
    ):
        steps.write_text(STEPS.replace(old, new), encoding="utf-8")
        assert listed(repository) == (0, selected), new
    steps.write_text(STEPS, encoding="utf-8")
    assert listed(repository) == (0, False)
    for more in ([], ["--json"]):  # nothing is run, and nothing is wrong
        done = harness(repository, "--changed", "HEAD", *more)
        assert (done.returncode, "0 of 1 cases" in done.stdout) == (0, True), done.stderr
    (repository / "notes.md").write_text("x", encoding="utf-8")
    assert listed(repository) == (0, False)
    (repository / "mine.yaml").write_text(
        CASES.replace("wrapper: ddp", "wrapper: ddp, accumulation: 2"), encoding="utf-8"
    )
    assert listed(repository) == (0, True)
    shutil.rmtree(repository / "out")
    assert listed(repository) == (2, False)


CASE = Case(name="a", why="a test")
MAP = CaseMap(
    case=json.loads(json.dumps(requested.to_json(CASE))),
    trainer="t",
    commit="c",
    functions={"t/loop.py": frozenset({"step", "Trainer.run"})},
    imported=frozenset({"t/loop.py", "t/data.py"}),
    shared=frozenset({"adapter.py"}),
    shell=False,
)


@pytest.mark.parametrize(
    ("changes", "affected"),
    [
        (SourceChanges(functions={"t/loop.py": {"step"}}), True),
        (SourceChanges(functions={"t/loop.py": {"evaluate"}, "t/data.py": {"load"}}), False),
        (SourceChanges(functions={"adapter.py": {"evaluate"}}), True),
        (SourceChanges(whole_files={"t/data.py": "code that runs at import"}), True),
        (SourceChanges(whole_files={"adapter.py": "code that runs at import"}), True),
        (SourceChanges(whole_files={"t/vision.py": "code that runs at import"}), False),
        (SourceChanges(new_files={"t/new.py"}), True),
        (SourceChanges(new_files={"vision/new.py"}), False),
        (SourceChanges(new_files={"vision/__init__.py"}), True),
        (SourceChanges(new_files={"vision/model/__init__.py"}), False),
        (SourceChanges(new_files={"random.py"}), True),
        (SourceChanges(gone_files={"t/data.py"}), True),
        (SourceChanges(gone_files={"t/never_imported.py"}), False),
        (SourceChanges(other_files={"setup.cfg"}), True),
        (SourceChanges(other_files={"run.sh"}), False),
        (SourceChanges(other_files={"cases/own.yaml"}), False),
        (SourceChanges(other_files={"cases/more/own.yaml"}), True),
        (SourceChanges(other_files={"cases/own.json"}), True),
    ],
)
def test_what_is_not_known_counts(changes: SourceChanges, affected: bool) -> None:
    assert bool(reason_for(CASE, MAP, changes, {PurePath("cases")})) is affected


def test_lost_functions_make_every_change_count() -> None:
    lost: Any = dataclasses.replace(MAP, lost="the trainer forked a process")
    assert reason_for(CASE, lost, SourceChanges(functions={"vision/other.py": {"f"}}), set())
    assert not reason_for(CASE, lost, SourceChanges(), set())


def test_scripts_count_where_a_shell_ran() -> None:
    assert reason_for(CASE, dataclasses.replace(MAP, shell=True), SourceChanges(other_files={"run.sh"}), set())


def test_a_case_that_is_another_one_now_is_selected() -> None:
    assert reason_for(dataclasses.replace(CASE, runs=2), MAP, SourceChanges(), set())
