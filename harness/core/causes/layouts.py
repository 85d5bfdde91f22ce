"""Hypotheses that ranks hold slices of another layout: other degrees, another order, an axis or a module left out.

Fitted to the slices that ranks hold; groups, claims, bytes and memory are then judged by the plan of that.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from harness.core.case.dims import AXES, ParallelDims
from harness.core.case.measured import Unit
from harness.core.causes.assume import assume_case, assume_reference, lacks_slices
from harness.core.causes.hypothesis import Broken, Hypothesis
from harness.core.causes.words import groups_text, in_parameters_text, shorten_names, sort_fqns, traffic_lines
from harness.core.evidence.records import RankEvidence, Run, Wrapper
from harness.core.judge.result import Cause, Lines
from harness.core.judge.trial import Trial
from harness.core.plan.grid import coordinate_of_rank, shard_degree_and_index
from harness.core.plan.kinds import PerRank
from harness.core.plan.make_plan import make_plan
from harness.core.plan.memory import parameter_bytes
from harness.core.plan.plan import Kept, Plan
from harness.core.plan.slices import BYTES, Interval, Slice, chunk_interval, numel, slice_text, tp_dim

PLAN_FIELDS_BY_RANK = (
    *("stages", "slices", "flows", "even_flows", "parameter_bytes", "spare_bytes", "units", "gradient_spare"),
    *("after_forward", "padding_after_forward", "last_flows"),
)
"""What a plan says of each rank."""
REORDERED_AXES = ("dp_replicate", "dp_shard", "tp")
"""Axes whose order is tried."""


@dataclass(frozen=True)
class Layout:
    """A way in which ranks hold parameters: degrees, the order of axes, and an axis along which nothing is cut."""

    dims: ParallelDims
    """Degrees of the grid of ranks."""
    order: tuple[str, ...] = AXES
    """Its axes, outermost first."""
    without: str = ""
    """An axis whose ranks all hold the same, for nothing is cut along it."""
    folded: bool = False
    """Whether FSDP shards over that axis as well, in the place of what it does."""

    @property
    def known_dims(self) -> ParallelDims:
        """Return the degrees that the wrappers know of: `dims`, but 1 for the axis `without`.

        If it is folded, tp's degree multiplies that of cp, or of dp_shard if cp is 1. If `without` is empty, they are
        `dims`.
        """
        if not self.without:
            return self.dims
        inner = "cp" if self.dims.cp > 1 else "dp_shard"
        folded = {inner: getattr(self.dims, inner) * self.dims.tp} if self.folded else {}
        return replace(self.dims, **{self.without: 1}, **folded)

    def usual_rank(self, rank: int) -> int:
        """Return the rank that has this rank's mesh coordinate if the axes are in the usual order."""
        degrees = [getattr(self.dims, axis) for axis in self.order]
        indices = np.unravel_index(rank, degrees)
        usual_indices = [indices[self.order.index(axis)] for axis in AXES]
        return int(np.ravel_multi_index(usual_indices, self.dims.degrees))

    def _known_rank(self, rank: int) -> int:
        """Return the rank of the grid without the axis `without` that holds the same slices.

        The rank itself if that is folded or empty.
        """
        if self.folded or not self.without:
            return rank
        index_by_axis = {**coordinate_of_rank(self.dims, rank), self.without: 0}
        return int(np.ravel_multi_index([index_by_axis[axis] for axis in AXES], self.known_dims.degrees))

    def assume(self, trial: Trial) -> Trial:
        """Return the trial as if this layout had been requested.

        If the axes have another order, its ranks are renumbered.
        """
        if self.order != AXES:
            trial = renumber_trial(trial, {rank: self.usual_rank(rank) for rank in range(self.dims.world_size)})
        return self.with_plan(trial)

    def with_plan(self, trial: Trial) -> Trial:
        """Return the trial with the plan of this layout, for ranks that are numbered in the usual order."""
        if self.dims != trial.case.dims:
            trial = assume_case(trial, replace(trial.case, dims=self.dims))
        return replace(trial, plan=self._plan_of_known_axes(trial)) if self.without else trial

    def _plan_of_known_axes(self, trial: Trial) -> Plan:
        """Return the plan of the known axes, repeated for each index along the axis `without`.

        The K/V exchange over cp, and bytes outside of passes, stay as they were.
        """
        own = trial.plan
        small = make_plan(replace(trial.case, dims=self.known_dims), trial.traits)
        ranks = range(self.dims.world_size)
        along = {rank: coordinate_of_rank(self.dims, rank)[self.without] * (not self.folded) for rank in ranks}
        known_rank = {rank: self._known_rank(rank) for rank in ranks}
        rank_at = {(known_rank[rank], along[rank]): rank for rank in ranks}
        groups = {self.without: own.groups[self.without]}
        for axis, lines in small.groups.items():
            copies = []
            for index, line in itertools.product(sorted({*along.values()}), lines):
                copies.append(tuple(sorted(rank_at[known, index] for known in line)))
            groups[axis] = tuple(copies)

        def each(key: str) -> PerRank[Any]:
            """Return a field of the plan, by rank of the whole grid."""
            of_known = getattr(small, key)
            of_all = getattr(own, key)
            keeps_exchange = self.without == "cp" and key in ("flows", "even_flows", "last_flows")

            def value_of(rank: int) -> Any:
                """Return the known rank's value; for flows without cp, with the K/V exchange of the requested plan."""
                if not keeps_exchange:
                    return of_known[known_rank[rank]]
                exchange = (flow for flow in of_all[rank] if "keys and values" in flow.role)
                return (*of_known[known_rank[rank]], *exchange)

            return PerRank({rank: rank for rank in ranks}, value_of)

        by_rank: dict[str, Any] = {key: each(key) for key in PLAN_FIELDS_BY_RANK}
        return replace(small, dims=own.dims, groups=groups, outside_bytes=own.outside_bytes, **by_rank)


def other_layouts(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Yield the hypotheses of layouts whose slices are exactly those that ranks hold.

    If none fits all parameters, yield strided shards, and a module that was left out. Where a job declares only a
    layout, yield other degrees of dp_replicate and dp_shard, by what wrappers claim. Nothing if slices are right, or
    unless `shard_contents` or `placements` fails.
    """
    if lacks_slices(trial) and ("placements" in broken or ("exchange" in broken and not trial.has_claims_or_contents)):
        yield from (_layout_hypothesis(trial, Layout(dims), 1) for dims in _other_degrees(trial.case.dims))
        return
    is_judged = {"shard_contents", "placements"} & set(broken)
    wrong = sort_fqns(trial, (fqn for _, fqn, _ in wrong_slices(trial))) if is_judged else []
    if not wrong:
        return
    candidates = [
        (count, layout) for count, layout in candidate_layouts(trial.case.dims) if _ranks_hold(layout, trial, wrong)
    ]
    explaining_all = [(count, layout) for count, layout in candidates if _ranks_hold(layout, trial, trial.plan.shapes)]
    yield from (_layout_hypothesis(trial, layout, count) for count, layout in explaining_all)
    if not explaining_all:
        yield from _strided_hypotheses(trial, wrong)
        yield from (_left_out_hypothesis(layout, trial, wrong) for _, layout in candidates[:1])


def candidate_layouts(dims: ParallelDims) -> Iterator[tuple[int, Layout]]:
    """Yield (number of choices, layout) of all other layouts with one choice, then with two.

    A choice is other degrees, another order of axes, or an axis along which nothing is cut.
    """
    movable = (axis for axis in REORDERED_AXES if getattr(dims, axis) > 1)
    orders = [tuple(_reorder_axes(order)) for order in itertools.permutations(movable)][1:]
    choices: list[dict[str, Any]] = [{"without": axis} for axis in ("tp", "cp") if getattr(dims, axis) > 1]
    if dims.tp > 1:
        choices.append({"without": "tp", "folded": True})
    choices += [{"order": order} for order in orders]
    degrees = _other_degrees(dims)
    yield from ((1, Layout(other)) for other in degrees)
    yield from ((1, Layout(dims, **choice)) for choice in choices)
    for choice in choices:
        for other in degrees:
            yield 2, Layout(other, **choice)


def _other_degrees(dims: ParallelDims) -> list[ParallelDims]:
    """Return the grids with other degrees of dp_replicate and dp_shard whose product is the same.

    Empty if there are none.
    """
    degrees = [replace(dims, dp_replicate=dims.dp // n, dp_shard=n) for n in range(1, dims.dp + 1) if dims.dp % n == 0]
    return [other for other in degrees if other != dims]


def _reorder_axes(order: Sequence[str]) -> Iterator[str]:
    """Yield all axes, with those of `order` in that order at the places of these axes. All others keep their places."""
    moved_axes = iter(order)
    yield from (next(moved_axes) if axis in order else axis for axis in AXES)


def _ranks_hold(layout: Layout, trial: Trial, fqns: Iterable[str]) -> bool:
    """Return whether every rank holds of these parameters exactly the slice that the layout gives it.

    Parameters that are not on record count as right.
    """
    planned_slices = layout.with_plan(trial).plan.slices
    for rank in sorted(trial.local_slices):
        local_shards = trial.local_slices[rank]
        for fqn in fqns:
            if fqn in local_shards and not _is_same_slice(
                local_shards[fqn], planned_slices[layout.usual_rank(rank)][fqn]
            ):
                return False
    return True


def _is_same_slice(held_slice: Slice | None, planned_slice: Slice) -> bool:
    """Return whether a rank holds the planned slice.

    All slices without elements are equal; an unknown one (None) is not.
    """
    if held_slice is None:
        return False
    return held_slice == planned_slice or numel(held_slice) == 0 == numel(planned_slice)


def wrong_slices(trial: Trial) -> list[tuple[int, str, Slice | None]]:
    """Return (rank, fqn, the slice that the rank holds) where that is not the plan's.

    The slice is None if its bytes were not found.
    """
    wrong = []
    for rank, local_shards in sorted(trial.local_slices.items()):
        for fqn, part in local_shards.items():
            planned_slices = trial.plan.slices[rank]
            if fqn in planned_slices and not _is_same_slice(part, planned_slices[fqn]):
                wrong.append((rank, fqn, part))
    return wrong


# ---- words


def _layout_hypothesis(trial: Trial, layout: Layout, count: int) -> Hypothesis:
    """Return the hypothesis that all parameters lie as this layout has them. count: how many choices it is made of."""
    observed, expected = _layout_texts(layout, trial.case.dims)
    details: list[tuple[str, object]] = list(vars(layout.dims).items()) if layout.dims != trial.case.dims else []
    details += [("order", layout.order)] if layout.order != AXES else []
    details += [("without", layout.without), ("folded", layout.folded)] if layout.without else []
    cause = Cause("another layout", observed, expected=expected, details=tuple(details))
    lines = (*_group_lines(trial, layout), *wrong_slices_line(trial), *traffic_lines(trial))
    return Hypothesis(cause, layout.assume, count, lines, renumbers_ranks=layout.order != AXES)


def _layout_texts(layout: Layout, dims: ParallelDims) -> tuple[str, str]:
    """Return the texts of (what is observed of a layout, what was requested instead). dims: the requested degrees."""
    requested_shards = _shard_degree(dims)
    shards = _shard_degree(layout.known_dims)
    replicas = dims.dp * dims.cp * (dims.tp if layout.folded else 1) // shards
    shard_axes = " x ".join(axis for axis in ("dp_shard", "cp") if getattr(layout.known_dims, axis) > 1)
    sharded = f"parameters are sharded over {shards} ranks"
    if dims.cp > 1:
        sharded += f" along {shard_axes}"
    if replicas > 1:
        sharded += f", replicated {replicas} times"
    requested_text = f"{requested_shards}"
    if dims.dp_replicate > 1:
        requested_text += f", replicated {dims.dp_replicate} times"
    if requested_shards == 1:
        requested_text = f"whole parameters on each of {dims.dp_replicate} ranks"
    if layout.folded:
        return f"FSDP over tp in place of TP: {sharded}", f"{requested_text} and tp {dims.tp}"
    texts = []
    if layout.without == "tp":
        texts.append(("TP not applied: every rank of a tp group holds whole weights", f"tp {dims.tp}"))
    if layout.order != AXES:
        observed_axes = [axis for axis in layout.order if getattr(dims, axis) > 1]
        usual_axes = [axis for axis in AXES if getattr(dims, axis) > 1]
        observed_order = f"axes in the wrong order: parameters lie as on a mesh ({', '.join(observed_axes)})"
        texts.append((observed_order, f"({', '.join(usual_axes)})"))
    if shards != requested_shards or layout.dims != dims:
        requested_wrapper = _wrapper_name(requested_shards, dims)
        observed_wrapper = _wrapper_name(shards, dims)
        if shards == 1:
            sharded = f"every {_data_axes_text(dims)} rank holds whole parameters"
        name = f"{requested_wrapper} ran as {observed_wrapper}"
        if requested_wrapper == observed_wrapper:
            name = f"{observed_wrapper} ran with other degrees"
        texts.append((f"{name}: {sharded}", requested_text))
    observed, requested = zip(*texts, strict=True)
    return "; ".join(observed), "; ".join(requested)


def _wrapper_name(shards: int, dims: ParallelDims) -> str:
    """Return the field's name of cutting parameters over so many data-parallel and cp ranks: DDP, FSDP or HSDP."""
    if shards == 1:
        return "DDP"
    return "FSDP" if shards == dims.dp * dims.cp else "HSDP"


def _shard_degree(dims: ParallelDims) -> int:
    """Return the number of ranks over which FSDP cuts a parameter, cp ranks included."""
    return dims.dp_shard * dims.cp


def _group_lines(trial: Trial, layout: Layout) -> Iterator[tuple[str, str]]:
    """Yield a line on shard groups and one on replicate groups: the planned ones, and the layout's that were used.

    Used is a group over which floats moved in forward and backward. An axis without planned groups has no line.
    """
    used = trial.run.groups_on_all(
        lambda evidence: (
            call.ranks
            for call in evidence.collectives
            if call.phase in ("forward", "backward") and "float" in call.dtype
        )
    )
    existing = trial.run.groups_on_all(lambda evidence: (group.ranks for group in evidence.groups))
    ran = layout.assume(trial).plan
    rank_at = {layout.usual_rank(rank): rank for rank in range(layout.dims.world_size)}
    for axis, axis_that_ran in ((trial.plan.shard_axis, ran.shard_axis), ("dp_replicate", "dp_replicate")):
        planned = trial.plan.groups.get(axis, ())
        used_groups = []
        for line in ran.groups.get(axis_that_ran, ()):
            group = tuple(sorted(rank_at[rank] for rank in line))
            if group in used:
                used_groups.append(group)
        if not planned:
            continue
        observed = groups_text(sorted(used_groups))
        if not observed:
            observed = "none in use"
            if {*planned} <= existing and not {*planned} & used:
                observed += " (the groups exist, no collective ran over them)"
        label = "shard groups" if axis == trial.plan.shard_axis else "replicate groups"
        yield label, f"expected {groups_text(planned)}   observed {observed}"


def wrong_slices_line(trial: Trial) -> Lines:
    """Return the line on how many parameters are not held as planned, with the first of them. Empty if all are.

    Slices without elements come last.
    """

    def is_held_empty(wrong_part: tuple[int, str, Slice | None]) -> bool:
        return wrong_part[2] is not None and not numel(wrong_part[2])

    wrong = sorted(wrong_slices(trial), key=is_held_empty)
    if not wrong:
        return ()
    rank, fqn, part = wrong[0]
    shape = trial.plan.shapes[fqn]
    flat = bool(trial.plan.flat)
    observed = slice_text(part, shape, flat=flat) if part is not None else "bytes that are nowhere in it"
    expected = slice_text(trial.plan.slices[rank][fqn], shape, flat=flat)
    count = (
        f"{len({fqn for _, fqn, _ in wrong})} of {len(trial.plan.shapes)} parameters are held otherwise than planned"
    )
    return (("contents", f"{count}; {fqn} on rank {rank}: expected {expected}, observed {observed}"),)


# ---- some parameters only


def _data_axes_text(dims: ParallelDims) -> str:
    """Return a text of the axes over which FSDP shards: "dp", "cp" or "dp and cp"."""
    if dims.cp == 1:
        return "dp"
    return "cp" if dims.dp == 1 else "dp and cp"


def _left_out_hypothesis(layout: Layout, trial: Trial, wrong: list[str]) -> Hypothesis:
    """Return the hypothesis that these parameters lie as this layout has them, and all others as planned.

    That is so if TP or FSDP was not applied to a module. wrong: fqns in the model's order.
    """
    left_out = ""
    if layout.without == "tp":
        left_out = "TP"
    elif _shard_degree(layout.known_dims) == 1:
        left_out = "FSDP"
    observed = (
        f"{left_out} is not applied" if left_out else f"for some parameters {_layout_texts(layout, trial.case.dims)[0]}"
    )

    def assume(trial: Trial) -> Trial:
        """Return the trial as if the plan had these parameters lie as the layout has them."""
        layout_slices = layout.with_plan(trial).plan.slices
        planned_slices = trial.plan.slices
        if left_out == "FSDP" and trial.case.wrapper == "fsdp2":
            trial = _without_units_of(trial, {*wrong})
        changed = {}
        for rank, slices in planned_slices.items():
            changed[rank] = {fqn: layout_slices[rank][fqn] for fqn in wrong if fqn in slices}
        return _with_slices(trial, changed)

    details = (("left_out", left_out), ("parameters", tuple(wrong)))
    cause = Cause("left out of a wrapper", observed, in_parameters_text(trial, wrong), details=details)
    return Hypothesis(cause, assume, 2, wrong_slices_line(trial))


def _with_slices(trial: Trial, changed: Mapping[int, Mapping[str, Slice]]) -> Trial:
    """Return the trial with a plan in which ranks hold these slices, by rank and fqn, in place of the planned ones.

    Bytes of parameters, and what is kept after forward, follow.
    """
    plan = trial.plan
    shards = trial.case.shards
    slices = {rank: {**planned, **changed[rank]} for rank, planned in plan.slices.items()}
    sizes = {}
    for rank, local_shards in slices.items():
        sizes[rank] = parameter_bytes(trial.case, trial.traits, rank, local_shards, plan.flat)
    after_forward = {}
    for rank, kept in plan.after_forward.items():
        freed = (fqn for fqn in changed[rank] if fqn not in kept or kept[fqn].degree == shards)
        kept_of_freed = {}
        for fqn in freed:
            kept_of_freed[fqn] = Kept(shards, numel(slices[rank][fqn]) * BYTES[trial.case.training.dtype])
        after_forward[rank] = kept | kept_of_freed
    return replace(trial, plan=replace(plan, slices=slices, parameter_bytes=sizes, after_forward=after_forward))


def _without_units_of(trial: Trial, fqns: set[str]) -> Trial:
    """Return the trial as if FSDP2 had been configured to ignore these parameters: no unit gathers them."""
    plan = trial.plan
    units = {}
    for rank, planned_units in plan.units.items():
        units_of_rank = []
        for planned_unit in planned_units:
            parameters = tuple(fqn for fqn in planned_unit if fqn not in fqns)
            if parameters:
                units_of_rank.append(Unit(parameters, plan.after_forward[rank][parameters[0]].degree))
        units[rank] = tuple(units_of_rank)
    plan_of_units = make_plan(trial.case, trial.traits.with_units(units))
    return replace(trial, plan=replace(plan_of_units, traits=plan.traits))


def _strided_hypotheses(trial: Trial, wrong: list[str]) -> Iterator[Hypothesis]:
    """Yield the hypothesis that rows are cut over dp_shard first and over tp inside: a tp rank's are not consecutive.

    Nothing unless ranks hold exactly these rows of all wrong parameters, or if parameters are flattened.
    """
    dims = trial.case.dims
    plan = trial.plan
    if plan.flat or any(tp_dim(fqn) != 0 for fqn in wrong):
        return
    rows: dict[int, dict[str, Interval]] = {}
    for rank, slices in plan.slices.items():
        shards, index = shard_degree_and_index(dims, rank)
        tp_index = coordinate_of_rank(dims, rank)["tp"]
        rows[rank] = {}
        for fqn in wrong:
            if fqn in slices:
                rows_of_shard = chunk_interval((0, plan.shapes[fqn][0]), shards, index)
                rows[rank][fqn] = chunk_interval(rows_of_shard, dims.tp, tp_index)
    for rank, local_shards in trial.local_slices.items():
        held_rows = {fqn: part[0] for fqn, part in local_shards.items() if fqn in wrong and part}
        if held_rows != rows[rank]:
            return

    def assume(trial: Trial) -> Trial:
        """Return the trial as if the reference's weights had the rows that ranks hold, at the planned places."""
        weights = {fqn: np.array(value) for fqn, value in trial.reference.weights.items()}
        for rank, planned_slices in trial.plan.slices.items():
            for fqn, (first, last) in rows[rank].items():
                start, stop = planned_slices[fqn][0]
                weights[fqn][start:stop] = trial.reference.weights[fqn][first:last]
        return assume_reference(trial, weights=weights)

    where = f"{len(wrong)} of {len(plan.shapes)} parameters ({shorten_names(wrong)})"
    text = f"{where} are cut by dp_shard first and by tp inside (strided shards)"
    cause = Cause("strided shards", text, expected="tp first", details=(("parameters", tuple(wrong)),))
    yield Hypothesis(cause, assume, 1, wrong_slices_line(trial))


# ---- each rank by the number of another


def renumber_trial(trial: Trial, names: Mapping[int, int]) -> Trial:
    """Return the trial with other numbers of its ranks. names: old rank -> new rank, a permutation."""
    repeat = _renumber_run(trial.repeat, names) if trial.repeat else None
    return replace(trial, run=_renumber_run(trial.run, names), repeat=repeat)


def _renumber_run(run: Run, names: Mapping[int, int]) -> Run:
    """Return a run whose ranks have other numbers, sorted by these. names: old rank -> new rank."""
    ranks = {names[rank]: _renumber_evidence(evidence, names) for rank, evidence in run.ranks.items()}
    exits = tuple(sorted((replace(exit, rank=names[exit.rank]) for exit in run.exits), key=lambda exit: exit.rank))
    return replace(run, ranks=dict(sorted(ranks.items())), exits=exits)


def _renumber_evidence(evidence: RankEvidence, names: Mapping[int, int]) -> RankEvidence:
    """Return a rank's evidence with other numbers for all ranks in it. names: old rank -> new rank."""

    def line(ranks: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted(names[rank] for rank in ranks))

    def mesh(ranks: Any) -> Any:
        return None if ranks is None else np.vectorize(names.get)(np.array(ranks)).tolist()

    def wrapper(claim: Wrapper) -> Wrapper:
        return replace(claim, shard_ranks=line(claim.shard_ranks), replicate_ranks=line(claim.replicate_ranks))

    calls = []
    for call in evidence.collectives:
        peer = names.get(call.peer, call.peer)  # type: ignore[arg-type]
        calls.append(replace(call, ranks=line(call.ranks), peer=peer))
    return replace(
        evidence,
        rank=names[evidence.rank],
        groups=tuple(replace(group, ranks=line(group.ranks)) for group in evidence.groups),
        collectives=tuple(calls),
        parameters=tuple(replace(tensor, mesh=mesh(tensor.mesh)) for tensor in evidence.parameters),
        structure={module: wrapper(claim) for module, claim in evidence.structure.items()},
    )
