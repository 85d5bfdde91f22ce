"""The resident rank server: a process that outlives a command, with torch imported.

    python -P -m harness.core.launch.resident SOCKET IDLE BEGAN MODULE..

For each command that connects it forks a separate rank server (server.py), which takes on the command's environment and
ends with it. So commands share nothing but what was imported, and the end of this process ends none of them. It ends
when no command has been connected for IDLE seconds. BEGAN: time_ns() when it was started.

A command writes one line of JSON with two file descriptors (working directory, output).

    {"modules", "environment", "umask", "limits", "processors"}   ->  {"server": pid}, from then on as in server.py; or
                                                                      {"changed": file}, and this process retires
    {"status": true}                                              ->  {"pid", "root", "torch", "commands", "idle", "ends"}
    {"stop": true}                                                ->  the same, and this process retires
    {"status": true, "stop_if": [prefix, root]}                   ->  the same; if it is of that environment, this process
                                                                      retires and answers "stays": false.

Once it retires it answers no other command, and ends with its last one.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from harness import ROOT
from harness.core.launch import server
from harness.core.launch.identity import adopt_circumstances, find_changed_file, imported_files
from harness.core.launch.process import peer_process

RETIRE_STATUS = 75  # exit status of a child that should, or saw that a source has changed
GREETING_PATIENCE = 10.0
LARGEST_GREETING = 10_000_000  # bytes; an environment has at most a few


class Resident:
    """The resident process: it listens on the socket at `path`, and forks a server for each command that connects.

    `commands` holds the pids of these servers. `listener` is None once it retires.
    """

    def __init__(self, path: Path, idle: float, began: int) -> None:
        self.path = path
        self.idle_limit = idle
        self.listener: socket.socket | None = listening_socket(path)
        self.inode = path.stat().st_ino
        self.commands: set[int] = set()  # pids of their servers
        self.last_used = time.monotonic()
        self.start_time_ns = began

    def preload_modules(self, modules: Iterable[str]) -> None:
        """Import PRELOAD and the modules, note the stamps of all imported files, and write the file .ready beside the
        socket.

        It also sets up the pipe that wakes serve() when a child ends.
        """
        server.import_preloaded(modules)
        self.imported_stamps = imported_files()
        self.path.with_suffix(".ready").write_text(str(os.getpid()))
        self.last_used = time.monotonic()
        self.death_pipe, wake = os.pipe()
        os.set_blocking(wake, False)
        self.private_descriptors = [self.death_pipe, wake]
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        """Accept commands and reap their servers, until it has retired and its last server has ended.

        It retires when no command was connected for `idle_limit` seconds, or when a server's exit status requests it.
        """
        while self.listener or self.commands:
            listening = [self.listener.fileno()] if self.listener else []
            ready, _, _ = select.select([self.death_pipe, *listening], [], [], 1.0)
            if self.death_pipe in ready:
                os.read(self.death_pipe, 4096)
                self.reap_servers()
            if self.listener and self.listener.fileno() in ready:
                self.accept_command(self.listener)
            if not self.commands and time.monotonic() - self.last_used > self.idle_limit:
                self.stop_listening()

    def accept_command(self, listener: socket.socket) -> None:
        """Accept one connection and fork the server that answers it."""
        connection, _ = listener.accept()
        with connection:
            pid = os.fork()
            if pid == 0:
                self.become_server(connection)
            self.commands.add(pid)

    def reap_servers(self) -> None:
        """Reap the servers that have ended; retire if one ended with RETIRE_STATUS."""
        while self.commands and (pid_and_status := os.waitpid(-1, os.WNOHANG))[0]:
            self.commands.discard(pid_and_status[0])
            self.last_used = time.monotonic()
            if os.waitstatus_to_exitcode(pid_and_status[1]) == RETIRE_STATUS:
                self.stop_listening()

    def stop_listening(self) -> None:
        """Close the socket and delete its files: no further command is taken. It does nothing if called again.

        The socket's name goes first. It is left alone if a later command has given it to another server.
        """
        if self.listener and self.path.exists() and self.path.stat().st_ino == self.inode:
            self.path.unlink()
            for suffix in (".ready", ".log"):
                self.path.with_suffix(suffix).unlink(missing_ok=True)
        if self.listener:
            self.listener.close()
        self.listener = None

    # ---- in the child

    def become_server(self, connection: socket.socket) -> NoReturn:
        """Answer one command in this process, which was just forked, and exit with the status; it never returns."""
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if self.listener:
                self.listener.close()
            for descriptor in self.private_descriptors:
                os.close(descriptor)
            status = self.answer_command(connection)
        except OSError:  # the command went away
            pass
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)

    def answer_command(self, connection: socket.socket) -> int:
        """Answer one command and return the exit status of this child, which is RETIRE_STATUS if the resident process
        must retire.

        A status or stop request gets the status record. A changed source is reported. Else ranks are served until the
        command ends. A command of another user is not answered (1).
        """
        pid, user = peer_process(connection)
        if user != os.geteuid():
            return 1
        command = os.pidfd_open(pid)
        request, descriptors = read_greeting(connection)
        if "status" in request or "stop" in request:
            retires = "stop" in request or request.get("stop_if") == [sys.prefix, str(ROOT)]
            send_json(connection, self.status_record() | {"stays": not retires})
            return RETIRE_STATUS if retires else 0
        if file := find_changed_file(self.imported_stamps, self.start_time_ns):
            send_json(connection, {"changed": file})
            return RETIRE_STATUS
        adopt_circumstances(request, working_directory=descriptors[0], output=descriptors[1])
        serve_command(connection, command, request["modules"])
        return 0

    def status_record(self) -> dict[str, Any]:
        """Return what this process reports of itself: pid, root, torch's version, `commands` served, seconds `idle` and
        the idle limit.

        The command that asks is not counted: its server was forked before.
        """
        return {
            "pid": os.getppid(),
            "root": str(ROOT),
            "torch": importlib.metadata.version("torch"),
            "commands": len(self.commands),
            "idle": time.monotonic() - self.last_used,
            "ends": self.idle_limit,
        }


def serve_command(connection: socket.socket, command: int, modules: Iterable[str]) -> None:
    """Serve a command that did not start this process, as server.py serves the one that did; return when the command ended.

    `command` is a pidfd of the command's process.
    """

    def is_alive() -> bool:
        return not select.select([command], [], [], 0)[0]

    send_json(connection, {"server": os.getpid()})
    began = time.monotonic()
    stream = connection.fileno()
    server._import.cache_clear()
    ranks = server.Server(stream, stream, is_alive, private=[command])
    server.import_once(modules)
    ranks.serve(time.monotonic() - began)


def listening_socket(path: Path) -> socket.socket:
    """Return a Unix socket that is bound to `path` and listens. Raises OSError if the path exists."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(128)
    return listener


def read_greeting(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return a command's request and its file descriptors. Raises OSError if the request is not whole in time."""
    connection.settimeout(GREETING_PATIENCE)
    data, descriptors, _, _ = socket.recv_fds(connection, 65536, 2)
    while data and not data.endswith(b"\n") and len(data) < LARGEST_GREETING:
        chunk = connection.recv(65536)
        if not chunk:
            raise ConnectionResetError
        data += chunk
    connection.settimeout(None)
    return json.loads(data), descriptors


def send_json(connection: socket.socket, value: dict[str, Any]) -> None:
    connection.sendall(json.dumps(value).encode() + b"\n")


def main(path: Path, idle: float, began: int, modules: Iterable[str]) -> None:
    """Run the resident process in the background, until it has retired.

    The command that started us waits for the first process, which ends once the socket listens: with 0, or with 1 if
    that fails.
    """
    read_end, write_end = os.pipe()
    if os.fork():
        os.close(write_end)
        os._exit(0 if os.read(read_end, 1) else 1)
    os.setsid()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    resident = Resident(path, idle, began)
    os.write(write_end, b"1")
    os.close(write_end)
    os.close(read_end)
    resident.preload_modules(modules)
    try:
        resident.serve()
    finally:
        resident.stop_listening()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
