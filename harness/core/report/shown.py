"""What drawings show of a trial: one parameter on every rank, and the groups over which tensors moved."""

from __future__ import annotations

from dataclasses import dataclass

from harness.core.judge.measures import step_shown
from harness.core.judge.traffic import axis_of, is_traffic
from harness.core.judge.trial import Trial
from harness.core.plan.grid import coordinate
from harness.core.plan.slices import Slice
from harness.core.plan.traffic.flow import OUTSIDE


def shown_parameter(trial: Trial) -> str:
    """The first parameter that some rank holds wrongly, else the first projection of attention."""
    for rank, held in trial.holdings.items():
        for fqn, part in held.items():
            if part != trial.plan.slices[rank].get(fqn):
                return fqn
    return next(
        (fqn for fqn in trial.plan.shapes if fqn.endswith("attention.wq.weight")), next(iter(trial.plan.shapes))
    )


def interval_text(part: Slice, shape: tuple[int, ...]) -> str:
    """[0:32] of dim 0, and of the other dims where they are cut."""
    shown = [f"{a}:{b}" if (a, b) != (0, size) else ":" for (a, b), size in zip(part, shape, strict=True)]
    return "[" + ", ".join(shown) + "]"


def rank_label(trial: Trial, rank: int) -> str:
    """The rank, and its place on each axis of the plan."""
    place = coordinate(trial.case.dims, rank)
    where = " ".join(f"{axis}{place[axis]}" for axis in trial.plan.groups if axis in place)
    return f"{rank}  {where}" if where else str(rank)


AS_REQUESTED = "as requested"


@dataclass(frozen=True)
class UsedGroup:
    """A group over which tensors move in one step, or should."""

    ranks: tuple[int, ...]
    """Its global ranks."""
    axis: str
    """The axis of the plan; empty if the plan has no such group."""
    requested: int
    """Bytes in the step, the sum over its ranks."""
    optional: int
    """Bytes of those requested that may be left out."""
    moved: int
    """Bytes observed in the step, the sum over its ranks."""

    @property
    def word(self) -> str:
        if not self.axis:
            return "not in the plan"
        if self.requested - self.optional <= self.moved <= self.requested:
            return AS_REQUESTED
        return "other bytes" if self.moved else "idle"


def used_groups(trial: Trial) -> list[UsedGroup]:
    """Return the groups of the plan, and others over which tensors moved in forward or backward of the step shown."""
    step = step_shown(trial)
    requested: dict[tuple[int, ...], int] = {group: 0 for groups in trial.plan.groups.values() for group in groups}
    optional, moved = dict.fromkeys(requested, 0), dict[tuple[int, ...], int]()
    for rank, evidence in trial.ranks.items():
        for flow in trial.plan.flows_of(rank, step):
            if flow.phase == OUTSIDE:
                continue
            group = trial.plan.group_of(rank, flow.axis)
            requested[group] += flow.bytes
            optional[group] += flow.bytes * flow.optional
        for call in evidence.collectives:
            if call.step == step and is_traffic(call):
                moved[call.ranks] = moved.get(call.ranks, 0) + call.bytes
    rows = sorted({*requested, *moved}, key=lambda group: (len(group), group))
    return [
        UsedGroup(group, axis_of(trial, group), requested.get(group, 0), optional.get(group, 0), moved.get(group, 0))
        for group in rows
    ]
