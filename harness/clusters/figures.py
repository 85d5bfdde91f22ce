"""What the ranks that ran were seen to hold and to move, and what the plan says of all others, in a few lines.

The first was counted while a rank ran alone; the second is arithmetic, and of activations an estimate (docs/preflight.md).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from harness.clusters.launches import Flown
from harness.core.case.case import Case
from harness.core.evidence.text import bytes_text
from harness.core.judge.trial import Trial
from harness.core.plan.figures.gpus import GPUS
from harness.core.plan.figures.pipeline_time import matmul_operations, pipeline_time
from harness.core.plan.plan import Plan
from harness.core.report.layout_text import balance, most_text, neediest, room_left, sent_by_axis

Rows = Iterator[tuple[str, str]]


def of_ranks(flown: Flown, trial: Trial, gpu: str) -> Rows:
    """Yield rows on the rank that holds most between steps, and the one that had most at once within one; in the last step."""
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
    yield from _peak(flown, gpu)


def _peak(flown: Flown, gpu: str) -> Rows:
    """Yield rows on the rank whose tensors took most bytes at once, in steps and outside of them."""
    if not flown.used:
        return
    rank = max(flown.used, key=lambda rank: (flown.used[rank].most, -rank))
    used = flown.used[rank]
    yield (
        "tensors",
        f"{rank} has {bytes_text(used.most)} at once, in {used.phase}, the most of them; {_of_gpu(used.most, gpu)}",
    )
    most_outside = max(used.outside for used in flown.used.values())
    if most_outside > used.most:
        yield "", f"{bytes_text(most_outside)} outside of steps, as while a model is built"


def of_layout(case: Case, plan: Plan, gpu: str) -> Rows:
    """Yield rows on all ranks, ran or not."""
    rank, needed = neediest(case, plan)
    estimated = f"of it activations, estimated, {bytes_text(needed.activations)}"
    yield "planned", f"{rank} needs {most_text(needed)}, the most of all, {estimated}; {_of_gpu(needed.reserved, gpu)}"
    links = [f"{axis} {sent}" for axis, sent in sent_by_axis(plan).items()]
    if links:
        yield "links", f"a rank sends a step, at most, {'; '.join(links)}"
    if case.dims.pp > 1:
        time = pipeline_time(case, lambda stage: matmul_operations(case, stage))
        schedule_text = f"{case.features.schedule}, {case.microbatches} microbatches, {case.n_stages} stages"
        yield "bubble", f"{time.bubble:.1%} of what the busiest rank computes: {schedule_text}"
    uneven = [f"{imbalance.what} +{imbalance.excess:.1%} ({imbalance.why})" for imbalance in balance(case, plan)]
    if uneven:
        yield "imbalance", f"the most, above the mean: {'; '.join(uneven)}"


def _of_gpu(size: int, gpu: str) -> str:
    """Return what these bytes leave of a GPU's memory, as text."""
    return f"of the {GPUS[gpu]} GB of {gpu}: {room_left(size, gpu)}"


def moved_by_axis(trial: Trial, rank: int, step: int) -> dict[str, int]:
    """Return a rank's bytes of one step by the axis whose ranks they go between, most first."""
    axes = {trial.plan.peers(rank, axis): axis for axis in trial.plan.groups}
    bytes_by_axis: dict[str, int] = defaultdict(int)
    for call in trial.ranks[rank].collectives:
        if call.step == step and len(call.ranks) > 1:
            bytes_by_axis[axes.get(call.ranks, "no axis of the plan")] += call.bytes
    return dict(sorted(bytes_by_axis.items(), key=lambda item: -item[1]))
