"""Ranks hold other slices than planned: other degrees, axes in another order, or an axis that nothing is cut along.

Fitted to the slices that ranks hold, where a plan is a grid of ranks and what of it the wrappers know. Then groups, claims,
bytes and memory are judged by the plan of that.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from harness.diagnosis.assume import another_case, another_reference, lacks_slices
from harness.diagnosis.hypothesis import Broken, Fact, Hypothesis
from harness.diagnosis.words import groups_text, in_order, some, traffic_lines, where_text
from harness.evidence.records import RankEvidence, Run, Wrapper
from harness.judge.result import Cause
from harness.judge.trial import Trial
from harness.plan.grid import coordinate, shard_place, tp_place
from harness.plan.make_plan import make_plan
from harness.plan.memory import parameter_bytes
from harness.plan.plan import Kept, Plan
from harness.plan.slices import BYTES, Slice, chunk, flat_slices, numel, slice_text, slices_of_rank, tp_dim
from harness.spec.dims import AXES, ParallelDims
from harness.spec.measured import Unit

BY_RANK = (
    *("stages", "slices", "flows", "even_flows", "parameter_bytes", "spare_bytes", "units", "gradient_spare"),
    *("after_forward", "padding_after_forward"),
)
"""What a plan says of each rank."""


@dataclass(frozen=True)
class Layout:
    """A way to hold parameters. dims: of the grid of ranks. order: of its axes, outermost first. without: an axis whose ranks
    all hold the same, for nothing is cut along it; `folded`: or FSDP shards over that as well, in the place of what it does."""

    dims: ParallelDims
    order: tuple[str, ...] = AXES
    without: str = ""
    folded: bool = False

    @property
    def known(self) -> ParallelDims:
        """The degrees that the wrappers know of."""
        if not self.without:
            return self.dims
        inner = "cp" if self.dims.cp > 1 else "dp_shard"
        folded = {inner: getattr(self.dims, inner) * self.dims.tp} if self.folded else {}
        return replace(self.dims, **{self.without: 1}, **folded)

    def place(self, rank: int) -> int:
        """Which rank of the usual order stands there."""
        at = np.unravel_index(rank, [getattr(self.dims, axis) for axis in self.order])
        return int(np.ravel_multi_index([at[self.order.index(axis)] for axis in AXES], self.dims.degrees))

    def known_place(self, rank: int) -> int:
        """Which rank holds the same where only the known axes are."""
        if self.folded or not self.without:
            return rank
        at = coordinate(self.dims, rank) | {self.without: 0}
        return int(np.ravel_multi_index([at[axis] for axis in AXES], self.known.degrees))

    def slices(self, rank: int, plan: Plan) -> dict[str, Slice]:
        there = self.known_place(self.place(rank))
        if plan.flat:
            return flat_slices(plan.flat, plan.shapes, *shard_place(self.known, there), tp_place(self.known, there))
        return slices_of_rank(self.known, there, plan.shapes, plan.traits)

    def assume(self, trial: Trial) -> Trial:
        if self.order != AXES:
            trial = renamed(trial, {rank: self.place(rank) for rank in range(self.dims.world_size)})
        if self.dims != trial.case.dims:
            trial = another_case(trial, replace(trial.case, dims=self.dims))
        return replace(trial, plan=self._plan(trial)) if self.without else trial

    def _plan(self, trial: Trial) -> Plan:
        """That of the known axes, once for each place along the other one. Along cp keys and values go as ever."""
        case, own = replace(trial.case, dims=self.known), trial.plan
        small = make_plan(case, trial.traits)
        ranks = range(self.dims.world_size)
        along = {rank: coordinate(self.dims, rank)[self.without] * (not self.folded) for rank in ranks}
        places = {rank: (self.known_place(rank), along[rank]) for rank in ranks}
        groups = {self.without: own.groups[self.without]}
        for axis, lines in small.groups.items():
            copies = itertools.product(sorted({*along.values()}), lines)
            groups[axis] = tuple(tuple(r for r in ranks if places[r] in {(p, a) for p in line}) for a, line in copies)
        mine: dict[str, Any] = {key: {rank: getattr(small, key)[places[rank][0]] for rank in ranks} for key in BY_RANK}
        for key in ("flows", "even_flows") if self.without == "cp" else ():
            for rank, flows in getattr(own, key).items():
                mine[key][rank] += tuple(flow for flow in flows if "keys and values" in flow.role)
        return replace(small, dims=own.dims, groups=groups, outside_bytes=own.outside_bytes, **mine)


def other_layouts(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """The simplest whose slices are those that ranks hold; else what only some parameters lack. Where slices are not derived,
    other degrees, by what wrappers claim."""
    if "placements" in broken and lacks_slices(trial):
        plain = (layout for _, layout in _layouts(trial.case.dims) if layout == Layout(layout.dims))
        yield from (_whole(trial, layout, 1) for layout in plain)
        return
    wrong = wrong_parameters(trial) if {"shard_contents", "placements"} & set(broken) else []
    if not wrong:
        return
    found = [(count, layout) for count, layout in _layouts(trial.case.dims) if _holds(layout, trial, wrong)]
    whole = [(count, layout) for count, layout in found if _holds(layout, trial, trial.plan.shapes)]
    yield from (_whole(trial, layout, count) for count, layout in whole)
    if not whole:
        yield from _strided(trial, wrong)
        yield from (_partial(layout, trial, wrong) for _, layout in found[:1])


def _whole(trial: Trial, layout: Layout, count: int) -> Hypothesis:
    cause = Cause("another layout", "; ".join(_differences(layout, trial.case.dims)))
    return Hypothesis(cause, layout.assume, count, tuple(_lines(trial, layout)), renumbers=layout.order != AXES)


def _layouts(dims: ParallelDims) -> Iterator[tuple[int, Layout]]:
    """Of how many choices it is made: another axis left out, order or degrees; then two of them."""
    axes = [axis for axis in ("dp_replicate", "dp_shard", "tp") if getattr(dims, axis) > 1]
    orders = [tuple(_ordered(order)) for order in itertools.permutations(axes)][1:]
    degrees = [replace(dims, dp_replicate=dims.dp // n, dp_shard=n) for n in range(1, dims.dp + 1) if dims.dp % n == 0]
    degrees.remove(dims)
    without: list[dict[str, Any]] = [{"without": axis} for axis in ("tp", "cp") if getattr(dims, axis) > 1]
    without += [{"without": "tp", "folded": True}] if dims.tp > 1 else []
    yield from ((1, Layout(other)) for other in degrees)
    yield from ((1, Layout(dims, **choice)) for choice in without)
    yield from ((1, Layout(dims, order)) for order in orders)
    yield from ((2, Layout(other, **choice)) for choice in without for other in degrees)
    yield from ((2, Layout(other, order)) for order in orders for other in degrees)


def _ordered(order: Sequence[str]) -> Iterator[str]:
    """Axes of degree 1 and those that are not exchanged keep their places."""
    there = iter(order)
    yield from (next(there) if axis in order else axis for axis in AXES)


def _holds(layout: Layout, trial: Trial, fqns: Iterable[str]) -> bool:
    """Whether every rank holds of these parameters what the layout gives it."""
    for rank, held in trial.holdings.items():
        wanted = layout.slices(rank, trial.plan)
        if any(not _same(held[fqn], wanted[fqn]) for fqn in fqns if fqn in held):
            return False
    return True


def _same(one: Slice | None, other: Slice) -> bool:
    return one is not None and (one == other or numel(one) == 0 == numel(other))


def wrong_parts(trial: Trial) -> list[tuple[int, str, Slice | None]]:
    """(rank, fqn, what it holds of it) where that is not what the plan says."""
    return [
        (rank, fqn, part)
        for rank, held in sorted(trial.holdings.items())
        for fqn, part in held.items()
        if fqn in trial.plan.slices[rank] and not _same(part, trial.plan.slices[rank][fqn])
    ]


def wrong_parameters(trial: Trial) -> list[str]:
    return in_order(trial, (fqn for _, fqn, _ in wrong_parts(trial)))


# ---- some parameters only


def _partial(layout: Layout, trial: Trial, wrong: list[str]) -> Hypothesis:
    """A module that was left out of what was applied to all others."""
    where = f"to {len(wrong)} of {len(trial.plan.shapes)} parameters ({some(wrong)})"
    left_out = "TP" if layout.without == "tp" else "FSDP" if _shards(layout.known) == 1 else ""
    text = f"{left_out} is not applied {where}: every rank of a group holds them whole"
    of_these = "; ".join(_differences(layout, trial.case.dims))
    text = text if left_out else f"another layout is applied {where} than to all others: {of_these}"

    def assume(trial: Trial) -> Trial:
        other = {rank: layout.slices(rank, trial.plan) for rank in trial.plan.slices}
        trial = _in_no_unit(trial, {*wrong}) if left_out == "FSDP" and trial.case.wrapper == "fsdp2" else trial
        own = trial.plan.slices
        return _with_slices(trial, {r: {f: held[f] for f in wrong if f in own[r]} for r, held in other.items()})

    return Hypothesis(Cause("left out of a wrapper", text), assume, 2, tuple(contents_line(trial)))


def _with_slices(trial: Trial, other: Mapping[int, Mapping[str, Slice]]) -> Trial:
    """As if the plan had ranks hold these."""
    plan = trial.plan
    slices = {rank: {**held, **other[rank]} for rank, held in plan.slices.items()}
    size = {rank: parameter_bytes(trial.case, trial.traits, rank, held, plan.flat) for rank, held in slices.items()}
    shards, after = trial.case.shards, {}
    for rank, kept in plan.after_forward.items():
        freed = (fqn for fqn in other[rank] if fqn not in kept or kept[fqn].degree == shards)
        after[rank] = kept | {f: Kept(shards, numel(slices[rank][f]) * BYTES[trial.case.training.dtype]) for f in freed}
    return replace(trial, plan=replace(plan, slices=slices, parameter_bytes=size, after_forward=after))


def _in_no_unit(trial: Trial, fqns: set[str]) -> Trial:
    """As if FSDP2 had been told to leave them alone: nobody gathers them."""
    plan, units = trial.plan, {}
    for rank, of_rank in plan.units.items():
        left = [tuple(fqn for fqn in unit if fqn not in fqns) for unit in of_rank]
        units[rank] = tuple(Unit(unit, plan.after_forward[rank][unit[0]].degree) for unit in left if unit)
    alone = make_plan(trial.case, trial.traits.with_units(units))
    return replace(trial, plan=replace(alone, traits=plan.traits))


def _strided(trial: Trial, wrong: list[str]) -> Iterator[Hypothesis]:
    """Rows dealt out over dp_shard first and tp inside, so that what a tp rank gathers are not its rows in a row."""
    dims, plan, rows = trial.case.dims, trial.plan, {}
    if plan.flat or any(tp_dim(fqn) != 0 for fqn in wrong):
        return
    for rank in plan.slices:
        (shards, index), tp = shard_place(dims, rank), coordinate(dims, rank)["tp"]
        held = [fqn for fqn in wrong if fqn in plan.slices[rank]]
        rows[rank] = {f: chunk(chunk((0, plan.shapes[f][0]), shards, index), dims.tp, tp) for f in held}
    firsts = {r: {f: part[0] for f, part in held.items() if f in wrong and part} for r, held in trial.holdings.items()}
    if any(first != rows[rank] for rank, first in firsts.items()):
        return

    def assume(trial: Trial) -> Trial:
        weights = {fqn: np.array(value) for fqn, value in trial.reference.weights.items()}
        for rank, held in trial.plan.slices.items():
            for fqn, (first, last) in rows[rank].items():
                start, stop = held[fqn][0]
                weights[fqn][start:stop] = trial.reference.weights[fqn][first:last]
        return another_reference(trial, weights=weights)

    where = f"{len(wrong)} of {len(plan.shapes)} parameters ({some(wrong)})"
    text = f"{where} are cut by dp_shard first and by tp inside, requested tp first (strided shards)"
    yield Hypothesis(Cause("strided shards", text), assume, 1, tuple(contents_line(trial)))


def other_slices(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """Slices of the seed weights, but of no layout that one mistake leads to."""
    wrong = wrong_parts(trial) if "shard_contents" in broken and "initial_weights" not in broken else []
    if wrong:
        where = where_text(trial, [(rank, fqn) for rank, fqn, _ in wrong])
        cause = Cause("other slices", "ranks hold other slices than planned", where)
        yield Fact(cause, ("shard_contents", "placements"), tuple(contents_line(trial)))


# ---- words


def _differences(layout: Layout, dims: ParallelDims) -> Iterator[str]:
    if layout.folded:
        yield _fsdp_over_tp(layout, dims)
        return
    if layout.without == "tp":
        yield f"TP not applied: every rank of a tp group holds whole weights, requested tp {dims.tp}"
    replicate, shard = layout.dims.dp_replicate, layout.dims.dp_shard
    exchanged = (replicate, shard) == (dims.dp_shard, dims.dp_replicate) != (dims.dp_replicate, dims.dp_shard)
    if layout.order != AXES and not exchanged:
        shown = [axis for axis in layout.order if getattr(dims, axis) > 1]
        wanted = [axis for axis in AXES if axis in shown]
        yield f"axes in the wrong order: parameters lie as on a mesh ({', '.join(shown)}), requested ({', '.join(wanted)})"
    if exchanged and min(replicate, shard) > 1:
        held = f"parameters are sharded over {shard * dims.cp} ranks and replicated {replicate} times"
        yield f"dp_replicate and dp_shard are swapped: {held}, requested {_requested(dims)}"
    elif _shards(layout.known) != _shards(dims):
        yield _other_strategy(layout, dims)


def _shards(dims: ParallelDims) -> int:
    return dims.dp_shard * dims.cp


def _requested(dims: ParallelDims) -> str:
    if _shards(dims) == 1:
        return f"whole parameters on each of {dims.dp_replicate} ranks"
    return f"{_shards(dims)}" + (f", replicated {dims.dp_replicate} times" if dims.dp_replicate > 1 else "")


def _fsdp_over_tp(layout: Layout, dims: ParallelDims) -> str:
    axes = " x ".join(axis for axis in ("dp_shard", "cp", "tp") if getattr(layout.dims, axis) > 1)
    requested = f"{_requested(dims)} and tp {dims.tp}" if dims.dp * dims.cp > 1 else f"tp {dims.tp}"
    held = f"parameters are sharded over {_shards(layout.known)} ranks"
    return f"TP not applied, FSDP over {axes} in its place: {held}, requested {requested}"


def _other_strategy(layout: Layout, dims: ParallelDims) -> str:
    """The degree of sharding that is observed, and what that is called."""
    ranks, degree = dims.dp * dims.cp, _shards(layout.known)
    times = f" and replicated {ranks // degree} times" if degree < ranks else ""
    along = " x ".join(axis for axis in ("dp_shard", "cp") if getattr(layout.known, axis) > 1)
    held = f"parameters are sharded over {degree} ranks{f' along {along}' if dims.cp > 1 else ''}{times}"
    if degree == 1:
        kind = "dp" if dims.cp == 1 else "cp" if dims.dp == 1 else "dp and cp"
        held = f"every {kind} rank holds whole parameters"
    if layout.without == "cp" and 1 < layout.known.dp_shard == dims.dp_shard:
        return f"FSDP ran over dp_shard alone, cp ranks hold copies: {held.removesuffix(times)}, requested {_requested(dims)}"
    requested, ran = ("DDP" if n == 1 else "FSDP" if n == ranks else "HSDP" for n in (_shards(dims), degree))
    text = f"{requested} ran as {ran}" if requested != ran else f"{ran} ran with other degrees"
    return f"{text}: {held}, requested {_requested(dims)}"


def _lines(trial: Trial, layout: Layout) -> Iterator[tuple[str, str]]:
    """Groups that really carried traffic, contents, bytes: expected and observed."""
    used, ran = _groups_in_use(trial), layout.assume(trial).plan
    there = {layout.place(rank): rank for rank in range(layout.dims.world_size)}
    for label, axis, other in (
        ("shard groups", trial.plan.shard_axis, ran.shard_axis),
        ("replicate groups", "dp_replicate", "dp_replicate"),
        ("tp groups", "tp", "tp"),
    ):
        if axis in trial.plan.groups:
            lines = [tuple(sorted(there[rank] for rank in line)) for line in ran.groups.get(other, ())]
            seen = _use_text(trial, axis, [line for line in sorted(lines) if line in used], used)
            yield label, f"expected {groups_text(trial.plan.groups[axis])}   observed {seen}"
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
    return trial.run.groups_on_all(
        lambda evidence: (
            call.ranks
            for call in evidence.collectives
            if call.phase in ("forward", "backward") and "float" in call.dtype
        )
    )


def _use_text(trial: Trial, axis: str, as_this: list[tuple[int, ...]], used: set[tuple[int, ...]]) -> str:
    if as_this:
        return groups_text(as_this)
    wanted = set(trial.plan.groups[axis])
    if wanted & used:
        return "none in use as this axis (what ran over the same ranks is of another)"
    exist = trial.run.groups_on_all(lambda evidence: (group.ranks for group in evidence.groups)) & wanted
    return "none in use" + (" (the groups exist, no collective ran over them)" if exist == wanted else "")


# ---- each rank by the number of another


Names = Mapping[int, int]


def renamed(trial: Trial, names: Names) -> Trial:
    """names: a permutation of the ranks."""
    repeat = _run(trial.repeat, names) if trial.repeat else None
    return replace(trial, run=_run(trial.run, names), repeat=repeat)


def _run(run: Run, names: Names) -> Run:
    ranks = {names[rank]: _evidence(evidence, names) for rank, evidence in run.ranks.items()}
    exits = tuple(sorted((replace(exit, rank=names[exit.rank]) for exit in run.exits), key=lambda exit: exit.rank))
    return replace(run, ranks=dict(sorted(ranks.items())), exits=exits)


def _evidence(evidence: RankEvidence, names: Names) -> RankEvidence:
    def line(ranks: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted(names[rank] for rank in ranks))

    def mesh(of: Any) -> Any:
        return None if of is None else np.vectorize(names.get)(np.array(of)).tolist()

    def wrapper(of: Wrapper) -> Wrapper:
        return replace(of, shard_ranks=line(of.shard_ranks), replicate_ranks=line(of.replicate_ranks))

    calls = (replace(c, ranks=line(c.ranks), peer=names.get(c.peer, c.peer)) for c in evidence.collectives)  # type: ignore[arg-type]
    return replace(
        evidence,
        rank=names[evidence.rank],
        groups=tuple(replace(group, ranks=line(group.ranks)) for group in evidence.groups),
        collectives=tuple(calls),
        parameters=tuple(replace(tensor, mesh=mesh(tensor.mesh)) for tensor in evidence.parameters),
        structure={module: wrapper(of) for module, of in evidence.structure.items()},
    )
