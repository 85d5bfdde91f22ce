"""The identity of a resident rank server: the environment that its ranks find, and the sources that it has imported.

Some settings can be changed in a running process (working directory, umask, soft limits, processors, any variable):
each command brings its own. The others are part of the name of the server's socket: a command that differs in one uses
another server.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import site
import stat
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from harness import ROOT
from harness.core.launch.python_path import child_environment

HARMLESS_PREFIXES = (
    *("COLORTERM", "COLUMNS", "HARNESS_", "LINES", "LS_COLORS", "OLDPWD", "PS1", "PWD", "PYTEST_", "SHLVL", "SSH_"),
    *("STY", "TERM", "TMUX", "VSCODE_", "WINDOWID", "XDG_SESSION_", "_="),
)
"""How variables begin, NAME=, that nothing reads while it is imported. Any other may be read then, by a library in C too."""

NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
LIMITS = {name: getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}

FileStamp = tuple[int, int, int, int]


class UnsafeFolder(OSError):
    """The folder of the sockets may be somebody else's."""


def socket_folder() -> Path:
    """Return the folder of this user's sockets, made if missing; no other user may look into it.

    It is in XDG_RUNTIME_DIR if that is our own folder, else in /tmp. Raises UnsafeFolder if it is not ours alone.
    """
    runtime_folder = os.environ.get("XDG_RUNTIME_DIR", "")
    path = (
        Path(runtime_folder, "harness")
        if runtime_folder and is_own_folder(Path(runtime_folder))
        else Path(f"/tmp/harness-{os.geteuid()}")
    )
    path.mkdir(mode=0o700, exist_ok=True)
    if not is_own_folder(path) or path.lstat().st_mode & 0o077:
        raise UnsafeFolder(f"{path} is open to others: remove it")
    return path


def is_own_folder(path: Path) -> bool:
    """Return whether a path is a folder, no link to one, and ours."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def server_identity(modules: Iterable[str]) -> str:
    """Return sixteen hex digits that name the server for a command like this one: a digest of its circumstances.

    They are the interpreter, the harness, installed packages, `modules` to import, environment variables that matter,
    user, hard limits, namespaces and cgroup. Commands that differ in one of them use different servers. Linux only.
    """
    circumstances_of_server = {
        "interpreter": [sys.executable, sys.version, sys.prefix, list(sys.flags)],
        "harness": str(ROOT),
        "packages": [
            [folder, modification_time(folder)] for folder in (*site.getsitepackages(), site.getusersitepackages())
        ],
        "modules": list(modules),
        "environment": {name: value for name, value in sorted(child_environment().items()) if not is_harmless(name)},
        "user": [os.getresuid(), os.getresgid(), sorted(os.getgroups()), os.getpriority(os.PRIO_PROCESS, 0)],
        "limits": {name: resource.getrlimit(number)[1] for name, number in LIMITS.items()},
        "namespaces": [os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES] + [os.readlink("/proc/self/root")],
        "cgroup": Path("/proc/self/cgroup").read_text(),
    }
    return hashlib.sha256(json.dumps(circumstances_of_server).encode()).hexdigest()[:16]


def is_harmless(name: str) -> bool:
    return f"{name}=".startswith(HARMLESS_PREFIXES)


def modification_time(folder: str) -> int:
    """Return when the folder was last changed (nanoseconds), as by installing or removing a package; 0 if there is no
    such folder."""
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return 0


# ---- sources


def imported_files() -> dict[str, FileStamp]:
    """Return the current stamps of the files of all modules that are imported here, by path.

    Modules without a file are left out.
    """
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    return {file: file_stamp for file in files if file and (file_stamp := stamp_of(file))}


def stamp_of(file: str) -> FileStamp | None:
    """Return a file's inode, size, and times of modification and change (nanoseconds). None if it cannot be read."""
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def find_changed_file(files: Mapping[str, FileStamp], began: int) -> str | None:
    """Return the first of `files` that changed since its stamp was taken, or was changed after `began`; None if there
    is none.

    `files` maps paths to their stamps; `began` is when importing began (nanoseconds). A file that is gone has changed.
    """
    return next(
        (file for file, old_stamp in files.items() if old_stamp[-1] > began or stamp_of(file) != old_stamp), None
    )


# ---- what is the command's


def process_circumstances() -> dict[str, Any]:
    """Return this process's environment, umask, soft limits and processors, for adopt_circumstances() in another process."""
    return {
        "environment": child_environment(),
        "umask": read_umask(),
        "limits": {name: resource.getrlimit(number)[0] for name, number in LIMITS.items()},
        "processors": sorted(os.sched_getaffinity(0)),
    }


def adopt_circumstances(other: Mapping[str, Any], *, working_directory: int, output: int) -> None:
    """Give this process the environment, umask, soft limits and processors of `other`, as from process_circumstances().

    It moves to the folder of descriptor `working_directory` and sends stdout and stderr to descriptor `output`. It
    closes both.
    """
    os.environ.clear()
    os.environ.update(other["environment"])
    os.umask(other["umask"])
    for name, soft in other["limits"].items():
        resource.setrlimit(LIMITS[name], (soft, resource.getrlimit(LIMITS[name])[1]))
    os.sched_setaffinity(0, other["processors"])
    os.fchdir(working_directory)
    for standard in (1, 2):
        os.dup2(output, standard)
    for descriptor in (working_directory, output):
        os.close(descriptor)


def read_umask() -> int:
    """Return this process's umask. It is read, not set and set back: a thread may be making a file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("Umask:")).split()[1], 8)
