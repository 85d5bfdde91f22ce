"""The interface of a rank server as a command sees it, and a server that is the command's child and ends with it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from typing import IO, Protocol

from harness.core.launch.python_path import child_environment, module_command


class ServerLink(Protocol):
    """A command's connection to a rank server. requests, reports: file descriptors, maybe the same one."""

    @property
    def pid(self) -> int: ...

    @property
    def requests(self) -> int: ...

    @property
    def reports(self) -> int: ...

    def kill(self) -> None: ...

    def hang_up(self) -> None:
        """Have the server end all its ranks and itself."""

    def end(self) -> str:
        """Free what there is after the server's last report, and return how it ended."""


class OwnServer:
    """A rank server that is a child of this process (`Link`), in a separate session: Ctrl-C is for the harness.

    Its input is closed when this process ends, whatever ends it, and the server then ends too.
    """

    def __init__(self, modules: Iterable[str], output: IO[bytes]) -> None:
        theirs_in, self.requests = os.pipe()
        self.reports, theirs_out = os.pipe()
        self.process = subprocess.Popen(
            module_command("harness.core.launch.server", str(theirs_in), str(theirs_out), *modules),
            pass_fds=(theirs_in, theirs_out),
            env=child_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self.pid = self.process.pid
        self.kill = self.process.kill

    def hang_up(self) -> None:
        os.close(self.requests)

    def end(self) -> str:
        os.close(self.reports)
        return f"status {self.process.wait()}"
