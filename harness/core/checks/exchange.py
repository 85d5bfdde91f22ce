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
from harness.core.evidence.keys import ranks_of
from harness.core.evidence.summary import POINT_TO_POINT, Outside, Summary, Use
from harness.core.evidence.text import ranks_text
from harness.core.judge.finding import Finding
from harness.core.judge.result import Result, Verdict, not_applicable, verdict_of
from harness.core.judge.traffic import INSIDE, OF_PARAMETERS
from harness.core.judge.trial import Trial
from harness.core.plan.plan import Plan
from harness.core.plan.slices import BYTES

STAGE = "structure"
NEEDS = frozenset({"uses", "members"})


def check(trial: Trial) -> Result:
    dims = trial.plan.dims
    axes = [axis for axis in ("tp", "cp", "pp") if getattr(dims, axis) > 1 and _is_expected(trial, axis)]
    data = [] if trial.holds_told else data_axes(trial.plan)
    if not axes and not data:
        return not_applicable("exchange", "neither tensor, context nor pipeline parallelism")
    judged = [one for one in trial.glances if one.saw_a_step and not one.failed]
    findings, untold = _of_data(trial, data)
    for axis in axes:
        lines = trial.lines(axis)
        for one in judged:
            moved = _moved(one, lines[one.rank], between_passes=axis == "pp")
            told = f"its {axis} group {ranks_text(lines[one.rank])}"
            declared = bool(moved) and _of_data_parallelism(trial, one, moved)
            if not moved or declared:
                where = "" if axis == "pp" else " in forward or backward"
                what: dict[str, Any] = {"kind": "group", "axis": axis, "group": lines[one.rank], "step": one.shown}
                none = "none but of parameters" if declared else None
                findings.append(Finding.at(one.rank, f"collectives{where}", none, **what))
            elif not any(_tells(trial, one, use, axis) for use in moved):
                ops = ", ".join(sorted({f"{use.op} in {use.phase}" for use in moved}))
                untold.append(f"rank {one.rank}, {told}: {ops} may be of another axis")
        untold += _began_alike(judged, lines) if axis == "pp" else []
    hint = other_order(judged, dims) if findings or untold else ""
    found = verdict_of("exchange", findings, len(judged), note=hint)
    return found if findings or not untold else replace(found, verdict=Verdict.UNKNOWN, note=hint or untold[0])


def data_axes(plan: Plan) -> list[str]:
    """Return the axes along which parameters are cut or copied: of cp alone a layout says neither."""
    shards = [plan.shard_axis] if plan.dims.dp_shard > 1 else []
    return [axis for axis in (*shards, *[plan.replicate_axis] * (plan.dims.dp_replicate > 1)) if axis in plan.groups]


def _of_data(trial: Trial, axes: Sequence[str]) -> tuple[list[Finding], list[str]]:
    """Return what is not moved along these in any step, and where what is moved may serve something else."""
    findings, untold = [], []
    seen_ranks = {rank: evidence for rank, evidence in trial.ranks.items() if evidence.steps and axes}
    for rank, evidence in sorted(seen_ranks.items()):
        calls = [call for call in evidence.collectives if len(call.ranks) > 1]
        for axis in axes:
            group = trial.plan.group_of(rank, axis)
            over = {(call.op, call.phase) for call in calls if call.ranks == group}
            told = ", ".join(sorted(f"{op} in {phase}" for op, phase in over))
            copied = axis == trial.plan.replicate_axis
            served = _gradients_summed(over) if copied else _parameters_cut(over)
            if served is Served.UNTOLD:
                untold.append(f"rank {rank}, its {axis} group {ranks_text(group)}: {told} may serve something else")
            elif served is Served.NO:
                cuts = {call.ranks for call in calls if call.op in CUTTING and call.phase in INSIDE}
                note = f"it gathers and scatters over {' '.join(map(ranks_text, sorted(cuts)))}" if cuts else ""
                what: dict[str, Any] = {"kind": "group", "axis": axis, "group": group, "note": note}
                wanted = "sums in backward" if copied else "gathers or scatters"
                findings.append(Finding.at(rank, wanted, told or None, **what))
    return findings, untold


class Served(Enum):
    """Whether collectives over a group do what its axis is for."""

    YES = "yes"
    NO = "no"
    UNTOLD = "they may serve something else"


def _parameters_cut(over: set[tuple[str, str]]) -> Served:
    """Return whether parameters are cut over these ranks. Losses may be gathered between passes. over: operators and phases."""
    phases = {phase for op, phase in over if op in CUTTING}
    if phases & {*INSIDE, "optimizer"}:
        return Served.YES
    return Served.UNTOLD if phases else Served.NO


def _gradients_summed(over: set[tuple[str, str]]) -> Served:
    """Return whether gradients are summed over these ranks. FSDP scatters them, and gathers. over: operators and phases."""
    if over & {(op, phase) for op in ("all_reduce", "reduce") for phase in ("backward", "pipeline")}:
        return Served.YES
    return Served.NO if not over or ("all_gather", "forward") in over else Served.UNTOLD


def _tells(trial: Trial, one: Summary, use: Use | Outside, axis: str) -> bool:
    """Return whether a collective is one that no other axis runs there."""
    if not trial.holds_told and use.op == "all_gather":
        return False  # which FSDP may issue over any ranks
    return TELLING[axis](use.op, use.phase) and (not _of_shards(one, use, axis) or _exactly_planned(trial, one, use))


def _is_expected(trial: Trial, axis: str) -> bool:
    """Return whether something should move along it; the layout decides for a job without a case."""
    if "declared" not in trial.provided:
        return True
    flows = (flow for rank in trial.ranks for flow in trial.plan.flows_of(rank, trial.first_step))
    return any(flow.axis == axis and flow.role not in OF_PARAMETERS for flow in flows)


def _of_data_parallelism(trial: Trial, one: Summary, moved: Sequence[Use | Outside]) -> bool:
    """Whether a case is declared, and by its plan all of this moves for parameters and gradients."""
    planned = _planned(trial, one)
    return all(use.bytes <= planned[ranks_of(use.ranks), use.op, use.phase][0] for use in moved)


def _planned(trial: Trial, one: Summary) -> dict[tuple[tuple[int, ...], str, str], tuple[int, int]]:
    """Return the bytes that a declared case moves, by group, collective and phase: of parameters and gradients, and others."""
    own, others = Counter[Any](), Counter[Any]()
    for flow in trial.plan.flows_of(one.rank, one.shown) if "declared" in trial.provided else ():
        counted = own if flow.role in OF_PARAMETERS else others
        counted[trial.plan.group_of(one.rank, flow.axis), flow.op, flow.phase] += flow.bytes
    return defaultdict(lambda: (0, 0), {key: (own[key], others[key]) for key in own.keys() | others.keys()})


def _exactly_planned(trial: Trial, one: Summary, use: Use | Outside) -> bool:
    """Return whether it is what a declared plan exchanges there, to the byte, with what it moves for parameters."""
    own, others = _planned(trial, one)[ranks_of(use.ranks), use.op, use.phase]
    return others > 0 and use.bytes == own + others


CUTTING = ("all_gather", "reduce_scatter", "reduce", "all_to_all")
"""Collectives by which parameters are used, or gradients reduced, that are cut over ranks."""

TELLING: dict[str, Callable[[str, str], bool]] = {
    "tp": lambda op, phase: op not in ("broadcast", *POINT_TO_POINT) and phase != "backward",
    "cp": lambda op, phase: op not in ("all_reduce", "broadcast"),
    "pp": lambda op, phase: op in POINT_TO_POINT,
}
"""By axis, whether a collective of this phase is none that data parallelism without shards has, too; nor a ring, of tp."""


GATHERED = BYTES | {"float16": 2}
"""Of a number that FSDP gathers, which may be in a dtype that no case requests."""


def _of_shards(one: Summary, use: Use | Outside, axis: str) -> bool:
    """Return whether it may be what a wrapper moves that claims to shard over these ranks. cp may share FSDP's ranks. Then it
    is what is gathered or scattered in backward, and what is gathered in forward if that is the parameters, once or several
    times. Who exchanges keys and values there gathers other bytes, or uses another collective."""
    if not one.roles.get(use.ranks, "").startswith("sharded") or axis == "pp":
        return False
    if axis == "tp":
        return True
    if use.phase == "backward":
        return use.op in ("all_gather", "reduce_scatter")
    whole = one.elements * GATHERED.get(use.dtype, 0)
    return (use.op, use.phase) == ("all_gather", "forward") and whole > 0 and use.bytes % whole == 0


def _began_alike(judged: Sequence[Summary], lines: dict[int, tuple[int, ...]]) -> list[str]:
    """Ranks that claim nothing and begin with the same bytes of all parameters may be replicas: cp sends, too."""
    found: dict[object, list[int]] = {}
    for one in judged:
        if not one.slices and 0 in one.contents:
            found.setdefault((lines[one.rank], one.model, one.contents[0]), []).append(one.rank)
    alike = [ranks for ranks in found.values() if len(ranks) > 1]
    return [f"ranks {ranks_text(ranks)} of a pp group begin with the same bytes, as replicas do" for ranks in alike]


def _moved(one: Summary, line: tuple[int, ...], *, between_passes: bool) -> list[Use | Outside]:
    """What it ran over itself and at least one other of these ranks. Stages of a pipeline send between passes, too."""
    uses: tuple[Use | Outside, ...] = (*one.uses, *one.outside, *one.background) if between_passes else one.uses
    return [use for use in uses if len(set(line).intersection(ranks_of(use.ranks))) > 1]


# ---- pipelines of a layout whose ranks are counted in another order


Lines = set[tuple[int, ...]]


def other_order(summaries: Iterable[Summary], dims: ParallelDims) -> str:
    """What the layout says, what was observed, and what to write; empty where sends run over the layout's pipelines, or over
    those of no such order."""
    listed = list(summaries)
    sent = [use.ranks for one in listed for use in one.uses if use.op in POINT_TO_POINT]
    sent += [use.ranks for one in listed for use in one.outside if use.op in POINT_TO_POINT]
    seen = {tuple(ranks_of(ranks)) for ranks in sent}
    outer, *inner = axes = [axis for axis in AXES if getattr(dims, axis) > 1]
    if outer != "pp" or not seen or seen <= _pipelines(dims, axes):
        return ""
    orders = ([*inner[:place], "pp", *inner[place:]] for place in range(1, len(axes)))
    order = next((order for order in orders if seen <= _pipelines(dims, order)), None)
    if order is None:
        return ""
    return (
        f"the layout counts ranks in the order {', '.join(axes)}: pp groups {_text(_pipelines(dims, axes))}; sends and receives"
        f" run over {_text(seen)}, as in the order {', '.join(order)}, which is not judged: make the script's mesh with pp"
        f" first (init_device_mesh with mesh_dim_names {tuple(axes)}), or leave out --layout"
    )


def _pipelines(dims: ParallelDims, order: Sequence[str]) -> Lines:
    """The ranks that differ in pp alone, if the axes follow in this order, outermost first."""
    grid = np.arange(dims.world_size).reshape([getattr(dims, axis) for axis in order])
    lines = np.moveaxis(grid, order.index("pp"), -1).reshape(-1, dims.pp)
    return {tuple(map(int, line)) for line in lines}


def _text(lines: Lines, most: int = 4) -> str:
    shown = sorted(lines)
    return " ".join(map(ranks_text, shown[:most])) + (" .." if len(shown) > most else "")
