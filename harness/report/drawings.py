"""A case's stored evidence as a page shows it: who holds what, which groups moved what, how losses and gradients compare."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from harness.checks.memory import planned
from harness.evidence.text import bytes_text, ranks_text
from harness.judge import tolerance
from harness.judge.assembly import gradient_distance, misfits
from harness.judge.losses import global_loss
from harness.judge.measures import OUTSIDE_THE_PLAN, step_shown
from harness.judge.trial import Trial
from harness.plan.slices import Slice, numel
from harness.report.shown import UsedGroup, interval_text, rank_label, shown_parameter, used_groups
from harness.report.svg import Curve, Strip, curves, strips

MOST_RANKS = 32  # a drawing of more is a wall of bars


@dataclass(frozen=True)
class Drawing:
    """svg: the picture. below: what its lines or colours are, in words."""

    title: str
    svg: str
    below: str = ""


@dataclass(frozen=True)
class Drawn:
    """groups: rows of group, axis, requested, observed, a word. axes, memory: rows of name, requested, observed."""

    drawings: tuple[Drawing, ...]
    groups: tuple[tuple[str, ...], ...]
    axes: tuple[tuple[str, ...], ...]
    memory: tuple[tuple[str, ...], ...]
    lacking: str


def drawn(trial: Trial) -> Drawn:
    """Ranks that left no evidence are named, and the others shown."""
    missing = [rank for rank in range(trial.run.world_size) if rank not in trial.ranks]
    lacking = f"ranks {ranks_text(missing)} left no evidence" if missing else ""
    if not trial.ranks:
        return Drawn((), (), (), (), lacking)
    groups = used_groups(trial)
    pictures = (*_holdings(trial), *_losses(trial), *_gradients(trial))
    return Drawn(pictures, tuple(map(_group_row, groups)), tuple(_axis_rows(groups)), tuple(_memory(trial)), lacking)


def _holdings(trial: Trial) -> tuple[Drawing, Drawing]:
    fqn = shown_parameter(trial)
    ranks = sorted(trial.ranks)[:MOST_RANKS]
    requested = [_strip(trial, rank, fqn, trial.plan.slices[rank].get(fqn), odd=False) for rank in ranks]
    seen = {rank: trial.holdings[rank].get(fqn) for rank in ranks}
    observed = [_strip(trial, r, fqn, part, odd=part != trial.plan.slices[r].get(fqn)) for r, part in seen.items()]
    cut = f" The first {MOST_RANKS} ranks." if len(trial.ranks) > MOST_RANKS else ""
    legend = "Hatched: other than requested." if any(row.odd for row in observed) else "As requested."
    return (
        Drawing(
            f"Requested: {fqn} by rank", strips("requested", requested), f"Rows of dim 0 that each rank holds.{cut}"
        ),
        Drawing(f"Observed: {fqn} by rank", strips("observed", observed), f"Found by comparing bytes. {legend}"),
    )


def _strip(trial: Trial, rank: int, fqn: str, part: Slice | None, *, odd: bool) -> Strip:
    label = rank_label(trial, rank).replace("dp_replicate", "rep").replace("dp_shard", "shard")
    if part is None:
        return Strip(label, 0.0, 0.0, "no such slice", odd)
    if not numel(part):
        return Strip(label, 0.0, 0.0, "nothing", odd)
    shape, (start, stop) = trial.plan.shapes[fqn], part[0]
    return Strip(label, start / shape[0], stop / shape[0], interval_text(part, shape), odd)


def _losses(trial: Trial) -> list[Drawing]:
    """Only where the reference has the steps."""
    known = {step.step: step.loss for step in trial.reference.steps if step.step in trial.case.steps}
    steps = sorted(known)
    if not steps:
        return []
    observed = {step: global_loss(trial, step) for step in steps}
    both = [
        Curve("reference", [known[step] for step in steps], "reference"),
        Curve("observed", [observed[step] for step in steps], "observed"),
    ]
    differences = {s: abs(seen - known[s]) / abs(known[s]) for s, seen in observed.items() if seen is not None}
    return [
        Drawing(
            "Loss by step", curves("loss by step", steps, both), "Wide line: reference on one device. Dots: observed."
        ),
        _against_bound(trial, "Difference of the loss", steps, differences, "loss"),
    ]


def _gradients(trial: Trial) -> list[Drawing]:
    """The largest of any entry, relative to its parameter's largest; in recipes with noise, of whole parameters too."""
    worst: dict[int, float] = {}
    for rank, step, reference in trial.steps():
        for fqn, gradient in step.gradients.items():
            if fqn in reference.gradients:
                found = gradient_distance(trial, rank, fqn, gradient, reference.gradients[fqn])
                worst[step.step] = max(worst.get(step.step, 0.0), found if math.isfinite(found) else math.inf)
    if not worst:
        return []
    entries = _against_bound(trial, "Largest difference of gradients", sorted(worst), worst, "gradient")
    return [entries, *([] if trial.case.exact else _of_whole_gradients(trial, sorted(worst)))]


def _of_whole_gradients(trial: Trial, steps: Sequence[int]) -> list[Drawing]:
    """Of the parameter that is off most, how many times its bound. Nothing where no noise was measured."""
    try:
        excess = {step: max((one.excess for one in misfits(trial, step)[0]), default=None) for step in steps}
    except tolerance.NoBound:
        return []
    title, ones = "Whole gradients, times their bound", Curve("bound", [1.0] * len(steps), "bound")
    lines = [Curve("difference", [excess[step] for step in steps], "observed"), ones]
    above = [step for step in steps if not (excess[step] or 0.0) <= 1]
    return [
        Drawing(title, curves(title, steps, lines, log=True), _said("Dots: the parameter that is off most.", above))
    ]


def _against_bound(
    trial: Trial, title: str, steps: Sequence[int], differences: dict[int, float], which: str
) -> Drawing:
    lines = [Curve("difference", [differences.get(step) for step in steps], "observed")]
    below = "Dots: relative difference from the reference."
    try:
        bound = getattr(trial.bounds, which)
    except tolerance.NoBound as reason:
        return Drawing(title, curves(title, steps, lines, log=True), f"{below} No bound: {reason}.")
    lines.append(Curve("bound", [bound.get(step) for step in steps], "bound"))
    above = [step for step in steps if step in bound and not differences.get(step, 0.0) <= bound[step]]
    return Drawing(title, curves(title, steps, lines, log=True), _said(below, above))


def _said(below: str, above: Sequence[int]) -> str:
    """above: in which steps dots are above the bound."""
    said = f"Above it in step {', '.join(map(str, above))}." if above else "Nowhere above it."
    return f"{below} Dashed line: the bound. {said}"


# ---- tables


def _group_row(group: UsedGroup) -> tuple[str, ...]:
    return (ranks_text(group.ranks), group.axis or "-", _bytes(group.requested), _bytes(group.moved), group.word)


def _axis_rows(groups: Sequence[UsedGroup]) -> list[tuple[str, ...]]:
    """Bytes of one step over each axis, of all ranks together."""
    axes = dict.fromkeys(group.axis for group in groups)
    return [
        (
            axis or OUTSIDE_THE_PLAN,
            _bytes(sum(group.requested for group in groups if group.axis == axis)),
            _bytes(sum(group.moved for group in groups if group.axis == axis)),
        )
        for axis in axes
    ]


def _memory(trial: Trial) -> list[tuple[str, ...]]:
    """By kind, the most that any rank may hold and the most that any holds, between steps."""
    step = step_shown(trial)
    held = [one.memory for evidence in trial.ranks.values() for one in evidence.steps if one.step == step]
    due = [planned(trial, rank) for rank in trial.ranks]
    return [
        (
            kind.replace("_", " "),
            _bytes(max(wanted[kind][1] for wanted in due)),
            _bytes(max((memory.get(kind, 0) for memory in held), default=0)),
        )
        for kind in due[0]
    ]


def _bytes(count: float) -> str:
    return bytes_text(count) if count else "0 B"
