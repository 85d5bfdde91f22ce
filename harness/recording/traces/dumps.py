"""Flight Recorder dumps of a job that hung, a file per rank: what each rank issued over each group, and what was not over.

The names of fields are those of torch's Flight Recorder, in its pickles and in its JSON alike.
"""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.core.evidence.reading import MOST, json_of, read_bytes
from harness.core.evidence.recording import RANKS
from harness.core.evidence.store import EvidenceError
from harness.core.launch.inflight import Issued
from harness.core.launch.sequences import Place, place
from harness.recording.traces.kineto import DTYPES, operator_of, ranks_in
from harness.recording.traces.plain_pickle import NotPlain, plain_of

RANK = re.compile(r"(\d+)(\.\w+)?$")
PEER = re.compile(r"(\d+)\s*(->|<-)\s*(\d+)")
COALESCED = re.compile(r"([A-Z_]+_)?coalesced")
"""What stands behind several collectives of one number, which are taken together."""
UNTOLD = -1
"""The step of what is issued in no step that is known."""
REMEDY = "have torch write it again (TORCH_NCCL_DUMP_ON_TIMEOUT, or torch._C._distributed_c10d._dump_fr_trace)"


@dataclass(frozen=True)
class Dump:
    """What one rank's recorder had when it was dumped."""

    path: Path
    """The file."""
    rank: int
    """Global rank, by the file's name."""
    plain: Mapping[str, Any]
    """All that the file has."""
    issued: tuple[Issued, ...]
    """What it issued, the oldest first; earlier calls may have been overwritten."""
    over: frozenset[tuple[Place, int]]
    """Group and number of the collectives that were completed."""
    given_up: frozenset[tuple[Place, int]]
    """The same of those that its recorder follows no more, completed or not: gloo's never say that they are completed."""
    whole: bool
    """Whether it has all calls from the first on: the recorder overwrites the oldest."""


def load_dumps(paths: Sequence[Path]) -> list[Dump]:
    """Raises EvidenceError, in one sentence with the remedy."""
    read: dict[int, tuple[Path, Mapping[str, Any]]] = {}
    for path in paths:
        rank = _rank(path)
        if rank in read:
            raise EvidenceError(f"{read[rank][0]} and {path}: both are of rank {rank}; name one file per rank")
        read[rank] = path, _plain(path)
    groups = _members({rank: plain for rank, (_, plain) in read.items()})
    return [_dump(path, rank, plain, groups) for rank, (path, plain) in sorted(read.items())]


def _rank(path: Path) -> int:
    found = RANK.search(path.name)
    if not found or int(found.group(1)) >= RANKS:
        raise EvidenceError(f"{path}: its name does not end with the rank that it is of; rename it to ..._RANK")
    return int(found.group(1))


def _plain(path: Path) -> Mapping[str, Any]:
    try:
        data = read_bytes(path, 8 * MOST)
        plain = plain_of(data) if data[:1] == b"\x80" else json_of(data)
        entries = plain["entries"]
        if not isinstance(entries, list) or not isinstance(plain.get("pg_config", {}), dict):
            raise ValueError("entries are no list, or pg_config no table")
        _groups(plain)
        return dict(plain)
    except (OSError, NotPlain, ValueError, LookupError, TypeError, AttributeError) as error:
        why = error if isinstance(error, OSError | NotPlain) else repr(error)
        raise EvidenceError(f"{path}: no whole Flight Recorder dump ({why}); {REMEDY}") from error


def _members(read: Mapping[int, Mapping[str, Any]]) -> dict[str, tuple[int, ...]]:
    """Return the ranks of each group by name. gloo's dumps list none: then those that use it, and of the default group all."""
    told: dict[str, tuple[int, ...]] = {}
    used: dict[str, set[int]] = defaultdict(set)
    for rank, plain in read.items():
        listed, uses = _groups(plain)
        told |= listed
        for name, by_all in uses.items():
            used[name] |= {*read} if by_all else {rank}
    return {name: tuple(sorted(ranks)) for name, ranks in used.items()} | told


def _groups(plain: Mapping[str, Any]) -> tuple[dict[str, tuple[int, ...]], dict[str, bool]]:
    """Return the groups that a dump lists, and those that it uses, with whether each is the default one."""
    listed = {}
    for one in plain.get("pg_config", {}).values():
        ranks = one.get("ranks", ())
        if found := ranks_in(json.loads(ranks) if isinstance(ranks, str) else ranks):
            listed[str(one.get("name", ""))] = found
    return listed, {str(e["process_group"][0]): e["process_group"][-1] == "default_pg" for e in plain["entries"]}


def _dump(path: Path, rank: int, plain: Mapping[str, Any], groups: Mapping[str, tuple[int, ...]]) -> Dump:
    try:
        entries = sorted(plain["entries"], key=lambda entry: int(entry["record_id"]))
        whole = not entries or int(entries[0]["record_id"]) == 0
        found, states = dict[Any, Issued](), dict[tuple[Place, int], set[str]]()
        sent = defaultdict[tuple[str, str, int], int](int)
        for entry in entries:
            name, one = str(entry["process_group"][0]), str(entry["profiling_name"]).rpartition(":")[2]
            peer = _peer(one, groups[name]) if entry["is_p2p"] else None
            if COALESCED.fullmatch(one) or (entry["is_p2p"] and (peer is None or not whole)):
                continue
            call = _issued(entry, name, operator_of(one) or one, groups[name])
            if peer is not None:
                lane = name, call.op, peer
                call, sent[lane] = replace(call, peer=peer, seq=sent[lane]), sent[lane] + 1
                found[lane, call.seq] = call
                continue
            key = place(call), call.seq
            found[key] = replace(call, bytes=call.bytes + (found[key].bytes if key in found else 0))
            states.setdefault(key, set()).add(_state(entry))
        over = frozenset(key for key, of in states.items() if of == {"completed"})
        given_up = frozenset(key for key, of in states.items() if "open" not in of) - over
        issued = tuple(sorted(found.values(), key=lambda call: call.order))
        return Dump(path, rank, plain, issued, over, given_up, whole)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise EvidenceError(f"{path}: no whole Flight Recorder dump ({error!r}); {REMEDY}") from error


def _state(entry: Mapping[str, Any]) -> str:
    return "completed" if entry["state"] == "completed" else "retired" if entry.get("retired") else "open"


def _peer(name: str, ranks: tuple[int, ...]) -> int | None:
    """Return the global rank of the other side: names have the places in the group, as in send 0->1 and recv 1<-0."""
    found = PEER.search(name)
    return ranks[int(found.group(3))] if found and int(found.group(3)) < len(ranks) else None


def _issued(entry: Mapping[str, Any], name: str, op: str, ranks: tuple[int, ...]) -> Issued:
    dtypes = entry.get("input_dtypes", ())
    dtypes = [dtypes] if isinstance(dtypes, str) else dtypes
    known = [DTYPES.get(str(dtype), (str(dtype).lower(), 1)) for dtype in dtypes]
    elements = [math.prod(map(int, shape)) for shape in entry.get("input_sizes", ())]
    size = sum(count * of for count, (_, of) in zip(elements, known, strict=False))
    return Issued(
        name,
        ranks,
        int(entry["collective_seq_id"]),
        op,
        size,
        step=UNTOLD,
        order=int(entry["record_id"]) + 1,
        dtype=known[0][0] if known else "",
        time=int(entry["time_created_ns"] or 0) / 1e9,
    )
