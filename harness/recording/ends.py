"""How this process ends, and those that it started: hooks on the ways out of Python, none of which changes what happens."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing import popen_fork
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

# ---- What an exception says, in one line


TRACE = "Traceback (most recent call last):"
LONGEST = 300


def in_one_line(kind: type[BaseException], error: BaseException) -> str:
    """Return the error with its cause. The cause is the last line of another process's traceback (a loader's worker, a spawned
    rank), or the line after a first one that only announces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[:1]
    if any(line.endswith(TRACE) for line in lines):
        said = [] if lines[0].endswith(TRACE) else [lines[0].rstrip(".:")]
        said.append(lines[-1])
    elif len(lines) > 1 and lines[0].endswith(":"):
        said = [lines[0].rstrip(":"), lines[1]]
    return ": ".join([kind.__name__, *said])[:LONGEST]


# ---- how a process ends


class Ends:
    def __init__(self, directory: Path, *, end: Callable[[], None], leave: Callable[[int], None]) -> None:
        """end: what is done as the process ends by itself. leave: what is done as os._exit ends it, with its exit code."""
        self._directory, self._end, self._leave = directory, end, leave
        self._raised: BaseException | None = None
        self._left: BaseException | None = None
        self._interrupted = False

    def install(self) -> None:
        self._see_errors()
        self._see_sys_exit()
        self._see_os_exit()
        self._see_own_process()
        self._see_children()
        self._see_interrupts()

    @property
    def error(self) -> str:
        """What ends this process, in one line; empty if nothing that Python reports. Trap: a trainer's own excepthook may call
        no other, but Python sets sys.last_value before it calls any."""
        error = self._raised or getattr(sys, "last_value", None) or self._left
        return in_one_line(type(error), error) if error is not None else ""

    def trains_on(self) -> None:
        """An exit that was caught ended nothing."""
        self._left, self._interrupted = None, False

    def _see_errors(self) -> None:
        hook = sys.excepthook

        def raised(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if not (issubclass(kind, SystemExit) and not error.args):
                self._raised = error
            hook(kind, error, trace)

        sys.excepthook = raised

    def _see_sys_exit(self) -> None:
        """Who handles an error and leaves with an exit code, as mp.spawn does, leaves because of it."""
        leave = sys.exit

        @functools.wraps(leave)
        def left(status: Any = None, /) -> None:
            if status not in (None, 0) and threading.current_thread() is threading.main_thread():
                self._left = _handled() or self._left
            leave(status)

        sys.exit = left  # type: ignore[assignment]

    def _see_os_exit(self) -> None:
        leave = os._exit

        @functools.wraps(leave)
        def left(status: int) -> None:
            self._left = (_handled() if status else None) or self._left
            self._leave(status)
            leave(status)

        os._exit = left  # type: ignore[assignment]

    def _see_own_process(self) -> None:
        """Trap: multiprocessing prints what its function raised, and a forked process calls nothing that atexit has."""
        original = BaseProcess._bootstrap  # type: ignore[attr-defined]

        @functools.wraps(original)
        def bootstrapped(process: Any, *args: Any, **kwargs: Any) -> Any:
            process.run = self._seen(process.run)
            try:
                return original(process, *args, **kwargs)
            finally:
                self._end()

        BaseProcess._bootstrap = bootstrapped  # type: ignore[attr-defined]

    def _seen(self, run: Callable[[], None]) -> Callable[[], None]:
        def seen() -> None:
            try:
                run()
                self._left = self._left or (KeyboardInterrupt() if self._interrupted else None)  # mp.spawn catches it
            except SystemExit:
                raise
            except BaseException as error:
                self._raised = error
                raise

        return seen

    def _see_interrupts(self) -> None:
        """Notice a Ctrl-C, where nobody else handles it."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return

        def noticed(number: int, frame: FrameType | None) -> None:
            self._interrupted = True
            signal.default_int_handler(number, frame)

        signal.signal(signal.SIGINT, noticed)

    def _see_children(self) -> None:
        """Record the exit code, or minus the signal, of each process that multiprocessing started."""
        poll = popen_fork.Popen.poll

        @functools.wraps(poll)
        def polled(child: Any, *args: Any, **kwargs: Any) -> int | None:
            known = child.returncode
            code = poll(child, *args, **kwargs)
            if known is None and code:
                with contextlib.suppress(OSError):  # a full disk: its exit is not reported
                    (self._directory / "processes" / f"{os.uname().nodename}-{child.pid}.code").write_text(str(code))
            return code

        popen_fork.Popen.poll = polled  # type: ignore[method-assign,assignment]


def _handled() -> BaseException | None:
    """The error that is being handled where this is called."""
    error = sys.exc_info()[1]
    return None if isinstance(error, (SystemExit, GeneratorExit)) else error
