"""The bytes that ranks moved, by collective, and those that the plan says they move."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from typing import Any

from harness.core.evidence.records import Collective, RankEvidence
from harness.core.evidence.text import bytes_text, ranks_text
from harness.core.judge.trial import Trial
from harness.core.plan.slices import BYTES, numel
from harness.core.plan.traffic.flow import OUTSIDE, Flow
from harness.core.plan.traffic.muon import MATRICES_ROLE

INSIDE_PHASES = ("forward", "backward", "pipeline")
TrafficKey = tuple[tuple[int, ...], str, str]  # ranks, op, phase


def planned_bytes_by_collective(trial: Trial, rank: int, step: int) -> dict[TrafficKey, int]:
    """Return the bytes that the plan has a rank move in forward and backward of one step, by (ranks, op, phase).

    Flows of activations are left out where no case declares the features that they follow from.
    """
    return _bytes_by_key(trial, rank, _flows_inside(trial, rank, step))


def optional_bytes_by_collective(trial: Trial, rank: int, step: int) -> dict[TrafficKey, int]:
    """Return the bytes of planned flows in forward and backward that a trainer may leave out, by (ranks, op, phase)."""
    return _bytes_by_key(trial, rank, [flow for flow in _flows_inside(trial, rank, step) if flow.optional])


def _flows_inside(trial: Trial, rank: int, step: int) -> list[Flow]:
    """Return a rank's planned flows in forward and backward of a step whose bytes the plan states."""
    inside = [flow for flow in trial.plan.flows_of(rank, step) if flow.phase != OUTSIDE]
    return [flow for flow in inside if trial.plan.states(flow)]


def _bytes_by_key(trial: Trial, rank: int, flows: Iterable[Flow]) -> dict[TrafficKey, int]:
    """Return the bytes of these flows, summed by (ranks, op, phase)."""
    totals: dict[TrafficKey, int] = defaultdict(int)
    for flow in flows:
        totals[_key_of_flow(trial, rank, flow)] += flow.bytes
    return dict(totals)


def planned_bytes_outside_passes(trial: Trial, rank: int, step: int) -> dict[tuple[TrafficKey, str], int]:
    """Return the least bytes that a rank moves in a step outside of its passes, by ((ranks, op, phase), role).

    Flows of Muon's matrices are left out over an axis along which a hypothesis assumes that no matrix is put together.
    """
    alone = trial.assumption.optimizer.alone
    flows = [flow for flow in trial.plan.flows_of(rank, step) if flow.phase == OUTSIDE]
    flows = [flow for flow in flows if flow.role != MATRICES_ROLE or flow.axis not in alone]
    return {(_key_of_flow(trial, rank, flow), flow.role): flow.bytes for flow in flows}


def observed_bytes_outside(
    evidence: RankEvidence, step: int, pairs: Collection[tuple[int, ...]] = ()
) -> dict[TrafficKey, int]:
    """Return the bytes that a rank moved outside of forward and backward, by (ranks, op, OUTSIDE). Integers count.

    Groups of one rank are left out. pairs: groups of two ranks. What one of the two sends to the other counts for the
    pair, whatever group carries it.
    """
    totals: dict[TrafficKey, int] = defaultdict(int)
    for call in evidence.collectives:
        if call.step == step and call.phase in ("optimizer", "other") and len(call.ranks) > 1:
            both = () if call.peer is None else (min(evidence.rank, call.peer), max(evidence.rank, call.peer))
            totals[both if both in pairs else call.ranks, call.op, OUTSIDE] += call.bytes
    return dict(totals)


def gathered_after_evaluation(trial: Trial, rank: int) -> list[tuple[int, str, int]]:
    """Return (step before, fqn, bytes) of each parameter of which evaluation left more than the rank's own slice.

    Parameters that the plan never gathers are left out.
    """
    parameters = []
    for record in trial.ranks[rank].after_evaluation:
        for fqn in record.gathered:
            if fqn in trial.plan.after_forward[rank]:
                parameters.append((record.step, fqn, record.bytes[fqn]))
    return parameters


def own_bytes(trial: Trial, rank: int, fqn: str) -> int:
    """Return the bytes of a rank's own slice of a parameter by the plan.

    Raises KeyError for a parameter that it has none of.
    """
    return numel(trial.plan.slices[rank][fqn]) * BYTES[trial.case.training.dtype]


def _key_of_flow(trial: Trial, rank: int, flow: Flow) -> TrafficKey:
    return trial.plan.group_of(rank, flow.axis), flow.op, flow.phase


def observed_bytes_by_collective(trial: Trial, evidence: RankEvidence, step: int) -> dict[TrafficKey, int]:
    """Return the bytes that a rank moved in the passes of one step, by (ranks, op, phase).

    Only calls that is_traffic accepts count. Bytes sent between two stages count for the whole pipeline's ranks.
    """
    totals: dict[TrafficKey, int] = defaultdict(int)
    for collective in evidence.collectives:
        if collective.step == step and is_traffic(collective):
            ranks = _pipeline_of_call(trial, evidence.rank, collective) or collective.ranks
            totals[ranks, collective.op, collective.phase] += collective.bytes
    return dict(totals)


def _pipeline_of_call(trial: Trial, rank: int, call: Collective) -> tuple[int, ...]:
    """Return the ranks of the pipeline that both ends of a send or receive belong to. Empty for all other calls.

    The group that carries the call does not count: Megatron sends one way through the world's group, so that the two
    ways do not wait for each other.
    """
    pipeline = trial.plan.peers(rank, "pp")
    if call.op in ("send", "recv") and call.peer != rank and call.peer in pipeline:
        return pipeline
    return ()


def is_traffic(collective: Collective) -> bool:
    """Return whether a call moves floating-point numbers between several ranks in forward, backward or the pipeline.

    torch 2.11 sends one number to the neighbours of a pipeline stage before the first pass. A send or receive of so few
    bytes is no traffic.
    """
    greeting = collective.op in ("send", "recv") and collective.bytes <= BYTES["float64"]
    inside = collective.phase in INSIDE_PHASES and len(collective.ranks) > 1
    return inside and "float" in collective.dtype and not greeting


def axis_text(trial: Trial, ranks: tuple[int, ...]) -> str:
    """Return a text of a group's ranks: with the plan's axis that they form, or with "no axis of the plan".

    The axis over which slices after forward are gathered is not named, because no configuration names it.
    """
    axis = axis_of(trial, ranks)
    if axis.startswith("post_forward"):  # slices after forward are gathered over it; no configuration names it
        return ranks_text(ranks)
    if axis:
        return f"{axis} {ranks_text(ranks)}"
    return f"{ranks_text(ranks)} (no axis of the plan)"


def collective_finding_fields(trial: Trial, key: TrafficKey) -> dict[str, Any]:
    """Return the fields of a Finding on a collective's bytes: kind, name, phase, axis, group, unit and note."""
    ranks, op, phase = key
    axis = axis_of(trial, ranks)
    return {
        "kind": "collective",
        "name": op,
        "phase": phase,
        "axis": "" if axis.startswith("post_forward") else axis,
        "group": ranks,
        "unit": "bytes",
        "note": "" if axis else "no axis of the plan",
    }


def axis_of(trial: Trial, ranks: tuple[int, ...]) -> str:
    """Return the name of the plan's axis of which these ranks are one group; empty if there is none."""
    return next((axis for axis, lines in trial.plan.groups.items() if ranks in lines), "")


def bytes_amount_text(count: int) -> str:
    """Return a number of bytes for a person, rounded and exact: "1.051 MB (1051136)". "nothing" for 0."""
    return f"{bytes_text(count)} ({count})" if count else "nothing"
