"""Traces of one job, a file per rank, made into a recording of it: for the same page and the same checks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.core.evidence.provided import TRACED, Provided
from harness.core.evidence.recording import RankRecord, RecordedStep
from harness.core.evidence.records import BACKGROUND, Collective, RankEvidence
from harness.core.evidence.step import StepEvidence
from harness.core.evidence.store import EvidenceError
from harness.core.evidence.summary import summary_of
from harness.core.evidence.text import count_text
from harness.recording.judged.stored_recording import Recording
from harness.recording.traces.kineto import Call, Span, Trace, operators_text
from harness.recording.traces.phases import Phases, training_steps


@dataclass(frozen=True)
class TracedRank:
    """One rank: its trace, and what of it is in the steps that all ranks have."""

    trace: Trace
    """What the file shows."""
    steps: Mapping[int, Span]
    """Number of the step, from 1 -> when it was."""
    calls: tuple[Call, ...]
    """Collectives of these steps, with step and phase."""
    calls_left_out: int
    """Number of collectives that other threads issued, or that are in no step."""
    nameless: tuple[str, ...]
    """Operators of the collectives in these steps of which the trace names no group."""


@dataclass(frozen=True)
class TracedJob:
    """All ranks of which there is a trace."""

    recording: Recording
    """The same as a recording."""
    records: Mapping[int, RankRecord]
    """Rank -> its record."""
    ranks: Mapping[int, TracedRank]
    """Rank -> what its trace shows."""
    step_numbers: tuple[int, ...]
    """Numbers of ProfilerStep that the steps have in the traces."""


def job_of(traces: Sequence[Trace]) -> TracedJob:
    """Return the job that these traces are of, with the steps that all ranks traced, numbered from 1.

    Raises EvidenceError for traces that are not of one job. Precondition: there is a trace.
    """
    world = _world_size(traces)
    spans = {trace.rank: training_steps(trace) for trace in traces}
    numbers = tuple(sorted(set.intersection(*({*steps} for steps in spans.values()))))
    position_of_number = {number: position for position, number in enumerate(numbers, start=1)}
    ranks: dict[int, TracedRank] = {}
    for trace in sorted(traces, key=lambda trace: trace.rank):
        steps: dict[int, Span] = {}
        for number, span in spans[trace.rank].items():
            if number in position_of_number:
                steps[position_of_number[number]] = span
        ranks[trace.rank] = _traced_rank(trace, steps)
    records = {rank: _rank_record(traced_rank, world) for rank, traced_rank in ranks.items()}
    folder = Path(os.path.commonpath([trace.path.parent for trace in traces]))
    recording = Recording(
        folder,
        {rank: summary_of(record) for rank, record in records.items()},
        exits=dict.fromkeys(ranks, 0),
        provides=_provided_evidence(ranks, world),
        chosen=tuple(ranks) if len(ranks) < world else (),
    )
    return TracedJob(recording, records, ranks, numbers)


def _world_size(traces: Sequence[Trace]) -> int:
    """Return the number of ranks of the job.

    Older traces do not say it: then it is one more than the largest rank named. Raises EvidenceError for two traces of
    one rank, or of jobs of different sizes.
    """
    by_rank: dict[int, Trace] = {}
    for trace in traces:
        if (earlier_trace := by_rank.setdefault(trace.rank, trace)) is not trace:
            raise EvidenceError(
                f"{earlier_trace.path} and {trace.path}: both are of rank {trace.rank}; name one file per rank"
            )
    trace_by_world = {trace.world: trace for trace in traces if trace.world}
    if len(trace_by_world) > 1:
        (fewer, first_trace), (more_ranks, second_trace), *_ = sorted(trace_by_world.items())
        raise EvidenceError(
            f"{first_trace.path} is of a job of {fewer} ranks, {second_trace.path} of {more_ranks}; name the files of one job"
        )
    named_ranks = set[int]()
    for trace in traces:
        for call in trace.calls:
            named_ranks.update(call.collective.ranks)
    return next(iter(trace_by_world), 1 + max(named_ranks | by_rank.keys()))


def _traced_rank(trace: Trace, steps: Mapping[int, Span]) -> TracedRank:
    """Return a rank's collectives in these steps, with step, phase, and position in their group.

    Collectives outside of the steps or of other threads are only counted.
    """
    phases = Phases(trace, steps)
    calls = []
    beside = 0
    issued: dict[tuple[str, int | None], int] = {}
    for call in trace.calls:
        step, phase = phases.step_and_phase(call)
        if not step:
            beside += 1
            continue
        key = (call.collective.group, call.collective.peer)
        issued[key] = issued.get(key, -1) + 1
        phase = phase if call.collective.phase == BACKGROUND else call.collective.phase
        calls.append(replace(call, collective=replace(call.collective, step=step, phase=phase, seq=issued[key])))
    nameless = []
    for when, op in trace.nameless:
        if any(span.start <= when <= span.end for span in steps.values()):
            nameless.append(op)
    return TracedRank(trace, steps, tuple(calls), beside, tuple(nameless))


def _rank_record(traced_rank: TracedRank, world: int) -> RankRecord:
    """Return a rank's trace as the record of a recording: its groups, collectives, and seconds of steps.

    It has no parameters.
    """
    empty_step = StepEvidence(0, (), None, None, None, {}, {}, {}, {})
    collectives: tuple[Collective, ...] = tuple(call.collective for call in traced_rank.calls)
    evidence = RankEvidence(
        traced_rank.trace.rank,
        world,
        (),
        traced_rank.trace.groups or (),
        collectives,
        tuple(replace(empty_step, step=step) for step in sorted(traced_rank.steps)),
    )
    steps = tuple(
        RecordedStep(step, {}, seconds=(span.end - span.start) / 1e6)
        for step, span in sorted(traced_rank.steps.items())
    )
    return RankRecord(evidence, steps, ended="ok", steps_seen=len(steps))


def _provided_evidence(ranks: Mapping[int, TracedRank], world: int) -> Provided:
    """Return which kinds of evidence the traces provide to checks, with reasons for what they lack or have in part only."""
    provided = TRACED
    if not any(traced_rank.steps for traced_rank in ranks.values()):
        why = "no step is in the traces of all ranks: call step() of the profiler in each step, on all ranks alike"
        provided = provided.lacking_words(("structure", "uses", "members"), why, unknown=True)
    for rank, traced_rank in ranks.items():
        if traced_rank.nameless:
            gloo = ", as gloo's do" if "gloo" in traced_rank.trace.backend else ""
            why = f"{operators_text(traced_rank.nameless)} of rank {rank} name no group{gloo}"
            provided = provided.lacking_words(("members",), why, unknown=True)
        if traced_rank.trace.groups is None:
            provided = provided.lacking_words(
                ("groups",), f"the trace of rank {rank} lists no process groups", unknown=True
            )
    if missing := sorted({*range(world)} - ranks.keys()):
        provided = provided.with_doubt_about(
            ("uses", "members", "groups"), f"no trace of {count_text(len(missing), 'rank')}"
        )
    return provided
