"""When collectives were issued, and how long their threads were blocked by them.

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
    """Measures while installed. Calls are known by their place among the records of one recorder."""

    def __init__(self) -> None:
        self.seen: dict[int, tuple[float, float]] = {}
        """Place of a call -> when it began, and for how many seconds it blocked."""
        self._thread = threading.local()
        self._wait: tuple[Any, Any] | None = None

    def install(self) -> None:
        wait = dist.Work.wait

        def timed(work: Any, *args: Any, **kwargs: Any) -> Any:
            with self._waiting():
                return wait(work, *args, **kwargs)

        dist.Work.wait, self._wait = timed, (wait, timed)

    def close(self) -> None:
        if self._wait is not None and dist.Work.wait is self._wait[1]:
            dist.Work.wait = self._wait[0]

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Surround a call from before it is put on record until it returns."""
        mine = self._thread
        mine.place, mine.calls = None, True
        try:
            yield
        finally:
            mine.calls = False
            if mine.place is not None:
                self.seen[mine.place] = (mine.began, time.perf_counter() - mine.started)

    def begins(self, place: int) -> None:
        """Take note that the call is on record at this place, and begins now."""
        if getattr(self._thread, "calls", False):
            self._thread.place, self._thread.began, self._thread.started = place, time.time(), time.perf_counter()

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Add to the last call of this thread. A wait within a call, as a trainer's own group may have, is in its time."""
        if getattr(self._thread, "calls", False):
            yield
            return
        place, started = getattr(self._thread, "place", None), time.perf_counter()
        self._thread.place = None
        try:
            yield
        finally:
            if place is not None:
                began, blocked = self.seen[place]
                self.seen[place] = (began, blocked + time.perf_counter() - started)
