"""The data of documents on layouts: a plan, and which layouts fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.core.case.case import Case
from harness.core.plan.figures.pipeline_time import matmul_operations, other_schedules, pipeline_time
from harness.core.plan.figures.rank_bytes import RankBytes, rank_bytes
from harness.core.plan.figures.step_time import COMPUTES, SENDS, Fit, Fitting
from harness.core.plan.plan import Plan
from harness.core.report.as_data import as_data
from harness.core.report.layout_text import balance, kinds_of, most_sent, neediest

MOST_RANKS = 64
"""Most ranks of a plan whose slices are written rank by rank."""


def plan(case: Case, plan: Plan, gpu: str, set_aside: Sequence[str] = ()) -> dict[str, Any]:
    """Return groups, kinds of ranks and their bytes; of few ranks also the slices of each. set_aside: what of a file is not
    planned."""
    return {
        "case": case.name,
        "requested": case,
        "not_planned": set_aside,
        "dims": plan.dims,
        "world": plan.dims.world_size,
        "groups": plan.groups,
        "shapes": plan.shapes,
        "kinds": [_kind(case, plan, ranks) for ranks in kinds_of(plan)],
        "slices": _slices(plan) if plan.dims.world_size <= MOST_RANKS else [],
        **figures(case, plan, gpu),
    }


def layouts(request: Mapping[str, Any], fits: Fitting) -> dict[str, Any]:
    """Return the layouts that fit, best first, with what their estimates are made of. request: what was asked for."""
    return {
        **request,
        "looked": fits.looked,
        "attained": {"computing": COMPUTES, "links": SENDS},
        "layouts": [_fit(fit, fits.published.get(position)) for position, fit in enumerate(fits.found)],
        "unlisted": [{"name": name, "why": why} for name, why in fits.unlisted.items()],
        "degrees": fits.degrees,
    }


def _fit(fit: Fit, name: str | None) -> dict[str, Any]:
    """Return the data of one layout that fits. name: of a published one."""
    case = fit.case
    time = fit.time
    parts = {"computing": time.computing, "bubble": time.bubble, "waited": time.waited, "exposed": time.exposed}
    return {
        "published": name,
        "dims": case.dims,
        "samples": case.training.global_batch,
        "tokens": case.training.seq_len,
        "features": case.features,
        "bytes": _bytes(fit.most),
        "seconds": time.seconds,
        "parts": parts,
        "utilization": time.utilization,
        "seconds_in_float8": time.in_float8.seconds,
    }


def figures(case: Case, plan: Plan, gpu: str) -> dict[str, Any]:
    """Return the figures of all ranks: the largest memory, traffic over links, the pipeline's bubble, and imbalance."""
    rank, needed = neediest(case, plan)
    return {
        "gpu": gpu,
        "neediest": {"rank": rank, **_bytes(needed)},
        "sent": [as_data(sent) | {"links": sent.links} for sent in most_sent(plan)],
        "pipeline": _pipeline(case) if case.dims.pp > 1 else {},
        "balance": list(balance(case, plan)),
    }


def _kind(case: Case, plan: Plan, ranks: Sequence[int]) -> dict[str, Any]:
    """Return the data of one rank class, from its first rank."""
    first = ranks[0]
    return {
        "ranks": ranks,
        "stages": plan.stages[first],
        "bytes": _bytes(rank_bytes(case, plan, first)),
        "parameter_bytes": plan.parameter_bytes[first],
        "flows": plan.flows[first],
        "even_flows": plan.even_flows[first] if plan.even_flows[first] != plan.flows[first] else (),
    }


def _bytes(needed: RankBytes) -> dict[str, Any]:
    """Return the bytes that a rank needs, by kind and in all."""
    return {**as_data(needed), "stays": needed.stays, "loss": needed.loss, "backward": needed.backward, **_most(needed)}


def _most(needed: RankBytes) -> dict[str, Any]:
    """Return the most bytes that a rank needs at once, and in which phase."""
    return {"most": needed.most, "phase": needed.phase, "reserved": needed.reserved}


def _slices(plan: Plan) -> list[dict[str, Any]]:
    """Return each slice of a parameter with the ranks that hold it."""
    ranks_by_slice: dict[tuple[str, Any], list[int]] = {}
    for rank, slices in plan.slices.items():
        for fqn, intervals in slices.items():
            ranks_by_slice.setdefault((fqn, intervals), []).append(rank)
    return [
        {"parameter": fqn, "intervals": intervals, "ranks": ranks} for (fqn, intervals), ranks in ranks_by_slice.items()
    ]


def _pipeline(case: Case) -> dict[str, Any]:
    """Return the bubble of the pipeline's schedule, and that of other schedules."""
    own_time = pipeline_time(case, lambda stage: matmul_operations(case, stage))
    return {
        "schedule": case.features.schedule,
        "microbatches": case.microbatches,
        "stages": case.n_stages,
        "bubble": own_time.bubble,
        "idle": own_time.idle,
        "bubble_of_equal_stages": pipeline_time(case).bubble,
        "bubble_of_others": {name: time.bubble for name, time in other_schedules(case)},
    }
