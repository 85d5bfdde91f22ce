"""Ends of this process, and of those that it started: hooks on the ways out of Python, none of which changes what happens."""

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


TRACEBACK_HEAD = "Traceback (most recent call last):"
LONGEST_ERROR = 300


def error_line(kind: type[BaseException], error: BaseException) -> str:
    """Return the error with its cause. The cause is the last line of another process's traceback (a loader's worker, a spawned
    rank), or the line after a first one that only announces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text_parts = lines[:1]
    if any(line.endswith(TRACEBACK_HEAD) for line in lines):
        text_parts = [] if lines[0].endswith(TRACEBACK_HEAD) else [lines[0].rstrip(".:")]
        text_parts.append(lines[-1])
    elif len(lines) > 1 and lines[0].endswith(":"):
        text_parts = [lines[0].rstrip(":"), lines[1]]
    return ": ".join([kind.__name__, *text_parts])[:LONGEST_ERROR]


# ---- how a process ends


class ProcessEnd:
    """Hooks on the ways out of this process, and the error that ends it."""

    def __init__(self, directory: Path, *, end: Callable[[], None], leave: Callable[[int], None]) -> None:
        """Take what is to be called: `end` as the process ends by itself, `leave` with the exit code as os._exit ends it."""
        self._directory = directory
        self._end = end
        self._leave = leave
        self._raised_error: BaseException | None = None
        self._exit_error: BaseException | None = None
        self._interrupted = False

    def install(self) -> None:
        """Patch the ways out of this process. Ctrl-C only in the main thread, where nobody else handles it."""
        self._see_errors()
        self._see_sys_exit()
        self._see_os_exit()
        self._watch_own_process()
        self._see_children()
        self._see_interrupts()

    @property
    def error(self) -> str:
        """Return the error that ends this process, in one line. Empty if Python reports none.

        Trap: a trainer's own excepthook may call no other, but Python sets sys.last_value before it calls any.
        """
        error = self._raised_error or getattr(sys, "last_value", None) or self._exit_error
        return error_line(type(error), error) if error is not None else ""

    def forget_exits(self) -> None:
        """Forget earlier exits, as the process trains on: an exit that was caught ended nothing."""
        self._exit_error = None
        self._interrupted = False

    def _see_errors(self) -> None:
        """Note the exception that Python reports as the process ends."""
        hook = sys.excepthook

        def note_raised(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if not (issubclass(kind, SystemExit) and not error.args):
                self._raised_error = error
            hook(kind, error, trace)

        sys.excepthook = note_raised

    def _see_sys_exit(self) -> None:
        """Note the error that is being handled where sys.exit is called with an exit code.

        A script that handles an error and leaves with an exit code, as mp.spawn does, leaves because of that error.
        """
        leave = sys.exit

        @functools.wraps(leave)
        def note_and_exit(status: Any = None, /) -> None:
            if status not in (None, 0) and threading.current_thread() is threading.main_thread():
                self._exit_error = _handled_error() or self._exit_error
            leave(status)

        sys.exit = note_and_exit  # type: ignore[assignment]

    def _see_os_exit(self) -> None:
        """Note the error that is being handled where os._exit is called, and report the exit."""
        leave = os._exit

        @functools.wraps(leave)
        def note_and_exit(status: int) -> None:
            self._exit_error = (_handled_error() if status else None) or self._exit_error
            self._leave(status)
            leave(status)

        os._exit = note_and_exit  # type: ignore[assignment]

    def _watch_own_process(self) -> None:
        """Note how a process that multiprocessing starts ends.

        Trap: multiprocessing prints what its function raised, and a forked process calls nothing that atexit has.
        """
        original = BaseProcess._bootstrap  # type: ignore[attr-defined]

        @functools.wraps(original)
        def bootstrap_and_end(process: Any, *args: Any, **kwargs: Any) -> Any:
            process.run = self._with_errors_noted(process.run)
            try:
                return original(process, *args, **kwargs)
            finally:
                self._end()

        BaseProcess._bootstrap = bootstrap_and_end  # type: ignore[attr-defined]

    def _with_errors_noted(self, run: Callable[[], None]) -> Callable[[], None]:
        """Return a process's function with the error noted that ends it."""

        def run_and_note() -> None:
            try:
                run()
                self._exit_error = self._exit_error or (
                    KeyboardInterrupt() if self._interrupted else None
                )  # mp.spawn catches it
            except SystemExit:
                raise
            except BaseException as error:
                self._raised_error = error
                raise

        return run_and_note

    def _see_interrupts(self) -> None:
        """Notice a Ctrl-C, where nobody else handles it."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return

        def note_interrupt(number: int, frame: FrameType | None) -> None:
            self._interrupted = True
            signal.default_int_handler(number, frame)

        signal.signal(signal.SIGINT, note_interrupt)

    def _see_children(self) -> None:
        """Record the exit code, or minus the signal, of each process that multiprocessing started."""
        poll = popen_fork.Popen.poll

        @functools.wraps(poll)
        def poll_and_note(child: Any, *args: Any, **kwargs: Any) -> int | None:
            earlier_code = child.returncode
            code = poll(child, *args, **kwargs)
            if earlier_code is None and code:
                with contextlib.suppress(OSError):  # a full disk: its exit is not reported
                    (self._directory / "processes" / f"{os.uname().nodename}-{child.pid}.code").write_text(str(code))
            return code

        popen_fork.Popen.poll = poll_and_note  # type: ignore[method-assign,assignment]


def _handled_error() -> BaseException | None:
    """Return the error that is being handled where this is called. None for SystemExit, or if there is none."""
    error = sys.exc_info()[1]
    return None if isinstance(error, (SystemExit, GeneratorExit)) else error
