"""A command's side of resident rank servers (resident.py): functions to meet, start, replace, list and end them."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from harness import ROOT
from harness.core.evidence.text import escape_control_characters
from harness.core.launch.identity import process_circumstances, server_identity, socket_folder
from harness.core.launch.own_server import OwnServer, ServerLink
from harness.core.launch.process import peer_process
from harness.core.launch.python_path import child_environment, module_command

SERVER_VARIABLE = "HARNESS_SERVER"
"""One of SERVERS (spec/launching.py): whether ranks come from a server that outlives the command."""

IDLE_LIMIT = 300.0  # seconds without a command, after which a server ends
START_PATIENCE = 100.0  # importing torch takes 3 s, on a cold disk a minute
LARGEST_ANSWER = 10_000  # bytes; what writes more is no server of ours
ANSWER_PATIENCE = 10.0  # of a server that has imported all: it only forks
POLL_TIMEOUT = 0.5


def is_resident_wanted(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether a server that stays is wanted: not in CI, where no second command follows, unless it is requested.

    False where the kernel cannot report that a command has died (no pidfd_open).
    """
    in_ci = environment.get("CI", "").lower() not in ("", "0", "false")
    return environment.get(SERVER_VARIABLE, "" if not in_ci else "own") != "own" and hasattr(os, "pidfd_open")


def connect_or_start(modules: Iterable[str], output: IO[bytes]) -> ServerLink:
    """Return a server that outlives the command, where that is wanted and can be had; else this command's own.

    A line on stderr says if a resident server is wanted but cannot be had.
    """
    if not is_resident_wanted():
        return OwnServer(modules, output)
    try:
        return connect_resident(modules, output)
    except OSError as error:
        print_note(f"no resident rank server, this command starts its own: {error}")
        return OwnServer(modules, output)


def choose_server_kind(kind: str | None) -> None:
    """Set the kind of server for this process and those that it starts, in its environment; None leaves it as it is."""
    if kind:
        os.environ[SERVER_VARIABLE] = kind


class SilentServer(Exception):
    """A server does not answer in time, or its answer does not end."""


class ResidentUnavailable(OSError):
    """No resident server can be had; the message says why."""


@dataclass(frozen=True)
class ResidentServer:
    """This command's own server, forked by the resident one (`own_server.Link`)."""

    connection: socket.socket
    pid: int

    @property
    def requests(self) -> int:
        return self.connection.fileno()

    reports = requests

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):  # it is gone already
            self.connection.shutdown(socket.SHUT_WR)

    def end(self) -> str:
        self.connection.close()
        return "the connection was closed"


def connect_resident(modules: Iterable[str], output: IO[bytes]) -> ResidentServer:
    """Return a server that writes to `output`; start a resident one if there is none, or it does not answer.

    Raises OSError, ResidentUnavailable among them. One that had imported a source that has changed since is replaced.
    """
    modules = tuple(modules)
    path = socket_folder() / f"{server_identity(modules)}.sock"
    answer: dict[str, Any] = {}
    with exclusive_lock(path):
        for open_connection in (try_connect, functools.partial(start_resident, modules=modules)):
            if connection := open_connection(path):
                answer = greet_server(connection, path, modules, output)
                if "server" in answer:
                    return ResidentServer(connection, answer["server"])
                connection.close()
                path.unlink(missing_ok=True)
    if "changed" in answer:
        raise ResidentUnavailable(f"{answer['changed']} changes while it is imported, or its disk has another clock")
    raise ResidentUnavailable(f"it ended as it started, see {path.with_suffix('.log')}")


@contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Wait for the lock beside this path and hold it in the context. The kernel releases it when the process dies."""
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def try_connect(path: Path) -> socket.socket | None:
    """Return a connection to the server of this socket; None if there is no socket, or its server was killed.

    Raises ResidentUnavailable if the server is another user's.
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(START_PATIENCE)
    try:
        connection.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    if peer_process(connection)[1] != os.geteuid():
        raise ResidentUnavailable(f"{path} is another user's")
    return connection


def start_resident(path: Path, modules: Iterable[str]) -> socket.socket:
    """Start a resident server in the background and return a connection to it. ResidentUnavailable if it did not start.

    It runs without a terminal, in the root folder, with a separate log. Files of a dead server at this path are deleted
    first.
    """
    if path.exists():
        print_note("the resident rank server had died; another one is started")
    for stale_file in (path, path.with_suffix(".ready")):
        stale_file.unlink(missing_ok=True)
    with open(path.with_suffix(".log"), "wb") as log:
        finished = subprocess.run(
            module_command("harness.core.launch.resident", str(path), str(IDLE_LIMIT), str(time.time_ns()), *modules),
            cwd="/",
            env=child_environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    connection = try_connect(path)
    if finished.returncode or connection is None:
        raise ResidentUnavailable(f"it did not start, see {path.with_suffix('.log')}")
    return connection


def greet_server(connection: socket.socket, path: Path, modules: Iterable[str], output: IO[bytes]) -> dict[str, Any]:
    """Return a server's answer to this command's greeting: {"server": pid} or {"changed": file}.

    Empty if the server ended. A server that does not answer is killed, a line on stderr says so, and the answer is
    empty.
    """
    working_directory = os.open(".", os.O_PATH)
    try:
        return ask_server(
            connection, path, {"modules": modules, **process_circumstances()}, [working_directory, output.fileno()]
        )
    except SilentServer:
        server, _ = peer_process(connection)
        print_note(f"the resident rank server (pid {server}) did not answer and was killed; another one is started")
        kill_process(server)
        return {}
    finally:
        os.close(working_directory)


def ask_server(
    connection: socket.socket, path: Path, request: dict[str, Any], descriptors: Iterable[int] = ()
) -> dict[str, Any]:
    """Send a request with file descriptors and return the server's answer; {} if the server ended.

    It may still be importing, which takes a while. Raises SilentServer.
    """
    try:
        data = json.dumps(request).encode() + b"\n"
        sent = socket.send_fds(connection, [data[:4096]], list(descriptors))
        connection.sendall(data[sent:])
        return read_answer(connection, path)
    except (BrokenPipeError, ConnectionResetError):
        return {}


def read_answer(connection: socket.socket, path: Path) -> dict[str, Any]:
    """Return the answer that comes; {} if the server ended.

    Raises SilentServer if none comes in START_PATIENCE seconds, in ANSWER_PATIENCE after it has imported all, or it is
    too long.
    """
    data = b""
    began = time.monotonic()
    ready_since = 0.0
    connection.settimeout(POLL_TIMEOUT)
    while not data.endswith(b"\n"):
        try:
            chunk = connection.recv(1)  # what comes after the answer is another's
        except TimeoutError:
            now = time.monotonic()
            if not ready_since and path.with_suffix(".ready").exists():
                ready_since = now
            if now - began > START_PATIENCE or (ready_since and now - ready_since > ANSWER_PATIENCE):
                raise SilentServer from None
            continue
        if not chunk:
            return {}
        data += chunk
        if len(data) > LARGEST_ANSWER:
            raise SilentServer
    connection.settimeout(None)
    return json.loads(data) or {}


def kill_process(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def print_note(text: str) -> None:
    print(escape_control_characters(f"harness: {text}"), file=sys.stderr, flush=True)


# ---- all of this user's


def status_of_all() -> list[dict[str, Any]]:
    """Return the status record of each server of this user (resident.py); the pid alone of a server that does not answer."""
    return [status for _, status in ask_all_servers({"status": True})]


def stop_servers(*, every: bool = False) -> list[dict[str, Any]]:
    """End this environment's servers, or every one of this user, and return each server's status, also of those that stay.

    A server of another environment has "stays": True. A server that has commands ends with them. A silent one is
    killed.
    """
    statuses = []
    request = {"stop": True} if every else {"status": True, "stop_if": own_environment()}  # others' may be older
    for path, status in ask_all_servers(request):
        is_silent = "commands" not in status
        is_ours = (
            interpreter_folder(status["pid"]) == Path(sys.executable).parent
            if is_silent
            else not status.get("stays", True)
        )
        if not (every or is_ours):
            statuses.append(status | {"stays": True})
            continue
        statuses.append(status)
        if is_silent:
            kill_process(status["pid"])
        else:
            wait_until_gone(path)
    return statuses


def own_environment() -> list[str]:
    """Return the interpreter's prefix and the harness's root, by which servers of one environment are known."""
    return [sys.prefix, str(ROOT)]


def interpreter_folder(pid: int) -> Path | None:
    """Return the folder of the interpreter that runs process `pid`, by its command line; None if it has ended."""
    try:
        return Path(os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0])).parent
    except OSError:
        return None


def wait_until_gone(path: Path) -> None:
    """Wait until the file is deleted, at most ANSWER_PATIENCE seconds; longer ones are not reported."""
    deadline = time.monotonic() + ANSWER_PATIENCE
    while path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def ask_all_servers(request: dict[str, Any]) -> list[tuple[Path, dict[str, Any]]]:
    """Return each server's socket path and answer to the request; {"pid"} alone of a server that does not answer.

    Sockets of servers that were killed are left out.
    """
    answers = []
    for path in sorted(socket_folder().glob("*.sock")):
        if connection := try_connect(path):
            with connection:
                status: dict[str, Any] = {}
                with contextlib.suppress(SilentServer):
                    status = ask_server(connection, path, request)
                answers.append((path, status or {"pid": peer_process(connection)[0]}))
    return answers
