"""A trainer that is one long function: run up to where its set-up is done, held there, and run on when told.

The function runs in a thread of its own. It calls `hold()` where it is to wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch


class Paused:
    def __init__(self, function: Callable[[Paused], None]) -> None:
        self._ready, self._go = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(function,), name="trainer", daemon=True)

    def to_hold(self) -> None:
        """Run until the function holds. Raises what it raises, and RuntimeError if it ends without holding."""
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            raise self._error
        if not self._thread.is_alive():
            raise RuntimeError("the trainer ended before its first step")

    def to_end(self) -> None:
        """Run on. Raises what the function raises."""
        self._go.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def hold(self) -> None:
        self._ready.set()
        self._go.wait()

    def _run(self, function: Callable[[Paused], None]) -> None:
        torch.set_num_threads(1)  # OpenMP keeps that number per thread
        try:
            function(self)
        except BaseException as error:
            self._error = error
        finally:
            self._ready.set()
