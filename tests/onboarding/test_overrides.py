"""Flags that no parser declares: a file that the script executes sets its constants by `--name=value`."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from harness.cli import main
from harness.onboarding import skeleton
from harness.onboarding.script_facts import read

SETTER = """
import sys
for word in sys.argv[1:]:
    name, value = word.removeprefix("--").split("=")
    globals()[name] = type(globals()[name])(value)
"""
SCRIPT = """
import torch
learning_rate = 6e-4
n_layer, n_head = 12, 12
accum_steps = 5 * 8
dtype = "bfloat16" if torch.cuda.is_available() else "float32"
names = [key for key in globals()]
device = get_device()
margin = -1
exec(open("settings.py").read())
warmup_iters = 3
"""


def flags(folder: Path, script: str = SCRIPT, setter: str = SETTER) -> dict[str, str]:
    (folder / "train.py").write_text(script)
    (folder / "settings.py").write_text(setter)
    return {flag.name: flag.default for flag in read(folder / "train.py").flags}


def test_constants_before_such_a_file_are_flags(tmp_path: Path) -> None:
    assert flags(tmp_path) == {
        "--learning_rate": "0.0006",
        "--accum_steps": "5 * 8",
        "--dtype": "'bfloat16' if torch.cuda.is_available() else 'float32'",
        "--margin": "-1",
    }
    adapter = skeleton.adapter(read(tmp_path / "train.py"))
    ast.parse(adapter)
    assert 'f"--learning_rate={case.training.lr}"' in adapter and "# --margin: left at -1" in adapter


@pytest.mark.parametrize(
    "setter",
    ["print('hello')", "import sys\nprint(globals(), sys.argv)", SETTER.replace("globals()", "settings")],
)
def test_a_file_that_does_something_else_makes_no_flags(tmp_path: Path, setter: str) -> None:
    assert flags(tmp_path, setter=setter) == {}


@pytest.mark.parametrize("line", ["exec(code)", "exec(open('nowhere.py').read())", "run(open('settings.py').read())"])
def test_what_is_executed_must_be_that_file(tmp_path: Path, line: str) -> None:
    assert flags(tmp_path, SCRIPT.replace('exec(open("settings.py").read())', line)) == {}


def test_init_says_where_such_flags_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    flags(tmp_path, SCRIPT + "model = DDP(model)\n")
    assert main(["init", "train.py"]) == 0
    said = "flags      4, of which 3 mean something to a case; train.py's constants, as settings.py sets them by --name=value"
    assert said in capsys.readouterr().out
