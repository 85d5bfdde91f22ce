"""What the ranks of tests/core/launch/test_launch.py run. `all_reduce` and the like note what they issue as the probe would."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist

from harness.core.launch import current_inflight

_issued: dict[str, int] = {}


def join() -> int:
    dist.init_process_group("gloo", init_method=os.environ.get("INIT_METHOD", "env://"), **place())
    dist.barrier()  # a rank that exits breaks those that are still connecting
    return dist.get_rank()


def place() -> dict[str, Any]:
    return {name: int(os.environ[name.upper()]) for name in ("rank", "world_size")}


def note(op: str, size: int, group: dist.ProcessGroup | None = None) -> None:
    group = group or dist.group.WORLD
    assert group is not None
    seq = _issued[group.group_name] = _issued.get(group.group_name, -1) + 1
    inflight = current_inflight()
    assert inflight is not None
    inflight.issue(group.group_name, dist.get_process_group_ranks(group), seq, op, size, 1, "forward")


def all_reduce(numbers: int = 4, group: dist.ProcessGroup | None = None) -> None:
    value = torch.ones(numbers)
    note("all_reduce", 4 * numbers, group)
    dist.all_reduce(value, group=group)
    assert value[0].item() == dist.get_world_size(group)


def broadcast(numbers: int = 4) -> None:
    note("broadcast", 4 * numbers)
    dist.broadcast(torch.ones(numbers), src=0)


def reduces(options: dict[str, Any]) -> None:
    rank = join()
    for _ in range(options.get("times", 1)):
        all_reduce()
    print("the sum is right on rank", rank)


def says_its_circumstances(options: dict[str, Any]) -> None:
    umask = os.umask(0)
    terminals = [os.isatty(stream) for stream in (0, 1, 2)]
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    print(os.environ.get("HARNESS_COLOUR"), os.getcwd(), oct(umask), limit, sorted(os.sched_getaffinity(0)), terminals)


def draws(options: dict[str, Any]) -> None:
    print(numpy.random.random())


def says_its_environment(options: dict[str, Any]) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "COLOUR")
    print(*(os.environ.get(name) for name in names), torch.get_num_threads(), options)


def raises(options: dict[str, Any]) -> None:
    rank = join()
    all_reduce()
    if rank == 1:
        raise ValueError("no such layer")  # the line that must be named
    all_reduce()


def kills_itself(_: dict[str, Any]) -> None:
    rank = join()
    all_reduce()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    all_reduce()


def sleeps(_: dict[str, Any]) -> None:
    rank = join()
    all_reduce()
    if rank == 1:
        time.sleep(600)
    all_reduce()


def goes_on_and_on(_: dict[str, Any]) -> None:
    join()
    while True:
        all_reduce()
        time.sleep(0.05)


def sleeps_before_joining(_: dict[str, Any]) -> None:
    if os.environ["RANK"] == "1":
        time.sleep(600)
    join()


def leaves_early(_: dict[str, Any]) -> None:
    rank = join()
    for _step in range(3 - (rank == 1)):
        all_reduce()


def disagrees(_: dict[str, Any]) -> None:
    first, second = (all_reduce, broadcast) if join() == 0 else (broadcast, all_reduce)
    first(1024)
    second(4)


def crosses_groups(_: dict[str, Any]) -> None:
    """Two groups of the same two ranks, used in opposite order: each waits for the other."""
    rank = join()
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    for group in groups if rank == 0 else groups[::-1]:
        all_reduce(group=group)


def differs_in_size(_: dict[str, Any]) -> None:
    all_reduce(4 if join() == 0 else 8)


def tells_timeouts(options: dict[str, Any]) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    join()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    groups = [dist.group.WORLD, *mesh.get_all_groups(), dist.new_group()]
    limits = {group._get_backend(torch.device("cpu")).options._timeout for group in groups}
    print("timeouts", sorted(limit.total_seconds() for limit in limits))
    dist.barrier()  # as in join


def subgroup_hangs(_: dict[str, Any]) -> None:
    """One mesh axis spans [0,1]; its group must give up after the group timeout."""
    from torch.distributed.device_mesh import init_device_mesh

    rank = join()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    if rank == 1:
        time.sleep(600)
    all_reduce(group=mesh.get_group("b"))
    time.sleep(0.5)


def hangs_at_exit(_: dict[str, Any]) -> None:
    import atexit

    if join() == 1:
        atexit.register(time.sleep, 600)  # the line that must be named


def leaves_processes(_: dict[str, Any]) -> None:
    """One that ends soon, one that another interpreter executes, one that is only forked, twice."""
    import subprocess

    if join() == 1:
        for seconds in (0.5, 600):
            command = [sys.executable, "-c", f"import time; time.sleep({seconds})"]
            subprocess.Popen(command, start_new_session=True)
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(600)
            os._exit(0)


def is_stopped(_: dict[str, Any]) -> None:
    rank = join()
    all_reduce()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    all_reduce()


def starts_a_process_and_sleeps(options: dict[str, Any]) -> None:
    import subprocess

    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    open(f"{options['here']}/{os.environ['RANK']}", "w").close()
    time.sleep(600)


def meets_other_jobs(options: dict[str, Any]) -> None:
    """Says its GPUs, once as many ranks of several jobs run as the test expects."""
    join()
    here = Path(options["here"])
    (here / f"{os.getpid()}").touch()
    while len(list(here.iterdir())) < options["ranks"]:
        time.sleep(0.01)
    print(os.environ["CUDA_VISIBLE_DEVICES"], os.environ["LOCAL_RANK"])


def leaves_before_joining(_: dict[str, Any]) -> None:
    if os.environ["RANK"] != "1":
        join()


def sleeps_in_c(_: dict[str, Any]) -> None:
    rank = join()
    all_reduce()
    if rank == 1:
        ctypes.CDLL(None).sleep(600)
    all_reduce()


def holds_the_gil(_: dict[str, Any]) -> None:
    rank = join()
    all_reduce()
    if rank == 1:
        ctypes.PyDLL(None).sleep(600)
    all_reduce()


def raises_oddly(_: dict[str, Any]) -> None:
    rank = join()
    all_reduce()
    if rank == 1:
        raise OSError("no such file: a\udc80b")
    all_reduce()
