"""Process control: functions by which a process never outlives the harness and never shares a terminal with it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import struct
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int, *, signal_number: int = signal.SIGKILL) -> None:
    """Have the kernel send us this signal when `parent`, our parent's pid, dies. Linux only; elsewhere it does nothing.

    If the parent is dead already, exit with status 1. Trap: for the kernel the parent is the *thread* that forked us.
    It must live as long as we may.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent:  # it died before prctl took hold
        os._exit(1)


def detach_session(log: Path) -> None:
    """Begin a session (killpg reaches all it starts; Ctrl-C does not), with empty stdin, stdout and stderr appended to
    `log`.

    It ignores SIGINT and restores the default of SIGTERM.
    """
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    redirect_descriptor(os.open(os.devnull, os.O_RDONLY), 0)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    redirect_descriptor(output, 2)


def kill_group(leader: int) -> None:
    """Send SIGKILL to a rank and to all processes of its group.

    It does nothing if the rank died, or has not made its session yet.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped: by SIGSTOP, its terminal or a debugger.

    Linux only; False elsewhere, or if it ended.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")


def wait_and_kill_group(pid: int) -> int:
    """Wait for our child and return its status: exit code, or minus the signal. Then kill what is left of its group.

    This happens while the pid is still the child's own, a zombie's, and so cannot be another process's.
    """
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    kill_group(pid)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def redirect_descriptor(source: int, target: int) -> None:
    os.dup2(source, target)
    os.close(source)


def loopback_environment() -> dict[str, str]:
    """Return the variable that keeps gloo on the loopback interface, where it looks up no host name.

    Empty without lo or lo0.
    """
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    return {"GLOO_SOCKET_IFNAME": names[0]} if names else {}


def peer_process(connection: socket.socket) -> tuple[int, int]:
    """Return the pid and the user id of the process at the other end of a Unix socket, as reported by the kernel."""
    pid, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, user
