"""Drawings of a case's stored evidence for a page: slices that ranks hold, bytes that groups moved, losses and
gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.core.checks.memory import planned_bytes_by_kind
from harness.core.evidence.text import bytes_text, ranks_text
from harness.core.judge import tolerance
from harness.core.judge.assembly import gradient_distance, gradient_misfits
from harness.core.judge.losses import global_loss
from harness.core.judge.measures import OUTSIDE_THE_PLAN, representative_step
from harness.core.judge.trial import Trial
from harness.core.plan.slices import Slice, numel
from harness.core.report.shown import AS_REQUESTED, UsedGroup, interval_text, rank_label, shown_parameter, used_groups
from harness.core.report.svg import Curve, Strip, curves_svg, strips_svg

MOST_RANKS = 32  # a drawing of more is a wall of bars


@dataclass(frozen=True)
class Drawing:
    """A picture with the words around it."""

    title: str
    """What it shows, and of which ranks."""
    svg: str
    """The picture."""
    below: str = ""
    """What its lines or colours are, in words."""


@dataclass(frozen=True)
class Table:
    """Rows of text below the names of the columns."""

    title: str
    """What it shows, and whether a figure is one rank's or a sum over ranks."""
    head: tuple[str, ...]
    """The names of the columns."""
    rows: tuple[tuple[str, ...], ...]
    """The cells. None is empty."""


@dataclass(frozen=True)
class Section:
    """The drawings and tables on one subject."""

    title: str
    """The subject."""
    differs: bool
    """Whether something observed is not as requested."""
    drawings: tuple[Drawing, ...] = ()
    """The pictures, side by side."""
    tables: tuple[Table, ...] = ()
    """The tables, one below the other."""
    text: str = ""
    """Text that stands as it is."""
    wide: bool = False
    """Whether a picture takes the whole width."""


@dataclass(frozen=True)
class CaseDrawings:
    """All drawings and tables of one case."""

    sections: tuple[Section, ...]
    """The sections that differ from the request come first."""
    lacking: str
    """Which ranks left no evidence; empty if all did."""


def draw_case(trial: Trial) -> CaseDrawings:
    """Return the drawings and tables of a case, from the ranks that left evidence, and a text on the ranks that left none.

    Sections without a drawing or table are left out. There are no sections if no rank left evidence.
    """
    missing = [rank for rank in range(trial.run.world_size) if rank not in trial.ranks]
    lacking = f"ranks {ranks_text(missing)} left no evidence" if missing else ""
    sections = (
        [_slices_section(trial), _traffic_section(trial), _numbers_section(trial), _memory_section(trial)]
        if trial.ranks
        else []
    )
    shown = [section for section in sections if section.drawings or section.tables]
    return CaseDrawings(tuple(sorted(shown, key=lambda section: not section.differs)), lacking)


# ---- who holds what


def _slices_section(trial: Trial) -> Section:
    """Return drawings of the requested and the observed slices of one parameter, with a row for each rank.

    Of more than MOST_RANKS ranks those that differ are drawn first, and the caption says how many there are.
    """
    fqn = shown_parameter(trial)
    requested = {rank: trial.plan.slices[rank].get(fqn) for rank in sorted(trial.ranks)}
    observed = {rank: trial.local_slices[rank].get(fqn) for rank in requested}
    differing = [rank for rank in requested if observed[rank] != requested[rank]]
    # Ranks that differ are shown before others, if there are too many to show all.
    ranks = sorted(sorted(requested, key=lambda rank: (rank not in differing, rank))[:MOST_RANKS])
    cut = ""
    if len(ranks) < len(requested):
        among = ", those that differ among them" if differing else ""
        cut = f" {len(ranks)} of {len(requested)} ranks{among}."
    legend = "As requested on every rank."
    if differing:
        legend = f"Hatched: other than requested, on ranks {ranks_text(differing)}."
    shape = "x".join(map(str, trial.plan.shapes[fqn]))
    requested_strips = [_strip_of_rank(trial, rank, fqn, requested[rank], odd=False) for rank in ranks]
    observed_strips = [_strip_of_rank(trial, rank, fqn, observed[rank], odd=rank in differing) for rank in ranks]
    requested_caption = f"The bar: dim 0 of {shape}. Filled: what each rank holds.{cut}"
    drawings = (
        Drawing(f"Requested: {fqn}", strips_svg("requested", requested_strips), requested_caption),
        Drawing(f"Observed: {fqn}", strips_svg("observed", observed_strips), f"Found by comparing bytes. {legend}"),
    )
    return Section("Who holds what", bool(differing), drawings)


def _strip_of_rank(trial: Trial, rank: int, fqn: str, part: Slice | None, *, odd: bool) -> Strip:
    """Return the row of a rank in a drawing of a parameter, a bar along dim 0.

    part: the slice that it holds; None if no slice of the parameter matches. odd: whether the bar is hatched.
    """
    label = rank_label(trial, rank).partition("  ")[2]
    coordinate_text = label.replace("dp_replicate", "rep").replace("dp_shard", "shard")
    if part is None:
        return Strip(str(rank), coordinate_text, 0.0, 0.0, "no such slice", odd)
    if not numel(part):
        return Strip(str(rank), coordinate_text, 0.0, 0.0, "nothing", odd)
    shape = trial.plan.shapes[fqn]
    start, stop = part[0]
    return Strip(str(rank), coordinate_text, start / shape[0], stop / shape[0], interval_text(part, shape), odd)


# ---- losses and gradients


def _numbers_section(trial: Trial) -> Section:
    """Return the drawings of losses and gradients; the section differs if a step is above its bound."""
    judged = [*_loss_drawings(trial), *_gradient_drawings(trial)]
    drawings = tuple(drawing for drawing, _ in judged)
    return Section("Losses and gradients", any(is_above for _, is_above in judged), drawings)


JudgedDrawing = tuple[Drawing, bool]
"""A drawing, and whether some step in it is above its bound."""


def _loss_drawings(trial: Trial) -> list[JudgedDrawing]:
    """Return a drawing of the loss by step, and one of its relative difference from the reference's.

    Empty without a reference.
    """
    expected = {step.step: step.loss for step in trial.reference.steps if step.step in trial.case.steps}
    steps = sorted(expected)
    if not steps:
        return []
    observed = {step: global_loss(trial, step) for step in steps}
    lines = [
        Curve("reference", [expected[step] for step in steps], "reference"),
        Curve("observed", [observed[step] for step in steps], "observed"),
    ]
    differences = {}
    for step, loss in observed.items():
        if loss is not None:
            differences[step] = abs(loss - expected[step]) / abs(expected[step])
    below = "Wide line: reference on one device. Dots: observed, over the tokens of all ranks."
    return [
        (Drawing("Loss by step", curves_svg("loss by step", steps, lines), below), False),
        _difference_drawing(trial, "Difference of the loss", steps, differences, "loss"),
    ]


def _gradient_drawings(trial: Trial) -> list[JudgedDrawing]:
    """Return a drawing of the largest difference of a gradient's entry, relative to its parameter's largest entry.

    In recipes with noise, there is a second drawing, of whole parameters. Empty if no gradient was observed.
    """
    worst: dict[int, float] = {}
    for rank, step, reference in trial.steps_with_reference():
        for fqn, gradient in step.gradients.items():
            if fqn in reference.gradients:
                distance = gradient_distance(trial, rank, fqn, gradient, reference.gradients[fqn])
                worst[step.step] = max(worst.get(step.step, 0.0), distance if math.isfinite(distance) else math.inf)
    if not worst:
        return []
    steps = sorted(worst)
    entries = _difference_drawing(trial, "Largest difference of gradients, any rank", steps, worst, "gradient")
    if trial.case.has_derived_bounds:
        return [entries]
    return [entries, *_whole_gradient_drawings(trial, steps)]


def _whole_gradient_drawings(trial: Trial, steps: Sequence[int]) -> list[JudgedDrawing]:
    """Return a drawing of the worst parameter's difference by step, divided by its bound.

    Empty if no noise was measured.
    """
    excess: dict[int, float | None] = {}
    try:
        for step in steps:
            step_misfits, _ = gradient_misfits(trial, step)
            excess[step] = max((misfit.ratio_to_bound for misfit in step_misfits), default=None)
    except tolerance.NoBound:
        return []
    title = "Whole gradients, times their bound"
    bound_line = Curve("bound", [1.0] * len(steps), "bound")
    lines = [Curve("difference", [excess[step] for step in steps], "observed"), bound_line]
    above = [step for step in steps if not (excess[step] or 0.0) <= 1]
    below = _caption_with_bound("Dots: the parameter that differs most.", above)
    return [(Drawing(title, curves_svg(title, steps, lines, log=True), below), bool(above))]


def _difference_drawing(
    trial: Trial, title: str, steps: Sequence[int], differences: dict[int, float], which: str
) -> JudgedDrawing:
    """Return a drawing of differences by step with their bound, and whether a step is above it.

    which: name of the bound, "loss" or "gradient". Without a bound the caption says why, and nothing is above it.
    """
    lines = [Curve("difference", [differences.get(step) for step in steps], "observed")]
    below = "Dots: relative difference from the reference."
    try:
        bound = getattr(trial.bounds, which)
    except tolerance.NoBound as reason:
        return Drawing(title, curves_svg(title, steps, lines, log=True), f"{below} No bound: {reason}."), False
    lines.append(Curve("bound", [bound.get(step) for step in steps], "bound"))
    above = [step for step in steps if step in bound and not differences.get(step, 0.0) <= bound[step]]
    return Drawing(title, curves_svg(title, steps, lines, log=True), _caption_with_bound(below, above)), bool(above)


def _caption_with_bound(below: str, above: Sequence[int]) -> str:
    """Return the caption with a sentence on the bound. above: the steps in which dots are above the bound."""
    verdict = f"Above it in step {', '.join(map(str, above))}." if above else "No step is above it."
    return f"{below} Dashed line: the bound. {verdict}"


# ---- what moved, and what is kept


def _traffic_section(trial: Trial) -> Section:
    """Return tables of the bytes that moved in one step, by group and by axis; groups that differ come first.

    Without groups there are no tables.
    """
    groups = sorted(used_groups(trial), key=lambda group: group.comparison_text == AS_REQUESTED)
    step = representative_step(trial)
    of_groups = Table(
        f"Groups, and the bytes that moved over each in step {step} (forward and backward, sum over its ranks)",
        ("group", "axis", "requested", "observed", "that is"),
        tuple(map(_group_row, groups)),
    )
    of_axes = Table(
        f"Bytes by axis in step {step} (forward and backward, sum over all ranks)",
        ("axis", "requested", "observed"),
        tuple(_axis_rows(groups)),
    )
    differs = any(group.comparison_text != AS_REQUESTED for group in groups)
    return Section("What moved, over which ranks", differs, tables=(of_groups, of_axes) if groups else ())


def _group_row(group: UsedGroup) -> tuple[str, ...]:
    """Return a group's row as texts: ranks, axis, requested bytes, observed bytes, comparison.

    Requested is a range if some bytes may be left out.
    """
    requested = _bytes_or_zero_text(group.requested)
    if group.optional:
        requested = f"{_bytes_or_zero_text(group.requested - group.optional)} to {requested}"
    return (
        ranks_text(group.ranks),
        group.axis or OUTSIDE_THE_PLAN,
        requested,
        _bytes_or_zero_text(group.moved),
        group.comparison_text,
    )


def _axis_rows(groups: Sequence[UsedGroup]) -> list[tuple[str, ...]]:
    """Return (axis, requested bytes, observed bytes) of each axis, as texts."""
    rows: list[tuple[str, ...]] = []
    for axis in dict.fromkeys(group.axis for group in groups):
        requested = sum(group.requested for group in groups if group.axis == axis)
        moved = sum(group.moved for group in groups if group.axis == axis)
        rows.append((axis or OUTSIDE_THE_PLAN, _bytes_or_zero_text(requested), _bytes_or_zero_text(moved)))
    return rows


def _memory_section(trial: Trial) -> Section:
    """Return a table of memory after one step, with a row and one rank for each kind of bytes.

    That is the rank that differs most from its plan, else that with most bytes. A kind that no rank recorded is "not
    observed".
    """
    step = representative_step(trial)
    observed_memory: dict[int, dict[str, int]] = {}
    for rank, evidence in trial.ranks.items():
        observed_memory[rank] = next((record.memory for record in evidence.steps if record.step == step), {})
    requested = {rank: planned_bytes_by_kind(trial, rank) for rank in trial.ranks}
    rows = []
    differs = False
    for kind in next(iter(requested.values())):
        kind_text = kind.replace("_", " ")
        observed = {rank: memory[kind] for rank, memory in observed_memory.items() if kind in memory}
        if not observed:
            rows.append((kind_text, "any", _range_text(*requested[min(requested)][kind]), "not observed"))
            continue
        excess = {}
        for rank, count in observed.items():
            lower, upper = requested[rank][kind]
            excess[rank] = max(lower - count, count - upper, 0)
        shown_rank = _worst_rank(excess, observed)
        differs |= excess[shown_rank] > 0
        requested_text = _range_text(*requested[shown_rank][kind])
        rows.append((kind_text, str(shown_rank), requested_text, _bytes_or_zero_text(observed[shown_rank])))
    title = f"Memory after step {step} (one rank: the one that differs most, or holds most)"
    return Section("Memory", differs, tables=(Table(title, ("kind", "rank", "requested", "observed"), tuple(rows)),))


def _worst_rank(excess: Mapping[int, int], observed: Mapping[int, int]) -> int:
    """Return the rank that is farthest outside of its plan, else that with most bytes; of several the lowest."""
    return max(observed, key=lambda rank: (excess[rank], observed[rank], -rank))


def _range_text(lower: int, upper: int) -> str:
    """Return the text of a range of bytes: "1 kB to 2 kB", "at most 2 kB" from 0, or one number if both are equal."""
    if lower == upper:
        return _bytes_or_zero_text(upper)
    return (
        f"{_bytes_or_zero_text(lower)} to {_bytes_or_zero_text(upper)}"
        if lower
        else f"at most {_bytes_or_zero_text(upper)}"
    )


def _bytes_or_zero_text(count: float) -> str:
    return bytes_text(count) if count else "0 B"
