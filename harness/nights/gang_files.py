"""The files of one launch on nodes without a common disk: each node has the files of its ranks, the first node has all.

The first node keeps the launch. The others ask it for the job, the weights and the end. A few times a second they send
it what their ranks write (logs, in-flight records, evidence, exits). So it sees these files like its own. How a rank
ended is read first and written last: if that file is there, all other files of the rank are there.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Protocol

from harness.core.launch import LaunchError
from harness.core.launch.job import SUFFIXES

POLL_SECONDS = 0.2  # seconds
EXITS_FOLDER = "exits"
NOTHING = "{}"  # run.json of a launch that is gone
CompressedFiles = dict[str, bytes]  # by name in the launch's folder; compressed, as an in-flight record is mostly zeros


@dataclass(frozen=True)
class BegunLaunch:
    """A launch that has begun on the first node: what another node needs to join it."""

    out: str  # the folder there in which all lies that the job names
    folder: str  # the launch's, relative to `out`
    job: str  # the text of job.json
    weights: bytes  # compressed


class FirstNodeProtocol(Protocol):
    """The calls of the other nodes to the first one."""

    def begun_launch(self) -> BegunLaunch | None: ...

    def receive_files(self, files: CompressedFiles) -> str | None: ...


class FirstNode:
    """The launch's folder on the first node, with the calls by which other nodes use it.

    out: the folder below which all paths of the job lie. folder: of the launch.
    launch: an argument that torchrun gets in this launch and in no other.
    """

    def __init__(self, out: Path, folder: Path, launch: str) -> None:
        self.out = out
        self.folder = folder
        self.launch = launch

    def begun_launch(self) -> BegunLaunch | None:
        """Return the launch, with its job and weights.

        None until it has begun; a job of an earlier launch in the folder does not count.
        """
        with contextlib.suppress(FileNotFoundError):
            text = (self.folder / "job.json").read_text(encoding="utf-8")
            job = json.loads(text)
            if self.launch in job["torchrun_args"]:
                weights = zlib.compress(Path(job["options"]["weights"]).read_bytes(), 1)
                return BegunLaunch(str(self.out), str(self.folder.relative_to(self.out)), text, weights)
        return None

    def receive_files(self, files: CompressedFiles) -> str | None:
        """Write the files of another node's ranks into the launch's folder, exits last.

        Return the text of run.json if it has ended. None while the launch runs. NOTHING if its folder is gone or holds
        another launch.
        """
        with contextlib.suppress(FileNotFoundError):
            if self.launch not in (self.folder / "job.json").read_text(encoding="utf-8"):
                return NOTHING
            for name in sorted(files, key=lambda name: name.startswith(EXITS_FOLDER)):
                (self.folder / name).parent.mkdir(exist_ok=True)
                write_atomically(self.folder / name, zlib.decompress(files[name]))
            end = self.folder / "run.json"
            return end.read_text(encoding="utf-8") if end.exists() else None
        return NOTHING


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file completely or not at all. Raises FileNotFoundError if its folder is gone.

    The file is not synchronized to disk: nothing here need outlive the machine.
    """
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(data)
    os.replace(partial, path)


@contextmanager
def join_launch(first: FirstNodeProtocol, node_folder: Path, seconds: float) -> Iterator[Path]:
    """Yield the launch's folder on another node, below `node_folder`, with job and weights in it.

    Until the block ends, a thread sends the files of its ranks to the first node. Raises LaunchError if the launch does
    not begin within `seconds`. An error of the thread is raised here at the end of the block.
    """
    folder = write_job(wait_for_launch(first, seconds), node_folder)
    ranks_ended = threading.Event()
    errors: list[BaseException] = []

    def send() -> None:
        """Send files until the end. If that fails, keep the error and write an empty run.json, so that ranks here stop."""
        try:
            send_until_end(first, folder, ranks_ended)
        except BaseException as error:
            errors.append(error)
            write_atomically(folder / "run.json", NOTHING.encode())  # the first node is gone: ranks here need not go on

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    try:
        yield folder
    finally:
        ranks_ended.set()
        sender.join()
    if errors:
        raise errors[0]


def wait_for_launch(first: FirstNodeProtocol, seconds: float) -> BegunLaunch:
    """Wait until the first node has begun its launch, and return it. Raises LaunchError after so many seconds."""
    give_up = time.monotonic() + seconds
    while (begun := first.begun_launch()) is None:
        if time.monotonic() > give_up:
            raise LaunchError(f"the first node began no launch in {seconds:g} s")
        time.sleep(POLL_SECONDS)
    return begun


def write_job(begun: BegunLaunch, node_folder: Path) -> Path:
    """Write job.json and the weights below a folder of this node, and make the launch's folders. Return the launch's folder.

    Paths of the first node in the job become paths of this node.
    """
    node_folder = node_folder.absolute()
    text = begun.job.replace(begun.out, str(node_folder))
    folder = node_folder / begun.folder
    weights = Path(json.loads(text)["options"]["weights"])
    for kind in (*SUFFIXES, "ranks"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    weights.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(weights, zlib.decompress(begun.weights))
    write_atomically(folder / "job.json", text.encode())
    return folder


def send_until_end(first: FirstNodeProtocol, folder: Path, ranks_ended: threading.Event) -> None:
    """Send changed files to the first node every POLL_SECONDS, until its launch has ended or the ranks here have.

    If the launch ends there, its run.json is written here too. If the ranks end here, files are sent a last time.
    """
    sent: dict[str, object] = {}
    is_last_round = False
    while True:
        is_last_round = ranks_ended.wait(POLL_SECONDS)
        end = first.receive_files(files_to_send(folder, sent))
        if end is not None:
            return write_atomically(folder / "run.json", end.encode() or NOTHING.encode())
        if is_last_round:
            return None


def files_to_send(folder: Path, sent: dict[str, object]) -> CompressedFiles:
    """Return the files of this node's ranks that changed since they were sent, compressed, by name. `sent` is updated.

    sent: by name, the state of the file when it was last sent.
    """
    changed: CompressedFiles = {}
    exits = folder.glob(f"{EXITS_FOLDER}/rank_*")
    others = folder.glob(f"[!{EXITS_FOLDER[0]}]*/rank_*")
    for path in chain(exits, others):  # the second is listed later
        name = path.relative_to(folder).as_posix()
        state = file_state(path)
        if sent.get(name) != state:
            changed[name] = zlib.compress(path.read_bytes(), 1)
            sent[name] = state
    return changed


def file_state(path: Path) -> object:
    """Return a value that differs when the file does: size and time of change, for a .bin a checksum of its content.

    The kernel does not report when memory that is mapped to a file was written, so the content of such a file is read.
    """
    if path.suffix == ".bin":
        return zlib.crc32(path.read_bytes())
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns
