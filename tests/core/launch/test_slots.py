"""Slots: taken all at once, given back by whoever dies, and never two launches on one GPU."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from harness import ROOT
from harness.core.launch import Job, LaunchError, Pool, launch, machine, slots
from harness.core.launch.process import is_stopped
from harness.core.launch.slots import FOLDER_VARIABLE, HELD_VARIABLE, hold_own_slots, ranks_per_node
from harness.core.launch.waiting import OVERTAKEN_AT_MOST

needs_other_user = pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
EIGHT = tuple(f"GPU-{number}" for number in range(8))


@pytest.fixture
def pool(tmp_path: Path) -> Pool:
    return Pool(tmp_path / "slots", EIGHT, has_gpus=True)


def eventually(condition: Any, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("place", ["file/slots", "file", "/proc/no/slots"])
def test_a_folder_that_cannot_keep_slots_is_named_with_the_variable_that_names_another(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / place
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
    with pytest.raises(LaunchError) as raised:
        launch(Job(tmp_path / "job", 2, "tests.launch_entries:reduces"))
    assert str(folder) in str(raised.value) and FOLDER_VARIABLE in str(raised.value)
    assert not (tmp_path / "job").exists()


@needs_other_user
def test_a_folder_of_slots_that_is_read_only_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(LaunchError, match=FOLDER_VARIABLE), Pool(tmp_path, EIGHT).take_slots(1):
        pass


def test_a_rank_whose_slots_are_gone_runs_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    held = [str(tmp_path / name) for name in ("gone", "file/slot")]
    monkeypatch.setenv(HELD_VARIABLE, os.pathsep.join([*held, str(tmp_path / "file")]))
    hold_own_slots()
    assert is_locked(tmp_path / "file")
    slots.open_slot_files.pop().close()


def free(pool: Pool, wanted: int) -> bool:
    """Whether so many can be had now, asked by somebody who would wait for them."""
    taken = threading.Event()

    def take() -> None:
        with pool.take_slots(wanted):
            taken.set()

    threading.Thread(target=take, daemon=True).start()
    return taken.wait(0.3)


def is_locked(path: Path) -> bool:
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@contextmanager
def other_process(code: str, **environment: str) -> Iterator[subprocess.Popen]:
    """A program that has said a line."""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_slots_that_are_free_are_had_at_once_and_others_are_waited_for(pool: Pool) -> None:
    with pool.take_slots(5) as taken:
        assert taken.names == EIGHT[:5]
        eventually(lambda: free(pool, 3))
        assert not free(pool, 4)
    eventually(lambda: free(pool, 8))


def test_takers_of_many_sizes_all_get_theirs_and_no_slot_is_had_twice(pool: Pool) -> None:
    holders: dict[str, list[int]] = {name: [] for name in EIGHT}
    most: list[int] = []

    def take(number: int) -> None:
        with pool.take_slots(random.Random(number).choice([1, 2, 4, 5, 7, 8])) as taken:
            for name in taken.names:
                holders[name].append(number)
            most.append(max(map(len, holders.values())))
            time.sleep(0.002)
            for name in taken.names:
                holders[name].remove(number)

    with ThreadPoolExecutor(40) as threads:
        list(threads.map(take, range(120)))
    assert (len(most), max(most)) == (120, 1)


def waiting(pool: Pool) -> list[str]:
    """What is written on the tickets of those that wait: pid, slots wanted, how often they were overtaken."""
    return [path.read_text() for path in sorted(pool.folder.glob("waiting_gpus/*"))]


def test_a_launch_of_many_ranks_is_overtaken_by_so_many_later_ones_of_few_and_by_no_more(pool: Pool) -> None:
    order: list[int] = []

    def take(wanted: int) -> None:
        with pool.take_slots(wanted):
            order.append(wanted)

    more = 3
    with pool.take_slots(1):
        wide = threading.Thread(target=take, args=(8,))
        wide.start()
        eventually(lambda: len(waiting(pool)) == 1)
        narrow = [threading.Thread(target=take, args=(1,)) for _ in range(OVERTAKEN_AT_MOST + more)]
        for thread in narrow:
            thread.start()
        eventually(lambda: len(order) == OVERTAKEN_AT_MOST)
        eventually(lambda: len(waiting(pool)) == 1 + more)
        assert waiting(pool)[0] == f"{os.getpid()} 8 {OVERTAKEN_AT_MOST}"
        assert order == [1] * OVERTAKEN_AT_MOST
    for thread in (wide, *narrow):
        thread.join()
    assert order == [*[1] * OVERTAKEN_AT_MOST, 8, *[1] * more]
    assert waiting(pool) == []


def test_among_launches_that_could_start_the_first_that_came_starts_first(pool: Pool) -> None:
    order: list[int] = []

    def take(number: int, wanted: int) -> None:
        with pool.take_slots(wanted):
            order.append(number)

    with pool.take_slots(8):
        threads = []
        for number in range(5):
            threads.append(threading.Thread(target=take, args=(number, 5)))
            threads[-1].start()
            eventually(lambda number=number: len(waiting(pool)) == number + 1)
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3, 4]


def test_one_that_waited_and_was_killed_bars_nobody(pool: Pool) -> None:
    code = (
        "from pathlib import Path; from harness.core.launch import Pool\n"
        "print('waits', flush=True)\n"
        f"with Pool(Path({str(pool.folder)!r}), {EIGHT}, True).take_slots(8): pass"
    )
    with pool.take_slots(1):
        with other_process(code):
            eventually(lambda: len(waiting(pool)) == 1)
            (ticket,) = pool.folder.glob("waiting_gpus/*")
            ticket.write_text(ticket.read_text().rpartition(" ")[0] + f" {OVERTAKEN_AT_MOST}")
            assert not free(pool, 1)
        eventually(lambda: free(pool, 1))


def test_two_takers_get_disjoint_slots_though_one_sees_only_some_of_the_gpus(pool: Pool) -> None:
    some = Pool(pool.folder, EIGHT[2:4], has_gpus=True)
    with some.take_slots(2), pool.take_slots(6) as taken:
        assert taken.names == EIGHT[:2] + EIGHT[4:]


def test_on_cores_more_ranks_than_slots_take_all_and_on_gpus_they_are_refused(pool: Pool) -> None:
    with Pool(pool.folder, EIGHT).take_slots(16) as taken:
        assert (len(taken.names), "CUDA_VISIBLE_DEVICES" in taken.environment) == (8, False)
    with pytest.raises(LaunchError, match="16 GPUs are wanted on this machine, 8 are visible"), pool.take_slots(16):
        pass


def test_a_folder_in_which_others_can_write_is_refused(pool: Pool) -> None:
    pool.folder.mkdir()
    pool.folder.chmod(0o777)
    with pytest.raises(LaunchError, match="slots: not a folder that is yours alone"), pool.take_slots(1):
        pass


def test_a_waiter_that_is_stopped_blocks_nobody(pool: Pool) -> None:
    code = (
        "import threading; from pathlib import Path; from harness.core.launch import Pool\n"
        "print('waits', flush=True)\n"
        f"with Pool(Path({str(pool.folder)!r}), {EIGHT}, True).take_slots(8): print('has them', flush=True)"
    )
    with pool.take_slots(1), other_process(code) as waiter:
        eventually(lambda: [text.split()[0] for text in waiting(pool)] == [str(waiter.pid)])
        waiter.send_signal(signal.SIGSTOP)
        eventually(lambda: is_stopped(waiter.pid))
        with pool.take_slots(7):
            pass
        waiter.send_signal(signal.SIGCONT)
        eventually(lambda: free(pool, 7))
        assert waiter.poll() is None


def test_one_that_is_stopped_in_the_gate_before_it_writes_anything_blocks_nobody(pool: Pool) -> None:
    pool.folder.mkdir(mode=0o700)
    code = (
        "import fcntl, time\n"
        f"gate = open({str(pool.folder / 'gate')!r}, 'a+'); fcntl.flock(gate, fcntl.LOCK_EX); print('in', flush=True)\n"
        "time.sleep(600)"
    )
    with other_process(code) as holder:
        assert not free(pool, 1)
        holder.send_signal(signal.SIGSTOP)
        eventually(lambda: free(pool, 1))


def test_slots_of_a_process_that_was_killed_are_free_again(pool: Pool) -> None:
    code = (
        "import sys, time; from pathlib import Path; from harness.core.launch import Pool\n"
        f"with Pool(Path({str(pool.folder)!r}), {EIGHT}, True).take_slots(8): print('has them', flush=True); time.sleep(600)"
    )
    with other_process(code) as process:
        assert not free(pool, 1)
        process.send_signal(signal.SIGKILL)
        process.wait()
    eventually(lambda: free(pool, 8))


def test_slots_are_not_free_while_a_rank_is_left_of_a_launch_whose_harness_died(pool: Pool) -> None:
    code = "import time; from harness.core.launch.slots import hold_own_slots\n"
    code += "hold_own_slots(); print('holds', flush=True); time.sleep(600)"
    with ExitStack() as rank:
        with pool.take_slots(2) as taken:
            rank.enter_context(other_process(code, **{HELD_VARIABLE: taken.environment[HELD_VARIABLE]}))
        assert not free(pool, 7)
    eventually(lambda: free(pool, 8))


@pytest.mark.slow("real ranks; test_takers_of_many_sizes_all_get_theirs_and_no_slot_is_had_twice gives slots back")
def test_a_harness_that_is_killed_gives_its_slots_back_with_its_ranks(pool: Pool, tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from harness.core.launch import *\n"
        f"launch(Job(Path({str(tmp_path)!r}) / 'job', 2, 'tests.launch_entries:sleeps'), "
        f"pool=Pool(Path({str(pool.folder)!r}), {EIGHT}, True), began=lambda: print('began', flush=True))"
    )
    with other_process(code) as process:
        eventually(lambda: (tmp_path / "job" / "inflight" / "rank_01.groups").exists())
        process.send_signal(signal.SIGKILL)
        process.wait()
        eventually(lambda: free(pool, 8))
    holders = [path for path in Path("/proc").glob("[0-9]*") if str(tmp_path).encode() in environment_of(path)]
    assert holders == []


def environment_of(process: Path) -> bytes:
    try:
        return (process / "environ").read_bytes()
    except OSError:
        return b""


def test_launches_side_by_side_have_gpus_of_their_own(pool: Pool, tmp_path: Path) -> None:
    """2, 2 and 4 ranks, which all run at a time: a rank goes on only when all eight are there."""
    (tmp_path / "here").mkdir()

    def gpus_of(name: str, ranks: int) -> set[str]:
        options = {"here": str(tmp_path / "here"), "ranks": 8}
        job = Job(tmp_path / name, ranks, "tests.launch_entries:meets_other_jobs", options)
        exits = launch(job, pool=pool)
        told = [Path(exit.log).read_text().split() for exit in exits]
        assert [place for _, place in told] == [str(rank) for rank in range(ranks)]
        (visible,) = {visible for visible, _ in told}
        assert len(visible.split(",")) == ranks
        return set(visible.split(","))

    with ThreadPoolExecutor(3) as threads:
        a, b, c = threads.map(gpus_of, ("a", "b", "c"), (2, 2, 4))
    assert (len(a), len(b), len(c), a | b | c) == (2, 2, 4, set(EIGHT))


# ---- what a machine has


@pytest.fixture
def eight_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The driver's tool lists eight."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n" + "".join(f"echo GPU-{number}a\n" for number in range(8)))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=os.pathsep)
    machine.all_gpu_uuids.cache_clear()
    yield
    machine.all_gpu_uuids.cache_clear()


@pytest.mark.parametrize(
    ("visible", "numbers"),
    [
        (None, "01234567"),
        ("", ""),
        ("3,1", "31"),
        ("3,9,1", "3"),  # as CUDA does: up to the first that is not there
        ("GPU-5,2", "52"),
        ("GPU", ""),  # of several
        ("0,0", "0"),
    ],
)
def test_gpus_are_known_by_uuid_however_they_are_named(
    eight_gpus: None, visible: str | None, numbers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.visible_gpu_uuids() == tuple(f"GPU-{number}a" for number in numbers)


def test_a_core_carries_four_ranks_and_a_container_has_the_cores_of_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(machine.SLOTS_VARIABLE, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 5, 7}, raising=False)
    monkeypatch.setattr(machine, "CPU_LIMIT", tmp_path / "cpu.max")
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    turns = [f"core_{core:03d}_{turn}" for turn in range(5) for core in (2, 5)]
    assert machine.core_slot_names() == tuple(turns[:8])
    monkeypatch.setenv(machine.SLOTS_VARIABLE, "9")
    assert machine.core_slot_names() == tuple(turns[:9])
    monkeypatch.setenv(machine.SLOTS_VARIABLE, "none")
    with pytest.raises(ValueError, match="HARNESS_SLOTS: expected how many ranks .* found 'none'"):
        machine.core_slot_names()


def test_a_container_has_the_memory_of_its_limit_of_which_caches_of_files_give_way(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("MEMORY_TABLE", "MEMORY_LIMIT", "MEMORY_USED"):
        monkeypatch.setattr(machine, name, tmp_path / name)
    machine.MEMORY_TABLE.write_text(
        "MemTotal: 64 kB\nMemAvailable: 32 kB\nSwapTotal: 4 kB\nSwapFree: 1 kB\nHugePages_Total: 0\n"
    )
    assert (machine.total_memory(), machine.free_memory()) == (68 * 1024, 33 * 1024)
    machine.MEMORY_LIMIT.write_text("20480\n")
    machine.MEMORY_USED.write_text("anon 4096\nfile 12288\n")
    assert (machine.total_memory(), machine.free_memory()) == (20 * 1024, 16 * 1024)
    machine.MEMORY_LIMIT.write_text("max\n")
    assert machine.total_memory() == 68 * 1024
    machine.MEMORY_TABLE.unlink()
    assert machine.free_memory() == machine.total_memory() > 0  # a system without /proc


@pytest.mark.parametrize(
    ("arguments", "ranks"),
    [("--nnodes 2 --nproc-per-node 8", 8), ("--nnodes=2 --nproc_per_node=4", 4), ("--nnodes 2", 1)],
)
def test_a_launch_on_several_nodes_takes_what_each_of_them_starts(arguments: str, ranks: int) -> None:
    assert ranks_per_node(tuple(arguments.split())) == ranks
