"""A rank's last collective in every group is on record even if the rank is killed while it issues the next one.

The record is a memory-mapped file: what is stored there is the kernel's, so SIGKILL cannot take it. The collectives of
every group have two cells, written in turn; so have its sends to, and its receives from, each other rank. A cell begins
and ends with the same stamp, the rank's running number of collectives. A cell torn by a kill has different ones and is
skipped; the cell before it is still whole. Group members are long and never change, so they go once into a text file
beside it, `rank_00.groups`.

Making groups is a separate sequence on record, for a rank that never comes to it issues no collective either.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from collections.abc import Sequence
from pathlib import Path

from harness.core.blame.calls import GROUP_CREATION, Issued

CELL_FORMAT = struct.Struct(
    "<QIqqqiid24s12s16sQ"
)  # stamp, group, seq, bytes, step, peer, root, time, op, phase, dtype, stamp
MAX_LANES = 1024  # with more sequences than this the oldest cells are overwritten; the reader then knows fewer
FILE_BYTES = MAX_LANES * 2 * CELL_FORMAT.size
NO_PEER = -1


class Inflight:
    """The writer. One per process; about two microseconds per collective."""

    def __init__(self, path: Path) -> None:
        self.groups_file = os.open(
            path.with_suffix(".groups"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644
        )
        with open(path, "w+b") as file:
            file.write(bytes(FILE_BYTES))  # a sparse file would end in SIGBUS when the disk is full
            file.flush()
            self.memory = mmap.mmap(file.fileno(), FILE_BYTES)
        self.groups: dict[tuple[str, tuple[int, ...]], int] = {}
        self.lanes: dict[tuple[int, str, int], int] = {}  # (group, "send" or "recv" or "", peer) -> its place
        self.order = 0

    def issue(self, group_name: str, ranks: Sequence[int], seq: int, op: str, bytes: int, step: int, phase: str,
              peer: int | None = None, root: int | None = None, dtype: str = "") -> None:  # fmt: skip
        """Note a collective that is about to be issued. `peer`: the other rank of a send or recv.

        Threads may call it: a cell is written by one C call under the interpreter's lock.
        """
        key = (group_name, tuple(ranks))
        index = self.groups.get(key)
        if index is None:
            index = self.add_group(key)
        self.order = stamp = self.order + 1
        peer, root = (NO_PEER if rank is None else rank for rank in (peer, root))
        key_of_lane = (
            (index, op, peer) if op in ("send", "recv") else (NO_PEER if op in GROUP_CREATION else index, "", NO_PEER)
        )
        lane = self.lanes.setdefault(key_of_lane, len(self.lanes))
        cell = 2 * (lane % MAX_LANES) + (seq & 1)
        texts = (op.encode(), phase.encode(), dtype.encode())
        fields = (stamp, index, seq, bytes, step, peer, root, time.time(), *texts, stamp)
        CELL_FORMAT.pack_into(self.memory, cell * CELL_FORMAT.size, *fields)

    def add_group(self, key: tuple[str, tuple[int, ...]]) -> int:
        os.write(self.groups_file, json.dumps(key).encode() + b"\n")
        return self.groups.setdefault(key, len(self.groups))


_current: Inflight | None = None


def current_inflight() -> Inflight | None:
    """Return this rank's record; None in a process that was not launched."""
    return _current


def open_current_inflight(path: Path) -> Inflight:
    """Make the record of this process. Called once, by rank.py."""
    global _current
    _current = Inflight(path)
    return _current


def read_inflight(path: Path) -> list[Issued]:
    """Return the last two calls of every sequence, oldest first: the last one is the rank's latest. [] without a file."""
    if not path.exists() or not path.with_suffix(".groups").exists():
        return []
    groups = read_groups(path.with_suffix(".groups"))
    data = path.read_bytes()
    cells = CELL_FORMAT.iter_unpack(data[: len(data) - len(data) % CELL_FORMAT.size])
    return sorted(
        (parse_cell(cell, groups) for cell in cells if is_whole_cell(cell, groups)), key=lambda each: each.order
    )


def read_groups(path: Path) -> list[tuple[str, tuple[int, ...]]]:
    """Return groups in order of first use. A last line without its end is torn and left out."""
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [(name, tuple(ranks)) for name, ranks in map(json.loads, lines)]


def is_whole_cell(cell: tuple, groups: list) -> bool:
    return cell[0] == cell[-1] != 0 and cell[1] < len(groups)


def parse_cell(cell: tuple, groups: list[tuple[str, tuple[int, ...]]]) -> Issued:
    stamp, index, seq, size, step, *others, when, op, phase, dtype, _ = cell
    name, ranks = groups[index]
    op, phase, dtype = (field.rstrip(b"\0").decode(errors="replace") for field in (op, phase, dtype))
    peer, root = (None if rank == NO_PEER else rank for rank in others)
    return Issued(name, ranks, seq, op, size, step, phase, peer, stamp, root, dtype, when)
