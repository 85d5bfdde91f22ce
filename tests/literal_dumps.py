"""Flight Recorder dumps in NCCL's format, as torch pickles them: what each rank of a small job issued."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Issued = Sequence[tuple[Any, ...]]
"""Operator, number of elements, and where they are not usual: name of the group, state, number of the collective."""


def entry(place: int, group: str, number: int, op: str, elements: int, state: str) -> dict[str, Any]:
    peer = " " in op
    return {
        "record_id": place,
        "pg_id": 0,
        "process_group": (group, "default_pg" if group == "0" else "mesh"),
        "collective_seq_id": number,
        "p2p_seq_id": number if peer else 0,
        "op_id": number,
        "profiling_name": f"nccl:{op}",
        "time_created_ns": 1_700_000_000_000_000_000 + 1000 * place,
        "input_sizes": [[elements]],
        "output_sizes": [[elements]],
        "input_dtypes": ["Float"],
        "output_dtypes": ["Float"],
        "state": state,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": state == "completed",
        "timeout_ms": 600000,
        "is_p2p": peer,
        "frames": [],
        "duration_ms": 0.0,
    }


def dump(issued: Issued, groups: Mapping[str, Sequence[int]], first: int = 0) -> dict[str, Any]:
    """first: place of the first one that is not overwritten."""
    entries, numbers = [], dict[str, int]()
    for place, (op, elements, *more) in enumerate(issued):
        group, state, number = (*more, *("0", "scheduled", None)[len(more) :])
        numbers[group] = number or numbers.get(group, 0) + 1
        entries.append(entry(place, group, numbers[group], op, elements, state))
    config = {str(n): {"name": name, "desc": "", "ranks": str([*of])} for n, (name, of) in enumerate(groups.items())}
    return {"version": "2.5", "pg_config": config, "pg_status": {}, "nccl_version": "2.21", "entries": entries[first:]}


def save_dumps(
    folder: Path, ranks: Mapping[int, Issued], groups: Mapping[str, Sequence[int]] | None = None, *, plain: bool = False,
    first: int = 0,
) -> Path:  # fmt: skip
    """Write a dump per rank, as a pickle or as JSON. first: as of dump, on all ranks."""
    folder.mkdir(exist_ok=True)
    groups = {"0": range(len(ranks))} if groups is None else groups
    for rank, issued in ranks.items():
        told = dump(issued, {name: of for name, of in groups.items() if rank in of}, first)
        path = folder / f"nccl_trace_rank_{rank}"
        path.write_bytes(json.dumps(told).encode() if plain else pickle.dumps(told, protocol=2))
    return folder
