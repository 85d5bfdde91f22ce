"""Ctrl-C and SIGTERM: what is under way ends, the ranks are killed, and nothing that was not judged gets a verdict."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ENDS: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}
"""What ends a command, with what Python does by itself: after two of them it would leave clones and half of a folder."""


@contextmanager
def one_interrupt() -> Iterator[None]:
    """The first Ctrl-C, SIGTERM or lost terminal ends what is under way; while that is cleaned up, another would leave a
    traceback and processes."""

    def interrupted(*_: object) -> None:
        for number in mine:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    main = threading.current_thread() is threading.main_thread()
    mine = [number for number, usual in ENDS.items() if main and signal.getsignal(number) == usual]
    for number in mine:
        signal.signal(number, interrupted)
    yield
    for number in mine:
        if signal.getsignal(number) is interrupted:
            signal.signal(number, ENDS[number])
