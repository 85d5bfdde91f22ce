"""The slots of this machine, taken by launches of all processes of one user: a launch takes as many as it has ranks.

A slot is a file in one folder; it is taken while a process holds a shared lock on it. Such are the harness that took it, each
rank that runs on it, what such a rank forked. So it is free when all these are dead, however they died, and not before.

Launches that take slots hold the gate, one at a time, until they have all that they want. So two cannot have half each, and a
launch of many ranks is not overtaken by launches of few that come later.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from harness.evidence.text import visible
from harness.launch.job import Job, LaunchError
from harness.launch.machine import core_slots, gpus
from harness.launch.process import is_stopped

HELD = "HARNESS_HELD_SLOTS"  # in the environment of a rank: the files of the slots it runs on
FOLDER = "HARNESS_SLOTS_FOLDER"
POLL = 0.02  # seconds
PATIENCE = 30.0  # seconds after which one that waits for others says so


@dataclass(frozen=True)
class Taken:
    """Slots by name, and their files."""

    names: tuple[str, ...]
    files: tuple[Path, ...]
    gpus: bool

    @property
    def environment(self) -> dict[str, str]:
        """What ranks on these slots need: rank i of this machine finds its GPU as device i."""
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(self.names)} if self.gpus and self.names else {}
        return {HELD: os.pathsep.join(map(str, self.files)), **visible}


@dataclass(frozen=True)
class Pool:
    """Slots that are shared by all who name the same folder."""

    folder: Path
    slots: tuple[str, ...]
    gpus: bool = False

    @contextmanager
    def taken(self, wanted: int) -> Iterator[Taken]:
        """Wait for that many slots; all of them where more are wanted, but no GPU carries two ranks (LaunchError)."""
        if self.gpus and wanted > len(self.slots):
            raise LaunchError(f"{wanted} GPUs are wanted on this machine, {len(self.slots)} are visible")
        with ExitStack() as held:
            try:
                own_folder(self.folder)
                taken = self._take(min(wanted, len(self.slots)), held)
            except OSError as error:
                why = f"cannot keep slots ({error.strerror}): name another folder in {FOLDER}"
                raise LaunchError(f"{self.folder}: {why}") from error
            yield taken

    def _take(self, wanted: int, held: ExitStack) -> Taken:
        """All at once or none: who waits holds no slot, so that one that is stopped meanwhile keeps none from others."""
        began = time.monotonic()
        with standing_in(self.folder / "gate"):
            while True:
                with ExitStack() as tried:
                    free = (name for name in self.slots if self._is_mine(name, tried))
                    found = list(itertools.islice(free, wanted))
                    if len(found) == wanted:
                        held.enter_context(tried.pop_all())
                        break
                time.sleep(POLL)
                began = self._say_who(wanted, found, began)
        return Taken(tuple(found), tuple(self.folder / name for name in found), self.gpus)

    def _is_mine(self, name: str, held: ExitStack) -> bool:
        """Return whether the slot was free and is taken: the first lock shows it. Between the two locks it may be lost."""
        file = open(self.folder / name, "a+", encoding="utf-8")  # noqa: SIM115 - held while the caller works
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.truncate(0)
            file.write(own_words())
            file.flush()
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return False
        held.enter_context(file)
        return True

    def _say_who(self, wanted: int, found: Sequence[str], since: float) -> float:
        """Once in PATIENCE, if others than this process hold what is waited for."""
        if time.monotonic() - since < PATIENCE:
            return since
        others = {(self.folder / name).read_text(encoding="utf-8") for name in self.slots if name not in found}
        others = {text for text in others if text.partition(" ")[0] != str(os.getpid())}
        if others:
            told = "; ".join(f"pid {text}" for text in sorted(others))
            print(
                visible(f"harness: waits for {wanted - len(found)} of {wanted} slots, held by {told}"), file=sys.stderr
            )
        return time.monotonic()


def own_words() -> str:
    """Return what a lock's file says of its holder: pid and command."""
    return f"{os.getpid()} {shlex.join(sys.argv)[:200]}"


@contextmanager
def standing_in(gate: Path) -> Iterator[None]:
    """One process at a time. One that is stopped in the gate (Ctrl-Z, SIGSTOP) loses its place to the next."""
    while (file := entered(gate)) is None:
        time.sleep(POLL)
    with file:
        yield


def entered(gate: Path) -> IO[str] | None:
    """Return the locked file, or None while another process that is not stopped stands in the gate."""
    file = open(gate, "a+", encoding="utf-8")  # noqa: SIM115 - held while the caller stands there
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().partition(" ")[0]
        if holder.isdecimal() and is_stopped(int(holder)) and is_at(gate, file):
            gate.unlink(missing_ok=True)
        file.close()
        return None
    if not is_at(gate, file):
        file.close()
        return None
    file.truncate(0)
    file.write(own_words())
    file.flush()
    return file


def is_at(path: Path, file: IO[str]) -> bool:
    """Return whether the name still is this file's."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def own_folder(folder: Path) -> None:
    """Makes it; refuses one in which somebody else could put files."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    stat = folder.lstat()
    if folder.is_symlink() or stat.st_uid != os.getuid() or stat.st_mode & 0o022:
        raise LaunchError(f"{folder}: not a folder that is yours alone: remove it, or name another in {FOLDER}")


def pool_of(device: str) -> Pool:
    """The slots of this machine for ranks on `device`. LaunchError if the variable for their count is no number."""
    folder = Path(os.environ.get(FOLDER) or f"/tmp/harness-slots-{os.getuid()}")
    try:
        return Pool(folder, gpus(), gpus=True) if device == "cuda" else Pool(folder, core_slots())
    except ValueError as error:
        raise LaunchError(str(error)) from error


def wanted_by(job: Job) -> int:
    """Return as many as the job has ranks on this machine."""
    if job.slots is not None:
        return job.slots
    return ranks_here(job.torchrun_args) if job.torchrun_args else job.world_size


def ranks_here(torchrun_args: tuple[str, ...]) -> int:
    """What torchrun starts on each node: `--nproc-per-node 8`, as typed in any of its spellings; else 1."""
    words = [part for word in torchrun_args for part in word.split("=", 1)]
    places = [place for place, word in enumerate(words) if word.replace("_", "-") == "--nproc-per-node"]
    told = words[places[-1] + 1] if places and places[-1] + 1 < len(words) else "1"
    if told.isdecimal():
        return int(told)
    return len(gpus()) if told in ("gpu", "auto") and gpus() else len(core_slots())


def hold_mine() -> None:
    """To be called by a rank: its slots are taken as long as it lives. The harness holds them too, so one whose file is gone
    or closed to us is taken as long as the harness lives."""
    for path in filter(None, os.environ.get(HELD, "").split(os.pathsep)):
        with contextlib.suppress(OSError):
            kept_open.append(open(path, encoding="utf-8"))  # noqa: SIM115 - held until the end
            fcntl.flock(kept_open[-1], fcntl.LOCK_SH)


kept_open: list = []
