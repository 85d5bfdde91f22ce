"""Locks that one process and one thread has at a time."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.core.evidence.store import EvidenceError


@contextmanager
def exclusive_lock(lock: Path) -> Iterator[None]:
    """Hold a lock while the block runs, waiting for whoever has it. Raises EvidenceError if its file cannot be written.

    The kernel releases the lock of a process that died.
    """
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        handle = open(lock, "a", encoding="utf-8")  # noqa: SIM115 - held while the caller works
    except OSError as error:
        raise EvidenceError(f"{lock.parent}: cannot be written: {error.strerror}; choose another --out") from error
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
