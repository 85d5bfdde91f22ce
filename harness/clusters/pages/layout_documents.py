"""The data of documents on layouts: a plan, a recording, and what checks say of either."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.core.case.case import Case
from harness.core.case.dims import ParallelDims
from harness.core.judge.result import Diagnosis, Result
from harness.core.plan.figures.pipeline_time import matmul_operations, other_schedules, pipeline_time
from harness.core.plan.figures.rank_bytes import RankBytes, rank_bytes
from harness.core.plan.figures.step_time import COMPUTES, SENDS, Fit, Fitting
from harness.core.plan.plan import Plan
from harness.core.report.as_data import as_data
from harness.core.report.cause_text import diagnosis_line
from harness.core.report.layout_text import balance, kinds_of, most_sent, neediest
from harness.recording.judged.stored_recording import Recording
from harness.recording.judged.structure import costs, structure
from harness.recording.pages.recording_layout import Judged, results_of, verdict_of_all
from harness.recording.pages.recording_odd import oddities
from harness.recording.pages.recording_page import facts
from harness.recording.pages.trace_page import trace_rows
from harness.recording.traces.job import TracedJob
from harness.recording.traces.times import Times

MOST_RANKS = 64
"""Most ranks of a plan whose slices are written rank by rank."""


def judged(results: Sequence[Result], diagnosis: Diagnosis | None) -> dict[str, Any]:
    """Return the verdict of all results, and its cause."""
    return {
        "verdict": verdict_of_all(results),
        "cause": diagnosis_line(diagnosis),
        "results": results,
        "diagnosis": diagnosis,
    }


def recording(
    found: Recording, dims: ParallelDims | None = None, jobs: Sequence[Judged] = (), *, with_layout: bool = False
) -> dict[str, Any]:
    """Return what is anomalous, what ran, in words and as structure, of which jobs and over which of the trainer's own groups.
    jobs: what is judged of each, where a layout was declared. with_layout: whether one was, and is not judged yet."""
    summaries = [one for _, one in sorted(found.summaries.items())]
    rows = facts(found, summaries, with_layout=with_layout or dims is not None) if summaries else []
    told: dict[str, Any] = (
        {"layout": dims, **judged(*jobs[0]), "verdict": verdict_of_all(results_of(jobs))} if jobs else {}
    )
    return {
        "directory": found.directory,
        "command": found.command,
        "code": found.code,
        "world": found.world,
        "left_evidence": list(found.summaries),
        "exits": found.exits,
        "unreadable": found.unreadable,
        "odd": oddities(found),
        "facts": [{"label": label, "text": text} for label, text in rows],
        "structure": structure(found) if summaries else {},
        "costs": costs(found),
        "own_groups": [as_data(group) | {"rank": one.rank} for one in summaries for group in one.own_groups],
        "jobs": [_job(job, *jobs[number : number + 1]) for number, job in enumerate(found.jobs)],
        **told,
    }


def traces(job: TracedJob, dims: ParallelDims | None, said: Judged, times: Times | None) -> dict[str, Any]:
    """Return what traces show and do not say, and what checks say of it."""
    told: dict[str, Any] = ({"layout": dims} if dims else {}) | ({"times": times} if times else {})
    return {
        "directory": job.recording.directory,
        "world": job.recording.world,
        "traced": list(job.ranks),
        "steps": job.numbers,
        "facts": [{"label": label, "text": text} for label, text in trace_rows(job)],
        **told,
        **judged(*said),
    }


def _job(job: Recording, *said: Judged) -> dict[str, Any]:
    """What is said of one of several jobs, with its verdict where a layout was declared."""
    return {
        "directory": job.directory,
        "name": job.job,
        "world": job.world,
        "left_evidence": list(job.summaries),
        "steps": max((one.steps_seen for one in job.summaries.values()), default=0),
        "ended": {rank: one.ended or "unheard" for rank, one in job.summaries.items()},
        **(judged(*said[0]) if said else {}),
    }


# ---- plans


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


def layouts(asked: Mapping[str, Any], fits: Fitting) -> dict[str, Any]:
    """Return the layouts that fit, best first, with what their estimates are made of. asked: the request."""
    return {
        **asked,
        "looked": fits.looked,
        "attained": {"computing": COMPUTES, "links": SENDS},
        "layouts": [_fit(fit, fits.published.get(place)) for place, fit in enumerate(fits.found)],
        "unlisted": [{"name": name, "why": why} for name, why in fits.unlisted.items()],
        "degrees": fits.degrees,
    }


def _fit(fit: Fit, name: str | None) -> dict[str, Any]:
    case, time = fit.case, fit.time
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
    """Return what is said of all ranks: who needs most memory, what goes over links, who waits, and what is uneven."""
    rank, held = neediest(case, plan)
    return {
        "gpu": gpu,
        "neediest": {"rank": rank, **_bytes(held)},
        "sent": [as_data(one) | {"links": one.links} for one in most_sent(plan)],
        "pipeline": _pipeline(case) if case.dims.pp > 1 else {},
        "balance": list(balance(case, plan)),
    }


def _kind(case: Case, plan: Plan, ranks: Sequence[int]) -> dict[str, Any]:
    first = ranks[0]
    return {
        "ranks": ranks,
        "stages": plan.stages[first],
        "bytes": _bytes(rank_bytes(case, plan, first)),
        "parameter_bytes": plan.parameter_bytes[first],
        "flows": plan.flows[first],
        "even_flows": plan.even_flows[first] if plan.even_flows[first] != plan.flows[first] else (),
    }


def _bytes(held: RankBytes) -> dict[str, Any]:
    return {**as_data(held), "stays": held.stays, "loss": held.loss, "backward": held.backward, **_most(held)}


def _most(held: RankBytes) -> dict[str, Any]:
    return {"most": held.most, "phase": held.phase, "reserved": held.reserved}


def _slices(plan: Plan) -> list[dict[str, Any]]:
    found: dict[tuple[str, Any], list[int]] = {}
    for rank, slices in plan.slices.items():
        for fqn, part in slices.items():
            found.setdefault((fqn, part), []).append(rank)
    return [{"parameter": fqn, "intervals": part, "ranks": ranks} for (fqn, part), ranks in found.items()]


def _pipeline(case: Case) -> dict[str, Any]:
    mine = pipeline_time(case, lambda stage: matmul_operations(case, stage))
    return {
        "schedule": case.features.schedule,
        "microbatches": case.microbatches,
        "stages": case.n_stages,
        "bubble": mine.bubble,
        "idle": mine.idle,
        "bubble_of_equal_stages": pipeline_time(case).bubble,
        "bubble_of_others": {name: time.bubble for name, time in other_schedules(case)},
    }
