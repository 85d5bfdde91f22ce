"""How other processes find this harness, from whatever folder they run in."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from pathlib import Path

from harness import ROOT

ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}


def python_path() -> str:
    """Return PYTHONPATH for them: ours, and before it the folder of the harness, unless that is one of installed packages.

    Installed packages are found without it. In front of another environment's they would hide the versions there.
    """
    installed = {*site.getsitepackages(), site.getusersitepackages(), *map(sysconfig.get_path, ("purelib", "platlib"))}
    own = [] if ROOT in {Path(folder).resolve() for folder in installed} else [str(ROOT)]
    given = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join((*own, *(map(os.path.abspath, given.split(os.pathsep)) if given else ())))


def module_command(module: str, *arguments: str, python: str = sys.executable) -> list[str]:
    """Return the words that run a module. -P: what lies in the current folder is not imported in place of ours or Python's."""
    return [python, "-P", "-m", module, *arguments]


def child_environment() -> dict[str, str]:
    """Return our environment, with one thread per library, and the harness importable from wherever we run."""
    return {**os.environ, **ONE_THREAD, "PYTHONPATH": python_path()}
