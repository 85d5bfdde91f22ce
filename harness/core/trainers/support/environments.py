"""Environments that pip makes: a version of a package on top of this interpreter, and a trainer's release alone.

An environment is a venv that has the version and what that needs. It sees all other packages of this interpreter, so that
nothing else differs. It is made once, and whole or not at all.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from harness import ROOT
from harness.core.evidence.store import write_text
from harness.core.launch.python_path import module_command, python_path


class EnvironmentFailed(ValueError):
    """pip, or the making of an environment, failed. The message is its complaint."""


BEGUN_MARK = "begun_by_harness"
"""The file in an environment that is first written."""
MOST_SECONDS = 3600.0  # for making an environment


def run_python(python: Path, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run an interpreter with these arguments and the harness importable; return the finished process, whatever its
    exit code.

    Nothing is imported from the current folder (-P). Its output is captured as text.
    """
    environment = {**os.environ, "PYTHONPATH": python_path()}
    return subprocess.run(
        [str(python), "-P", *arguments], env=environment, capture_output=True, encoding="utf-8", errors="replace"
    )


def environment(requirement: str, folder: Path, tell: Callable[[str], None]) -> Path:
    """Return the interpreter of an environment with this pip requirement, made in `folder` if it is not there complete.

    It also sees the packages of this interpreter. `tell` is called with a line before it is made. Raises
    EnvironmentFailed.
    """
    python = folder / "bin" / "python"
    finished_mark = folder / "whole"
    if not finished_mark.exists():
        tell(f"making an environment with {requirement} in {folder}")
        begin_environment(folder)
        run_command(module_command("venv", str(folder)))
        beneath = {str(ROOT), *map(sysconfig.get_path, ("purelib", "platlib"))}
        own_packages = next(folder.glob("lib/python*/site-packages"))
        write_text(own_packages / "beneath.pth", "\n".join(sorted(beneath)))
        run_command(
            module_command("pip", "install", "--quiet", "--disable-pip-version-check", requirement, python=str(python))
        )
        finished_mark.touch()
    return python


def begin_environment(folder: Path) -> None:
    """Make the folder of an environment, after deleting one that was begun here before.

    Raises EnvironmentFailed if the folder is a link, or holds files that this harness did not begin.
    """
    mark = folder / BEGUN_MARK
    if folder.is_symlink() or (folder.exists() and any(folder.iterdir()) and not mark.is_file()):
        raise EnvironmentFailed(
            f"{folder}: not an environment that this harness began; remove it or choose another --out"
        )
    if mark.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    mark.touch()


def install_release(package: str, number: str, folder: Path) -> Path:
    """Return the folder of that version of a package, installed by pip without its dependencies, once.

    Raises ValueError with pip's complaint if it cannot be installed.
    """
    release_folder = folder.absolute() / f"{package}-{number}"
    if not release_folder.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as partial:
            laid = Path(partial, "laid")
            pip = module_command("pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps")
            try:
                run_command([*pip, "--target", str(laid), f"{package}=={number}"])
            except EnvironmentFailed as error:
                raise ValueError(f"no {package} {number}: {error}; or give --source a checkout of it") from None
            with contextlib.suppress(OSError):  # another process was first
                laid.rename(release_folder)
    return release_folder


def run_command(command: Sequence[str]) -> None:
    """Run a command and wait.

    Raises EnvironmentFailed with its last error if it fails or takes more than MOST_SECONDS.
    """
    try:
        process = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=MOST_SECONDS)
    except subprocess.TimeoutExpired:
        raise EnvironmentFailed(f"{' '.join(command[:5])} .. took more than {MOST_SECONDS:.0f} s") from None
    if process.returncode:
        error_lines = [
            line for line in process.stderr.splitlines() if line.startswith("ERROR")
        ] or process.stderr.splitlines()
        raise EnvironmentFailed(f"{' '.join(command)}: {error_lines[-1] if error_lines else process.returncode}")
