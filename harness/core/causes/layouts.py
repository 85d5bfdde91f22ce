"""Ranks hold other slices than planned: other degrees, another order, an axis that nothing is cut along, a module left out.

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
from harness.core.causes.assume import another_case, another_reference, lacks_slices
from harness.core.causes.hypothesis import Broken, Hypothesis
from harness.core.causes.words import groups_text, in_order, in_parameters, some, traffic_lines
from harness.core.evidence.records import RankEvidence, Run, Wrapper
from harness.core.judge.result import Cause, Lines
from harness.core.judge.trial import Trial
from harness.core.plan.grid import coordinate, shard_place
from harness.core.plan.kinds import PerRank
from harness.core.plan.make_plan import make_plan
from harness.core.plan.memory import parameter_bytes
from harness.core.plan.plan import Kept, Plan
from harness.core.plan.slices import BYTES, Slice, chunk, numel, slice_text, tp_dim

BY_RANK = (
    *("stages", "slices", "flows", "even_flows", "parameter_bytes", "spare_bytes", "units", "gradient_spare"),
    *("after_forward", "padding_after_forward", "last_flows"),
)
"""What a plan says of each rank."""
MOVED = ("dp_replicate", "dp_shard", "tp")
"""Axes whose order is tried."""


@dataclass(frozen=True)
class Layout:
    """A way to hold parameters."""

    dims: ParallelDims
    """Degrees of the grid of ranks."""
    order: tuple[str, ...] = AXES
    """Its axes, outermost first."""
    without: str = ""
    """An axis whose ranks all hold the same, for nothing is cut along it."""
    folded: bool = False
    """Whether FSDP shards over that axis as well, in the place of what it does."""

    @property
    def known(self) -> ParallelDims:
        """The degrees that the wrappers know of."""
        if not self.without:
            return self.dims
        inner = "cp" if self.dims.cp > 1 else "dp_shard"
        folded = {inner: getattr(self.dims, inner) * self.dims.tp} if self.folded else {}
        return replace(self.dims, **{self.without: 1}, **folded)

    def place(self, rank: int) -> int:
        """Return which rank of the usual order stands there."""
        at = np.unravel_index(rank, [getattr(self.dims, axis) for axis in self.order])
        return int(np.ravel_multi_index([at[self.order.index(axis)] for axis in AXES], self.dims.degrees))

    def _known_place(self, rank: int) -> int:
        """Return which rank holds the same where only the known axes are."""
        if self.folded or not self.without:
            return rank
        at = {**coordinate(self.dims, rank), self.without: 0}
        return int(np.ravel_multi_index([at[axis] for axis in AXES], self.known.degrees))

    def assume(self, trial: Trial) -> Trial:
        if self.order != AXES:
            trial = renamed(trial, {rank: self.place(rank) for rank in range(self.dims.world_size)})
        return self.planned(trial)

    def planned(self, trial: Trial) -> Trial:
        """Return the trial with the plan of it, by the numbers that ranks have in the usual order."""
        if self.dims != trial.case.dims:
            trial = another_case(trial, replace(trial.case, dims=self.dims))
        return replace(trial, plan=self._plan(trial)) if self.without else trial

    def _plan(self, trial: Trial) -> Plan:
        """Return that of the known axes, once for each place along the other one. Along cp keys and values go as ever."""
        own, small = trial.plan, make_plan(replace(trial.case, dims=self.known), trial.traits)
        ranks = range(self.dims.world_size)
        along = {rank: coordinate(self.dims, rank)[self.without] * (not self.folded) for rank in ranks}
        place = {rank: self._known_place(rank) for rank in ranks}
        there = {(place[rank], along[rank]): rank for rank in ranks}
        groups = {self.without: own.groups[self.without]}
        for axis, lines in small.groups.items():
            copies = itertools.product(sorted({*along.values()}), lines)
            groups[axis] = tuple(tuple(sorted(there[p, a] for p in line)) for a, line in copies)

        def each(key: str) -> PerRank[Any]:
            of_known, of_all = getattr(small, key), getattr(own, key)
            between = self.without == "cp" and key in ("flows", "even_flows", "last_flows")

            def made(rank: int) -> Any:
                kept = (flow for flow in of_all[rank] if "keys and values" in flow.role) if between else ()
                return (*of_known[place[rank]], *kept) if between else of_known[place[rank]]

            return PerRank({rank: rank for rank in ranks}, made)

        by_rank: dict[str, Any] = {key: each(key) for key in BY_RANK}
        return replace(small, dims=own.dims, groups=groups, outside_bytes=own.outside_bytes, **by_rank)


def other_layouts(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Yield those whose slices are the ones that ranks hold; else what only some parameters lack. Where slices are not derived,
    other degrees, by what wrappers claim."""
    if lacks_slices(trial) and ("placements" in broken or ("exchange" in broken and not trial.holds_told)):
        yield from (_whole(trial, Layout(other), 1) for other in _degrees(trial.case.dims))
        return
    looked = {"shard_contents", "placements"} & set(broken)
    wrong = in_order(trial, (fqn for _, fqn, _ in wrong_parts(trial))) if looked else []
    if not wrong:
        return
    found = [(count, layout) for count, layout in layouts(trial.case.dims) if _holds(layout, trial, wrong)]
    whole = [(count, layout) for count, layout in found if _holds(layout, trial, trial.plan.shapes)]
    yield from (_whole(trial, layout, count) for count, layout in whole)
    if not whole:
        yield from _strided(trial, wrong)
        yield from (_partial(layout, trial, wrong) for _, layout in found[:1])


def layouts(dims: ParallelDims) -> Iterator[tuple[int, Layout]]:
    """Yield other degrees, another order, or an axis left out, with how many choices each is made of; then two of them."""
    orders = [tuple(_ordered(order)) for order in itertools.permutations(a for a in MOVED if getattr(dims, a) > 1)][1:]
    without: list[dict[str, Any]] = [{"without": axis} for axis in ("tp", "cp") if getattr(dims, axis) > 1]
    without += [{"without": "tp", "folded": True}] if dims.tp > 1 else []
    choices = without + [{"order": order} for order in orders]
    degrees = _degrees(dims)
    yield from ((1, Layout(other)) for other in degrees)
    yield from ((1, Layout(dims, **choice)) for choice in choices)
    yield from ((2, Layout(other, **choice)) for choice in choices for other in degrees)


def _degrees(dims: ParallelDims) -> list[ParallelDims]:
    degrees = [replace(dims, dp_replicate=dims.dp // n, dp_shard=n) for n in range(1, dims.dp + 1) if dims.dp % n == 0]
    return [other for other in degrees if other != dims]


def _ordered(order: Sequence[str]) -> Iterator[str]:
    """Yield all axes: those of degree 1 and those that are not exchanged keep their places."""
    there = iter(order)
    yield from (next(there) if axis in order else axis for axis in AXES)


def _holds(layout: Layout, trial: Trial, fqns: Iterable[str]) -> bool:
    """Return whether every rank holds of these parameters what the layout gives it."""
    slices = layout.planned(trial).plan.slices
    held = ((rank, fqn, trial.holdings[rank]) for rank in sorted(trial.holdings) for fqn in fqns)
    return all(_same(of[fqn], slices[layout.place(rank)][fqn]) for rank, fqn, of in held if fqn in of)


def _same(one: Slice | None, other: Slice) -> bool:
    return one is not None and (one == other or numel(one) == 0 == numel(other))


def wrong_parts(trial: Trial) -> list[tuple[int, str, Slice | None]]:
    """Return (rank, fqn, what it holds of it) where that is not what the plan says."""
    return [
        (rank, fqn, part)
        for rank, held in sorted(trial.holdings.items())
        for fqn, part in held.items()
        if fqn in trial.plan.slices[rank] and not _same(part, trial.plan.slices[rank][fqn])
    ]


# ---- words


def _whole(trial: Trial, layout: Layout, count: int) -> Hypothesis:
    observed, expected = _words(layout, trial.case.dims)
    details: list[tuple[str, object]] = list(vars(layout.dims).items()) if layout.dims != trial.case.dims else []
    details += [("order", layout.order)] if layout.order != AXES else []
    details += [("without", layout.without), ("folded", layout.folded)] if layout.without else []
    cause = Cause("another layout", observed, expected=expected, details=tuple(details))
    lines = (*_group_lines(trial, layout), *contents_line(trial), *traffic_lines(trial))
    return Hypothesis(cause, layout.assume, count, lines, renumbers=layout.order != AXES)


def _words(layout: Layout, dims: ParallelDims) -> tuple[str, str]:
    """Return what is observed, and what was requested."""
    of_all, cut = _shards(dims), _shards(layout.known)
    times = dims.dp * dims.cp * (dims.tp if layout.folded else 1) // cut
    along = " x ".join(axis for axis in ("dp_shard", "cp") if getattr(layout.known, axis) > 1)
    held = (
        f"parameters are sharded over {cut} ranks{f' along {along}' if dims.cp > 1 else ''}"
        + f", replicated {times} times" * (times > 1)
    )
    wanted = f"{of_all}" + f", replicated {dims.dp_replicate} times" * (dims.dp_replicate > 1)
    wanted = f"whole parameters on each of {dims.dp_replicate} ranks" if of_all == 1 else wanted
    if layout.folded:
        return f"FSDP over tp in place of TP: {held}", f"{wanted} and tp {dims.tp}"
    texts = [("TP not applied: every rank of a tp group holds whole weights", f"tp {dims.tp}")] * (
        layout.without == "tp"
    )
    if layout.order != AXES:
        shown, usual = ([a for a in order if getattr(dims, a) > 1] for order in (layout.order, AXES))
        lie = f"axes in the wrong order: parameters lie as on a mesh ({', '.join(shown)})"
        texts.append((lie, f"({', '.join(usual)})"))
    if cut != of_all or layout.dims != dims:
        asked, ran = ("DDP" if n == 1 else "FSDP" if n == dims.dp * dims.cp else "HSDP" for n in (of_all, cut))
        kind = "dp" if dims.cp == 1 else "cp" if dims.dp == 1 else "dp and cp"
        held = f"every {kind} rank holds whole parameters" if cut == 1 else held
        name = f"{asked} ran as {ran}" if asked != ran else f"{ran} ran with other degrees"
        texts.append((f"{name}: {held}", wanted))
    seen, requested = zip(*texts, strict=True)
    return "; ".join(seen), "; ".join(requested)


def _shards(dims: ParallelDims) -> int:
    return dims.dp_shard * dims.cp


def _group_lines(trial: Trial, layout: Layout) -> Iterator[tuple[str, str]]:
    """Yield the groups planned, and those of the layout over which floats moved in forward and backward."""
    used = trial.run.groups_on_all(
        lambda e: (c.ranks for c in e.collectives if c.phase in ("forward", "backward") and "float" in c.dtype)
    )
    there = trial.run.groups_on_all(lambda e: (group.ranks for group in e.groups))
    ran, rank_at = layout.assume(trial).plan, {layout.place(rank): rank for rank in range(layout.dims.world_size)}
    for axis, other in ((trial.plan.shard_axis, ran.shard_axis), ("dp_replicate", "dp_replicate")):
        wanted = trial.plan.groups.get(axis, ())
        lines = (tuple(sorted(rank_at[rank] for rank in line)) for line in ran.groups.get(other, ()))
        idle = {*wanted} <= there and not {*wanted} & used
        none = "none in use" + " (the groups exist, no collective ran over them)" * idle
        seen = groups_text(sorted(line for line in lines if line in used)) or none
        if wanted:
            label = "shard groups" if axis == trial.plan.shard_axis else "replicate groups"
            yield label, f"expected {groups_text(wanted)}   observed {seen}"


def contents_line(trial: Trial) -> Lines:
    """Return how many parameters are not held as planned, and the first of them."""
    wrong = sorted(wrong_parts(trial), key=lambda found: found[2] is not None and not numel(found[2]))
    if not wrong:
        return ()
    rank, fqn, part = wrong[0]
    shape, flat = trial.plan.shapes[fqn], bool(trial.plan.flat)
    seen = slice_text(part, shape, flat=flat) if part is not None else "bytes that are nowhere in it"
    wanted = slice_text(trial.plan.slices[rank][fqn], shape, flat=flat)
    count = f"{len({fqn for _, fqn, _ in wrong})} of {len(trial.plan.shapes)} parameters"
    return (("contents", f"{count}; {fqn} on rank {rank}: expected {wanted}, observed {seen}"),)


# ---- some parameters only


def _partial(layout: Layout, trial: Trial, wrong: list[str]) -> Hypothesis:
    """Return a module that was left out of what was applied to all others."""
    left_out = "TP" if layout.without == "tp" else "FSDP" if _shards(layout.known) == 1 else ""
    observed = f"{left_out} is not applied" if left_out else f"for some parameters {_words(layout, trial.case.dims)[0]}"

    def assume(trial: Trial) -> Trial:
        other, own = layout.planned(trial).plan.slices, trial.plan.slices
        trial = _in_no_unit(trial, {*wrong}) if left_out == "FSDP" and trial.case.wrapper == "fsdp2" else trial
        return _with_slices(trial, {r: {f: other[r][f] for f in wrong if f in held} for r, held in own.items()})

    details = (("left_out", left_out), ("parameters", tuple(wrong)))
    cause = Cause("left out of a wrapper", observed, in_parameters(trial, wrong), details=details)
    return Hypothesis(cause, assume, 2, contents_line(trial))


def _with_slices(trial: Trial, other: Mapping[int, Mapping[str, Slice]]) -> Trial:
    """Return the trial as if the plan had ranks hold these."""
    plan = trial.plan
    slices = {rank: {**held, **other[rank]} for rank, held in plan.slices.items()}
    size = {rank: parameter_bytes(trial.case, trial.traits, rank, held, plan.flat) for rank, held in slices.items()}
    shards, after = trial.case.shards, {}
    for rank, kept in plan.after_forward.items():
        freed = (fqn for fqn in other[rank] if fqn not in kept or kept[fqn].degree == shards)
        after[rank] = kept | {f: Kept(shards, numel(slices[rank][f]) * BYTES[trial.case.training.dtype]) for f in freed}
    return replace(trial, plan=replace(plan, slices=slices, parameter_bytes=size, after_forward=after))


def _in_no_unit(trial: Trial, fqns: set[str]) -> Trial:
    """Return the trial as if FSDP2 had been configured to ignore them: no unit gathers them."""
    plan, units = trial.plan, {}
    for rank, of_rank in plan.units.items():
        left = [tuple(fqn for fqn in unit if fqn not in fqns) for unit in of_rank]
        units[rank] = tuple(Unit(unit, plan.after_forward[rank][unit[0]].degree) for unit in left if unit)
    alone = make_plan(trial.case, trial.traits.with_units(units))
    return replace(trial, plan=replace(alone, traits=plan.traits))


def _strided(trial: Trial, wrong: list[str]) -> Iterator[Hypothesis]:
    """Yield rows dealt out over dp_shard first and tp inside: what a tp rank gathers are not its rows in a row."""
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
    text = f"{where} are cut by dp_shard first and by tp inside (strided shards)"
    cause = Cause("strided shards", text, expected="tp first", details=(("parameters", tuple(wrong)),))
    yield Hypothesis(cause, assume, 1, contents_line(trial))


# ---- each rank by the number of another


def renamed(trial: Trial, names: Mapping[int, int]) -> Trial:
    """Return the trial with other numbers of its ranks. names: a permutation of them."""
    repeat = _run(trial.repeat, names) if trial.repeat else None
    return replace(trial, run=_run(trial.run, names), repeat=repeat)


def _run(run: Run, names: Mapping[int, int]) -> Run:
    ranks = {names[rank]: _evidence(evidence, names) for rank, evidence in run.ranks.items()}
    exits = tuple(sorted((replace(exit, rank=names[exit.rank]) for exit in run.exits), key=lambda exit: exit.rank))
    return replace(run, ranks=dict(sorted(ranks.items())), exits=exits)


def _evidence(evidence: RankEvidence, names: Mapping[int, int]) -> RankEvidence:
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
