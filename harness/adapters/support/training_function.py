"""A trainer that is one function, run up to its first step, stopped there, and run on when `train` is called.

The function runs in a separate thread. It calls `wait()` where its set-up is done.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


class TrainingFunction:
    """A function that trains, in a thread of its own, which another thread runs from stop to stop."""

    def __init__(self, function: Callable[[TrainingFunction], None]) -> None:
        self._ready = threading.Event()
        self._go = threading.Event()
        self._error: BaseException | None = None
        self._waited = False
        self._ended = False
        self._modes = _get_current_dispatch_mode_stack()  # a thread has its own
        self._thread = threading.Thread(target=self._run, args=(function,), name="trainer", daemon=True)

    def set_up(self) -> None:
        """Run the function until it waits. Raises what it raises, and RuntimeError if it ends without waiting."""
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            raise self._error
        if not self._waited:
            raise RuntimeError("the trainer ended before its first step")

    def train(self) -> None:
        """Run the function on to where it pauses, or to its end. Raises what it raises. After its end nothing is run."""
        if not self._ended:
            self._ready.clear()
            self._go.set()
            self._ready.wait()
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Stop the function until `train` is called. The function calls this itself; only the first call stops it."""
        if not self._waited:
            self._waited = True
            self.pause()

    def pause(self) -> None:
        """Stop the function until `train` is called again. The function calls this itself."""
        self._go.clear()
        self._ready.set()
        self._go.wait()

    def _run(self, function: Callable[[TrainingFunction], None]) -> None:
        """Run the function in this thread, with the dispatch modes of the thread that made it.

        Keep its error for the other thread.
        """
        torch.set_num_threads(1)  # OpenMP keeps that number per thread
        try:
            with contextlib.ExitStack() as stack:
                for mode in self._modes:
                    stack.enter_context(mode)
                function(self)
        except BaseException as error:
            self._error = error
        finally:
            self._ended = True
            self._ready.set()
