"""Data for drawings of a trial: one parameter on every rank, and the groups over which tensors moved."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from harness.core.judge.measures import representative_step
from harness.core.judge.traffic import axis_of, is_traffic
from harness.core.judge.trial import Trial
from harness.core.plan.grid import coordinate_of_rank
from harness.core.plan.slices import Slice
from harness.core.plan.traffic.flow import OUTSIDE


def shown_parameter(trial: Trial) -> str:
    """Return the fqn of the first parameter that some rank holds wrongly, else layer 0's attention.wq.

    Without attention it is the first parameter.
    """
    for rank, slices in trial.local_slices.items():
        for fqn, part in slices.items():
            if part != trial.plan.slices[rank].get(fqn):
                return fqn
    first_fqn = next(iter(trial.plan.shapes))
    return next((fqn for fqn in trial.plan.shapes if fqn.endswith("attention.wq.weight")), first_fqn)


def interval_text(part: Slice, shape: tuple[int, ...]) -> str:
    """Return a slice as text: "[0:32, :]". A dim that is not cut is ":"."""
    texts = []
    for (start, stop), size in zip(part, shape, strict=True):
        texts.append(":" if (start, stop) == (0, size) else f"{start}:{stop}")
    return "[" + ", ".join(texts) + "]"


def rank_label(trial: Trial, rank: int) -> str:
    """Return a text of a rank and its coordinate along each axis of the plan: "3  dp_shard1 tp1"."""
    mesh_coordinate = coordinate_of_rank(trial.case.dims, rank)
    coordinate_text = " ".join(
        f"{axis}{mesh_coordinate[axis]}" for axis in trial.plan.groups if axis in mesh_coordinate
    )
    return f"{rank}  {coordinate_text}" if coordinate_text else str(rank)


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
    def comparison_text(self) -> str:
        """Return how the observed bytes compare with those requested: AS_REQUESTED, "other bytes", "idle" or "not in
        the plan"."""
        if not self.axis:
            return "not in the plan"
        if self.requested - self.optional <= self.moved <= self.requested:
            return AS_REQUESTED
        return "other bytes" if self.moved else "idle"


def used_groups(trial: Trial) -> list[UsedGroup]:
    """Return the groups of the plan, and others over which tensors moved, with their bytes in forward and backward of
    one step.

    Smaller groups come first. The step is the one that `representative_step` returns.
    """
    step = representative_step(trial)
    requested: dict[tuple[int, ...], int] = dict.fromkeys(itertools.chain.from_iterable(trial.plan.groups.values()), 0)
    optional = dict.fromkeys(requested, 0)
    moved = dict[tuple[int, ...], int]()
    for rank, evidence in trial.ranks.items():
        for flow in trial.plan.flows_of(rank, step):
            if flow.phase == OUTSIDE:
                continue
            group = trial.plan.group_of(rank, flow.axis)
            requested[group] += flow.bytes
            if flow.optional:
                optional[group] += flow.bytes
        for call in evidence.collectives:
            if call.step == step and is_traffic(call):
                moved[call.ranks] = moved.get(call.ranks, 0) + call.bytes
    rows = sorted({*requested, *moved}, key=lambda group: (len(group), group))
    return [
        UsedGroup(group, axis_of(trial, group), requested.get(group, 0), optional.get(group, 0), moved.get(group, 0))
        for group in rows
    ]
