"""Along each of tp, cp and pp every rank moves something that data parallelism would not, over its group of the layout.

It is seen in one step: of tp and cp in forward or backward, of pp anywhere. Where all that moves may be of another axis, it is
UNKNOWN: gradients are summed over replicas, FSDP gathers over its shards, and DDP shares buffers. For a declared case the plan
states how much of that there is. If nothing shows what ranks hold, as in traces, one more thing must be seen in at least one
step. Every rank gathers or scatters over exactly its shards, and sums in backward over exactly its replicas.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any

import numpy as np

from harness.core.case.dims import AXES, ParallelDims
from harness.core.evidence.keys import ranks_from_key
from harness.core.evidence.summary import POINT_TO_POINT, Summary
from harness.core.evidence.summary_parts import Outside, Use
from harness.core.evidence.text import ranks_text
from harness.core.judge.finding import Finding
from harness.core.judge.result import Result, Verdict, not_applicable, verdict_of
from harness.core.judge.traffic import INSIDE_PHASES
from harness.core.judge.trial import Trial
from harness.core.plan.plan import Plan
from harness.core.plan.slices import BYTES
from harness.core.plan.traffic.flow import PARAMETER_ROLES

STAGE = "structure"
NEEDS = frozenset({"uses", "members"})


def check(trial: Trial) -> Result:
    """Return the result, with a finding for each rank and axis along which nothing moves. NOT APPLICABLE if no axis is judged.

    UNKNOWN if nothing fails, and some collectives may be of another axis.
    """
    dims = trial.plan.dims
    axes = [axis for axis in ("tp", "cp", "pp") if getattr(dims, axis) > 1 and _expects_traffic(trial, axis)]
    data = [] if trial.has_claims_or_contents else data_axes(trial.plan)
    if not axes and not data:
        return not_applicable("exchange", "neither tensor, context nor pipeline parallelism")
    judged = [summary for summary in trial.rank_summaries if summary.saw_a_step and not summary.recorder.failed]
    findings, undecided = _data_parallel_findings(trial, data)
    for axis in axes:
        lines = trial.axis_groups_by_rank(axis)
        for summary in judged:
            line = lines[summary.rank]
            moved = _calls_along_line(summary, line, between_passes=axis == "pp")
            declared = bool(moved) and _is_data_parallel_traffic(trial, summary, moved)
            if not moved or declared:
                in_passes = "" if axis == "pp" else " in forward or backward"
                subject: dict[str, Any] = {"kind": "group", "axis": axis, "group": line, "step": summary.shown}
                observed = "none but of parameters" if declared else None
                findings.append(Finding.at(summary.rank, f"collectives{in_passes}", observed, **subject))
            elif not any(_proves_axis(trial, summary, use, axis) for use in moved):
                ops = ", ".join(sorted({f"{use.op} in {use.phase}" for use in moved}))
                group = f"its {axis} group {ranks_text(line)}"
                undecided.append(f"rank {summary.rank}, {group}: {ops} may be of another axis")
        if axis == "pp":
            undecided += _possible_replicas_texts(judged, lines)
    hint = axis_order_hint(judged, dims) if findings or undecided else ""
    result = verdict_of("exchange", findings, len(judged), note=hint)
    if undecided and not findings:
        return replace(result, verdict=Verdict.UNKNOWN, note=hint or undecided[0])
    return result


def data_axes(plan: Plan) -> list[str]:
    """Return the axes along which parameters are cut or copied: of cp alone a layout says neither."""
    axes: list[str] = []
    if plan.dims.dp_shard > 1:
        axes.append(plan.shard_axis)
    if plan.dims.dp_replicate > 1:
        axes.append(plan.replicate_axis)
    return [axis for axis in axes if axis in plan.groups]


def _data_parallel_findings(trial: Trial, axes: Sequence[str]) -> tuple[list[Finding], list[str]]:
    """Return findings of axes along which nothing is moved in any step, and texts where what moves may serve something else."""
    findings: list[Finding] = []
    undecided: list[str] = []
    with_steps = {rank: evidence for rank, evidence in trial.ranks.items() if evidence.steps and axes}
    for rank, evidence in sorted(with_steps.items()):
        calls = [call for call in evidence.collectives if len(call.ranks) > 1]
        for axis in axes:
            group = trial.plan.group_of(rank, axis)
            over = {(call.op, call.phase) for call in calls if call.ranks == group}
            observed = ", ".join(sorted(f"{op} in {phase}" for op, phase in over))
            copied = axis == trial.plan.replicate_axis
            served = _serves_replication(over) if copied else _serves_sharding(over)
            if served is ServesAxis.UNDECIDED:
                undecided.append(
                    f"rank {rank}, its {axis} group {ranks_text(group)}: {observed} may serve something else"
                )
            elif served is ServesAxis.NO:
                cuts = {call.ranks for call in calls if call.op in CUTTING and call.phase in INSIDE_PHASES}
                note = f"it gathers and scatters over {' '.join(map(ranks_text, sorted(cuts)))}" if cuts else ""
                subject: dict[str, Any] = {"kind": "group", "axis": axis, "group": group, "note": note}
                wanted = "sums in backward" if copied else "gathers or scatters"
                findings.append(Finding.at(rank, wanted, observed or None, **subject))
    return findings, undecided


class ServesAxis(Enum):
    """Whether collectives over a group do what its axis is for."""

    YES = "yes"
    NO = "no"
    UNDECIDED = "they may serve something else"


def _serves_sharding(over: set[tuple[str, str]]) -> ServesAxis:
    """Return YES if a collective that cuts parameters runs in a pass or the optimizer, UNDECIDED if only elsewhere, else NO.

    Elsewhere losses may be gathered. over: operators and phases of collectives over these ranks.
    """
    phases = {phase for op, phase in over if op in CUTTING}
    if phases & {*INSIDE_PHASES, "optimizer"}:
        return ServesAxis.YES
    return ServesAxis.UNDECIDED if phases else ServesAxis.NO


def _serves_replication(over: set[tuple[str, str]]) -> ServesAxis:
    """Return whether gradients are summed over these ranks. FSDP scatters them, and gathers. over: operators and phases."""
    if any(op in ("all_reduce", "reduce") and phase in ("backward", "pipeline") for op, phase in over):
        return ServesAxis.YES
    return ServesAxis.NO if not over or ("all_gather", "forward") in over else ServesAxis.UNDECIDED


def _proves_axis(trial: Trial, summary: Summary, use: Use | Outside, axis: str) -> bool:
    """Return whether a collective proves that something moves along this axis: no other axis runs it there."""
    if not trial.has_claims_or_contents and use.op == "all_gather":
        return False  # which FSDP may issue over any ranks
    return PROVES_AXIS[axis](use.op, use.phase) and (
        not _may_be_sharding(summary, use, axis) or _is_planned_exactly(trial, summary, use)
    )


def _expects_traffic(trial: Trial, axis: str) -> bool:
    """Return whether something should move along an axis, beside parameters and gradients.

    True for each axis of a layout if the plan does not state what.
    """
    if not trial.plan.is_exact:
        return True
    for rank in trial.ranks:
        for flow in trial.plan.flows_of(rank, trial.first_step):
            if flow.axis == axis and flow.role not in PARAMETER_ROLES:
                return True
    return False


def _is_data_parallel_traffic(trial: Trial, summary: Summary, moved: Sequence[Use | Outside]) -> bool:
    """Return whether by an exact plan all of this moves for parameters and gradients. False if the plan is not exact."""
    planned = _planned_bytes(trial, summary)
    return all(use.bytes <= planned[ranks_from_key(use.ranks), use.op, use.phase][0] for use in moved)


def _planned_bytes(trial: Trial, summary: Summary) -> dict[tuple[tuple[int, ...], str, str], tuple[int, int]]:
    """Return the bytes that an exact plan states, by group, collective and phase: of parameters and gradients, and others.

    (0, 0) for each if the plan is not exact.
    """
    of_parameters = Counter[Any]()
    of_others = Counter[Any]()
    if trial.plan.is_exact:
        for flow in trial.plan.flows_of(summary.rank, summary.shown):
            counted = of_parameters if flow.role in PARAMETER_ROLES else of_others
            counted[trial.plan.group_of(summary.rank, flow.axis), flow.op, flow.phase] += flow.bytes
    return defaultdict(
        lambda: (0, 0), {key: (of_parameters[key], of_others[key]) for key in of_parameters.keys() | of_others.keys()}
    )


def _is_planned_exactly(trial: Trial, summary: Summary, use: Use | Outside) -> bool:
    """Return whether a collective moves, to the byte, what an exact plan moves there for parameters and otherwise."""
    of_parameters, of_others = _planned_bytes(trial, summary)[ranks_from_key(use.ranks), use.op, use.phase]
    return of_others > 0 and use.bytes == of_parameters + of_others


CUTTING = ("all_gather", "reduce_scatter", "reduce", "all_to_all")
"""Collectives by which parameters are used, or gradients reduced, that are cut over ranks."""

PROVES_AXIS: dict[str, Callable[[str, str], bool]] = {
    "tp": lambda op, phase: op not in ("broadcast", *POINT_TO_POINT) and phase != "backward",
    "cp": lambda op, phase: op not in ("all_reduce", "broadcast"),
    "pp": lambda op, phase: op in POINT_TO_POINT,
}
"""By axis, whether a collective of this phase is none that data parallelism without shards has, too; nor a ring, of tp."""


BYTES_PER_ELEMENT = BYTES | {"float16": 2}
"""Of a number that FSDP gathers, which may be in a dtype that no case requests."""


def _may_be_sharding(summary: Summary, use: Use | Outside, axis: str) -> bool:
    """Return whether a collective may be of a wrapper that claims to shard over these ranks.

    cp may share FSDP's ranks. The wrapper's collectives are then those that gather or scatter in backward, and those in forward
    that gather the parameters, once or several times. An exchange of keys and values there gathers other bytes, or uses another
    collective.
    """
    if not summary.groups.roles.get(use.ranks, "").startswith("sharded") or axis == "pp":
        return False
    if axis == "tp":
        return True
    if use.phase == "backward":
        return use.op in ("all_gather", "reduce_scatter")
    parameter_bytes = summary.parameters.elements * BYTES_PER_ELEMENT.get(use.dtype, 0)
    return (use.op, use.phase) == ("all_gather", "forward") and parameter_bytes > 0 and use.bytes % parameter_bytes == 0


def _possible_replicas_texts(judged: Sequence[Summary], lines: dict[int, tuple[int, ...]]) -> list[str]:
    """Return a text on each set of ranks that claim nothing and begin with the same bytes of all parameters.

    They may be replicas: cp sends, too.
    """
    by_beginning: dict[object, list[int]] = {}
    for summary in judged:
        if not summary.parameters.slices and 0 in summary.contents.by_step:
            by_beginning.setdefault(
                (lines[summary.rank], summary.parameters.model, summary.contents.by_step[0]), []
            ).append(summary.rank)
    families = [ranks for ranks in by_beginning.values() if len(ranks) > 1]
    return [f"ranks {ranks_text(ranks)} of a pp group begin with the same bytes, as replicas do" for ranks in families]


def _calls_along_line(summary: Summary, line: tuple[int, ...], *, between_passes: bool) -> list[Use | Outside]:
    """Return the collectives that a rank ran over itself and at least one other of these ranks.

    Stages of a pipeline send between passes, too.
    """
    uses: tuple[Use | Outside, ...] = (
        (*summary.traffic.uses, *summary.traffic.outside, *summary.traffic.background)
        if between_passes
        else summary.traffic.uses
    )
    return [use for use in uses if len(set(line).intersection(ranks_from_key(use.ranks))) > 1]


# ---- pipelines of a layout whose ranks are counted in another order


RankLines = set[tuple[int, ...]]


def axis_order_hint(summaries: Iterable[Summary], dims: ParallelDims) -> str:
    """Return the layout's pipelines, the observed ones, and what to write, as a text.

    Empty where sends run over the layout's pipelines, or over those of no other order of the axes.
    """
    observed_lines: set[tuple[int, ...]] = set()
    for summary in summaries:
        calls: tuple[Use | Outside, ...] = (*summary.traffic.uses, *summary.traffic.outside)
        for use in calls:
            if use.op in POINT_TO_POINT:
                observed_lines.add(tuple(ranks_from_key(use.ranks)))
    outer, *inner = axes = [axis for axis in AXES if getattr(dims, axis) > 1]
    if outer != "pp" or not observed_lines or observed_lines <= _pipeline_lines(dims, axes):
        return ""
    orders = ([*inner[:index], "pp", *inner[index:]] for index in range(1, len(axes)))
    order = next((order for order in orders if observed_lines <= _pipeline_lines(dims, order)), None)
    if order is None:
        return ""
    return (
        f"the layout counts ranks in the order {', '.join(axes)}: pp groups {_lines_text(_pipeline_lines(dims, axes))};"
        f" sends and receives run over {_lines_text(observed_lines)}, as in the order {', '.join(order)},"
        " which is not judged: make the script's mesh"
        f" with pp first (init_device_mesh with mesh_dim_names {tuple(axes)}), or leave out --layout"
    )


def _pipeline_lines(dims: ParallelDims, order: Sequence[str]) -> RankLines:
    """Return the ranks that differ in pp alone, if the axes follow in this order, outermost first."""
    grid = np.arange(dims.world_size).reshape([getattr(dims, axis) for axis in order])
    lines = np.moveaxis(grid, order.index("pp"), -1).reshape(-1, dims.pp)
    return {tuple(map(int, line)) for line in lines}


def _lines_text(lines: RankLines, limit: int = 4) -> str:
    """Return the first groups of ranks as a text, with ".." if there are more than `limit`."""
    shown = sorted(lines)
    return " ".join(map(ranks_text, shown[:limit])) + (" .." if len(shown) > limit else "")
