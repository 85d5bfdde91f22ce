"""The shell completes commands, options and the names of cases."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LOOKING = """
import argcomplete, functools, os, sys
from harness.core.cli import main
def leave(code):
    os.write(1, str(sorted({"torch", "numpy"} & {*sys.modules})).encode())
    os._exit(code)
argcomplete.autocomplete = functools.partial(argcomplete.autocomplete, exit_method=leave)
main([])
"""
"""Completion that says what it has imported."""
PAIR = "cases: {pair: {why: a test}, other: {why: a test}}"


def completed(line: str, folder: Path) -> set[str]:
    """Return what the shell is told, as bash asks for it."""
    pytest.importorskip("argcomplete", reason="no argcomplete here; `make` installs it")
    asks = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(folder / "told")}
    asks |= {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_SUPPRESS_SPACE": "1"}
    command = [sys.executable, "-m", "harness"]
    subprocess.run(command, cwd=folder, env=os.environ | asks, check=True, capture_output=True, timeout=60)
    return set((folder / "told").read_text().split())


def test_completion_imports_neither_torch_nor_numpy(tmp_path: Path) -> None:
    """In the process that the shell would start, which looks at what it has imported as it ends."""
    pytest.importorskip("argcomplete", reason="no argcomplete here; `make` installs it")
    (tmp_path / "cases").mkdir()
    (tmp_path / "cases" / "mine.yaml").write_text(PAIR)
    for line in ("harness re", "harness report --his", "harness run p"):
        asks = os.environ | {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "told")}
        asks |= {"COMP_LINE": line, "COMP_POINT": str(len(line)), "_ARGCOMPLETE_IFS": "\n"}
        done = subprocess.run([sys.executable, "-c", LOOKING], cwd=tmp_path, env=asks, capture_output=True, timeout=60)
        assert (done.stdout, done.stderr) == (b"[]", b""), line
        assert (tmp_path / "told").read_text(), line


def test_commands_options_and_cases_are_completed(tmp_path: Path) -> None:
    (tmp_path / "cases").mkdir()
    (tmp_path / "cases" / "mine.yaml").write_text(PAIR)
    assert completed("harness re", tmp_path) == {"report", "record"}
    assert completed("harness report --his", tmp_path) == {"--history"}
    assert completed("harness run p", tmp_path) == {"pair"}
    assert completed("harness run --cases nowhere p", tmp_path) == set()
