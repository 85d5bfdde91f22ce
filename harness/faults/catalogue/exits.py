"""Ranks that do all their work, and then do not end, or leave something behind."""

from __future__ import annotations

import atexit
import os
import subprocess
import threading
import time

from harness.faults import Fired, fault
from harness.faults.catalogue.process import _before_step


@fault(
    breaks="rank 1 hangs in what it registered with atexit, as one that waits there for a logger or a file system",
    bug="Z-class: training is done, and the job never ends",
    case="fsdp_2",
    caught_by="completed",
    named="rank 1 hung",
    hangs=True,
)
def rank_hangs_at_exit(fired: Fired) -> None:
    def hang() -> None:
        fired()
        time.sleep(3600)

    def register() -> None:
        atexit.register(hang)

    _before_step(2, 1, register)


@fault(
    breaks="rank 1 has a thread, not a daemon, that waits for ever for something to do",
    bug="Z-class: training is done, and a prefetching or writing thread keeps the process",
    case="fsdp_2",
    caught_by="completed",
    named="rank 1 hung",
    hangs=True,
)
def thread_keeps_the_rank(fired: Fired) -> None:
    def keep() -> None:
        fired()
        threading.Thread(target=threading.Event().wait).start()

    _before_step(2, 1, keep)


@fault(
    breaks="rank 1 starts a process in a session of its own and never ends it",
    bug="Z-class: a monitor or a loader survives the job and keeps memory, ports and files",
    case="fsdp_2",
    caught_by="completed",
    named="rank 1 left a process behind: sleep 600",
    hangs=True,
)
def process_outlives_its_rank(fired: Fired) -> None:
    def start() -> None:
        fired()
        subprocess.Popen(["sleep", "600"], start_new_session=True)

    _before_step(2, 1, start)


@fault(
    breaks="rank 1 forks a daemon, which makes a session of its own and forks again",
    bug="Z-class: a monitor or a loader survives the job and keeps memory, ports and files",
    case="fsdp_2",
    caught_by="completed",
    named="rank 1 left a process behind: forked from the rank",
    hangs=True,
)
def daemon_outlives_its_rank(fired: Fired) -> None:
    def fork() -> None:
        fired()
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            return
        os.setsid()
        if not os.fork():
            time.sleep(600)
        os._exit(0)

    _before_step(2, 1, fork)
