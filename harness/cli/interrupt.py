"""Ctrl-C: what is under way ends, the ranks are killed, and nothing that was not judged gets a verdict."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from harness.cli.exit_codes import INTERRUPTED
from harness.launch import standing
from harness.report.output import complain
from harness.report.progress import Progress


@contextmanager
def one_interrupt() -> Iterator[None]:
    """The first Ctrl-C ends what is under way; while that is cleaned up, another would leave a traceback and processes."""

    def interrupted(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if usual and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, interrupted)
    yield
    if signal.getsignal(signal.SIGINT) is interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def abandon(progress: Progress, what: str, remedy: str = "") -> NoReturn:
    """Ends this process at once, whatever its threads wait for. The rank server sees it and kills what it started."""
    progress.clear()
    first = f"interrupted after {len(progress.done)} of {len(progress.weights)} {what}{remedy}"
    complain("\n  ".join([first, *standing()]))
    os._exit(INTERRUPTED)
