"""The fixture `same_training`, in a pytest of somebody's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from forked_jobs import TORCHRUN, Main

from harness.recording.same_training import compare_commands

SCRIPT = Path(__file__).parent / "layouts_script.py"

OWN = """
ALONE = "{python} {script}"
BOTH = "{python} -m torch.distributed.run --standalone --nproc-per-node 2 {script} --layout ddp"


def test_ddp(same_training):
    same_training(ALONE, BOTH, noise=False)


def test_a_mistake(same_training):
    same_training(ALONE, BOTH + " --mistake halved", noise=False)
"""


@pytest.mark.parametrize(("mistake", "factor"), [("", ""), ("halved", "0.5")])
def test_two_commands_are_the_same_training_or_what_differs_is_returned(
    mistake: str, factor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_main: Main
) -> None:
    monkeypatch.setitem(compare_commands.__globals__, "main", forked_main)  # the module has the name of a fixture
    trusted = f"{sys.executable} {SCRIPT}"
    other = " ".join([sys.executable, *TORCHRUN, "2", str(SCRIPT), "--layout", "ddp", "--mistake", f"'{mistake}'"])
    failed = compare_commands(tmp_path, trusted, other, noise=False)
    assert (factor in failed) and bool(failed) == bool(mistake)


@pytest.mark.slow(
    "four real jobs; test_two_commands_are_the_same_training_or_what_differs_is_returned has the fixture's judgement"
)
def test_a_layout_that_trains_another_way_fails(tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text(OWN.format(python=sys.executable, script=SCRIPT))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'own'}", "test_own.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 1 passed" in done.stdout
    assert "gradients are 0.5 times what they should be" in done.stdout
