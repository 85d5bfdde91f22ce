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

from harness.core.blame.calls import UNKNOWN_STEP, GroupKey, Issued, group_key
from harness.core.evidence.reading import MAX_FILE_BYTES, parse_json, read_bytes
from harness.core.evidence.recording import MAX_RANGE
from harness.core.evidence.store import EvidenceError
from harness.recording.traces.kineto import DTYPES, operator_of, sorted_ranks
from harness.recording.traces.plain_pickle import NotPlain, load_plain

RANK = re.compile(r"(\d+)(\.\w+)?$")
PEER = re.compile(r"(\d+)\s*(->|<-)\s*(\d+)")
COALESCED = re.compile(r"([A-Z_]+_)?coalesced")
"""What stands behind several collectives of one number, which are taken together."""
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
    completed: frozenset[tuple[GroupKey, int]]
    """Group and number of the collectives that were completed."""
    retired: frozenset[tuple[GroupKey, int]]
    """The same of those that its recorder follows no more, completed or not: gloo's never say that they are completed."""
    is_complete: bool
    """Whether it has all calls from the first on: the recorder overwrites the oldest."""


def load_dumps(paths: Sequence[Path]) -> list[Dump]:
    """Return the dumps of these files in the order of ranks. Raises EvidenceError, in one sentence with the remedy."""
    plain_by_rank: dict[int, tuple[Path, Mapping[str, Any]]] = {}
    for path in paths:
        rank = _rank_of_name(path)
        if rank in plain_by_rank:
            raise EvidenceError(f"{plain_by_rank[rank][0]} and {path}: both are of rank {rank}; name one file per rank")
        plain_by_rank[rank] = path, _load_plain(path)
    groups = _ranks_by_group({rank: plain for rank, (_, plain) in plain_by_rank.items()})
    return [_build_dump(path, rank, plain, groups) for rank, (path, plain) in sorted(plain_by_rank.items())]


def _rank_of_name(path: Path) -> int:
    """Return the rank that a file's name ends with. Raises EvidenceError."""
    match = RANK.search(path.name)
    if not match or int(match.group(1)) >= MAX_RANGE:
        raise EvidenceError(f"{path}: its name does not end with the rank that it is of; rename it to ..._RANK")
    return int(match.group(1))


def _load_plain(path: Path) -> Mapping[str, Any]:
    """Return the content of a dump's file as plain values. Raises EvidenceError."""
    try:
        data = read_bytes(path, 8 * MAX_FILE_BYTES)
        plain = load_plain(data) if data[:1] == b"\x80" else parse_json(data)
        entries = plain["entries"]
        if not isinstance(entries, list) or not isinstance(plain.get("pg_config", {}), dict):
            raise ValueError("entries are no list, or pg_config no table")
        _listed_and_used_groups(plain)
        return dict(plain)
    except (OSError, NotPlain, ValueError, LookupError, TypeError, AttributeError) as error:
        why = error if isinstance(error, OSError | NotPlain) else repr(error)
        raise EvidenceError(f"{path}: no whole Flight Recorder dump ({why}); {REMEDY}") from error


def _ranks_by_group(plain_by_rank: Mapping[int, Mapping[str, Any]]) -> dict[str, tuple[int, ...]]:
    """Return the ranks of each group by name. gloo's dumps list none: then those that use it, and of the default group all."""
    listed_ranks: dict[str, tuple[int, ...]] = {}
    using_ranks: dict[str, set[int]] = defaultdict(set)
    for rank, plain in plain_by_rank.items():
        listed, uses = _listed_and_used_groups(plain)
        listed_ranks |= listed
        for name, by_all in uses.items():
            if by_all:
                using_ranks[name].update(plain_by_rank)
            else:
                using_ranks[name].add(rank)
    return {name: tuple(sorted(ranks)) for name, ranks in using_ranks.items()} | listed_ranks


def _listed_and_used_groups(plain: Mapping[str, Any]) -> tuple[dict[str, tuple[int, ...]], dict[str, bool]]:
    """Return the groups that a dump lists, and those that it uses, with whether each is the default one."""
    listed = {}
    for group_entry in plain.get("pg_config", {}).values():
        ranks = group_entry.get("ranks", ())
        if group_ranks := sorted_ranks(json.loads(ranks) if isinstance(ranks, str) else ranks):
            listed[str(group_entry.get("name", ""))] = group_ranks
    return listed, {
        str(entry["process_group"][0]): entry["process_group"][-1] == "default_pg" for entry in plain["entries"]
    }


def _build_dump(path: Path, rank: int, plain: Mapping[str, Any], groups: Mapping[str, tuple[int, ...]]) -> Dump:
    """Return the dump of a rank, its calls in order. Raises EvidenceError."""
    try:
        entries = sorted(plain["entries"], key=lambda entry: int(entry["record_id"]))
        whole = not entries or int(entries[0]["record_id"]) == 0
        issued_by_key = dict[Any, Issued]()
        states = dict[tuple[GroupKey, int], set[str]]()
        sent = defaultdict[tuple[str, str, int], int](int)
        coalesced_bytes = defaultdict[tuple[GroupKey, int], int](int)
        for entry in entries:
            name = str(entry["process_group"][0])
            profiling_name = str(entry["profiling_name"]).rpartition(":")[2]
            peer = _peer_rank(profiling_name, groups[name]) if entry["is_p2p"] else None
            if COALESCED.fullmatch(profiling_name) or (entry["is_p2p"] and (peer is None or not whole)):
                continue
            call = _issued_call(entry, name, operator_of(profiling_name) or profiling_name, groups[name])
            if peer is not None:
                lane = name, call.op, peer
                call = replace(call, peer=peer, seq=sent[lane])
                sent[lane] += 1
                issued_by_key[lane, call.seq] = call
                continue
            key = group_key(call), call.seq
            if call.bytes is not None:
                coalesced_bytes[key] += call.bytes
                call = replace(call, bytes=coalesced_bytes[key])
            issued_by_key[key] = call
            states.setdefault(key, set()).add(_entry_state(entry))
        over = frozenset(key for key, states_of_key in states.items() if states_of_key == {"completed"})
        given_up = frozenset(key for key, states_of_key in states.items() if "open" not in states_of_key) - over
        issued = tuple(sorted(issued_by_key.values(), key=lambda call: call.order))
        return Dump(path, rank, plain, issued, over, given_up, whole)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise EvidenceError(f"{path}: no whole Flight Recorder dump ({error!r}); {REMEDY}") from error


def _entry_state(entry: Mapping[str, Any]) -> str:
    """Return "completed", "retired" (its recorder follows it no more) or "open"."""
    if entry["state"] == "completed":
        return "completed"
    return "retired" if entry.get("retired") else "open"


def _peer_rank(name: str, ranks: tuple[int, ...]) -> int | None:
    """Return the global rank of the other side: names have the places in the group, as in send 0->1 and recv 1<-0."""
    match = PEER.search(name)
    return ranks[int(match.group(3))] if match and int(match.group(3)) < len(ranks) else None


def _issued_call(entry: Mapping[str, Any], name: str, op: str, ranks: tuple[int, ...]) -> Issued:
    """Return one entry of a dump as a call. Its step is not known."""
    dtypes = entry.get("input_dtypes", ())
    dtypes = [dtypes] if isinstance(dtypes, str) else dtypes
    dtypes_and_sizes = [DTYPES.get(str(dtype), (str(dtype).lower(), 1)) for dtype in dtypes]
    elements = [math.prod(map(int, shape)) for shape in entry.get("input_sizes", ())]
    size = sum(count * element_size for count, (_, element_size) in zip(elements, dtypes_and_sizes, strict=False))
    return Issued(
        name,
        ranks,
        int(entry["collective_seq_id"]),
        op,
        None if op == "scatter" else size,  # its inputs are on the root alone
        step=UNKNOWN_STEP,
        order=int(entry["record_id"]) + 1,
        dtype=dtypes_and_sizes[0][0] if dtypes_and_sizes else "",
        time=int(entry["time_created_ns"] or 0) / 1e9,
    )
