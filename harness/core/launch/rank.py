"""The life of one rank, from its first instruction to its exit status; the same under both launchers.

Locally the server forks and calls `run_forked`. Under torchrun this module is the worker: it forks the rank and only
waits to write down how it ended. torchrun neither reports exit statuses nor lets the others finish their output.
"""

from __future__ import annotations

import _thread
import atexit
import faulthandler
import importlib
import itertools
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from harness.core.blame.calls import GROUP_CREATION
from harness.core.launch import inflight
from harness.core.launch.job import rank_file, read_json, write_json
from harness.core.launch.leftovers import end_leftovers, mark_children
from harness.core.launch.process import (
    detach_session,
    die_with_parent,
    kill_group,
    loopback_environment,
    wait_and_kill_group,
)
from harness.core.launch.slots import hold_own_slots

_stacks: Any = None  # the file faulthandler writes to: it must never be collected


def run_forked(job_file: Path, rank: int, parent: int) -> NoReturn:
    """Run rank `rank` of a job in this process, which was just forked from the server with pid `parent`; it never
    returns."""
    die_with_parent(parent)
    if "numpy" in sys.modules:  # forked with one generator, all ranks of all launches would draw the same from it
        sys.modules["numpy"].random.seed()
    job = json.loads(job_file.read_text(encoding="utf-8"))
    run_rank(job, rank, environment=environment_of_rank(job, rank))


def environment_of_rank(job: dict[str, Any], rank: int) -> dict[str, str]:
    """Return the variables of a rank on this machine: those that torchrun would set, the job's own, and INIT_METHOD.

    INIT_METHOD is a file store in the job's folder, which needs neither a port nor a name server.
    """
    variables = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": job["world_size"],
        "LOCAL_WORLD_SIZE": job["world_size"],
    }
    return {
        **loopback_environment(),
        **job["env"],
        **{name: str(value) for name, value in variables.items()},
        "INIT_METHOD": f"file://{job['directory']}/store",
    }


def run_rank(job: dict[str, Any], rank: int, *, environment: dict[str, str]) -> NoReturn:
    """Set this process up as a rank, call the job's entry with its options, record what it raised, and exit; it never
    returns.

    A rank that raised exits at once, so that the others lose their connection. os._exit: no destructor holds us.
    """
    directory = Path(job["directory"])
    code = 1
    try:
        detach_session(rank_file(directory, "logs", rank))
        os.environ.update(environment)
        share_gpus(job)
        hold_own_slots()
        mark_children(directory, rank)
        sys.path[:] = list(dict.fromkeys([*job["sys_path"], *sys.path, os.getcwd()]))  # a trainer may lie here
        dump_stacks_to(rank_file(directory, "stacks", rank))
        inflight.open_current_inflight(rank_file(directory, "inflight", rank))
        set_up_torch(job)
        record_group_creation(job["world_size"])
        _held = load_entry(job["entry"])(job["options"])  # until the end: freeing process groups may hang
        code = 0
    except BaseException as error:
        code = note_failure(error, rank_file(directory, "failures", rank))
    finally:
        try:
            if code == 0:
                wind_up()
            flush_output()
        finally:
            os._exit(code)


def wind_up() -> None:
    """Do what the interpreter does when a program ends: wait for its threads, then call what it registered with atexit.

    A trainer that hangs there hangs here. Nothing is freed afterwards: freeing process groups may hang.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def dump_stacks_to(path: Path) -> None:
    """Dump all threads' stacks into the file at `path` on SIGUSR1 and on fatal signals; its first line names the main
    thread.

    faulthandler writes from C, so also while Python waits inside gloo or NCCL. A thread that does nothing else takes
    SIGUSR1. In any other one the signal could end a call early, such as C's sleep(3): the rank would go on too soon.
    """
    global _stacks
    _stacks = open(path, "w", encoding="utf-8")  # noqa: SIM115 - open until the end
    print(f"main thread {threading.main_thread().ident:#018x}", file=_stacks, flush=True)
    faulthandler.enable(file=_stacks, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=_stacks, all_threads=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # threads and processes to come inherit it
    os.register_at_fork(after_in_child=take_dump_signal)
    _thread.start_new_thread(wait_for_dump_signal, ())


def take_dump_signal() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


def wait_for_dump_signal() -> None:
    """Wait until the process ends, with SIGUSR1 unblocked in this thread alone.

    `threading` does not list or join this thread.
    """
    take_dump_signal()
    never = _thread.allocate_lock()
    never.acquire()
    never.acquire()


def set_up_torch(job: dict[str, Any]) -> None:
    """Set torch to one thread and limit group timeouts; on GPUs choose the device of LOCAL_RANK.

    RuntimeError if the process was forked from one that had started CUDA.
    """
    import torch

    torch.set_num_threads(1)
    limit_group_timeouts(job["group_timeout"])
    if job["device"] == "cuda":
        refuse_started_cuda(torch.cuda._is_in_bad_fork())
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))


def share_gpus(job: dict[str, Any]) -> None:
    """Set LOCAL_RANK, by which trainers choose their GPU, to the same number for ranks that share one."""
    if job["device"] == "cuda" and job["ranks_per_gpu"] > 1:
        os.environ["LOCAL_RANK"] = str(int(os.environ["LOCAL_RANK"]) // job["ranks_per_gpu"])


def refuse_started_cuda(touched: bool) -> None:
    """Raise RuntimeError if `touched`: this process was forked from a server that had started CUDA."""
    if touched:
        why = "a module that it imported asked for a GPU, and CUDA cannot be used in a process forked after that"
        raise RuntimeError(f"the rank server has touched CUDA: {why}; --launcher torchrun forks from no server")


def limit_group_timeouts(seconds: float) -> None:
    """Give every group that is made without a timeout this one, DeviceMesh's too, which ignore init_process_group(timeout=).

    It replaces torch's module globals, in which torch 2.11 to 2.14 look the default up when a group is made.
    """
    import torch.distributed as dist

    for module in (dist, dist.constants, dist.distributed_c10d):
        for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
            if getattr(module, name, None) is not None:  # the NCCL one is None in a CPU build
                setattr(module, name, timedelta(seconds=seconds))


def record_group_creation(world_size: int) -> None:
    """Patch torch so that the in-flight record notes when this rank begins to make a group, in which it may wait for ever.

    torch 2.11 to 2.14 ask for a name first, before any rank waits for another. Groups that only their members take part
    in making, whose names are digests, are not recorded.
    """
    from torch.distributed import distributed_c10d

    name_of = distributed_c10d._process_group_name
    record = inflight.current_inflight()
    issue_numbers = itertools.count()

    def name_and_record(ranks: Any, use_hashed_name: bool) -> Any:
        """Return torch's name of a new group, after recording that this rank begins to make it."""
        name = name_of(ranks, use_hashed_name)
        if record is not None and not use_hashed_name:
            op = GROUP_CREATION[bool(ranks)]
            record.issue(str(name), tuple(ranks) or tuple(range(world_size)), next(issue_numbers), op, 0, 0, "")
        return name

    distributed_c10d._process_group_name = name_and_record


def load_entry(entry: str) -> Callable[[dict[str, Any]], Any]:
    """Import and return the function that `entry` names, "package.module:function". ValueError without a colon."""
    module, colon, name = entry.partition(":")
    if not colon:
        raise ValueError(f"entry {entry!r}: expected package.module:function")
    return getattr(importlib.import_module(module), name)


def note_failure(error: BaseException, path: Path) -> int:
    """Write an exception to `path` and its traceback to the log; return the exit code.

    For exit code 0 nothing is written.
    """
    code = exit_code(error)
    if code:
        record = {"type": type(error).__name__, "message": exception_text(error), "time": time.time()}
        record |= {"inside": [], "traceback": "", "module": "", "cause": None, "chain": []}
        for name, read in FAILURE_DETAILS.items():
            try:
                record[name] = read(error)
            except Exception as another:  # of the trainer's own classes, which a detail asks
                record["traceback"] = f"{name} cannot be read: {type(another).__name__}"
        print(record["traceback"], file=sys.stderr)
        write_json(path, encodable_json(record))
    return code


def exception_text(error: BaseException) -> str:
    """Return str(error); if that raises, a sentence that says so."""
    try:
        return str(error)
    except BaseException as another:
        return f"no text: its __str__ raised {type(another).__name__}"


def encodable_json(value: Any) -> Any:
    """Return the JSON value with all texts made encodable: a lone surrogate becomes \\udc80. Tuples become lists."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list | tuple):
        return [encodable_json(each) for each in value]
    return {name: encodable_json(each) for name, each in value.items()} if isinstance(value, dict) else value


def linked_exceptions(error: BaseException) -> list[BaseException]:
    """Return the exceptions that led to this one, by `__cause__` or else `__context__`, nearest first.

    A cycle ends the list.
    """
    linked: list[BaseException] = []
    link = error.__cause__ or error.__context__
    while link is not None and link is not error and all(link is not seen_link for seen_link in linked):
        linked.append(link)
        link = link.__cause__ or link.__context__
    return linked


def follow_causes(error: BaseException) -> list[BaseException]:
    """Return an exception, the one it was raised from by `raise .. from`, and so on; the first cause comes last."""
    chain_of_causes = [error]
    while (link := chain_of_causes[-1].__cause__) is not None and all(
        link is not seen_cause for seen_cause in chain_of_causes
    ):
        chain_of_causes.append(link)
    return chain_of_causes


def first_cause_text(error: BaseException) -> list[str] | None:
    """Return the class name and text of the first cause, by `raise .. from`; None if the exception has none."""
    first = follow_causes(error)[-1]
    return None if first is error else [type(first).__name__, exception_text(first)]


def exception_chain(error: BaseException) -> list[list[str]]:
    """Return class name and text of each exception that led to this one, nearest first."""
    return [[type(link).__name__, exception_text(link)] for link in linked_exceptions(error)]


def frames_of_causes(error: BaseException) -> list[list[Any]]:
    """Return the frames as [file, line, function]: the first cause's, innermost first, then those of what was raised
    from it."""
    frames: list[list[Any]] = []
    for cause in reversed(follow_causes(error)):
        stack = traceback.extract_tb(cause.__traceback__)
        frames += [[frame.filename, frame.lineno, frame.name] for frame in reversed(stack)]
    return frames


def module_of_exception(error: BaseException) -> str:
    """Return the fqn of the innermost torch module in whose methods the first cause was raised, within the outermost module.

    Empty if that is the outermost one itself, or no module was entered.
    """
    kind = getattr(sys.modules.get("torch.nn"), "Module", ())
    owners: list[Any] = [
        frame.f_locals.get("self") for frame, _ in traceback.walk_tb(follow_causes(error)[-1].__traceback__)
    ]
    entered = [owner for owner in owners if isinstance(owner, kind)]
    names = {id(module): name for name, module in entered[0].named_modules()} if entered else {}
    return next((names[id(module)] for module in reversed(entered) if id(module) in names), "")


FAILURE_DETAILS: dict[str, Callable[[BaseException], Any]] = {
    "inside": frames_of_causes,
    "traceback": lambda error: "".join(traceback.format_exception(error)),
    "module": module_of_exception,
    "cause": first_cause_text,
    "chain": exception_chain,
}


def exit_code(error: BaseException) -> int:
    """Return the exit code, 0 to 255, that the system makes of an exception: 1 for all but SystemExit.

    SystemExit has its own number, 0 without one, and 1 with a text.
    """
    if not isinstance(error, SystemExit):
        return 1
    return error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)


def flush_output() -> None:
    """Flush logging's handlers, stdout and stderr: os._exit flushes nothing."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()


def main(job_file: Path) -> int:
    """Fork the rank as torchrun's worker, wait for it, and write its exit record; return 0 if the rank ended well, else 1.

    It ignores torchrun's SIGTERM, sent when another rank failed: the harness kills. torchrun's own death arrives as
    SIGUSR2, on which it kills the rank and what that started.
    """
    die_with_parent(int(os.environ["HARNESS_AGENT"]), signal_number=signal.SIGUSR2)
    for number in (signal.SIGTERM, signal.SIGUSR1):  # the second: until the rank can dump its stack
        signal.signal(number, signal.SIG_IGN)
    job = read_json(job_file)
    rank = int(os.environ["RANK"])
    guard_pid = os.getpid()
    exit_file = rank_file(job["directory"], "exits", rank)
    pid = os.fork()
    if pid == 0:
        die_with_parent(guard_pid)
        run_rank(job, rank, environment=job["env"])
    signal.signal(signal.SIGUSR2, lambda *_: kill_group(pid))
    record_head = {"pid": pid, "host": socket.gethostname()}
    write_json(exit_file, {**record_head, "status": None})
    status = wait_and_kill_group(pid)
    if status == -signal.SIGKILL:
        end_leftovers(Path(job["directory"]), [rank])
    write_json(exit_file, {**record_head, "status": status, "ended": time.time()})
    return int(status != 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
