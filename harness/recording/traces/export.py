"""A recording as profiler traces, a file per rank, in the words of PyTorch's Kineto, for tools that read those.

A recorder sees calls and no kernels. So a trace has the steps, the phases in which something was issued, and each collective
for as long as it blocked its thread. The recorder's own work is in them.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness.core.evidence.reading import read_bytes
from harness.core.evidence.recording import RankRecord, load_record, record_file
from harness.core.evidence.records import BACKGROUND, Collective, RankEvidence
from harness.core.evidence.store import EvidenceError
from harness.core.evidence.whole_file import whole_file
from harness.recording.judged.stored_recording import Recording
from harness.recording.traces.kineto import DTYPES, PHASE, STEP

NAMES = {"all_gather": "_allgather_base", "reduce_scatter": "_reduce_scatter_base", "all_reduce": "allreduce"}
"""Operator -> how torch's events name it, where they do otherwise."""
WORDS = {name: word for word, (name, _) in reversed(DTYPES.items()) if word != name}
"""Dtype -> how torch's events write it."""
TRAINS, OTHERS = 1, 2
"""Threads of a trace: the one that trains, and all others."""
BEGINS = b'{"schemaVersion": 1, "distributedInfo": '
"""The first bytes of a trace."""
SHOWN = 30
"""Ranks of a group that torch writes before it writes dots."""


def export(recording: Recording, folder: Path) -> tuple[list[Path], int]:
    """Write a file for each rank that has times; return them, and how many collectives have none. Raises EvidenceError and
    OSError."""
    files, untimed = [], 0
    for rank in sorted(recording.summaries):
        record = load_record(record_file(recording.directory, rank))
        calls = [call for call in record.evidence.collectives if call.began is not None]
        untimed += len(record.evidence.collectives) - len(calls)
        if calls:
            files.append(folder / f"rank_{rank:05d}.json.gz")
            files[-1].parent.mkdir(parents=True, exist_ok=True)
            refuse_other_file(files[-1])
            with whole_file(files[-1]) as file:
                file.write(gzip.compress(json.dumps(trace_of(record, calls)).encode(), mtime=0))
    return files, untimed


def refuse_other_file(file: Path) -> None:
    """Raises EvidenceError for a file that is there and is no trace that `export` wrote."""
    if not os.path.lexists(file):
        return
    try:
        begins = gzip.decompress(read_bytes(file))[: len(BEGINS)]
    except (OSError, EOFError, zlib.error) as error:
        raise EvidenceError(f"{file}: is there, and is no trace of ours ({error}); move it away") from error
    if begins != BEGINS:
        raise EvidenceError(f"{file}: is there, and this harness did not write it; move it away")


def trace_of(record: RankRecord, calls: Sequence[Collective]) -> dict[str, Any]:
    """Return the trace of one rank. calls: those of its collectives that have times."""
    evidence = record.evidence
    ordered = sorted(calls, key=lambda call: call.began or 0.0)
    named = {"name": "process_name", "ph": "M", "pid": evidence.rank, "tid": 0, "ts": 0}
    events = [named | {"args": {"name": f"rank {evidence.rank}"}}]
    spans = [*_steps(record, ordered), *_phases(ordered), *map(_issued, ordered)]
    events += [_event(evidence.rank, *span) for span in sorted(spans, key=lambda span: (span[2], -span[3]))]
    return {"schemaVersion": 1, "distributedInfo": _info(evidence), "displayTimeUnit": "ms", "traceEvents": events}


Named = tuple[str, str, float, float, int, dict[str, Any]]
"""Kind, name, beginning and end in seconds, thread, arguments."""


def _event(
    rank: int, kind: str, name: str, began: float, ended: float, thread: int, args: dict[str, Any]
) -> dict[str, Any]:
    times = {"ts": round(1e6 * began, 3), "dur": round(1e6 * (ended - began), 3)}
    return {"ph": "X", "cat": kind, "name": name, "pid": rank, "tid": thread, **times, "args": args}


def _info(evidence: RankEvidence) -> dict[str, Any]:
    backends = sorted({group.backend for group in evidence.groups})
    listed = [
        {
            "pg_name": group.name,
            "pg_desc": group.description,
            "backend_config": group.backend,
            "pg_size": len(group.ranks),
            "ranks": list(group.ranks),
        }
        for group in evidence.groups
    ]
    return {
        "backend": ",".join(backends),
        "rank": evidence.rank,
        "world_size": evidence.world_size,
        "pg_count": len(listed),
        "pg_config": listed,
    }


def _ended(call: Collective) -> float:
    return (call.began or 0.0) + (call.blocked or 0.0)


def _steps(record: RankRecord, calls: Sequence[Collective]) -> Iterator[Named]:
    """Yield each step from its first pass until the next one's, or until its last collective where that is not known."""
    began = {step.step: step.began for step in record.steps if step.step and step.began}
    for number in record.ended_steps:
        last = max((_ended(call) for call in calls if call.step == number), default=0.0)
        if number in began:
            ended = began.get(number + 1, max(last, began[number]))
            yield "user_annotation", f"{STEP}{number}", began[number], ended, TRAINS, {}


def _phases(calls: Sequence[Collective]) -> Iterator[Named]:
    """Yield from the first to the last collective of each stretch of one phase, as an annotation."""
    mine = [call for call in calls if call.phase != BACKGROUND]
    for (step, phase), some in itertools.groupby(mine, key=lambda call: (call.step, call.phase)):
        of = list(some)
        yield "user_annotation", phase, of[0].began or 0.0, max(map(_ended, of)), TRAINS, {"step": step}


def _issued(call: Collective) -> Named:
    word, size = WORDS.get(call.dtype, call.dtype), dict(DTYPES.values()).get(call.dtype, 1)
    whole, ranks = call.bytes // size, len(call.ranks)
    sizes = {"all_gather": (whole // ranks, whole), "reduce_scatter": (whole, whole // ranks)}
    received, sent = sizes.get(call.op, (whole, whole))
    shown = f"[{', '.join(map(str, call.ranks[:SHOWN]))}{', ...' * (ranks > SHOWN)}]"
    args: dict[str, Any] = {
        "Collective name": NAMES.get(call.op, call.op),
        "dtype": word,
        "In msg nelems": received,
        "Out msg nelems": sent,
        "Group size": ranks,
        "Process Group Name": call.group,
        "Process Group Ranks": shown,
        "Seq": call.seq,
        "bytes": call.bytes,
        PHASE: call.phase,
    }
    args |= {"Dst Rank" if call.op == "send" else "Src Rank": call.peer} if call.peer is not None else {}
    args |= {"Root Rank": call.root} if call.root is not None else {}
    thread = OTHERS if call.phase == BACKGROUND else TRAINS
    return "cpu_op", "record_param_comms", call.began or 0.0, _ended(call), thread, args
