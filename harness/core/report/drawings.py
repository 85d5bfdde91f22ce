"""A case's stored evidence as a page shows it: who holds what, which groups moved what, how losses and gradients compare."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from harness.core.checks.memory import planned
from harness.core.evidence.text import bytes_text, ranks_text
from harness.core.judge import tolerance
from harness.core.judge.assembly import gradient_distance, misfits
from harness.core.judge.losses import global_loss
from harness.core.judge.measures import OUTSIDE_THE_PLAN, step_shown
from harness.core.judge.trial import Trial
from harness.core.plan.slices import Slice, numel
from harness.core.report.shown import AS_REQUESTED, UsedGroup, interval_text, rank_label, shown_parameter, used_groups
from harness.core.report.svg import Curve, Strip, curves, strips

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
    """What is shown of one subject."""

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
class Drawn:
    """What a page shows of one case."""

    sections: tuple[Section, ...]
    """The sections that differ from the request come first."""
    lacking: str
    """Which ranks left no evidence; empty if all did."""


def drawn(trial: Trial) -> Drawn:
    """Return what the ranks that left evidence show, and the names of the others."""
    missing = [rank for rank in range(trial.run.world_size) if rank not in trial.ranks]
    lacking = f"ranks {ranks_text(missing)} left no evidence" if missing else ""
    sections = [_holdings(trial), _traffic(trial), _numbers(trial), _memory(trial)] if trial.ranks else []
    shown = [section for section in sections if section.drawings or section.tables]
    return Drawn(tuple(sorted(shown, key=lambda section: not section.differs)), lacking)


# ---- who holds what


def _holdings(trial: Trial) -> Section:
    fqn = shown_parameter(trial)
    due = {rank: trial.plan.slices[rank].get(fqn) for rank in sorted(trial.ranks)}
    seen = {rank: trial.holdings[rank].get(fqn) for rank in due}
    odd = [rank for rank in due if seen[rank] != due[rank]]
    ranks = sorted(sorted(due, key=lambda rank: (rank not in odd, rank))[:MOST_RANKS])
    cut = f" {len(ranks)} of {len(due)} ranks{', those that differ among them' * bool(odd)}." * (len(ranks) < len(due))
    legend = f"Hatched: other than requested, on ranks {ranks_text(odd)}." if odd else "As requested on every rank."
    shape = "x".join(map(str, trial.plan.shapes[fqn]))
    requested = strips("requested", [_strip(trial, rank, fqn, due[rank], odd=False) for rank in ranks])
    observed = strips("observed", [_strip(trial, rank, fqn, seen[rank], odd=rank in odd) for rank in ranks])
    drawings = (
        Drawing(f"Requested: {fqn}", requested, f"The bar: dim 0 of {shape}. Filled: what each rank holds.{cut}"),
        Drawing(f"Observed: {fqn}", observed, f"Found by comparing bytes. {legend}"),
    )
    return Section("Who holds what", bool(odd), drawings)


def _strip(trial: Trial, rank: int, fqn: str, part: Slice | None, *, odd: bool) -> Strip:
    place = rank_label(trial, rank).partition("  ")[2].replace("dp_replicate", "rep").replace("dp_shard", "shard")
    if part is None:
        return Strip(str(rank), place, 0.0, 0.0, "no such slice", odd)
    if not numel(part):
        return Strip(str(rank), place, 0.0, 0.0, "nothing", odd)
    shape, (start, stop) = trial.plan.shapes[fqn], part[0]
    return Strip(str(rank), place, start / shape[0], stop / shape[0], interval_text(part, shape), odd)


# ---- losses and gradients


def _numbers(trial: Trial) -> Section:
    found = [*_losses(trial), *_gradients(trial)]
    return Section("Losses and gradients", any(above for _, above in found), tuple(drawing for drawing, _ in found))


Judged = tuple[Drawing, bool]
"""A drawing, and whether some step in it is above its bound."""


def _losses(trial: Trial) -> list[Judged]:
    """Return the loss and its difference, if the reference has the steps."""
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
    below = "Wide line: reference on one device. Dots: observed, over the tokens of all ranks."
    return [
        (Drawing("Loss by step", curves("loss by step", steps, both), below), False),
        _against_bound(trial, "Difference of the loss", steps, differences, "loss"),
    ]


def _gradients(trial: Trial) -> list[Judged]:
    """Return the largest difference of an entry, relative to its parameter's largest.

    In recipes with noise, whole parameters are compared too.
    """
    worst: dict[int, float] = {}
    for rank, step, reference in trial.steps():
        for fqn, gradient in step.gradients.items():
            if fqn in reference.gradients:
                found = gradient_distance(trial, rank, fqn, gradient, reference.gradients[fqn])
                worst[step.step] = max(worst.get(step.step, 0.0), found if math.isfinite(found) else math.inf)
    if not worst:
        return []
    entries = _against_bound(trial, "Largest difference of gradients, any rank", sorted(worst), worst, "gradient")
    return [entries, *([] if trial.case.exact else _of_whole_gradients(trial, sorted(worst)))]


def _of_whole_gradients(trial: Trial, steps: Sequence[int]) -> list[Judged]:
    """Return how many times its bound the worst parameter differs; nothing if no noise was measured."""
    try:
        excess = {step: max((one.excess for one in misfits(trial, step)[0]), default=None) for step in steps}
    except tolerance.NoBound:
        return []
    title, ones = "Whole gradients, times their bound", Curve("bound", [1.0] * len(steps), "bound")
    lines = [Curve("difference", [excess[step] for step in steps], "observed"), ones]
    above = [step for step in steps if not (excess[step] or 0.0) <= 1]
    below = _said("Dots: the parameter that differs most.", above)
    return [(Drawing(title, curves(title, steps, lines, log=True), below), bool(above))]


def _against_bound(trial: Trial, title: str, steps: Sequence[int], differences: dict[int, float], which: str) -> Judged:
    lines = [Curve("difference", [differences.get(step) for step in steps], "observed")]
    below = "Dots: relative difference from the reference."
    try:
        bound = getattr(trial.bounds, which)
    except tolerance.NoBound as reason:
        return Drawing(title, curves(title, steps, lines, log=True), f"{below} No bound: {reason}."), False
    lines.append(Curve("bound", [bound.get(step) for step in steps], "bound"))
    above = [step for step in steps if step in bound and not differences.get(step, 0.0) <= bound[step]]
    return Drawing(title, curves(title, steps, lines, log=True), _said(below, above)), bool(above)


def _said(below: str, above: Sequence[int]) -> str:
    """Return the caption. above: the steps in which dots are above the bound."""
    said = f"Above it in step {', '.join(map(str, above))}." if above else "No step is above it."
    return f"{below} Dashed line: the bound. {said}"


# ---- what moved, and what is kept


def _traffic(trial: Trial) -> Section:
    groups = sorted(used_groups(trial), key=lambda group: group.word == AS_REQUESTED)
    step = step_shown(trial)
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
    differs = any(group.word != AS_REQUESTED for group in groups)
    return Section("What moved, over which ranks", differs, tables=(of_groups, of_axes) if groups else ())


def _group_row(group: UsedGroup) -> tuple[str, ...]:
    requested = _bytes(group.requested)
    if group.optional:
        requested = f"{_bytes(group.requested - group.optional)} to {requested}"
    return (ranks_text(group.ranks), group.axis or OUTSIDE_THE_PLAN, requested, _bytes(group.moved), group.word)


def _axis_rows(groups: Sequence[UsedGroup]) -> list[tuple[str, ...]]:
    """Return the bytes over each axis."""
    axes = dict.fromkeys(group.axis for group in groups)
    return [
        (
            axis or OUTSIDE_THE_PLAN,
            _bytes(sum(group.requested for group in groups if group.axis == axis)),
            _bytes(sum(group.moved for group in groups if group.axis == axis)),
        )
        for axis in axes
    ]


def _memory(trial: Trial) -> Section:
    """Show the rank that differs most from its plan, of each kind; if none does, the rank that holds most."""
    step = step_shown(trial)
    held = {
        rank: next((one.memory for one in evidence.steps if one.step == step), {})
        for rank, evidence in trial.ranks.items()
    }
    due = {rank: planned(trial, rank) for rank in trial.ranks}
    rows, differs = [], False
    for kind in next(iter(due.values())):
        seen = {rank: memory[kind] for rank, memory in held.items() if kind in memory}
        if not seen:
            rows.append((kind.replace("_", " "), "any", _range(*due[min(due)][kind]), "not observed"))
            continue
        beyond = {rank: max(due[rank][kind][0] - count, count - due[rank][kind][1], 0) for rank, count in seen.items()}
        rank = max(seen, key=lambda rank: (beyond[rank], seen[rank], -rank))
        differs |= beyond[rank] > 0
        rows.append((kind.replace("_", " "), str(rank), _range(*due[rank][kind]), _bytes(seen[rank])))
    title = f"Memory after step {step} (one rank: the one that differs most, or holds most)"
    return Section("Memory", differs, tables=(Table(title, ("kind", "rank", "requested", "observed"), tuple(rows)),))


def _range(least: int, most: int) -> str:
    if least == most:
        return _bytes(most)
    return f"{_bytes(least)} to {_bytes(most)}" if least else f"at most {_bytes(most)}"


def _bytes(count: float) -> str:
    return bytes_text(count) if count else "0 B"
