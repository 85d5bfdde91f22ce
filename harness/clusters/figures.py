"""The bytes that ranks that ran held and moved, and the plan's figures for all others, in a few lines.

The first was counted while a rank ran alone; the second is arithmetic, and of activations an estimate
(docs/preflight.md).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from harness.clusters.launches import LoneRun
from harness.core.case.case import Case
from harness.core.evidence.text import bytes_text
from harness.core.judge.trial import Trial
from harness.core.plan.figures.gpus import GPU_GIGABYTES
from harness.core.plan.figures.pipeline_time import matmul_operations, pipeline_time
from harness.core.plan.plan import Plan
from harness.core.report.layout_text import (
    imbalances,
    neediest_rank,
    peak_memory_text,
    room_left_text,
    sent_texts_by_axis,
)

Rows = Iterator[tuple[str, str]]


def rank_rows(flown: LoneRun, trial: Trial, gpu: str) -> Rows:
    """Yield rows (label, text), of the last step: the rank that holds most between steps, and the most bytes at once.

    Nothing if no rank finished a step. gpu: the model whose memory is compared.
    """
    last_steps = {rank: evidence.steps[-1] for rank, evidence in trial.ranks.items() if evidence.steps}
    if not last_steps:
        return
    rank = max(last_steps, key=lambda rank: (sum(last_steps[rank].memory.values()), -rank))
    kinds = (
        f"{bytes_text(size)} of {kind.replace('_', ' ')}" for kind, size in sorted(last_steps[rank].memory.items())
    )
    yield "a rank", f"{rank} holds {', '.join(kinds)}, the most of them"
    moved_texts = (
        f"{bytes_text(size)} over {axis}" for axis, size in moved_by_axis(trial, rank, last_steps[rank].step).items()
    )
    yield "", f"moves a step {', '.join(moved_texts) or 'nothing'}"
    yield from _peak_rows(flown, gpu)


def _peak_rows(flown: LoneRun, gpu: str) -> Rows:
    """Yield rows on the rank whose tensors took most bytes at once, in steps and outside of them; nothing without usage."""
    if not flown.usage_by_rank:
        return
    rank = max(flown.usage_by_rank, key=lambda rank: (flown.usage_by_rank[rank].most, -rank))
    used = flown.usage_by_rank[rank]
    yield (
        "tensors",
        f"{rank} has {bytes_text(used.most)} at once, in {used.phase}, the most of them; {_gpu_text(used.most, gpu)}",
    )
    most_outside = max(used.outside for used in flown.usage_by_rank.values())
    if most_outside > used.most:
        yield "", f"{bytes_text(most_outside)} outside of steps, as while a model is built"


def layout_rows(case: Case, plan: Plan, gpu: str) -> Rows:
    """Yield rows (label, text) on all ranks by the plan: the most memory, traffic over links, pipeline bubble, imbalance."""
    rank, needed = neediest_rank(case, plan)
    estimated = f"of it activations, estimated, {bytes_text(needed.activations)}"
    yield (
        "planned",
        f"{rank} needs {peak_memory_text(needed)}, the most of all, {estimated}; {_gpu_text(needed.reserved, gpu)}",
    )
    links = [f"{axis} {sent}" for axis, sent in sent_texts_by_axis(plan).items()]
    if links:
        yield "links", f"a rank sends a step, at most, {'; '.join(links)}"
    if case.dims.pp > 1:
        time = pipeline_time(case, lambda stage: matmul_operations(case, stage))
        schedule_text = f"{case.features.schedule}, {case.microbatches} microbatches, {case.n_stages} stages"
        yield "bubble", f"{time.bubble_ratio:.1%} of what the busiest rank computes: {schedule_text}"
    uneven = [f"{imbalance.what} +{imbalance.excess:.1%} ({imbalance.why})" for imbalance in imbalances(case, plan)]
    if uneven:
        yield "imbalance", f"the most, above the mean: {'; '.join(uneven)}"


def _gpu_text(size: int, gpu: str) -> str:
    """Return what these bytes leave of a GPU's memory, as text."""
    return f"of the {GPU_GIGABYTES[gpu]} GB of {gpu}: {room_left_text(size, gpu)}"


def moved_by_axis(trial: Trial, rank: int, step: int) -> dict[str, int]:
    """Return the bytes that a rank's collectives of one step move, by axis of the group, most first; groups of one are
    left out.

    Bytes over a group that is no axis of the plan are under "no axis of the plan".
    """
    axes = {trial.plan.peers(rank, axis): axis for axis in trial.plan.groups}
    bytes_by_axis: dict[str, int] = defaultdict(int)
    for call in trial.ranks[rank].collectives:
        if call.step == step and len(call.ranks) > 1:
            bytes_by_axis[axes.get(call.ranks, "no axis of the plan")] += call.bytes
    return dict(sorted(bytes_by_axis.items(), key=lambda item: -item[1]))
