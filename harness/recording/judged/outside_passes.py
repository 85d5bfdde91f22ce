"""Traffic of ranks outside of forward and backward: norms of gradients, losses, checkpoints, validation.

A correct job may do so in some steps only. So each step is looked at by itself, and two jobs are compared in the steps
that both have on record.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.core.evidence.keys import ranks_from_key, ranks_key, steps_text
from harness.core.evidence.records import CHECKPOINT
from harness.core.evidence.summary import POINT_TO_POINT, Summary

SECTION = "outside of forward and backward"
PHASES = {
    "optimizer": " in an optimizer's step",
    "evaluation": " in evaluation",
    CHECKPOINT: " of a checkpoint",
}
OBJECTS = "not compared, for they may be of pickled objects"
NONE = "none"
Kind = tuple[str, str, str, str]  # op, dtype, phase, whose groups
Range = tuple[int, int]
Section = Mapping[str, Any]
Moved = dict[tuple[int, str], dict[int, Range]]  # by rank and group, by step: calls and bytes


@dataclass(frozen=True)
class Line:
    """One collective over groups of which the same is claimed."""

    op: str
    """Name of the collective."""
    dtype: str
    """Dtype of the elements."""
    phase: str
    """Phase, as of an Outside."""
    role: str
    """Words for whose groups these are."""
    groups: tuple[str, ...]
    """Groups, in the words of ranks_key."""
    calls: dict[int, Range]
    """Step -> least and most calls of a rank in a group."""
    bytes: dict[int, Range]
    """Step -> least and most bytes of a rank in a group."""


def whole_steps(summaries: Iterable[Summary]) -> tuple[int, ...]:
    """Return the steps that every rank has on record, ascending.

    Ranks that have none are left out; empty if all have none.
    """
    known = [set(summary.traffic.whole) for summary in summaries if summary.traffic.whole]
    return tuple(sorted(set.intersection(*known))) if known else ()


def outside_lines(summaries: Sequence[Summary], *, axes_apart: bool = False) -> tuple[Line, ...]:
    """Return a line for each collective outside of passes: by op, dtype, phase and whose groups.

    Empty if nothing is moved. axes_apart: groups that share a rank are of different axes, and each axis has a separate
    line. Only steps that every rank has on record count.
    """
    steps = whole_steps(summaries)
    rows = []
    for kind, moved in sorted(_moved_by_kind(summaries).items()):
        axes = [moved]
        if axes_apart and kind[0] not in POINT_TO_POINT:
            axes = _split_by_axis(moved)
        for moved_of_axis in axes:
            if _is_moved_in(moved_of_axis, steps):
                rows.append(_line(kind, moved_of_axis, steps))
    return tuple(rows)


def _is_moved_in(moved: Moved, steps: Iterable[int]) -> bool:
    """Return whether anything is moved in any of these steps."""
    return any(not by_step.keys().isdisjoint(steps) for by_step in moved.values())


def _line(kind: Kind, moved: Moved, steps: Iterable[int]) -> Line:
    """Return the line of a kind of collectives, with the least and most calls and bytes of ranks in each step.

    A rank that moves nothing in a step counts as 0.
    """
    calls = {}
    sizes = {}
    for step in steps:
        of_ranks = [by_step.get(step, (0, 0)) for by_step in moved.values()]
        calls[step] = _least_and_most(number for number, _ in of_ranks)
        sizes[step] = _least_and_most(size for _, size in of_ranks)
    groups = sorted({group for _, group in moved}, key=ranks_from_key)
    return Line(*kind, groups=tuple(groups), calls=calls, bytes=sizes)


def _split_by_axis(moved: Moved) -> list[Moved]:
    """Return what is moved over each axis, one entry an axis.

    A group goes to the first axis whose groups have its size and none of its ranks; else it begins a new axis.
    """
    axes: list[tuple[list[str], set[int]]] = []
    for group in sorted({group for _, group in moved}, key=ranks_from_key):
        ranks = set(ranks_from_key(group))
        axis = next((axis for axis in axes if _fits_axis(ranks, *axis)), None)
        if axis is None:
            axis = ([], set())
            axes.append(axis)
        groups_of_axis, ranks_of_axis = axis
        groups_of_axis.append(group)
        ranks_of_axis |= ranks
    rows = []
    for groups_of_axis, _ in axes:
        rows.append({key: by_step for key, by_step in moved.items() if key[1] in groups_of_axis})
    return rows


def _fits_axis(ranks: set[int], groups_of_axis: Sequence[str], ranks_of_axis: set[int]) -> bool:
    """Return whether a group of these ranks has the size of an axis' groups, and none of their ranks."""
    return len(ranks_from_key(groups_of_axis[0])) == len(ranks) and ranks_of_axis.isdisjoint(ranks)


def _moved_by_kind(summaries: Iterable[Summary]) -> dict[Kind, Moved]:
    """Return by (op, dtype, phase, whose groups) the calls and bytes of each rank and group, by step."""
    by_kind: dict[Kind, Moved] = defaultdict(lambda: defaultdict(dict))
    for summary in summaries:
        for use in summary.traffic.outside:
            for step in ranks_from_key(use.steps):
                kind = (use.op, use.dtype, use.phase, _group_owner_text(summary, use.ranks))
                by_kind[kind][summary.rank, use.ranks][step] = (use.calls, use.bytes)
    return by_kind


def _group_owner_text(summary: Summary, group: str) -> str:
    """Return whose a group is, in words that another number of ranks does not change: its role, "all ranks" or "part
    of the ranks"."""
    if group in summary.groups.roles:
        return f"ranks {summary.groups.roles[group]}"
    return "all ranks" if len(ranks_from_key(group)) == summary.world else "part of the ranks"


def _least_and_most(numbers: Iterable[int]) -> Range:
    """Return the least and the largest number. Precondition: there is one."""
    listed = list(numbers)
    return min(listed), max(listed)


# ---- as structure


def structure_section(summaries: Sequence[Summary]) -> dict[str, Any]:
    """Return the section of a structure on what is moved outside of forward and backward.

    It has the steps that every rank has on record, and for each kind of collective its groups, calls and bytes. Bytes
    of uint8 are replaced by OBJECTS. Amounts that differ between steps are given by steps.
    """
    section: dict[str, Any] = {"steps": ranks_key(whole_steps(summaries)) or NONE}
    for line in outside_lines(summaries):
        sizes = OBJECTS if line.dtype == "uint8" else _amount_or_by_steps(line.bytes)
        section[f"{line.op} of {line.dtype}{PHASES.get(line.phase, '')} over {line.role}"] = {
            "groups": list(line.groups),
            "calls": _amount_or_by_steps(line.calls),
            "bytes": sizes,
        }
    return section


def _amount_or_by_steps(ranges: Mapping[int, Range]) -> Any:
    """Return the amount if it is the same in every step; else steps -> amount. "2 to 4" where ranks differ."""
    amounts = {
        step: least if least == largest else f"{least} to {largest}" for step, (least, largest) in ranges.items()
    }
    by_steps = {ranks_key(tuple(steps)): amount for amount, steps in _steps_by_amount(amounts)}
    return next(iter(by_steps.values())) if len(by_steps) == 1 else by_steps


def _steps_by_amount(amounts: Mapping[int, Any]) -> list[tuple[Any, list[int]]]:
    """Return each different amount with the steps that have it, in the order of steps."""
    by_amount: dict[Any, list[int]] = {}
    for step, amount in amounts.items():
        by_amount.setdefault(amount, []).append(step)
    return list(by_amount.items())


def restrict_to_common_steps(baseline: Section, candidate: Section) -> tuple[Section, Section]:
    """Return both sections with amounts of only the steps that both have.

    If there is none, return which steps each has.
    """
    steps = _common_steps(baseline, candidate)
    if not steps:
        return {"steps": baseline["steps"]}, {"steps": candidate["steps"]}
    return _lines_of_steps(baseline, steps), _lines_of_steps(candidate, steps)


def compared_steps_text(baseline: Section, candidate: Section) -> str:
    """Return which steps two sections are compared in, in words; or that they have no step in common."""
    steps = _common_steps(baseline, candidate)
    if not steps:
        return "not compared: no step that was followed by another is recorded in both"
    return f"compared in {steps_text(steps)}, which both have on record"


def _common_steps(baseline: Section, candidate: Section) -> tuple[int, ...]:
    return tuple(sorted(set(_recorded_steps(baseline)) & set(_recorded_steps(candidate))))


def _recorded_steps(section: Section) -> tuple[int, ...]:
    text = str(section["steps"])
    return () if text == NONE else ranks_from_key(text)


def _lines_of_steps(section: Section, steps: tuple[int, ...]) -> dict[str, Any]:
    """Return the entries of collectives that are called in any of these steps, with the amounts of these steps in words."""
    lines = {}
    for name, line in section.items():
        if name == "steps":
            continue
        calls = _amounts_of_steps(line["calls"], steps)
        if set(calls.values()) != {0}:
            sizes = _amounts_of_steps(line["bytes"], steps)
            lines[name] = {**line, "calls": _amounts_text(calls), "bytes": _amounts_text(sizes)}
    return lines


def _amounts_of_steps(amounts: Any, steps: tuple[int, ...]) -> dict[int, Any]:
    """Return step -> amount for these steps, from one amount for all steps or a mapping of steps in the words of ranks_key."""
    if not isinstance(amounts, Mapping):
        return dict.fromkeys(steps, amounts)
    by_step = {}
    for steps_of_amount, amount in amounts.items():
        by_step.update(dict.fromkeys(ranks_from_key(str(steps_of_amount)), amount))
    return {step: by_step[step] for step in steps}


def _amounts_text(amounts: Mapping[int, Any]) -> Any:
    """Return the amount if it is the same in every step; else the amounts with their steps, in words."""
    alike = _steps_by_amount(amounts)
    if len(alike) == 1:
        return alike[0][0]
    return ", ".join(f"{amount} in {steps_text(tuple(steps))}" for amount, steps in alike)
