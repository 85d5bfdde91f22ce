"""What a process does to itself so that it never outlives the harness and never shares a terminal with it."""

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
    """Have the kernel send us this signal when `parent`, our parent's pid, dies. Linux only; elsewhere nothing.

    Trap: for the kernel the parent is the *thread* that forked us. It must live as long as we may.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal_number)
    if os.getppid() != parent:  # it died before prctl took hold
        os._exit(1)


def detach_session(log: Path) -> None:
    """Begin a session (killpg reaches all it starts; Ctrl-C does not), with empty stdin, stdout and stderr in `log`."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    redirect_descriptor(os.open(os.devnull, os.O_RDONLY), 0)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    redirect_descriptor(output, 2)


def kill_group(leader: int) -> None:
    """Kill a rank and all it started. Nothing if it died, or has yet to make its session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def is_stopped(pid: int) -> bool:
    """Return whether SIGSTOP, its terminal or a debugger stopped it. Linux only; False elsewhere."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")


def wait_and_kill_group(pid: int) -> int:
    """Wait for our child and return its status: exit code, or minus the signal.

    What it left running is killed while the pid is still its own, a zombie's, and so cannot be somebody else's.
    """
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    kill_group(pid)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def redirect_descriptor(source: int, target: int) -> None:
    os.dup2(source, target)
    os.close(source)


def loopback_environment() -> dict[str, str]:
    """Return the variables that keep gloo on this machine and away from its name server: else it looks its host name up."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    return {"GLOO_SOCKET_IFNAME": names[0]} if names else {}


def peer_process(connection: socket.socket) -> tuple[int, int]:
    """Return the process and user at the other end, as the kernel knows them."""
    pid, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, user
