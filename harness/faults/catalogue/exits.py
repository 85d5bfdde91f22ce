"""Ranks that do all their work, and then do not end, or leave something behind."""

from __future__ import annotations

import os
import threading
import time
from functools import partial

from harness.faults import fault
from harness.faults import operators as op

rank_hangs_at_exit = fault(
    breaks="rank 1 hangs in what it registered with atexit, as one that waits there for a logger or a file system",
    bug="Z-class: training is done, and the job never ends",
    case="fsdp_2",
    caught_by="completed",
    named="a process failed",
    hangs=True,
    does=op.on_rank(1, op.before_step(2, op.call("atexit:register", time.sleep, 3600))),
)
thread_keeps_the_rank = fault(
    breaks="rank 1 has a thread, not a daemon, that waits for ever for something to do",
    bug="Z-class: training is done, and a prefetching or writing thread keeps the process",
    case="fsdp_2",
    caught_by="completed",
    named="a process failed",
    hangs=True,
    does=op.on_rank(1, op.before_step(2, lambda: threading.Thread(target=threading.Event().wait).start())),
)
process_outlives_its_rank = fault(
    breaks="rank 1 starts a process in a session of its own and never ends it",
    bug="Z-class: a monitor or a loader survives the job and keeps memory, ports and files",
    case="fsdp_2",
    caught_by="completed",
    named="incomplete",
    hangs=True,
    does=op.on_rank(1, op.before_step(2, op.call("subprocess:Popen", ["sleep", "600"], start_new_session=True))),
)


@fault(
    breaks="rank 1 forks a daemon, which makes a session of its own and forks again",
    bug="Z-class: a monitor or a loader survives the job and keeps memory, ports and files",
    case="fsdp_2",
    caught_by="completed",
    named="incomplete",
    hangs=True,
)
@partial(op.on_rank, 1)
@partial(op.before_step, 2)
def daemon_outlives_its_rank() -> None:
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    os.setsid()
    if not os.fork():
        time.sleep(600)
    os._exit(0)
