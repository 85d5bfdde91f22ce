"""The structure of a recorded job: what is the same when it runs again, in words and numbers that a person reviews.

Costs that no two runs have alike, step time and peak memory, are kept separately.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from harness.core.evidence.summary import Summary
from harness.core.judge.observed import Axis, axes, replicas, together
from harness.recording.judged import outside_passes
from harness.recording.judged.stored_recording import Recording

BY_DEGREE = ("groups", "calls", "memory", "bytes", "replicas", "fed")
"""What another number of ranks changes of the same script."""
TYPE = re.compile(r" of ((?:b?float|u?int|complex)\d\w*|bool)\b")
"""In the name of a collective."""


def structure(recording: Recording) -> dict[str, Any]:
    summaries = [one for _, one in sorted(recording.summaries.items())]
    return {
        "ranks": recording.world,
        "ended": {
            state or "unheard": len(ranks)
            for state, ranks in together(summaries, lambda one: one.progress.ended).items()
        },
        "models": _per_kind(summaries, _models_text),
        "parameters": _per_kind(summaries, lambda one: "; ".join(_counts(one.parameters.placements))),
        "wrappers": _per_kind(summaries, lambda one: ", ".join(_counts(one.modules.wrappers))),
        "optimizers": _per_kind(summaries, lambda one: ", ".join(one.modules.optimizers)),
        "axes": {_name(axis, number): _axis(axis) for number, axis in numbered(axes(summaries))},
        outside_passes.SECTION: outside_passes.section(summaries),
        "idle groups": sorted({key for one in summaries for key in one.groups.idle}),
        "memory": _memory(summaries),
        "replicas": ", ".join(dict.fromkeys(f"sets of {len(family)}" for family in replicas(summaries)))
        or "none claimed",
        "fed": len(together(summaries, lambda one: one.received.batches.get(min(one.received.batches, default=0)))),
        "settings": _settings(summaries),
    }


def _models_text(one: Summary) -> str:
    return f"{' + '.join(one.modules.classes)}: {one.parameters.count} of {one.parameters.elements}"


def _counts(by_name: Mapping[str, int]) -> list[str]:
    """Return a text for each: 2 fsdp2."""
    return [f"{count} {name}" for name, count in by_name.items()]


def _per_kind(summaries: list[Summary], text: Callable[[Summary], str]) -> Any:
    """One text where all ranks have the same; else how many ranks have each."""
    kinds = together(summaries, text)
    return next(iter(kinds), "") if len(kinds) < 2 else {text: len(ranks) for text, ranks in kinds.items()}


def numbered(found: tuple[Axis, ...]) -> Iterator[tuple[int, Axis]]:
    """The n-th of axes that look alike."""
    seen: dict[str, int] = {}
    for axis in found:
        name = _name(axis, 0)
        seen[name] = seen.get(name, 0) + 1
        yield seen[name] - 1, axis


def _name(axis: Axis, number: int) -> str:
    operators = "unnamed, " + ", ".join(sorted({moved.op for moved in axis.moved}))
    return (axis.role or operators) + (f" ({number + 1})" if number else "")


def _axis(axis: Axis) -> dict[str, Any]:
    several = Counter((one.op, one.phase) for one in axis.moved)
    moved = {}
    for one in axis.moved:
        size = one.most if one.least == one.most else f"{one.least} to {one.most}"
        apart = f" of {one.dtype}" if several[one.op, one.phase] > 1 else ""
        moved[f"{one.op} in {one.phase}{apart}"] = {"dtype": one.dtype, "bytes": size, "calls": one.calls}
    return {"degree": axis.size, "groups": list(axis.groups), **moved}


def _memory(summaries: list[Summary]) -> dict[str, Any]:
    kinds = sorted({kind for one in summaries for kind in one.resources.memory})
    sizes = {kind: {one.resources.memory.get(kind, 0) for one in summaries} for kind in kinds}
    sizes["parameters as forward ends"] = {one.resources.after_forward for one in summaries}
    return {kind: max(held) if len(held) == 1 else f"{min(held)} to {max(held)}" for kind, held in sizes.items()}


def _settings(summaries: list[Summary]) -> dict[str, Any]:
    names = sorted({name for one in summaries for name in one.environment.settings} - {"threads"})
    return {name: _per_kind(summaries, functools.partial(_setting, name)) for name in names}


def _setting(name: str, one: Summary) -> str:
    return one.environment.settings.get(name, "")


# ---- two of them


@dataclass(frozen=True)
class Difference:
    """where: the words on the way there, such as axes, sharded by fsdp2, all_gather in forward, bytes."""

    where: tuple[str, ...]
    one: str
    other: str


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[Difference]:
    """Return what differs. If numbers of ranks differ, what follows from them is left out: degrees, parameters, exits."""
    found = [Difference(where, a, b) for where, a, b in _pairs(*_comparable(one, other), ()) if a != b]
    if one.get("ranks") == other.get("ranks"):
        return found
    return [each for each in found if not set(each.where) & {*BY_DEGREE, "parameters", "ended"}]


def _comparable(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Outside of passes the steps that both have on record."""
    name = outside_passes.SECTION
    if name not in one or name not in other:
        return one, other
    mine, theirs = outside_passes.in_common(one[name], other[name])
    return {**one, name: mine}, {**other, name: theirs}


def compared_outside(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Say which steps were compared. Empty where either is no structure."""
    name = outside_passes.SECTION
    return outside_passes.steps_compared(one[name], other[name]) if name in one and name in other else ""


def _pairs(one: Any, other: Any, where: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Yield pairs of values at the same place; what only one of them has comes all at once."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        one, other = _of_other_types(one, other)
        for key in dict.fromkeys([*one, *other]):
            yield from _pairs(one.get(key, "none"), other.get(key, "none"), (*where, str(key)))
    else:
        yield where, _text(one), _text(other)


def _of_other_types(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """A collective that one has in this type alone, and the other in that alone, is one collective, whose type differs."""
    mine, theirs = (_by_name_without_type(here, there) for here, there in ((one, other), (other, one)))
    for name in [name for name in mine if len(mine[name]) == 1 == len(theirs.get(name, ()))]:
        one, other = _under(name, mine[name][0], one), _under(name, theirs[name][0], other)
    return one, other


def _by_name_without_type(here: Mapping[str, Any], there: Mapping[str, Any]) -> dict[str, list[str]]:
    """The names of those that are here alone."""
    found: dict[str, list[str]] = {}
    for name in here:
        if name not in there and TYPE.search(name):
            found.setdefault(TYPE.sub("", name), []).append(name)
    return found


def _under(name: str, named: str, section: Mapping[str, Any]) -> dict[str, Any]:
    dtype = TYPE.findall(named)[0]
    moved = {name if key == named else key: value for key, value in section.items()}
    return {**moved, name: {"dtype": dtype, **section[named]}}


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(part)}".strip() for key, part in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return " ".join(f"[{part}]" for part in value) or "none"
    return "" if value is None else str(value)


# ---- costs


def costs(recording: Recording) -> dict[str, float]:
    """Seconds of the step that is shown, on the slowest rank; most bytes of memory on any rank."""
    summaries = list(recording.summaries.values())
    found = {
        "step time": max((one.resources.seconds.get(one.shown, 0.0) for one in summaries), default=0.0),
        "peak memory": float(max((one.resources.peak for one in summaries), default=0)),
    }
    return {name: value for name, value in found.items() if value}
