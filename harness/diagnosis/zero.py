"""ZeRO: what should be cut is whole on every rank, or what was stepped on apart is not brought together again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from harness.diagnosis.differences import seen_gradients
from harness.diagnosis.hypothesis import NOT_TESTED, Broken, Fact, Hypothesis, stated
from harness.diagnosis.words import finding_line
from harness.evidence.text import ranks_text
from harness.judge import tolerance
from harness.judge.contents import take
from harness.judge.result import Cause
from harness.judge.traffic import observed, observed_outside, planned, planned_outside
from harness.judge.trial import Trial
from harness.plan.slices import BYTES, Slice, local_numel, numel
from harness.plan.traffic.data_parallel import reductions_per_step
from harness.plan.traffic.flow import Flow

FOLLOWING = ("loss", "gradients", "grad_norm", "reported_loss")


def nothing_cut(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """ZeRO-1 or 2 that ran as ZeRO-0, which is DDP: whole gradients are reduced, and every rank's optimizer has all of them."""
    if trial.case.wrapper in ("zero1", "zero2") and "memory" in broken:
        text = f"ZeRO-{trial.case.wrapper[-1]} ran as ZeRO-0: every rank keeps and updates all of the optimizer's state"
        lines = (finding_line(broken["memory"]),)
        yield Hypothesis(Cause("another stage of ZeRO", text), _as_replicas, 1, lines)


def _as_replicas(trial: Trial) -> Trial:
    """The same vectors, of which each rank has all. What other axes move is moved as ever."""
    case, plan = trial.case, trial.plan
    dims = replace(case.dims, dp_shard=1, dp_replicate=case.dims.dp_shard)
    size = BYTES[case.training.dtype] * reductions_per_step(case)
    groups = {"dp_replicate" if axis == "dp_shard" else axis: lines for axis, lines in plan.groups.items()}

    def reduced(rank: int, flows: tuple[Flow, ...]) -> tuple[Flow, ...]:
        count = size * sum(map(numel, plan.slices[rank].values()))
        others = (flow for flow in flows if flow.axis != "dp_shard")
        return *others, Flow("dp_replicate", "gradients", "all_reduce", "backward", count)

    def of(flows: Mapping[int, tuple[Flow, ...]]) -> dict[int, tuple[Flow, ...]]:
        return {rank: reduced(rank, own) for rank, own in flows.items()}

    whole = replace(plan, dims=dims, groups=groups, flows=of(plan.flows), even_flows=of(plan.even_flows))
    whole = replace(whole, gradient_slices={}, state_slices={}, gradient_bytes={}, state_bytes={})
    return replace(trial, plan=whole, case=replace(case, dims=dims, features=replace(case.features, wrapper="ddp")))


def not_gathered(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """From then on each rank trains a model of its own, with old values of what others step on."""
    if not {"traffic", "replica_agreement"} <= set(broken):
        return
    rank, late = min(trial.ranks), trial.plan.traits.zero_gathers_late
    step, ranks = trial.first_step + late, trial.plan.peers(rank, "dp_shard")
    if late:
        wanted, seen = planned(trial, rank, step), observed(trial, trial.ranks[rank], step)
        where = "in the next step's forward pass"
    else:
        wanted, seen = planned_outside(trial, rank, step), observed_outside(trial.ranks[rank], step)
        where = "after the optimizer"
    if any(key[:2] == (ranks, "all_gather") for key in wanted.keys() - seen.keys()):
        text = f"parameters updated by other ranks are not gathered: no all_gather ran over {ranks_text(ranks)} {where}"
        checks = ("traffic", *FOLLOWING)
        yield stated(broken, "replica_agreement", "parameters not gathered", text, *checks, more=NOT_TESTED)


MOST_ELEMENTS = 8


def shifted_gradients(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """An offset into the vector: what a rank is given of the gradients lies some elements before or behind what it steps on."""
    if "gradients" not in broken or not trial.plan.gradient_slices:
        return
    vectors = [_vectors(trial, rank) for rank in trial.ranks]
    ways = ((1, "too early"), (-1, "too late"))
    for count, (sign, where) in itertools.product(range(1, MOST_ELEMENTS + 1), ways):
        if all(vector and _shifted(trial, *vector, sign * count) for vector in vectors):
            far = f"{count} element{'s' * (count > 1)} {where}"
            text = f"each rank takes its part of ZeRO's gradient vector {far}"
            yield stated(broken, "gradients", "gradients shifted", text, *FOLLOWING, more=NOT_TESTED)
            return


def _vectors(trial: Trial, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """What the rank has of the gradients of its first step, what it should have, and at which places of ZeRO's vector; None
    where it has not one element for each that it should."""
    held, step = trial.plan.gradient_slices[rank], trial.first_step
    names = [fqn for fqn in held if numel(held[fqn])]
    seen = seen_gradients(trial, rank, step)
    if any(fqn not in seen or seen[fqn].size != numel(held[fqn]) for fqn in names):
        return None
    expected = [take(trial.reference_step(step).gradients[fqn], held[fqn]) for fqn in names]
    places = np.concatenate([_places(trial, fqn, held[fqn]) for fqn in names])
    return np.concatenate([seen[fqn] for fqn in names]), np.concatenate(expected), places


def _places(trial: Trial, fqn: str, held: Slice) -> np.ndarray:
    """Of each element of a parameter's slice, all vectors one behind the other, too far apart to be taken for each other."""
    flat, size = trial.plan.flat, local_numel(fqn, trial.plan.shapes[fqn], trial.plan.dims.tp)
    apart = max(unit.numel for unit in flat) + MOST_ELEMENTS
    first, starts = next((number * apart, unit.starts[fqn]) for number, unit in enumerate(flat) if fqn in unit.starts)
    places = np.concatenate([first + start + np.arange(size // len(starts)) for start in starts])
    ((begin, end),) = held
    return places[begin % size :][: end - begin]


def _shifted(trial: Trial, seen: np.ndarray, expected: np.ndarray, places: np.ndarray, by: int) -> bool:
    """Judged where both places are of parameters: between two of them there may be padding."""
    if len(seen) <= 2 * MOST_ELEMENTS:
        return False
    _, there, mine = np.intersect1d(places, places - by, return_indices=True)
    return tolerance.relative_difference(seen[mine], expected[there]) <= trial.bounds.gradient[trial.first_step]
