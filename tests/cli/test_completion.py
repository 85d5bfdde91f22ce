"""The shell completes commands, options and the names of cases."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PAIR = "cases: {pair: {why: a test}, other: {why: a test}}"


def completed(line: str, folder: Path) -> set[str]:
    """Return what the shell is told, as bash asks for it."""
    pytest.importorskip("argcomplete", reason="no argcomplete here; `make` installs it")
    asks = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(folder / "told")}
    asks |= {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_SUPPRESS_SPACE": "1"}
    command = [sys.executable, "-m", "harness"]
    subprocess.run(command, cwd=folder, env=os.environ | asks, check=True, capture_output=True, timeout=60)
    return set((folder / "told").read_text().split())


def test_commands_options_and_cases_are_completed(tmp_path: Path) -> None:
    (tmp_path / "cases").mkdir()
    (tmp_path / "cases" / "mine.yaml").write_text(PAIR)
    assert completed("harness re", tmp_path) == {"report", "record"}
    assert completed("harness report --his", tmp_path) == {"--history"}
    assert completed("harness run p", tmp_path) == {"pair"}
    assert completed("harness run --cases nowhere p", tmp_path) == set()
