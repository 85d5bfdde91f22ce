"""Ranks are forked from a server that has not touched CUDA: a process forked after that cannot use a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.core.launch.local import preloadable_modules
from harness.core.launch.rank import refuse_started_cuda

ASKED = """
import sys, torch
from harness.core.launch.server import PRELOAD, import_preloaded
asked = []
def spied(name):
    original = getattr(torch.cuda, name)
    def spy(*args, **kwargs):
        asked.append((name, sys._getframe(1).f_globals.get("__name__")))
        return original(*args, **kwargs)
    setattr(torch.cuda, name, spy)
for name in ("is_available", "device_count", "_lazy_init", "current_device", "get_device_capability"):
    spied(name)
import_preloaded(())
print(len(PRELOAD), asked)
"""


def test_nothing_that_the_server_imports_asks_for_a_gpu() -> None:
    done = subprocess.run([sys.executable, "-c", ASKED], capture_output=True, text=True, cwd=Path(__file__).parents[3])
    count, _, requested = done.stdout.strip().partition(" ")
    assert (int(count) > 10, requested) == (True, "[]"), done.stderr


def test_for_gpus_the_server_imports_nothing_of_a_trainers() -> None:
    assert preloadable_modules(("torchao.float8",), "cpu") == ("torchao.float8",)
    assert preloadable_modules(("torchao.float8",), "cuda") == ()


def test_a_rank_forked_from_a_server_that_touched_cuda_says_so_and_what_helps() -> None:
    refuse_started_cuda(False)
    with pytest.raises(
        RuntimeError, match="the rank server has touched CUDA: .*; --launcher torchrun forks from no server"
    ):
        refuse_started_cuda(True)
