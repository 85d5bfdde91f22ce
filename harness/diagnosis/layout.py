"""Ranks hold other slices than planned: the strategy that runs, or the order of axes, is another one.

Found from contents: every layout that one mistake could lead to is worked out and compared with what each rank holds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from harness.diagnosis.words import Broken, groups_text, in_parameters, on_ranks, some, traffic_lines
from harness.judge.result import Diagnosis, one_cause
from harness.judge.trial import Trial
from harness.plan.plan import Plan
from harness.plan.slices import Slice, flat_slices, numel, slice_of, slice_text
from harness.spec.dims import AXES, ParallelDims

SHARD_AXES = ("dp_shard", "cp")  # FSDP shards over cp as well: its ranks hold equal parameters
DATA_AXES = ("dp_replicate", *SHARD_AXES)


@dataclass(frozen=True)
class Layout:
    """A way the ranks could hold the parameters: degrees, order of axes in the rank grid, which axes shard, if tp cuts."""

    dims: ParallelDims
    order: tuple[str, ...] = AXES
    sharded_by: tuple[str, ...] = SHARD_AXES
    tensor_parallel: bool = True

    @property
    def shard_degree(self) -> int:
        return self.degree(self.sharded_by)

    def degree(self, axes: Sequence[str]) -> int:
        return math.prod(getattr(self.dims, axis) for axis in axes)

    def slices(self, rank: int, wanted: Plan) -> dict[str, Slice]:
        place = np.unravel_index(rank, [getattr(self.dims, axis) for axis in self.order])
        at = dict(zip(self.order, map(int, place), strict=True))
        index = 0
        for axis in self.sharded_by:
            index = index * getattr(self.dims, axis) + at[axis]
        if wanted.flat:
            return flat_slices(wanted.flat, wanted.shapes, self.shard_degree, index)
        tp = (self.dims.tp, at["tp"]) if self.tensor_parallel else (1, 0)
        return {fqn: slice_of(fqn, shape, tp, (self.shard_degree, index)) for fqn, shape in wanted.shapes.items()}

    def groups(self, axes: Sequence[str]) -> list[tuple[int, ...]]:
        """The ranks that differ only along `axes`, if this is how the ranks are laid out."""
        grid = np.arange(self.dims.world_size).reshape([getattr(self.dims, axis) for axis in self.order])
        lines = np.moveaxis(grid, [self.order.index(axis) for axis in axes], range(-len(axes), 0))
        return sorted(tuple(sorted(map(int, line))) for line in lines.reshape(-1, self.degree(axes)))


def wrong_layout(trial: Trial, broken: Broken) -> Diagnosis | None:
    if "shard_contents" not in broken:
        return None
    parts = wrong_parts(trial)
    wrong = [fqn for fqn in trial.plan.shapes if fqn in {fqn for _, fqn, _ in parts}]
    if not wrong:
        return None  # parameters that no plan knows
    explaining = [layout for layout in _layouts(trial.case.dims) if _explains(layout, trial, set(wrong))]
    for layout in explaining:
        if _would_change(trial, layout) == set(wrong):
            causes = [*_causes(layout, trial.case.dims), *_unreduced(trial, broken)]
            return one_cause("; ".join(causes), tuple(_layout_lines(trial, layout)))
    return _name_partial(explaining[0], trial, wrong) if explaining else None


def _layouts(dims: ParallelDims) -> Iterator[Layout]:
    """One mistake at a time, then two: which axes shard, exchanged axes or degrees, tensor parallel left out."""
    subsets = [(), DATA_AXES, (*SHARD_AXES, "tp"), (*DATA_AXES, "tp"), *_parts_of_the_fold(dims)]
    yield from (Layout(dims, sharded_by=subset) for subset in subsets)
    yield Layout(dims, tensor_parallel=False)
    axes = [axis for axis in (*DATA_AXES, "tp") if getattr(dims, axis) > 1]
    rest = tuple(axis for axis in AXES if axis not in axes)
    yield from (Layout(dims, order=(*rest, *order)) for order in itertools.permutations(axes))
    yield Layout(dims, sharded_by=("dp_replicate", "cp"))
    for shard in range(2, dims.dp):
        if dims.dp % shard == 0:
            yield Layout(replace(dims, dp_replicate=dims.dp // shard, dp_shard=shard))
    yield from (Layout(dims, sharded_by=subset, tensor_parallel=False) for subset in [*subsets, ("dp_replicate", "cp")])


def _parts_of_the_fold(dims: ParallelDims) -> list[tuple[str, ...]]:
    """Sharded over some axes that are not folded with cp as requested."""
    if dims.cp == 1:
        return []
    return [("dp_shard",), ("cp",), ("dp_replicate", "dp_shard"), ("dp_replicate",)]


def _explains(layout: Layout, trial: Trial, fqns: set[str]) -> bool:
    """Whether every rank holds of these parameters what the layout gives it."""
    for rank, held in trial.holdings.items():
        wanted = layout.slices(rank, trial.plan)
        if any(part is None or not _same(part, wanted[fqn]) for fqn, part in held.items() if fqn in fqns):
            return False
    return True


def _same(one: Slice, other: Slice) -> bool:
    return one == other or numel(one) == 0 == numel(other)


def wrong_parts(trial: Trial) -> list[tuple[int, str, Slice | None]]:
    """(rank, fqn, what it holds of it) where that is not what the plan says."""
    return [
        (rank, fqn, part)
        for rank, held in sorted(trial.holdings.items())
        for fqn, part in held.items()
        if fqn in trial.plan.shapes and (part is None or not _same(part, trial.plan.slices[rank][fqn]))
    ]


def _would_change(trial: Trial, layout: Layout) -> set[str]:
    """Parameters that some rank would hold otherwise than planned if the layout were everybody's."""
    found = set()
    for rank in trial.ranks:
        wanted = layout.slices(rank, trial.plan)
        found |= {fqn for fqn, part in wanted.items() if not _same(part, trial.plan.slices[rank][fqn])}
    return found


def _name_partial(layout: Layout, trial: Trial, wrong: list[str]) -> Diagnosis:
    """Only some parameters are held otherwise: a module that was left out of what was applied to all others."""
    left_out = "FSDP" if not layout.sharded_by else "TP" if not layout.tensor_parallel else ""
    where = f"{len(wrong)} of {len(trial.plan.shapes)} parameters"
    if not left_out and layout.order != AXES and min(trial.case.dims.tp, trial.case.dims.dp_shard) > 1:
        cause = (
            f"{where} ({some(wrong)}) are cut by dp_shard first and by tp inside, requested tp first (strided shards)"
        )
    elif left_out:
        cause = f"{left_out} is not applied to {where} ({some(wrong)}): every rank of a group holds them whole"
    else:
        cause = f"{where} ({some(wrong)}) are sharded otherwise than all others"
    return one_cause(cause, tuple(contents_line(trial)))


def _causes(layout: Layout, dims: ParallelDims) -> Iterator[str]:
    if "tp" in layout.sharded_by and dims.tp > 1:
        yield _fsdp_over_tp(layout)
        return
    if dims.tp > 1 and not layout.tensor_parallel:
        yield f"TP not applied: every rank of a tp group holds whole weights, requested tp {dims.tp}"
    if layout.order != AXES:
        shown = [axis for axis in layout.order if getattr(dims, axis) > 1]
        wanted = [axis for axis in AXES if axis in shown]
        yield f"axes in the wrong order: ranks are laid out as ({', '.join(shown)}), requested ({', '.join(wanted)})"
    shard_degree = dims.dp_shard * dims.cp
    as_degrees = dims.cp == 1 and (layout.shard_degree, dims.dp // layout.shard_degree) == (
        dims.dp_replicate,
        dims.dp_shard,
    )
    exchanged = as_degrees or layout.sharded_by == ("dp_replicate", "cp")
    if exchanged and min(dims.dp_replicate, dims.dp_shard) > 1 and layout.shard_degree != shard_degree:
        held = f"parameters are sharded over {layout.shard_degree} ranks and replicated {dims.dp_shard} times"
        yield f"dp_replicate and dp_shard exchanged: {held}, requested {_asked(dims)}"
    elif layout.shard_degree != shard_degree:
        yield _other_strategy(layout, dims)


def _asked(dims: ParallelDims) -> str:
    if dims.dp_shard * dims.cp == 1:
        return f"whole parameters on each of {dims.dp_replicate} ranks"
    return f"{dims.dp_shard * dims.cp}" + (f", replicated {dims.dp_replicate} times" if dims.dp_replicate > 1 else "")


def _fsdp_over_tp(layout: Layout) -> str:
    axes = " x ".join(axis for axis in layout.sharded_by if getattr(layout.dims, axis) > 1)
    held = f"parameters are sharded over {layout.shard_degree} ranks"
    if layout.tensor_parallel:
        return f"FSDP also over tp: {held} on top of TP, requested {_asked(layout.dims)}"
    asked = (
        f"{_asked(layout.dims)} and tp {layout.dims.tp}"
        if layout.dims.dp * layout.dims.cp > 1
        else f"tp {layout.dims.tp}"
    )
    return f"TP not applied, FSDP over {axes} in its place: {held}, requested {asked}"


def _other_strategy(layout: Layout, dims: ParallelDims) -> str:
    """The degree of sharding that is observed, and what that is called."""
    ranks = dims.dp * dims.cp
    if layout.shard_degree == 1:
        held = f"every {'dp' if dims.cp == 1 else 'cp' if dims.dp == 1 else 'dp and cp'} rank holds whole parameters"
    else:
        along = " x ".join(axis for axis in layout.sharded_by if getattr(layout.dims, axis) > 1)
        times = f" and replicated {ranks // layout.shard_degree} times" if layout.shard_degree < ranks else ""
        held = (
            f"parameters are sharded over {layout.shard_degree} ranks{f' along {along}' if dims.cp > 1 else ''}{times}"
        )
    asked, ran = strategy_name(ranks, dims.dp_shard * dims.cp), strategy_name(ranks, layout.shard_degree)
    return f"{asked} ran as {ran}: {held}, requested {_asked(dims)}"


def _unreduced(trial: Trial, broken: Broken) -> Iterator[str]:
    """Data-parallel axes and cp, if nothing in backward runs between the ranks along them and gradients are wrong."""
    used = {
        call.ranks
        for call in trial.ranks[0].collectives
        if call.phase == "backward" and call.op in ("all_reduce", "reduce_scatter") and "float" in call.dtype
    }
    axes = [axis for axis in DATA_AXES if axis in trial.plan.groups]
    missing = [axis for axis in axes if not any(len({*trial.plan.group_of(0, axis)} & {*line}) > 1 for line in used)]
    if missing and "gradients" in broken:
        yield f"gradient reduction missing over {' and '.join(missing)}"


def strategy_name(dp: int, shard_degree: int) -> str:
    return "DDP" if shard_degree == 1 else "FSDP" if shard_degree == dp else "HSDP"


def _layout_lines(trial: Trial, layout: Layout) -> Iterator[tuple[str, str]]:
    """Groups that really carried traffic, contents, bytes: expected and observed."""
    used = _groups_in_use(trial)
    for label, axis, ran in (
        ("shard groups", trial.plan.shard_axis, layout.sharded_by),
        ("replicate groups", "dp_replicate", [axis for axis in DATA_AXES if axis not in layout.sharded_by]),
        ("tp groups", "tp", ["tp"]),
    ):
        if axis in trial.plan.groups:
            lines = [group for group in layout.groups(ran) if len(group) > 1 and group in used] if ran else []
            yield label, f"expected {groups_text(trial.plan.groups[axis])}   observed {_use_text(trial, axis, lines)}"
    yield from contents_line(trial)
    yield from traffic_lines(trial)


def contents_line(trial: Trial) -> Iterator[tuple[str, str]]:
    """How many parameters are held otherwise than planned, and the first of them."""
    wrong = sorted(wrong_parts(trial), key=lambda found: found[2] is not None and not numel(found[2]))
    if wrong:
        rank, fqn, part = wrong[0]
        seen, wanted = _part_text(trial, fqn, part), _part_text(trial, fqn, trial.plan.slices[rank][fqn])
        count = f"{len({fqn for _, fqn, _ in wrong})} of {len(trial.plan.shapes)} parameters"
        yield "contents", f"{count}; {fqn} on rank {rank}: expected {wanted}, observed {seen}"


def _part_text(trial: Trial, fqn: str, part: Slice | None) -> str:
    if part is None:
        return "bytes that are nowhere in it"
    text = slice_text(part, trial.plan.shapes[fqn], flat=bool(trial.plan.flat))
    return "nothing" if numel(part) == 0 else "all" if text == "whole" else text


def _groups_in_use(trial: Trial) -> set[tuple[int, ...]]:
    """Over which ranks tensors moved in forward and backward."""
    return {
        call.ranks
        for evidence in trial.ranks.values()
        for call in evidence.collectives
        if call.phase in ("forward", "backward") and "float" in call.dtype
    }


def _use_text(trial: Trial, axis: str, used: list[tuple[int, ...]]) -> str:
    if used:
        return groups_text(used)
    wanted = set(trial.plan.groups[axis])
    exist = {group.ranks for evidence in trial.ranks.values() for group in evidence.groups} & wanted
    return "none in use" + (" (the groups exist, no collective ran over them)" if exist == wanted else "")


def wrong_contents(trial: Trial, broken: Broken) -> Diagnosis | None:
    """Slices of the seed weights, but of no layout we know."""
    if "shard_contents" not in broken:
        return None
    wrong = wrong_parts(trial)
    fqns = [fqn for fqn in trial.plan.shapes if fqn in {fqn for _, fqn, _ in wrong}]
    where = f"{in_parameters(trial, fqns)}{on_ranks(trial, [rank for rank, _, _ in wrong])}"
    return one_cause(f"ranks hold other slices than planned {where}", tuple(contents_line(trial)))
