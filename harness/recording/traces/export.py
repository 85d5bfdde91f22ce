"""Writer of a recording as profiler traces, a file per rank, in the words of PyTorch's Kineto, for tools that read
those.

A recorder sees calls and no kernels. So a trace has the steps, the phases in which something was issued, and each
collective for as long as it blocked its thread. The recorder's own work is in them.
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
from harness.core.evidence.whole_file import open_whole_file
from harness.recording.judged.stored_recording import Recording
from harness.recording.traces.kineto import DTYPES, PHASE, STEP

EVENT_NAMES = {"all_gather": "_allgather_base", "reduce_scatter": "_reduce_scatter_base", "all_reduce": "allreduce"}
"""Operator -> how torch's events name it, where they do otherwise."""
EVENT_DTYPES = {name: word for word, (name, _) in reversed(DTYPES.items()) if word != name}
"""Dtype -> how torch's events write it."""
TRAINING_THREAD = 1
"""Thread of a trace: the one that trains."""
OTHER_THREADS = 2
"""Thread of a trace that stands for all others."""
TRACE_BEGINNING = b'{"schemaVersion": 1, "distributedInfo": '
"""The first bytes of a trace."""
SHOWN_RANKS = 30
"""Ranks of a group that torch writes before it writes dots."""


def export_traces(recording: Recording, folder: Path) -> tuple[list[Path], int]:
    """Write a trace into the folder for each rank that has times.

    Return these files, and the number of collectives without times. Raises EvidenceError for a damaged record, and for
    a file that is there and is no earlier export. Raises OSError.
    """
    files = []
    untimed = 0
    for rank in sorted(recording.summaries):
        record = load_record(record_file(recording.directory, rank))
        calls = [call for call in record.evidence.collectives if call.began is not None]
        untimed += len(record.evidence.collectives) - len(calls)
        if calls:
            files.append(folder / f"rank_{rank:05d}.json.gz")
            files[-1].parent.mkdir(parents=True, exist_ok=True)
            refuse_other_file(files[-1])
            with open_whole_file(files[-1]) as file:
                file.write(gzip.compress(json.dumps(trace_of(record, calls)).encode(), mtime=0))
    return files, untimed


def refuse_other_file(file: Path) -> None:
    """Raise EvidenceError if the file exists, and no export of a recording wrote it."""
    if not os.path.lexists(file):
        return
    try:
        first_bytes = gzip.decompress(read_bytes(file))[: len(TRACE_BEGINNING)]
    except (OSError, EOFError, zlib.error) as error:
        raise EvidenceError(f"{file}: is there, and is no trace of ours ({error}); move it away") from error
    if first_bytes != TRACE_BEGINNING:
        raise EvidenceError(f"{file}: is there, and this harness did not write it; move it away")


def trace_of(record: RankRecord, calls: Sequence[Collective]) -> dict[str, Any]:
    """Return the trace of one rank as Kineto's JSON object, its events in order of time.

    calls: those of its collectives that have times.
    """
    evidence = record.evidence
    ordered = sorted(calls, key=lambda call: call.began or 0.0)
    process_name = {"name": "process_name", "ph": "M", "pid": evidence.rank, "tid": 0, "ts": 0}
    events = [process_name | {"args": {"name": f"rank {evidence.rank}"}}]
    spans = [*_step_spans(record, ordered), *_phase_spans(ordered), *map(_collective_span, ordered)]
    events += [_event(evidence.rank, *span) for span in sorted(spans, key=lambda span: (span[2], -span[3]))]
    return {
        "schemaVersion": 1,
        "distributedInfo": _distributed_info(evidence),
        "displayTimeUnit": "ms",
        "traceEvents": events,
    }


NamedSpan = tuple[str, str, float, float, int, dict[str, Any]]
"""Kind, name, beginning and end in seconds, thread, arguments."""


def _event(
    rank: int, kind: str, name: str, began: float, ended: float, thread: int, args: dict[str, Any]
) -> dict[str, Any]:
    """Return one complete event of Kineto's format. began, ended: in seconds; in the event they are microseconds."""
    times = {"ts": round(1e6 * began, 3), "dur": round(1e6 * (ended - began), 3)}
    return {"ph": "X", "cat": kind, "name": name, "pid": rank, "tid": thread, **times, "args": args}


def _distributed_info(evidence: RankEvidence) -> dict[str, Any]:
    """Return the distributedInfo of a trace: rank, world size and process groups."""
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


def _end_time(call: Collective) -> float:
    """Return when a collective no longer blocked its thread."""
    return (call.began or 0.0) + (call.blocked or 0.0)


def _step_spans(record: RankRecord, calls: Sequence[Collective]) -> Iterator[NamedSpan]:
    """Yield each step that ended, from its first pass until the next step's, or until its last collective if that is
    not known.

    Steps without a time are left out.
    """
    began = {step.step: step.began for step in record.steps if step.step and step.began}
    for number in record.ended_steps:
        last = max((_end_time(call) for call in calls if call.step == number), default=0.0)
        if number in began:
            ended = began.get(number + 1, max(last, began[number]))
            yield "user_annotation", f"{STEP}{number}", began[number], ended, TRAINING_THREAD, {}


def _phase_spans(calls: Sequence[Collective]) -> Iterator[NamedSpan]:
    """Yield a span for each stretch of collectives in one phase of one step, from the first one to the end of the last.

    Collectives of other threads are left out.
    """
    foreground_calls = [call for call in calls if call.phase != BACKGROUND]
    for (step, phase), phase_calls in itertools.groupby(foreground_calls, key=lambda call: (call.step, call.phase)):
        calls_of_phase = list(phase_calls)
        yield (
            "user_annotation",
            phase,
            calls_of_phase[0].began or 0.0,
            max(map(_end_time, calls_of_phase)),
            TRAINING_THREAD,
            {"step": step},
        )


def _collective_span(call: Collective) -> NamedSpan:
    """Return a collective as a span, with the arguments that torch's events have: operator, dtype, elements, group, peer."""
    word = EVENT_DTYPES.get(call.dtype, call.dtype)
    size = dict(DTYPES.values()).get(call.dtype, 1)
    elements = call.bytes // size
    ranks = len(call.ranks)
    elements_of_operator = {
        "all_gather": (elements // ranks, elements),
        "reduce_scatter": (elements, elements // ranks),
    }
    received, sent = elements_of_operator.get(call.op, (elements, elements))
    dots = ", ..." if ranks > SHOWN_RANKS else ""
    ranks_text = f"[{', '.join(map(str, call.ranks[:SHOWN_RANKS]))}{dots}]"
    args: dict[str, Any] = {
        "Collective name": EVENT_NAMES.get(call.op, call.op),
        "dtype": word,
        "In msg nelems": received,
        "Out msg nelems": sent,
        "Group size": ranks,
        "Process Group Name": call.group,
        "Process Group Ranks": ranks_text,
        "Seq": call.seq,
        "bytes": call.bytes,
        PHASE: call.phase,
    }
    if call.peer is not None:
        args["Dst Rank" if call.op == "send" else "Src Rank"] = call.peer
    if call.root is not None:
        args["Root Rank"] = call.root
    thread = OTHER_THREADS if call.phase == BACKGROUND else TRAINING_THREAD
    return "cpu_op", "record_param_comms", call.began or 0.0, _end_time(call), thread, args
