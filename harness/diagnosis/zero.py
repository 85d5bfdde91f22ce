"""ZeRO: what should be cut is whole on every rank, or what was stepped on apart is not brought together again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

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
from harness.plan.traffic.flow import Flow

FOLLOWING = ("loss", "gradients", "grad_norm", "reported_loss")


def nothing_cut(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """ZeRO-1 or 2 that ran as ZeRO-0, which is DDP: whole gradients are reduced, and every rank's optimizer has all of them."""
    if trial.case.wrapper in ("zero1", "zero2") and "memory" in broken:
        text = f"ZeRO-{trial.case.wrapper[-1]} ran as ZeRO-0: every rank keeps and updates all of the optimizer's state"
        lines = (finding_line("memory", broken["memory"]),)
        yield Hypothesis(Cause("another stage of ZeRO", text), _as_replicas, 1, lines)


def _as_replicas(trial: Trial) -> Trial:
    """The same vectors, of which each rank has all. What other axes move is moved as ever."""
    case, plan, size = trial.case, trial.plan, BYTES[trial.case.training.dtype]
    times = 1 if case.features.defer_sync else case.features.accumulation
    dims = replace(case.dims, dp_shard=1, dp_replicate=case.dims.dp_shard)
    bytes_of = {rank: times * size * sum(map(numel, held.values())) for rank, held in plan.slices.items()}
    groups = {"dp_replicate" if axis == "dp_shard" else axis: lines for axis, lines in plan.groups.items()}
    apart: dict[str, Any] = dict.fromkeys(("gradient_slices", "state_slices", "gradient_bytes", "state_bytes"), {})
    for key in ("flows", "even_flows"):
        others = {rank: [f for f in flows if f.axis != "dp_shard"] for rank, flows in getattr(plan, key).items()}
        apart[key] = {
            rank: (*flows, Flow("dp_replicate", "gradients", "all_reduce", "backward", bytes_of[rank]))
            for rank, flows in others.items()
        }
    whole = replace(plan, dims=dims, groups=groups, **apart)
    return replace(trial, plan=whole, case=replace(case, dims=dims, features=replace(case.features, wrapper="ddp")))


def not_gathered(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """From then on each rank trains a model of its own, with old values of what others step on."""
    if not {"traffic", "replica_agreement"} <= set(broken):
        return
    rank, late = min(trial.ranks), trial.plan.traits.zero_gathers_late
    step, ranks = trial.first_step + late, trial.plan.peers(rank, "dp_shard")
    seen = (observed(trial, trial.ranks[rank], step) if late else observed_outside(trial.ranks[rank], step)).items()
    wanted = planned(trial, rank, step) if late else planned_outside(trial, rank, step)
    moved = {key for key, count in seen if count}
    if any(key[:2] == (ranks, "all_gather") for key in wanted.keys() - moved):
        where = "in the next step's forward pass" if late else "after the optimizer"
        text = f"no all_gather ran over {ranks_text(ranks)} {where}"
        text = f"parameters updated by other ranks are not gathered: {text}"
        laws = ("traffic", *FOLLOWING)
        yield stated(broken, "replica_agreement", "parameters not gathered", text, *laws, more=NOT_TESTED)


MOST_ELEMENTS = 8


def shifted_gradients(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """An offset into the vector: what a rank is given of the gradients lies some elements before or behind what it steps on."""
    if "gradients" not in broken or not trial.plan.gradient_slices:
        return
    vectors = [_vectors(trial, rank) for rank in trial.ranks]
    near = [sign * count for count in range(1, MOST_ELEMENTS + 1) for sign in (1, -1)]
    if by := next((by for by in near if all(vector and _shifted(trial, *vector, by) for vector in vectors)), 0):
        where = "too early" if by > 0 else "too late"
        far = f"{abs(by)} element{'s' * (abs(by) > 1)} {where}"
        text = f"each rank takes its part of ZeRO's gradient vector {far}"
        yield stated(broken, "gradients", "gradients shifted", text, *FOLLOWING, more=NOT_TESTED)


def _vectors(trial: Trial, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """What the rank has of the gradients of its first step, what it should have, and at which places of ZeRO's vector; None
    where it has not one element for each that it should."""
    held, step = trial.plan.gradient_slices[rank], trial.first_step
    names = [fqn for fqn in held if numel(held[fqn])]
    seen = seen_gradients(trial, rank, step)
    if any(seen[fqn].size != numel(held[fqn]) for fqn in names if fqn in seen) or not {*names} <= {*seen}:
        return None
    expected = [take(trial.reference_step(step).gradients[fqn], held[fqn]) for fqn in names]
    places = np.concatenate([_places(trial, fqn, held[fqn]) for fqn in names])
    return np.concatenate([seen[fqn] for fqn in names]), np.concatenate(expected), places


def _places(trial: Trial, fqn: str, held: Slice) -> np.ndarray:
    """Of each element of a parameter's slice, all vectors one behind the other."""
    before = np.cumsum([0, *(unit.numel + MOST_ELEMENTS for unit in trial.plan.flat)])
    first, starts = next((at, u.starts[fqn]) for at, u in zip(before, trial.plan.flat, strict=False) if fqn in u.starts)
    size = local_numel(fqn, trial.plan.shapes[fqn], trial.plan.dims.tp)
    places = np.concatenate([first + start + np.arange(size // len(starts)) for start in starts])
    ((begin, end),) = held
    return places[begin % size :][: end - begin]


def _shifted(trial: Trial, seen: np.ndarray, expected: np.ndarray, places: np.ndarray, by: int) -> bool:
    """Judged where both places are of parameters: between two of them there may be padding."""
    if len(seen) <= 2 * MOST_ELEMENTS:
        return False
    _, there, mine = np.intersect1d(places, places - by, return_indices=True)
    return tolerance.relative_difference(seen[mine], expected[there]) <= trial.bounds.gradient[trial.first_step]
