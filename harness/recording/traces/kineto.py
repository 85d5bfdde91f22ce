"""Reader of one rank's profiler trace (PyTorch's Kineto JSON): its groups, its collectives, its steps, and when they
were.

The names of fields and events are those of torch's profiler. Times are microseconds on the rank's own clock.
"""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from harness.core.evidence.recording import MAX_RANGE
from harness.core.evidence.records import BACKGROUND, Collective, Group
from harness.core.evidence.store import EvidenceError
from harness.recording.traces.stream import NotJson, event_batches, open_trace

OPERATORS = (
    *(
        "reduce_scatter",
        "reducescatter",
        "all_reduce",
        "allreduce",
        "all_gather",
        "allgather",
        "all_to_all",
        "alltoall",
    ),
    *("broadcast", "barrier", "gather", "scatter", "reduce", "send", "recv"),
)
"""What a collective's name contains, the longer ones first."""
OPERATOR_ALIASES = {
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
}
DTYPES = {
    **{"Float": ("float32", 4), "Double": ("float64", 8), "Half": ("float16", 2), "BFloat16": ("bfloat16", 2)},
    **{"Long": ("int64", 8), "Int": ("int32", 4), "Short": ("int16", 2), "Byte": ("uint8", 1), "Char": ("int8", 1)},
    **{"Bool": ("bool", 1)},
}
DTYPES |= {name: (name, size) for name, size in DTYPES.values()}
"""Name in a trace -> the name here, and the bytes of one."""
STEP = "ProfilerStep#"
PHASE = "Phase"
"""Argument with the phase of a collective, in traces that were made of a recording."""
BACKWARD_OP = "autograd::engine::evaluate_function"
WRAPPERS = ("FSDP::", "FullyShardedDataParallel.", "DistributedDataParallel.")
REMEDY = "export it again by torch.profiler's export_chrome_trace"


@dataclass(frozen=True, slots=True)
class Span:
    """Time in which an event of a trace ran, in microseconds, and its thread or stream."""

    start: float
    """When it began, in microseconds."""
    end: float
    """When it ended."""
    thread: str = ""
    """The thread that it ran on; of a kernel, its stream."""


@dataclass(frozen=True, slots=True)
class Call:
    """One collective as a rank issued it, or its kernel."""

    span: Span
    """When it was issued, and on which thread; of a kernel, when it ran."""
    collective: Collective
    """What it was; phase and step are filled in last."""


@dataclass
class Trace:
    """What the trace of one rank shows."""

    path: Path
    """The file."""
    rank: int = -1
    """Global rank."""
    world: int = 0
    """Number of ranks of the job; 0 where the trace does not say."""
    backend: str = ""
    """The job's backend."""
    groups: tuple[Group, ...] | None = None
    """All process groups that it is a member of; None where the trace does not list them."""
    steps: dict[int, Span] = field(default_factory=dict)
    """Number of ProfilerStep -> when it was."""
    calls: list[Call] = field(default_factory=list)
    """Collectives with a group, in the order of issue."""
    nameless: list[tuple[float, str]] = field(default_factory=list)
    """When a collective was issued of which the trace names no group, and its operator."""
    kernels: list[Call] = field(default_factory=list)
    """Kernels of collectives."""
    compute: np.ndarray = field(default_factory=lambda: np.zeros((0, 2)))
    """Start and end of all other kernels."""
    optimizer: list[Span] = field(default_factory=list)
    """Steps of optimizers."""
    passes: dict[str, list[Span]] = field(default_factory=lambda: {"forward": [], "backward": []})
    """Pass -> the ranges in which a wrapper or autograd says that it is in it."""
    forward_ops: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """When an operator ran that has a backward."""


def load_trace(path: Path) -> Trace:
    """Return what a profiler trace shows: steps, passes, collectives and kernels, with the rank and its groups.

    Raises EvidenceError, in one sentence with the remedy, if the file is no whole trace or does not name its rank.
    """
    reader = _Reader(Trace(path))
    try:
        with open_trace(path) as file:
            for batch in event_batches(file, reader.around):
                for event in batch:
                    reader.read_event(event)
        return reader.build_trace()
    except (NotJson, KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
        why = error if isinstance(error, NotJson) else repr(error)
        raise EvidenceError(f"{path}: not a whole profiler trace ({why}); {REMEDY}") from error


class _Reader:
    """Reader of events, each taken once, of which it keeps little."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.around: dict[str, Any] = {}
        self.compute = array("d")
        self.forward_ops = array("d")
        self.issued: list[tuple[Span, str]] = []
        self.annotated: dict[str, list[tuple[Span, str]]] = {"nccl": [], "gloo": []}
        self.raw_calls: list[tuple[Span, dict[str, Any]]] = []
        self.raw_kernels: list[tuple[Span, dict[str, Any], str]] = []

    def read_event(self, event: dict[str, Any]) -> None:
        """Keep what the trace shows of this event; most events are dropped.

        Times, ranks and groups are resolved once all are read.
        """
        kind = event.get("cat")
        name = event.get("name", "")
        if kind == "cpu_op":
            args = event.get("args", {})
            if name.startswith((BACKWARD_OP, "record_param_comms", "c10d::")):
                self._keep_operator(_span_of(event), name, args)
            elif args.get("Fwd thread id") == 0 and "Sequence number" in args:
                self.forward_ops.append(float(event["ts"]))
        elif kind == "user_annotation":
            self._keep_annotation(event, name)
        elif kind == "kernel":
            self._keep_kernel(event, name)

    def _keep_operator(self, span: Span, name: str, args: dict[str, Any]) -> None:
        """Keep an operator: backward passes, and the calls of collectives. Others, such as a wait, are dropped."""
        if name.startswith(BACKWARD_OP):
            self.trace.passes["backward"].append(span)
        elif name.startswith("c10d::"):
            if op := operator_of(name.removeprefix("c10d::")):
                self.issued.append((span, op))
        elif "Collective name" in args and operator_of(args["Collective name"]):
            self.raw_calls.append((span, args))

    def _keep_annotation(self, event: dict[str, Any], name: str) -> None:
        """Keep a range: a step, an optimizer's step, a backend's collective, or a pass of a wrapper.

        Others are dropped.
        """
        if name.startswith(STEP):
            number = int(name.removeprefix(STEP))
            self.trace.steps[number] = _span_of(event)
        elif name.startswith("Optimizer.step"):
            self.trace.optimizer.append(_span_of(event))
        elif name.startswith(("nccl:", "gloo:")):
            if op := operator_of(name[5:]):
                self.annotated[name[:4]].append((_span_of(event), op))
        elif name.startswith(WRAPPERS):
            for kind in ("backward", "forward"):
                if kind in name:
                    self.trace.passes[kind].append(_span_of(event))
                    break

    def _keep_kernel(self, event: dict[str, Any], name: str) -> None:
        """Keep a kernel: of a collective (NCCL) its times and arguments, of others only the times."""
        span = _span_of(event)
        args = event.get("args", {})
        if "nccl" in name.lower():
            self.raw_kernels.append((Span(span.start, span.end, str(args.get("stream"))), args, name))
        else:
            self.compute.extend((span.start, span.end))

    def build_trace(self) -> Trace:
        """Return the trace, once all is read: what the groups are may stand behind the events.

        Raises EvidenceError if the trace does not name its rank, ValueError for a rank that cannot be.
        """
        trace = self.trace
        info = self.around.get("distributedInfo", {})
        if "rank" not in info:
            raise EvidenceError(
                f"{trace.path}: it does not say of which rank it is (distributedInfo); trace a job that"
                " has called torch.distributed.init_process_group"
            )
        trace.rank = int(info["rank"])
        trace.world = int(info.get("world_size", 0))
        trace.backend = str(info.get("backend", ""))
        if not 0 <= trace.rank < (trace.world or MAX_RANGE) <= MAX_RANGE:
            raise ValueError(f"rank {trace.rank} of {trace.world}")
        trace.groups = _listed_groups(info.get("pg_config"))
        ranks_of_group = {group.name: group.ranks for group in trace.groups or ()}
        for span, args in sorted(self.raw_calls, key=lambda span_and_args: span_and_args[0].start):
            call = _collective_of(args, ranks_of_group, operator_of(args["Collective name"]))
            if call is None:
                trace.nameless.append((span.start, operator_of(args["Collective name"])))
            else:
                trace.calls.append(Call(span, call))
        for span, args, name in self.raw_kernels:
            if call := _collective_of(args, ranks_of_group, operator_of(args.get("Collective name", name.lower()))):
                trace.kernels.append(Call(span, call))
        trace.nameless += self._list_nameless_calls()
        trace.compute = np.frombuffer(self.compute, np.float64).reshape(-1, 2)
        trace.forward_ops = np.sort(np.frombuffer(self.forward_ops, np.float64))
        return trace

    def _list_nameless_calls(self) -> list[tuple[float, str]]:
        """Return (time, operator) of the collectives for which the trace has no event with arguments, and so no group.

        Most are an operator and an annotation; gloo's annotation is on another thread, and counts only if no operator
        is traced.
        """
        named_spans = [span for span, _ in self.raw_calls]
        issued_spans = [span for span, _ in self.issued]
        annotated = [*self.annotated["nccl"], *([] if issued_spans else self.annotated["gloo"])]
        return _unnamed_calls(self.issued, named_spans) + _unnamed_calls(annotated, named_spans + issued_spans)


def _span_of(event: dict[str, Any]) -> Span:
    start = float(event["ts"])
    return Span(start, start + float(event.get("dur", 0)), str(event.get("tid")))


def sorted_ranks(rank_numbers: Iterable[Any]) -> tuple[int, ...]:
    """Return the ranks in ascending order. Raises ValueError for a number that is no rank."""
    ranks = sorted(int(rank) for rank in rank_numbers)
    if ranks and not 0 <= ranks[0] <= ranks[-1] < MAX_RANGE:
        raise ValueError(f"ranks {ranks[0]} to {ranks[-1]}")
    return tuple(ranks)


def operator_of(name: str) -> str:
    """Return the operator of a collective's name; empty where it is none, such as a wait."""
    operator = next((candidate for candidate in OPERATORS if candidate in name.lower()), "")
    return OPERATOR_ALIASES.get(operator, operator)


def _listed_groups(listed_groups: Any) -> tuple[Group, ...] | None:
    """Return the groups that distributedInfo lists; None where it lists none, or a group without all its ranks."""
    if not isinstance(listed_groups, list):
        return None
    groups = []
    for group_entry in listed_groups:
        ranks = sorted_ranks(group_entry.get("ranks", ()))
        if len(ranks) != int(group_entry.get("pg_size", len(ranks))) or not ranks:
            return None
        groups.append(
            Group(
                str(group_entry["pg_name"]),
                ranks,
                str(group_entry.get("backend_config", "")),
                str(group_entry.get("pg_desc", "")),
            )
        )
    return tuple(groups)


def _collective_of(args: dict[str, Any], ranks_of_group: dict[str, tuple[int, ...]], op: str) -> Collective | None:
    """Return the collective that an event's arguments describe; None where they do not say over which ranks it ran, or
    `op` is "".

    Step and position are 0. Without a phase in the arguments it is BACKGROUND.
    """
    name = str(args.get("Process Group Name", args.get("Process Group ID", "")))
    ranks = _ranks_of_call(args, ranks_of_group.get(name))
    if ranks is None or not op:
        return None
    dtype = str(args.get("dtype", ""))
    dtype_name, size = DTYPES.get(dtype, (dtype.lower(), 1 if "8" in dtype else 0))
    peer = args.get("Dst Rank" if op == "send" else "Src Rank") if op in ("send", "recv") else None
    received = int(args.get("In msg nelems", 0))
    sent = int(args.get("Out msg nelems", 0))
    elements = max(received, sent) if op in ("all_gather", "reduce_scatter", "recv") else received
    if op in ("all_gather", "reduce_scatter") and received == sent:
        elements *= len(ranks)
    phase = str(args.get(PHASE, BACKGROUND))
    peer_rank = None if peer is None else int(peer)
    return Collective(op, ranks, name, dtype_name, elements * size, phase, 0, 0, peer=peer_rank)


def _ranks_of_call(args: dict[str, Any], listed_ranks: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Return the ranks of the group that a collective ran over. None where the trace does not say them.

    torch writes the first 30 ranks of a group, and then dots. The others follow from the group's name, or from start and
    stride.
    """
    size = int(args.get("Group size", 0))
    ranks_text = str(args.get("Process Group Ranks", ""))
    ranks = [int(rank) for rank in re.findall(r"\d+", ranks_text)]
    if "..." not in ranks_text and ranks and len(ranks) == size:
        return sorted_ranks(ranks)
    if listed_ranks is not None and len(listed_ranks) == size:
        return listed_ranks
    start = int(args.get("Global rank start", -1))
    stride = int(args.get("Global rank stride", 0))
    ranks_by_stride = range(0)
    if start >= 0 and stride > 0 and 0 < size <= MAX_RANGE:
        ranks_by_stride = range(start, start + size * stride, stride)
    return tuple(ranks_by_stride) if [*ranks_by_stride[: len(ranks)]] == ranks and ranks_by_stride else None


def _unnamed_calls(candidates: Sequence[tuple[Span, str]], named_spans: Sequence[Span]) -> list[tuple[float, str]]:
    """Return (time, operator) of the candidates that overlap with none of the named spans on their thread."""
    by_thread: dict[Any, list[tuple[float, float]]] = {}
    for span in sorted(named_spans, key=lambda span: span.start):
        by_thread.setdefault(span.thread, []).append((span.start, span.end))
    unnamed = []
    no_intervals = np.zeros((0, 2))
    intervals_by_thread = {thread: np.array(intervals) for thread, intervals in by_thread.items()}
    for span, op in candidates:
        intervals = intervals_by_thread.get(span.thread, no_intervals)
        index = int(np.searchsorted(intervals[:, 0], span.end, "right")) - 1
        if index < 0 or intervals[index, 1] < span.start:
            unnamed.append((span.start, op))
    return unnamed


def operators_text(ops: Sequence[str]) -> str:
    """Return how often each operator occurs, the most frequent first, such as "18 all_gather, 9 reduce_scatter".

    Empty for none.
    """
    return ", ".join(f"{count} {op}" for op, count in Counter(ops).most_common())


def seconds_of(span: Span) -> float:
    """Return how long a span took, in seconds."""
    return math.fsum((span.end, -span.start)) / 1e6
