"""The slots of this machine, taken by launches of all processes of one user: a launch takes as many as it has ranks.

A slot is a file in one folder; it is taken while a process holds a shared lock on it. Such are the harness that took
it, each rank that runs on it, and processes that such a rank forked. So it is free when all these are dead, however
they died, and not before.

Launches take slots in the gate, one at a time, and all that they want at once. So two cannot have half each. Launches
of few ranks may pass one of many, but not without end (waiting.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from harness.core.evidence.text import escape_control_characters
from harness.core.launch.job import Job, LaunchError
from harness.core.launch.machine import core_slot_names, usable_cores, visible_gpu_uuids
from harness.core.launch.process import is_stopped
from harness.core.launch.waiting import hold_ticket, may_start

HELD_VARIABLE = "HARNESS_HELD_SLOTS"  # in the environment of a rank: the files of the slots it runs on
FOLDER_VARIABLE = "HARNESS_SLOTS_FOLDER"
POLL = 0.02  # seconds
NOTICE_AFTER = 30.0  # seconds after which one that waits for others says so


@dataclass(frozen=True)
class TakenSlots:
    """The slots that one launch has taken: their names (UUIDs for GPUs), and the files that are locked."""

    names: tuple[str, ...]
    files: tuple[Path, ...]
    has_gpus: bool

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables of ranks on these slots: rank i of this machine finds its GPU as device i."""
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(self.names)} if self.has_gpus and self.names else {}
        return {HELD_VARIABLE: os.pathsep.join(map(str, self.files)), **visible}


@dataclass(frozen=True)
class Pool:
    """The slots of one folder, by name, which are shared by all processes that use that folder."""

    folder: Path
    slots: tuple[str, ...]
    has_gpus: bool = False

    @contextmanager
    def take_slots(self, wanted: int) -> Iterator[TakenSlots]:
        """Wait until `wanted` slots are free, and hold them in the context.

        All slots of the pool if more are wanted. But no GPU carries two ranks: LaunchError if more GPUs are wanted than
        are visible. LaunchError also if the folder cannot hold slots.
        """
        if self.has_gpus and wanted > len(self.slots):
            raise LaunchError(f"{wanted} GPUs are wanted on this machine, {len(self.slots)} are visible")
        with ExitStack() as locks:
            try:
                make_own_folder(self.folder)
                taken = self._wait_for_slots(min(wanted, len(self.slots)), locks)
            except OSError as error:
                why = f"cannot keep slots ({error.strerror}): name another folder in {FOLDER_VARIABLE}"
                raise LaunchError(f"{self.folder}: {why}") from error
            yield taken

    def _wait_for_slots(self, wanted: int, locks: ExitStack) -> TakenSlots:
        """Wait until `wanted` slots can be taken at once; return them, their locks entered into `locks`.

        A launch that waits holds no slot, so one that is stopped meanwhile keeps none from others. Every NOTICE_AFTER
        seconds it prints who holds them.
        """
        since = time.monotonic()
        with ExitStack() as waiting:
            with self._enter_gate():
                own = waiting.enter_context(
                    hold_ticket(self.folder / ("waiting_gpus" if self.has_gpus else "waiting"), wanted)
                )
            while True:
                with self._enter_gate(), ExitStack() as trial_locks:
                    free = self._lock_free_slots(trial_locks)
                    if may_start(own, len(free)):
                        taken = dict(list(free.items())[:wanted])
                        if all(map(_claim_slot, taken.values())):
                            for file in taken.values():
                                locks.enter_context(os.fdopen(os.dup(file.fileno())))
                            return TakenSlots(tuple(taken), tuple(self.folder / name for name in taken), self.has_gpus)
                time.sleep(POLL)
                since = self._report_holders(wanted, list(free), since)

    @contextmanager
    def _enter_gate(self) -> Iterator[None]:
        """Stand in the gate, in which there is one thread of one process at a time."""
        with _gate_lock, hold_gate(self.folder / "gate"):
            yield

    def _lock_free_slots(self, trial_locks: ExitStack) -> dict[str, IO[str]]:
        """Return the files of the free slots, by name, each locked exclusively until `trial_locks` ends."""
        free: dict[str, IO[str]] = {}
        for name in self.slots:
            file = trial_locks.enter_context(open(self.folder / name, "a+", encoding="utf-8"))  # noqa: SIM115 - a stack closes it
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                free[name] = file
        return free

    def _report_holders(self, wanted: int, free: Sequence[str], since: float) -> float:
        """Print which other processes hold the slots, at most every NOTICE_AFTER seconds.

        Return when that was last due (monotonic). Nothing is printed if this process alone holds them.
        """
        if time.monotonic() - since < NOTICE_AFTER:
            return since
        holders = {(self.folder / name).read_text(encoding="utf-8") for name in self.slots if name not in free}
        holders = {text for text in holders if text.partition(" ")[0] != str(os.getpid())}
        if holders:
            holders_text = "; ".join(f"pid {text}" for text in sorted(holders))
            print(
                escape_control_characters(
                    f"harness: waits for {wanted - len(free)} of {wanted} slots, held by {holders_text}"
                ),
                file=sys.stderr,
            )
        return time.monotonic()


_gate_lock = threading.Lock()
"""Held by the thread that stands in the gate, or tries to."""


def _claim_slot(file: IO[str]) -> bool:
    """Write in a slot's file who holds it, and change its lock to a shared one, which ranks can share.

    Return whether that succeeded: False if another process locked it in between.
    """
    file.truncate(0)
    file.write(holder_text())
    file.flush()
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def holder_text() -> str:
    """Return what a slot's file says of its holder, which is this process: pid and command line."""
    return f"{os.getpid()} {shlex.join(sys.argv)[:200]}"


@contextmanager
def hold_gate(gate: Path) -> Iterator[None]:
    """Wait for the gate and hold it in the context; one process at a time does.

    A process that is stopped there (Ctrl-Z, SIGSTOP) loses its place to the next.
    """
    while (file := try_enter_gate(gate)) is None:
        time.sleep(POLL)
    with file:
        yield


def try_enter_gate(gate: Path) -> IO[str] | None:
    """Return the gate's locked file; None if it could not be entered now: try again.

    If the process that holds it is stopped, the file is deleted, so that the next attempt makes another gate.
    """
    file = open(gate, "a+", encoding="utf-8")  # noqa: SIM115 - held while the caller stands there
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = lock_holder(file)
        if holder is not None and is_stopped(holder) and is_same_file(gate, file):
            gate.unlink(missing_ok=True)
        file.close()
        return None
    if not is_same_file(gate, file):
        file.close()
        return None
    return file


def lock_holder(file: IO[str]) -> int | None:
    """Return the pid that holds a file's lock, by the kernel's list of locks; None if the list does not name one.

    The text in the file may be missing: a holder may be stopped before it writes.
    """
    inode = str(os.fstat(file.fileno()).st_ino)
    try:
        lines = Path("/proc/locks").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        _, kind, *_, pid, file_id, _, _ = line.split()  # 1: FLOCK ADVISORY WRITE 1234 fd:01:5678 0 EOF
        if kind == "FLOCK" and file_id.rpartition(":")[2] == inode and int(pid) > 0:
            return int(pid)
    return None


def is_same_file(path: Path, file: IO[str]) -> bool:
    """Return whether `path` still names the open file; False if the path was deleted or names another file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def make_own_folder(folder: Path) -> None:
    """Make the folder with mode 700, if it is missing.

    LaunchError if other users could put files into it, or it is a link.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    stat = folder.lstat()
    if folder.is_symlink() or stat.st_uid != os.getuid() or stat.st_mode & 0o022:
        raise LaunchError(
            f"{folder}: not a folder that is yours alone: remove it, or name another in {FOLDER_VARIABLE}"
        )


def slot_pool(device: str) -> Pool:
    """Return the slots of this machine for ranks on `device`: one per visible GPU for "cuda", else several per core.

    LaunchError if HARNESS_SLOTS is not a number.
    """
    folder = Path(os.environ.get(FOLDER_VARIABLE) or f"/tmp/harness-slots-{os.getuid()}")
    try:
        return Pool(folder, visible_gpu_uuids(), has_gpus=True) if device == "cuda" else Pool(folder, core_slot_names())
    except ValueError as error:
        raise LaunchError(str(error)) from error


def reference_slot_pool() -> Pool:
    """Return the slots of this machine for references on CPU, one for each core.

    They lie beside those of ranks: a launch that waits for all slots of ranks does not wait for a reference that takes minutes.
    """
    ranks = slot_pool("cpu")
    return Pool(ranks.folder / "references", tuple(f"reference_{core:03d}" for core in usable_cores()))


def slots_wanted_by(job: Job) -> int:
    """Return how many slots a job takes: its `slots`, or else as many as it has ranks on this machine."""
    if job.slots is not None:
        return job.slots
    return ranks_per_node(job.torchrun_args) if job.torchrun_args else job.world_size


def ranks_per_node(torchrun_args: tuple[str, ...]) -> int:
    """Return how many ranks torchrun starts on each node: `--nproc-per-node 8`, in any of its spellings; 1 if it is not
    there.

    For "gpu" or "auto" the number of visible GPUs; if there is none, or for any other word, the number of slots on CPU.
    """
    words: list[str] = []
    for argument in torchrun_args:
        words += argument.split("=", 1)
    indices = [index for index, word in enumerate(words) if word.replace("_", "-") == "--nproc-per-node"]
    per_node = words[indices[-1] + 1] if indices and indices[-1] + 1 < len(words) else "1"
    if per_node.isdecimal():
        return int(per_node)
    return len(visible_gpu_uuids()) if per_node in ("gpu", "auto") and visible_gpu_uuids() else len(core_slot_names())


def hold_own_slots() -> None:
    """Lock this rank's slots for as long as it lives; call it in the rank.

    The harness holds them too. So a slot whose file is gone or cannot be opened is skipped: it is taken as long as the
    harness lives.
    """
    for path in filter(None, os.environ.get(HELD_VARIABLE, "").split(os.pathsep)):
        with contextlib.suppress(OSError):
            open_slot_files.append(open(path, encoding="utf-8"))  # noqa: SIM115 - held until the end
            fcntl.flock(open_slot_files[-1], fcntl.LOCK_SH)


open_slot_files: list = []
