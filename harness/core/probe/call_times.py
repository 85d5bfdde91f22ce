"""Times of collectives: when each was issued, and how long it blocked the thread that issued it.

A thread is blocked in the call, and in a wait from Python before it issues another collective. Waits of C++ code are not seen,
such as those of DDP's reducer. On GPUs a wait blocks a stream and not the thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist


class CallTimes:
    """Times of calls while it is installed, by their index among the records of one recorder."""

    def __init__(self) -> None:
        self.times_by_call: dict[int, tuple[float, float]] = {}
        """Index of a call among the records -> when it began, and for how many seconds it blocked."""
        self._thread = threading.local()
        self._patched_wait: tuple[Any, Any] | None = None

    def install(self) -> None:
        """Patch `Work.wait`, so that waits from Python are timed."""
        original_wait = dist.Work.wait

        def timed_wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            with self._waiting():
                return original_wait(work, *args, **kwargs)

        dist.Work.wait = timed_wait
        self._patched_wait = (original_wait, timed_wait)

    def close(self) -> None:
        if self._patched_wait is not None and dist.Work.wait is self._patched_wait[1]:
            dist.Work.wait = self._patched_wait[0]

    @contextlib.contextmanager
    def timing_call(self) -> Iterator[None]:
        """Surround a call from before it is put on record until it returns."""
        thread_state = self._thread
        thread_state.place = None
        thread_state.calls = True
        try:
            yield
        finally:
            thread_state.calls = False
            if thread_state.place is not None:
                self.times_by_call[thread_state.place] = (
                    thread_state.began,
                    time.perf_counter() - thread_state.started,
                )

    def note_begin(self, index: int) -> None:
        """Note that the call with this index among the records begins now. Nothing outside of `timing_call`."""
        if getattr(self._thread, "calls", False):
            self._thread.place = index
            self._thread.began = time.time()
            self._thread.started = time.perf_counter()

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Add the time of a wait to the last call of this thread.

        A wait within a call, as a trainer's own group may have, is part of that call's time already."""
        if getattr(self._thread, "calls", False):
            yield
            return
        index = getattr(self._thread, "place", None)
        started = time.perf_counter()
        self._thread.place = None
        try:
            yield
        finally:
            if index is not None:
                began, blocked = self.times_by_call[index]
                self.times_by_call[index] = (began, blocked + time.perf_counter() - started)
