"""Ctrl-C and SIGTERM: what is under way ends, the ranks are killed, and nothing that was not judged gets a verdict."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

DEFAULT_HANDLERS: dict[signal.Signals, Any] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}
"""What ends a command, with what Python does by itself: after two of them it would leave clones and half of a folder."""


@contextmanager
def single_interrupt() -> Iterator[None]:
    """Let the first Ctrl-C, SIGTERM or lost terminal raise KeyboardInterrupt in the block, and ignore the next ones.

    While that is cleaned up, another would leave a traceback and processes. Outside of the main thread, and for a
    signal that has another handler, nothing changes.
    """

    def interrupt(*_: object) -> None:
        """Ignore all further signals of these kinds, and raise KeyboardInterrupt."""
        for number in handled:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    is_main_thread = threading.current_thread() is threading.main_thread()
    handled = [
        number for number, usual in DEFAULT_HANDLERS.items() if is_main_thread and signal.getsignal(number) == usual
    ]
    for number in handled:
        signal.signal(number, interrupt)
    yield
    for number in handled:
        if signal.getsignal(number) is interrupt:
            signal.signal(number, DEFAULT_HANDLERS[number])
