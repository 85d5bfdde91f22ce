"""The data of documents on layouts: a plan, and which layouts fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.core.case.case import Case
from harness.core.plan.figures.pipeline_time import matmul_operations, pipeline_time, times_of_schedules
from harness.core.plan.figures.rank_bytes import RankBytes, rank_bytes
from harness.core.plan.figures.step_time import COMPUTE_EFFICIENCY, LINK_EFFICIENCY, FittingLayout, FittingLayouts
from harness.core.plan.plan import Plan
from harness.core.report.as_data import as_data
from harness.core.report.layout_text import imbalances, largest_traffic_by_axis, neediest_rank, rank_classes

MOST_RANKS = 64
"""Most ranks of a plan whose slices are written rank by rank."""


def plan_document(case: Case, plan: Plan, gpu: str, set_aside: Sequence[str] = ()) -> dict[str, Any]:
    """Return the document of a plan: groups, rank classes and their bytes; up to MOST_RANKS ranks also the slices of each.

    set_aside: parts of a file that are not planned. gpu: the model whose memory is compared.
    """
    return {
        "case": case.name,
        "requested": case,
        "not_planned": set_aside,
        "dims": plan.dims,
        "world": plan.dims.world_size,
        "groups": plan.groups,
        "shapes": plan.shapes,
        "kinds": [_kind_document(case, plan, ranks) for ranks in rank_classes(plan)],
        "slices": _slice_documents(plan) if plan.dims.world_size <= MOST_RANKS else [],
        **figures_document(case, plan, gpu),
    }


def layouts_document(request: Mapping[str, Any], fits: FittingLayouts) -> dict[str, Any]:
    """Return the document of the layouts that fit, best first, with the parts of their estimates.

    request: options, by name.
    """
    return {
        **request,
        "looked": fits.examined_count,
        "attained": {"computing": COMPUTE_EFFICIENCY, "links": LINK_EFFICIENCY},
        "layouts": [_fit_document(fit, fits.published.get(position)) for position, fit in enumerate(fits.layouts)],
        "unlisted": [{"name": name, "why": why} for name, why in fits.unlisted.items()],
        "degrees": fits.degrees,
    }


def _fit_document(fit: FittingLayout, name: str | None) -> dict[str, Any]:
    """Return the data of one layout that fits. name: of a published layout; None for another."""
    case = fit.case
    time = fit.time
    parts = {"computing": time.computing, "bubble": time.bubble, "waited": time.waited, "exposed": time.exposed}
    return {
        "published": name,
        "dims": case.dims,
        "samples": case.training.global_batch,
        "tokens": case.training.seq_len,
        "features": case.features,
        "bytes": _bytes_document(fit.peak_rank),
        "seconds": time.seconds,
        "parts": parts,
        "utilization": time.utilization,
        "seconds_in_float8": time.in_float8.seconds,
    }


def figures_document(case: Case, plan: Plan, gpu: str) -> dict[str, Any]:
    """Return the figures of all ranks: the largest memory, traffic over links, the pipeline's bubble, and imbalance."""
    rank, needed = neediest_rank(case, plan)
    return {
        "gpu": gpu,
        "neediest": {"rank": rank, **_bytes_document(needed)},
        "sent": [as_data(sent) | {"links": sent.links} for sent in largest_traffic_by_axis(plan)],
        "pipeline": _pipeline_document(case) if case.dims.pp > 1 else {},
        "balance": list(imbalances(case, plan)),
    }


def _kind_document(case: Case, plan: Plan, ranks: Sequence[int]) -> dict[str, Any]:
    """Return the data of one rank class, from its first rank."""
    first = ranks[0]
    return {
        "ranks": ranks,
        "stages": plan.stages[first],
        "bytes": _bytes_document(rank_bytes(case, plan, first)),
        "parameter_bytes": plan.parameter_bytes[first],
        "flows": plan.flows[first],
        "even_flows": plan.even_flows[first] if plan.even_flows[first] != plan.flows[first] else (),
    }


def _bytes_document(needed: RankBytes) -> dict[str, Any]:
    """Return the bytes that a rank needs, by kind and in all."""
    return {
        **as_data(needed),
        "stays": needed.between_steps,
        "loss": needed.loss_peak,
        "backward": needed.backward_peak,
        **_peak_fields(needed),
    }


def _peak_fields(needed: RankBytes) -> dict[str, Any]:
    """Return the most bytes that a rank needs at once, and in which phase."""
    return {"most": needed.peak, "phase": needed.peak_phase, "reserved": needed.reserved}


def _slice_documents(plan: Plan) -> list[dict[str, Any]]:
    """Return each slice of a parameter with the ranks that hold it."""
    ranks_by_slice: dict[tuple[str, Any], list[int]] = {}
    for rank, slices in plan.slices.items():
        for fqn, intervals in slices.items():
            ranks_by_slice.setdefault((fqn, intervals), []).append(rank)
    return [
        {"parameter": fqn, "intervals": intervals, "ranks": ranks} for (fqn, intervals), ranks in ranks_by_slice.items()
    ]


def _pipeline_document(case: Case) -> dict[str, Any]:
    """Return the bubble of the pipeline's schedule, and that of other schedules."""
    own_time = pipeline_time(case, lambda stage: matmul_operations(case, stage))
    return {
        "schedule": case.features.schedule,
        "microbatches": case.microbatches,
        "stages": case.n_stages,
        "bubble": own_time.bubble_ratio,
        "idle": own_time.idle_ratio,
        "bubble_of_equal_stages": pipeline_time(case).bubble_ratio,
        "bubble_of_others": {name: time.bubble_ratio for name, time in times_of_schedules(case)},
    }
