"""The capacity of this machine: its GPUs by UUID, or its cores, each of which carries some ranks; and its memory.

It imports no torch where the driver's own tool is installed, and it touches no GPU.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

RANKS_PER_CORE = 4
"""Ranks of a case wait for each other much of the time, and other cases' ranks work meanwhile; 50 MB each."""
SLOTS_VARIABLE = "HARNESS_SLOTS"
CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")
MEMORY_USED = Path("/sys/fs/cgroup/memory.stat")
MEMORY_TABLE = Path("/proc/meminfo")
LIST_GPUS = ("nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader")
NAME_GPUS = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")


def usable_cores() -> list[int]:
    """Return the numbers of the cores that this process may use, at most as many as a container's limit of CPU time
    allows."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return sorted(allowed)[: container_core_limit()]


def container_core_limit() -> int | None:
    """Return how many cores a container's limit of CPU time allows, rounded down, at least one; None without a limit."""
    words = CPU_LIMIT.read_text().split() if CPU_LIMIT.exists() else ["max"]
    return None if words[0] == "max" else max(1, int(words[0]) // int(words[1]))


def total_memory() -> int:
    """Return the bytes that processes of this machine can have, swap included, and no more than a container's limit."""
    meminfo = read_byte_table(MEMORY_TABLE)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(meminfo.get("MemTotal", pages) + meminfo.get("SwapTotal", 0), container_memory_limit())


def free_memory() -> int:
    """Return the bytes that processes can still have, swap and file caches included, within a container's limit.

    If the system does not report what is available, all of its memory counts as free.
    """
    meminfo = read_byte_table(MEMORY_TABLE)
    used = read_byte_table(MEMORY_USED).get("anon", 0)
    free = meminfo["MemAvailable"] + meminfo.get("SwapFree", 0) if "MemAvailable" in meminfo else total_memory()
    return min(free, container_memory_limit() - used)


def container_memory_limit() -> int:
    """Return the container's limit in bytes; sys.maxsize without one."""
    word = MEMORY_LIMIT.read_text().strip() if MEMORY_LIMIT.exists() else "max"
    return sys.maxsize if word == "max" else int(word)


def read_byte_table(table: Path) -> dict[str, int]:
    """Return the bytes in one of the kernel's files, by name: `MemTotal: 16 kB`, `anon 16384`.

    Empty if there is no such file.
    """
    lines = table.read_text().splitlines() if table.exists() else []
    fields = [line.split() for line in lines]
    return {name.rstrip(":"): int(number) * (1024 if unit else 1) for name, number, *unit in fields}


def core_slot_names() -> tuple[str, ...]:
    """Return the names of this machine's slots on CPU: RANKS_PER_CORE for each usable core, or as many as HARNESS_SLOTS
    says.

    A name is core_CORE_TURN, so processes that count differently share names. ValueError if HARNESS_SLOTS is no number
    above 0.
    """
    usable = usable_cores()
    typed_count = os.environ.get(SLOTS_VARIABLE, "")
    if typed_count and (not typed_count.isdecimal() or int(typed_count) < 1):
        raise ValueError(
            f"{SLOTS_VARIABLE}: expected how many ranks this machine carries at a time, found {typed_count!r}"
        )
    count = int(typed_count) if typed_count else RANKS_PER_CORE * len(usable)
    names = []
    for number in range(count):
        turn, index = divmod(number, len(usable))
        names.append(f"core_{usable[index]:03d}_{turn}")
    return tuple(names)


def visible_gpu_uuids() -> tuple[str, ...]:
    """Return the UUIDs of the GPUs that CUDA_VISIBLE_DEVICES lets this process see, all GPUs if it is not set.

    Numbers in place of UUIDs if the driver's tool is missing. UUIDs name a GPU alike in processes that see others of
    them.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    all_uuids = all_gpu_uuids()
    if not all_uuids:
        return gpus_counted_by_torch(visible)
    return all_uuids if visible is None else select_gpus(visible, all_uuids)


def select_gpus(visible: str, all_uuids: tuple[str, ...]) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs in `visible`, a value of CUDA_VISIBLE_DEVICES: numbers or beginnings of UUIDs.

    As in CUDA, the first one that does not exist, or fits several GPUs, ends the list. A name of a MIG slice is kept as
    it is.
    """
    selected: list[str] = []
    for word in filter(None, (part.strip() for part in visible.split(","))):
        if word.isdecimal():
            matching = all_uuids[int(word) : int(word) + 1]
        else:  # a part of a GPU (MIG) is not listed and is what it is called
            beginning_so = tuple(uuid for uuid in all_uuids if uuid.startswith(word))
            matching = (word,) if word.startswith("MIG-") else beginning_so
        if len(matching) != 1:
            break
        selected += matching
    return tuple(dict.fromkeys(selected))


@functools.cache
def all_gpu_uuids() -> tuple[str, ...]:
    """Return all GPUs of the machine, as its driver lists them; none if there is no such tool."""
    return tuple(line for line in run_driver_tool(LIST_GPUS) if line.startswith("GPU-"))


@functools.cache
def gpu_model() -> str:
    """Return the model of the machine's first GPU: NVIDIA-H200; "unknown" without the driver's tool.

    Each model has another noise.
    """
    return next((re.sub(r"[^\w.]+", "-", line) for line in run_driver_tool(NAME_GPUS)), "unknown")


def run_driver_tool(question: tuple[str, ...]) -> list[str]:
    """Return the lines, stripped, that the driver's tool prints.

    Empty if it is missing, fails or takes longer than 60 s.
    """
    try:
        listed = subprocess.run(question, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in listed.splitlines() if line.strip()]


def gpus_counted_by_torch(visible: str | None) -> tuple[str, ...]:
    """Return the visible GPUs by number, without the driver's tool and on other makes; none without CUDA.

    The words of `visible`, if any, up to as many as torch counts. torch counts them without touching one.
    """
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    words = [word.strip() for word in visible.split(",")] if visible else [str(number) for number in range(count)]
    return tuple(words[:count])
