"""Cases and faults in a folder of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

FAULTS = """
import time
from pathlib import Path
from harness.faults import fault

told = dict(breaks="nothing", bug="none", case="pair", caught_by="completed", named="")

@fault(**told)
def silent(fired):
    pass

@fault(**told)
def fatal(fired):
    fired()
    raise RuntimeError("on purpose")

@fault(**told)
def late(fired):
    import os
    import torch.distributed as dist
    original = dist.all_reduce
    def all_reduce(*args, **kwargs):
        if os.environ["RANK"] == "1":
            Path("alive").touch()
            time.sleep(600)
        return original(*args, **kwargs)
    dist.all_reduce = all_reduce

@fault(**told)
def endless(fired):
    Path("alive").touch()
    time.sleep(600)
"""


@pytest.fixture
def cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Writes a YAML file and answers the arguments that point to it, in a folder of the test's own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong.py").write_text(FAULTS)

    def write(text: str) -> list[str]:
        (tmp_path / "cases").mkdir()
        (tmp_path / "cases" / "some.yaml").write_text(text)
        return ["--cases", "cases"]

    return write
