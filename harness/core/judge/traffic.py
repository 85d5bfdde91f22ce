"""The bytes that ranks moved by collective, and those that the plan has them move."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Any

from harness.core.evidence.records import Collective, RankEvidence
from harness.core.evidence.text import bytes_text, ranks_text
from harness.core.judge.trial import Trial
from harness.core.plan.slices import BYTES, numel
from harness.core.plan.traffic.flow import OUTSIDE, Flow
from harness.core.plan.traffic.muon import MATRICES

INSIDE = ("forward", "backward", "pipeline")
OF_PARAMETERS = ("parameters", "gradients")
Key = tuple[tuple[int, ...], str, str]  # ranks, op, phase


def planned(trial: Trial, rank: int, step: int, *, optional_only: bool = False) -> dict[Key, int]:
    """Bytes of one step, by group, collective and phase. optional_only: of flows that may be left out."""
    totals: dict[Key, int] = defaultdict(int)
    for flow in trial.plan.flows_of(rank, step):
        if flow.phase == OUTSIDE:
            continue
        if (flow.optional or not optional_only) and ("declared" in trial.run.provided or flow.role in OF_PARAMETERS):
            totals[_key(trial, rank, flow)] += flow.bytes
    return dict(totals)


def planned_outside(trial: Trial, rank: int, step: int) -> dict[tuple[Key, str], int]:
    """The bytes that a step moves at least outside of forward and backward, by collective and purpose."""
    alone = trial.assumption.optimizer.alone
    flows = [flow for flow in trial.plan.flows_of(rank, step) if flow.phase == OUTSIDE]
    flows = [flow for flow in flows if flow.role != MATRICES or flow.axis not in alone]
    return {(_key(trial, rank, flow), flow.role): flow.bytes for flow in flows}


def observed_outside(evidence: RankEvidence, step: int, pairs: Collection[tuple[int, ...]] = ()) -> dict[Key, int]:
    """All that a rank issued there, integers among it. pairs: groups of two ranks, of which one sends to the other, whatever
    group carries it."""
    totals: dict[Key, int] = defaultdict(int)
    for call in evidence.collectives:
        if call.step == step and call.phase in ("optimizer", "other") and len(call.ranks) > 1:
            both = () if call.peer is None else (min(evidence.rank, call.peer), max(evidence.rank, call.peer))
            totals[both if both in pairs else call.ranks, call.op, OUTSIDE] += call.bytes
    return dict(totals)


def still_gathered(trial: Trial, rank: int) -> list[tuple[int, str, int]]:
    """(step before, parameter, bytes of it still there) of what evaluation left, beyond the rank's own slices."""
    return [
        (record.step, fqn, record.bytes[fqn])
        for record in trial.ranks[rank].after_evaluation
        for fqn in record.gathered
        if fqn in trial.plan.after_forward[rank]
    ]


def own_bytes(trial: Trial, rank: int, fqn: str) -> int:
    """Bytes of a rank's own slice of a parameter."""
    return numel(trial.plan.slices[rank][fqn]) * BYTES[trial.case.training.dtype]


def _key(trial: Trial, rank: int, flow: Flow) -> Key:
    return trial.plan.group_of(rank, flow.axis), flow.op, flow.phase


def observed(trial: Trial, evidence: RankEvidence, step: int) -> dict[Key, int]:
    """Bytes of one step, by group, collective and phase, as the rank issued them."""
    totals: dict[Key, int] = defaultdict(int)
    for collective in evidence.collectives:
        if collective.step == step and is_traffic(collective):
            ranks = _stages(trial, evidence.rank, collective) or collective.ranks
            totals[ranks, collective.op, collective.phase] += collective.bytes
    return dict(totals)


def _stages(trial: Trial, rank: int, call: Collective) -> tuple[int, ...]:
    """The pipeline that both ends of a send or receive are of: these take part in it, whatever group carries it. (Megatron
    sends one way through the world's group, so that the two ways do not wait for each other.)"""
    pipeline = trial.plan.peers(rank, "pp")
    return pipeline if call.op in ("send", "recv") and call.peer != rank and call.peer in pipeline else ()


def is_traffic(collective: Collective) -> bool:
    """torch 2.11 greets the neighbours of a pipeline stage with one number, before the first pass."""
    greeting = collective.op in ("send", "recv") and collective.bytes <= BYTES["float64"]
    inside = collective.phase in INSIDE and len(collective.ranks) > 1
    return inside and "float" in collective.dtype and not greeting


def axis_text(trial: Trial, ranks: tuple[int, ...]) -> str:
    """The ranks of a group, with the plan's axis that they form, if any."""
    axis = axis_of(trial, ranks)
    if axis.startswith("post_forward"):  # slices after forward are gathered over it; no configuration names it
        return ranks_text(ranks)
    return f"{axis} {ranks_text(ranks)}" if axis else f"{ranks_text(ranks)} (no axis of the plan)"


def of_collective(trial: Trial, key: Key) -> dict[str, Any]:
    """Return what a finding on the bytes of a collective is about."""
    ranks, op, phase = key
    axis = axis_of(trial, ranks)
    known, note = "" if axis.startswith("post_forward") else axis, "" if axis else "no axis of the plan"
    what = {"kind": "collective", "name": op, "phase": phase, "axis": known, "group": ranks}
    return what | {"unit": "bytes", "note": note}


def axis_of(trial: Trial, ranks: tuple[int, ...]) -> str:
    """The plan's axis that they form; empty if they form none."""
    return next((axis for axis, lines in trial.plan.groups.items() if ranks in lines), "")


def amount(count: int) -> str:
    """Bytes for a person, and the exact number."""
    return f"{bytes_text(count)} ({count})" if count else "nothing"
