"""The fixture `same_training`, in a pytest of somebody's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent / "layouts_script.py"

OWN = """
ALONE = "{python} {script}"
BOTH = "{python} -m torch.distributed.run --standalone --nproc-per-node 2 {script} --layout ddp"


def test_ddp(same_training):
    same_training(ALONE, BOTH, noise=False)


def test_a_mistake(same_training):
    same_training(ALONE, BOTH + " --mistake halved", noise=False)
"""


def test_a_layout_that_trains_another_way_fails(tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text(OWN.format(python=sys.executable, script=SCRIPT))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'own'}", "test_own.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 1 passed" in done.stdout
    assert "gradients are 0.5 times what they should be" in done.stdout
