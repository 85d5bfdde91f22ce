"""Structure of a recorded job: what is the same when it runs again, in words and numbers that a person reviews.

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
from harness.core.judge.observed import Axis, families_of_replicas, group_ranks_by, observed_axes
from harness.recording.judged import outside_passes
from harness.recording.judged.stored_recording import Recording

BY_DEGREE = ("groups", "calls", "memory", "bytes", "replicas", "fed")
"""Keys of entries that change with the number of ranks of the same script."""
TYPE = re.compile(r" of ((?:b?float|u?int|complex)\d\w*|bool)\b")
"""In the name of a collective."""


def structure(recording: Recording) -> dict[str, Any]:
    """Return the structure of a recording's first job: name of a section -> its entries, as text, number or mapping."""
    summaries = [summary for _, summary in sorted(recording.summaries.items())]
    ranks_by_end = group_ranks_by(summaries, lambda summary: summary.progress.ended)
    axes = {}
    for number, axis in number_alike_axes(observed_axes(summaries)):
        axes[_axis_name(axis, number)] = _axis_fields(axis)
    idle_groups: set[str] = set()
    for summary in summaries:
        idle_groups.update(summary.groups.idle)
    replica_sets = dict.fromkeys(f"sets of {len(family)}" for family in families_of_replicas(summaries))
    return {
        "ranks": recording.world,
        "ended": {state or "unheard": len(ranks) for state, ranks in ranks_by_end.items()},
        "models": _text_or_counts(summaries, _models_text),
        "parameters": _text_or_counts(summaries, _placements_text),
        "wrappers": _text_or_counts(summaries, lambda summary: ", ".join(_count_texts(summary.modules.wrappers))),
        "optimizers": _text_or_counts(summaries, lambda summary: ", ".join(summary.modules.optimizers)),
        "axes": axes,
        outside_passes.SECTION: outside_passes.structure_section(summaries),
        "idle groups": sorted(idle_groups),
        "memory": _memory_sizes(summaries),
        "replicas": ", ".join(replica_sets) or "none claimed",
        "fed": len(group_ranks_by(summaries, _first_batch)),
        "settings": _settings(summaries),
    }


def _placements_text(summary: Summary) -> str:
    return "; ".join(_count_texts(summary.parameters.placements))


def _first_batch(summary: Summary) -> Any:
    """Return the digest of the batch that a rank received in its first recorded step; None if it received none."""
    batches = summary.received.batches
    return batches.get(min(batches, default=0))


def _models_text(summary: Summary) -> str:
    return f"{' + '.join(summary.modules.classes)}: {summary.parameters.count} of {summary.parameters.elements}"


def _count_texts(by_name: Mapping[str, int]) -> list[str]:
    """Return a text for each name, such as "2 fsdp2"."""
    return [f"{count} {name}" for name, count in by_name.items()]


def _text_or_counts(summaries: list[Summary], make_text: Callable[[Summary], str]) -> Any:
    """Return the text if all ranks have the same, "" if there is no rank; else text -> number of ranks that have it."""
    ranks_of_texts = group_ranks_by(summaries, make_text)
    if len(ranks_of_texts) < 2:
        return next(iter(ranks_of_texts), "")
    return {text: len(ranks) for text, ranks in ranks_of_texts.items()}


def number_alike_axes(axes: tuple[Axis, ...]) -> Iterator[tuple[int, Axis]]:
    """Yield (number, axis) of each axis: its number, from 0, among axes that have the same name."""
    counts: dict[str, int] = {}
    for axis in axes:
        name = _axis_name(axis, 0)
        counts[name] = counts.get(name, 0) + 1
        yield counts[name] - 1, axis


def _axis_name(axis: Axis, number: int) -> str:
    """Return the claimed role of an axis, else "unnamed" with its collectives. number: 0 for the first axis of that name."""
    operators = "unnamed, " + ", ".join(sorted({moved.op for moved in axis.moved}))
    return (axis.role or operators) + (f" ({number + 1})" if number else "")


def _axis_fields(axis: Axis) -> dict[str, Any]:
    """Return the degree and groups of an axis, and for each collective and phase its dtype, bytes a rank and calls."""
    several = Counter((moved.op, moved.phase) for moved in axis.moved)
    collectives = {}
    for moved in axis.moved:
        size = moved.most if moved.least == moved.most else f"{moved.least} to {moved.most}"
        of_dtype = f" of {moved.dtype}" if several[moved.op, moved.phase] > 1 else ""
        entry = {"dtype": moved.dtype, "bytes": size, "calls": moved.calls}
        collectives[f"{moved.op} in {moved.phase}{of_dtype}"] = entry
    return {"degree": axis.size, "groups": list(axis.groups), **collectives}


def _memory_sizes(summaries: list[Summary]) -> dict[str, Any]:
    """Return by kind of memory the bytes that ranks have of it: one number, or the least and the most."""
    kinds: set[str] = set()
    for summary in summaries:
        kinds.update(summary.resources.memory)
    sizes = {}
    for kind in sorted(kinds):
        sizes[kind] = {summary.resources.memory.get(kind, 0) for summary in summaries}
    sizes["parameters as forward ends"] = {summary.resources.after_forward for summary in summaries}
    texts: dict[str, Any] = {}
    for kind, sizes_of_ranks in sizes.items():
        if len(sizes_of_ranks) == 1:
            texts[kind] = max(sizes_of_ranks)
        else:
            texts[kind] = f"{min(sizes_of_ranks)} to {max(sizes_of_ranks)}"
    return texts


def _settings(summaries: list[Summary]) -> dict[str, Any]:
    """Return by name the settings that ranks run with: one text, or text -> number of ranks.

    The number of threads is left out.
    """
    names: set[str] = set()
    for summary in summaries:
        names.update(summary.environment.settings)
    return {name: _text_or_counts(summaries, functools.partial(_setting, name)) for name in sorted(names - {"threads"})}


def _setting(name: str, summary: Summary) -> str:
    return summary.environment.settings.get(name, "")


# ---- two of them


@dataclass(frozen=True)
class Difference:
    """An entry in which two structures differ. Fields are keys of the comparison document, so their names stay."""

    where: tuple[str, ...]
    """Keys on the way there, such as axes, sharded by fsdp2, all_gather in forward, bytes."""
    one: str
    """Value in the first one."""
    other: str
    """Value in the second one."""


def differences(baseline: Mapping[str, Any], candidate: Mapping[str, Any]) -> list[Difference]:
    """Return the entries in which two structures differ, in the order of sections; empty if they are the same.

    If numbers of ranks differ, what follows from them is left out: degrees, parameters, exits.
    """
    pairs = _value_pairs(*_with_common_steps(baseline, candidate), ())
    all_differences = [Difference(where, first, second) for where, first, second in pairs if first != second]
    if baseline.get("ranks") == candidate.get("ranks"):
        return all_differences
    left_out = {*BY_DEGREE, "parameters", "ended"}
    return [difference for difference in all_differences if not set(difference.where) & left_out]


def _with_common_steps(
    baseline: Mapping[str, Any], candidate: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return both structures. Traffic outside of passes is restricted to the steps that both have on record."""
    name = outside_passes.SECTION
    if name not in baseline or name not in candidate:
        return baseline, candidate
    expected, observed = outside_passes.restrict_to_common_steps(baseline[name], candidate[name])
    return {**baseline, name: expected}, {**candidate, name: observed}


def outside_steps_text(baseline: Mapping[str, Any], candidate: Mapping[str, Any]) -> str:
    """Return in which steps traffic outside of passes was compared, in words.

    Empty if a structure has no such section.
    """
    name = outside_passes.SECTION
    if name not in baseline or name not in candidate:
        return ""
    return outside_passes.compared_steps_text(baseline[name], candidate[name])


def _value_pairs(expected: Any, observed: Any, where: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Yield (keys on the way, first value, second value) for each place, as texts. Equal pairs are not left out.

    A value that only one of them has is paired whole with "none".
    """
    if isinstance(expected, Mapping) and isinstance(observed, Mapping):
        expected, observed = _with_matched_types(expected, observed)
        for key in dict.fromkeys([*expected, *observed]):
            yield from _value_pairs(expected.get(key, "none"), observed.get(key, "none"), (*where, str(key)))
    else:
        yield where, _value_text(expected), _value_text(observed)


def _with_matched_types(
    expected: Mapping[str, Any], observed: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return both sections with collectives that each has in one dtype alone under one name, whose dtype differs."""
    expected_names = _names_without_type(expected, observed)
    observed_names = _names_without_type(observed, expected)
    for name, names in expected_names.items():
        if len(names) == 1 == len(observed_names.get(name, ())):
            expected = _rename_without_type(name, names[0], expected)
            observed = _rename_without_type(name, observed_names[name][0], observed)
    return expected, observed


def _names_without_type(section: Mapping[str, Any], other_section: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return by name without dtype the names that only the first section has. Names that have no dtype are left out."""
    by_name: dict[str, list[str]] = {}
    for name in section:
        if name not in other_section and TYPE.search(name):
            by_name.setdefault(TYPE.sub("", name), []).append(name)
    return by_name


def _rename_without_type(name: str, named: str, section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section with an entry under its name without dtype; the dtype is its first value. named: its present name."""
    dtype = TYPE.findall(named)[0]
    moved = {name if key == named else key: value for key, value in section.items()}
    return {**moved, name: {"dtype": dtype, **section[named]}}


def _value_text(value: Any) -> str:
    """Return a value as text: "none" for an empty mapping or list, "" for None."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_value_text(part)}".strip() for key, part in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return " ".join(f"[{part}]" for part in value) or "none"
    return "" if value is None else str(value)


# ---- costs


def costs(recording: Recording) -> dict[str, float]:
    """Return the seconds of the step that is shown, on the slowest rank, and the most bytes of memory on any rank, by
    name.

    A cost that was not measured is left out.
    """
    summaries = list(recording.summaries.values())
    step_times = [summary.resources.seconds.get(summary.shown, 0.0) for summary in summaries]
    peaks = [summary.resources.peak for summary in summaries]
    values = {
        "step time": max(step_times, default=0.0),
        "peak memory": float(max(peaks, default=0)),
    }
    return {name: value for name, value in values.items() if value}
