"""The environment and command with which other processes find this harness, from whatever folder they run in."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
from pathlib import Path

from harness import ROOT

ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}


def python_path() -> str:
    """Return PYTHONPATH for child processes: the harness's folder, then our own entries, made absolute.

    The harness's folder is left out if it is one of installed packages, which are found without it. In front of another
    environment's packages it would hide the versions there.
    """
    installed = {*site.getsitepackages(), site.getusersitepackages(), *map(sysconfig.get_path, ("purelib", "platlib"))}
    own = [] if ROOT in {Path(folder).resolve() for folder in installed} else [str(ROOT)]
    given = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join((*own, *(map(os.path.abspath, given.split(os.pathsep)) if given else ())))


def module_command(module: str, *arguments: str, python: str = sys.executable) -> list[str]:
    """Return the command line that runs a module with these arguments.

    With -P, nothing is imported from the current folder.
    """
    return [python, "-P", "-m", module, *arguments]


def child_environment() -> dict[str, str]:
    """Return our environment variables, with one thread per library, and a PYTHONPATH on which children find the harness."""
    return {**os.environ, **ONE_THREAD, "PYTHONPATH": python_path()}
