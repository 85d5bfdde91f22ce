"""What lies in the current folder is not imported in place of the harness's modules or Python's."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from harness import ROOT
from harness.core.launch.job import Job
from harness.core.launch.python_path import child_environment, module_command
from harness.core.launch.torchrun import torchrun_arguments

MODULES = (
    "harness.core.launch.server",
    "harness.core.launch.agent",
    "harness.core.launch.rank",
    "harness.core.launch.resident",
)


@pytest.mark.parametrize("module", MODULES)
def test_a_process_of_ours_imports_nothing_from_the_current_folder(module: str, tmp_path: Path) -> None:
    for name in ("harness", "queue", "json", "socket"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    command = module_command(module)
    done = subprocess.run(command, cwd=tmp_path, env=child_environment(), capture_output=True, text=True, check=False)
    assert "IndexError" in done.stderr or "ValueError" in done.stderr  # ours, which lacks its arguments
    assert not (tmp_path / "ran").exists()


def test_workers_of_torchrun_are_started_so(tmp_path: Path) -> None:
    words = torchrun_arguments(Job(tmp_path, 2, "a:b"))
    assert words[-5:] == ["--no-python", sys.executable, "-P", "-m", "harness.core.launch.rank"]


def test_no_list_of_words_runs_a_module_otherwise() -> None:
    lists = [
        ast.unparse(node)
        for file in (ROOT / "harness").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.List | ast.Tuple) and "sys.executable" in ast.unparse(node)
    ]
    assert [words for words in lists if "'-m'" in words or "'-c'" in words] == []
