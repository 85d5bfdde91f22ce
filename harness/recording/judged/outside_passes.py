"""What ranks moved outside of forward and backward: norms of gradients, losses, checkpoints, validation.

A correct job may do so in some steps only. So each step is looked at by itself, and two jobs are compared in the steps that
both have on record.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.core.evidence.keys import ranks_key, ranks_of, steps_text
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
    """Return the steps that every rank has on record."""
    known = [set(one.traffic.whole) for one in summaries if one.traffic.whole]
    return tuple(sorted(set.intersection(*known))) if known else ()


def lines(summaries: Sequence[Summary], *, axes_apart: bool = False) -> tuple[Line, ...]:
    """axes_apart: groups that share a rank are of different axes, and each is in a separate line."""
    steps, moved = whole_steps(summaries), _moved(summaries)
    return tuple(
        Line(
            *kind,
            groups=tuple(sorted({group for _, group in ranks}, key=ranks_of)),
            calls={step: _range(done.get(step, (0, 0))[0] for done in ranks.values()) for step in steps},
            bytes={step: _range(done.get(step, (0, 0))[1] for done in ranks.values()) for step in steps},
        )
        for kind, of_kind in sorted(moved.items())
        for ranks in (_axes(of_kind) if axes_apart and kind[0] not in POINT_TO_POINT else [of_kind])
        if any(step in done for done in ranks.values() for step in steps)
    )


def _axes(ranks: Moved) -> list[Moved]:
    """Each group goes to the first axis whose groups have its size and none of its ranks."""
    axes: list[tuple[list[str], set[int]]] = []
    for group in sorted({group for _, group in ranks}, key=ranks_of):
        own = set(ranks_of(group))
        homes = (axis for axis in axes if len(ranks_of(axis[0][0])) == len(own) and axis[1].isdisjoint(own))
        groups, taken = next(homes, None) or ([], set())
        if not groups:
            axes.append((groups, taken))
        groups.append(group)
        taken |= own
    found = (set(groups) for groups, _ in axes)
    return [{key: done for key, done in ranks.items() if key[1] in groups} for groups in found]


def _moved(summaries: Iterable[Summary]) -> dict[Kind, Moved]:
    found: dict[Kind, Moved] = defaultdict(lambda: defaultdict(dict))
    for one in summaries:
        for use in one.traffic.outside:
            for step in ranks_of(use.steps):
                found[use.op, use.dtype, use.phase, _whose(one, use.ranks)][one.rank, use.ranks][step] = (
                    use.calls,
                    use.bytes,
                )
    return found


def _whose(one: Summary, group: str) -> str:
    """Name the group in words that another number of ranks does not change."""
    if group in one.groups.roles:
        return f"ranks {one.groups.roles[group]}"
    return "all ranks" if len(ranks_of(group)) == one.world else "part of the ranks"


def _range(numbers: Iterable[int]) -> Range:
    listed = list(numbers)
    return min(listed), max(listed)


# ---- as structure


def section(summaries: Sequence[Summary]) -> dict[str, Any]:
    told: dict[str, Any] = {"steps": ranks_key(whole_steps(summaries)) or NONE}
    for line in lines(summaries):
        sizes = OBJECTS if line.dtype == "uint8" else _by_steps(line.bytes)
        told[f"{line.op} of {line.dtype}{PHASES.get(line.phase, '')} over {line.role}"] = {
            "groups": list(line.groups),
            "calls": _by_steps(line.calls),
            "bytes": sizes,
        }
    return told


def _by_steps(ranges: Mapping[int, Range]) -> Any:
    """One amount where it is that in every step; else amounts by steps."""
    amounts = {step: least if least == most else f"{least} to {most}" for step, (least, most) in ranges.items()}
    found = {ranks_key(tuple(steps)): amount for amount, steps in _alike(amounts)}
    return next(iter(found.values())) if len(found) == 1 else found


def _alike(amounts: Mapping[int, Any]) -> list[tuple[Any, list[int]]]:
    found: dict[Any, list[int]] = {}
    for step, amount in amounts.items():
        found.setdefault(amount, []).append(step)
    return list(found.items())


def in_common(one: Section, other: Section) -> tuple[Section, Section]:
    """Both, of the steps alone that both have; where they have none in common, which steps they have."""
    steps = _common(one, other)
    if not steps:
        return {"steps": one["steps"]}, {"steps": other["steps"]}
    return _within(one, steps), _within(other, steps)


def steps_compared(one: Section, other: Section) -> str:
    steps = _common(one, other)
    if not steps:
        return "not compared: no step that was followed by another is recorded in both"
    return f"compared in {steps_text(steps)}, which both have on record"


def _common(one: Section, other: Section) -> tuple[int, ...]:
    return tuple(sorted(set(_steps(one)) & set(_steps(other))))


def _steps(told: Section) -> tuple[int, ...]:
    text = str(told["steps"])
    return () if text == NONE else ranks_of(text)


def _within(told: Section, steps: tuple[int, ...]) -> dict[str, Any]:
    """What is moved in none of these steps is not there."""
    found = {}
    for name, line in told.items():
        if name != "steps" and set((calls := _of_steps(line["calls"], steps)).values()) != {0}:
            sizes = _of_steps(line["bytes"], steps)
            found[name] = {**line, "calls": _amounts_text(calls), "bytes": _amounts_text(sizes)}
    return found


def _of_steps(amounts: Any, steps: tuple[int, ...]) -> dict[int, Any]:
    if not isinstance(amounts, Mapping):
        return dict.fromkeys(steps, amounts)
    each = {step: amount for at, amount in amounts.items() for step in ranks_of(str(at))}
    return {step: each[step] for step in steps}


def _amounts_text(amounts: Mapping[int, Any]) -> Any:
    alike = _alike(amounts)
    if len(alike) == 1:
        return alike[0][0]
    return ", ".join(f"{amount} in {steps_text(tuple(steps))}" for amount, steps in alike)
