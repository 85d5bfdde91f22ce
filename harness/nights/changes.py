"""Changes from night to night: of each case what it is now, since when, and what differs between the two nights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from harness.core.evidence.text import bytes_text
from harness.core.judge.measures import BLOCKED, MOVED, PARAMETERS, PEAK, SECONDS
from harness.core.judge.result import Verdict
from harness.core.report.outcome import GREEN_VERDICTS, Outcome
from harness.nights.history import Night

SLOWER_FACTOR = 1.1
"""Seconds are reported from this factor on, of the largest value in the last COMPARED_NIGHTS nights before.

They vary by themselves.
"""
LARGER_PEAK_FACTOR = 1.02
"""The same factor for an allocator's peak, which varies too. Bytes held and moved do not vary: one more byte is reported."""
COMPARED_NIGHTS = 5
"""How many earlier nights a measure is compared with."""


class State(StrEnum):
    """A state of a case that a person must look at. A case that is good has none of them."""

    BROKEN = "broken"
    UNJUDGED = "not judged"
    FIXED = "fixed"
    FLAKY = "flaky"


@dataclass(frozen=True)
class Change:
    """A case that is in another state than in an earlier night, or that is broken or not judged in all nights."""

    case: str
    state: State
    text: str  # its cause or reason
    now: Night  # the first night in which it is so
    before: Night | None  # the last night in which it was not; None if it always was
    new: bool = True  # it is so since the last night
    again: str = ""


@dataclass(frozen=True)
class MeasureChange:
    """A measure of a case that grew or shrank. `was` and `now` are seconds or bytes."""

    case: str
    measure: str
    was: float
    now: float

    def __str__(self) -> str:
        """Return the sentence. It has the difference in bytes: numbers of four digits may look alike."""
        if self.measure == SECONDS:
            return f"{self.case}: {self.measure} {self.was:.3g} s, now {self.now:.3g} s"
        difference = bytes_text(abs(self.now - self.was))
        word = "more" if self.now > self.was else "less"
        return f"{self.case}: {self.measure} {bytes_text(self.was)}, now {difference} {word}"


@dataclass(frozen=True)
class Curve:
    """A measure of a case over all nights."""

    case: str
    """The case."""
    measure: str
    """Name of the measure."""
    values: tuple[float | None, ...]
    """A value for each night; None where the case was not green, another one, or on another kind of GPU."""

    @property
    def known_values(self) -> tuple[float, ...]:
        """Return the values of the nights that have one."""
        return tuple(value for value in self.values if value is not None)


def find_changes(nights: Sequence[Night]) -> list[Change]:
    """Return the change of every case of the last two nights that has one, then those of the cases that were flaky in
    any nights.
    """
    tables = [night.outcomes for night in nights]
    found_changes: list[Change] = []
    for name in _case_names(reversed(tables[-2:])):
        change = _find_change(name, nights, tables)
        if change:
            found_changes.append(change)
    for name in _case_names(tables):
        flaky = _find_flaky(name, nights, tables)
        if flaky:
            found_changes.append(flaky)
    return found_changes


def _case_names(tables: Iterable[dict[str, Outcome]]) -> list[str]:
    """Return the names of all cases in the tables, each once, in the order in which they first occur."""
    names: dict[str, None] = {}
    for table in tables:
        names |= dict.fromkeys(table)
    return list(names)


def case_state(outcome: Outcome | None) -> str:
    """Return "good" for a green case (PASS or XFAIL), BROKEN for FAIL, else UNJUDGED: also for skipped, and for None."""
    if outcome is None:
        return State.UNJUDGED
    return (
        "good"
        if outcome.verdict in GREEN_VERDICTS
        else State.BROKEN
        if outcome.verdict == Verdict.FAIL
        else State.UNJUDGED
    )


def _find_change(name: str, nights: Sequence[Night], tables: Sequence[dict[str, Outcome]]) -> Change | None:
    """Return the change of a case that in the last night is broken, not judged or newly fixed.

    `before` is the last night in another state. None for a case that is good, unless it was broken just before, and for
    one that was skipped in all nights. A case that the last night lacks is not judged.
    """
    nights_with_case = [index for index, table in enumerate(tables) if name in table]
    last = len(nights) - 1
    states = {index: case_state(tables[index].get(name)) for index in (*nights_with_case, last)}
    indices = sorted(states)
    last_other = next((i for i in reversed(indices) if states[i] != states[last]), None)
    first_same = next(index for index in indices if last_other is None or index > last_other)
    outcome = tables[last].get(name)
    night_before = None if last_other is None else nights[last_other]
    if states[last] == "good":
        is_fixed = last_other is not None and first_same == last and states[last_other] == State.BROKEN
        return Change(name, State.FIXED, "", nights[last], night_before) if is_fixed else None
    if outcome is not None and outcome.skipped and last_other is None:
        return None
    text = (outcome.cause or outcome.reason) if outcome else "it is not in the last night, and was in the one before"
    rerun_command = outcome.again if outcome else ""
    return Change(name, State(states[last]), text, nights[first_same], night_before, first_same == last, rerun_command)


def _find_flaky(name: str, nights: Sequence[Night], tables: Sequence[dict[str, Outcome]]) -> Change | None:
    """Return the change of a case that was good in one night and broken in another, under equal conditions.

    None if there is none. Conditions are sources, torch, device, GPU and request. `now` is the broken night, `before`
    the good one, in whatever order.
    """
    good_nights: dict[tuple[str, ...], Night] = {}
    broken_nights: dict[tuple[str, ...], tuple[Night, Outcome]] = {}
    for night, table in zip(nights, tables, strict=True):
        if name in table and (sources := night.conditions_of(name)) is not None:
            if case_state(table[name]) == "good":
                good_nights[sources] = night
            elif case_state(table[name]) == State.BROKEN:
                broken_nights[sources] = night, table[name]
    for sources, (night, outcome) in broken_nights.items():
        if sources in good_nights:
            return Change(
                name, State.FLAKY, outcome.cause or outcome.reason, night, good_nights[sources], again=outcome.again
            )
    return None


def night_differences(earlier: Night, later: Night) -> dict[str, tuple[str, str]]:
    """Return what two nights differ in, by name ("commit", "torch", "harness", "trainer"), as (earlier value, later value).

    A value that was not recorded is "unknown". "harness" is the digest of its sources. Empty if nothing differs.
    """
    pairs = {
        key: (earlier.recorded_value(key) or "unknown", later.recorded_value(key) or "unknown")
        for key in ("commit", "torch", "sources")
    }
    pairs["trainer"] = (earlier.runs[0].trainer, later.runs[0].trainer)
    pairs["harness"] = pairs.pop("sources")
    return {name: (was, now) for name, (was, now) in pairs.items() if was != now}


def differences_text(pairs: Mapping[str, tuple[str, str]]) -> str:
    """Return the differences as one line, "NAME WAS, now NOW; ..", or "nothing that is recorded" without any."""
    return "; ".join(f"{name} {was}, now {now}" for name, (was, now) in pairs.items()) or "nothing that is recorded"


# ---- what grew and what shrank


def find_grown_measures(nights: Sequence[Night]) -> list[MeasureChange]:
    """Return the measures that grew in the last night, beyond their thresholds.

    Only cases count that are green in the last night. They are compared with earlier nights in which they were green
    too, requested alike, on the same kind of GPU.
    """
    return _measure_changes(nights, 1)


def find_shrunk_measures(nights: Sequence[Night]) -> list[MeasureChange]:
    """Return the measures that shrank in the last night, by the conditions and thresholds of find_grown_measures."""
    return _measure_changes(nights, -1)


def _measure_changes(nights: Sequence[Night], sign: int) -> list[MeasureChange]:
    """Return the measures of green cases that grew (sign 1) or shrank (sign -1) in the last night, against
    COMPARED_NIGHTS before.
    """
    last = nights[-1]
    measure_changes: list[MeasureChange] = []
    for name, outcome in last.outcomes.items():
        if outcome.verdict in GREEN_VERDICTS:
            earlier = [night.outcomes[name] for night in nights[:-1] if _is_comparable(name, night, last)][
                -COMPARED_NIGHTS:
            ]
            measure_changes += [
                measure_change
                for measure in outcome.measures
                if (measure_change := _measure_change(outcome, measure, earlier, sign))
            ]
    return measure_changes


def _is_comparable(name: str, night: Night, last: Night) -> bool:
    """Return whether the case was green in that night, requested as in the last one, on the same kind of GPU."""
    outcome = night.outcomes.get(name)
    is_green_on_same_gpu = (
        outcome is not None and outcome.verdict in GREEN_VERDICTS and outcome.gpu == last.outcomes[name].gpu
    )
    return is_green_on_same_gpu and night.request_digest(name) == last.request_digest(name)


def _measure_change(outcome: Outcome, measure: str, earlier: Sequence[Outcome], sign: int) -> MeasureChange | None:
    """Return the change of one measure against earlier outcomes of the case. None if it is within the threshold.

    sign: 1 for what grew, -1 for what shrank. A measure is compared with the last night that has it; seconds and peak,
    which vary, with the largest (smallest) value of the earlier nights.

    None as well if no earlier night has the measure, or if another measure shows the change. Seconds count on GPUs
    only, and against three nights or more.
    """
    earlier_values = [
        earlier_outcome.measures[measure] for earlier_outcome in earlier if measure in earlier_outcome.measures
    ]
    if not earlier_values or (measure == SECONDS and (not outcome.gpu or len(earlier_values) < 3)):
        return None
    if measure == PARAMETERS or measure.startswith(BLOCKED) or _is_part_of_changed_sum(outcome, measure, earlier):
        return None
    varies_by_itself = measure in (SECONDS, PEAK)
    baseline = earlier_values[-1] if not varies_by_itself else max(earlier_values) if sign > 0 else min(earlier_values)
    factor = {SECONDS: SLOWER_FACTOR, PEAK: LARGER_PEAK_FACTOR}.get(measure, 1.0)
    measured = outcome.measures[measure]
    is_changed = measured > baseline * factor if sign > 0 else measured * factor < baseline
    return MeasureChange(outcome.case, measure, baseline, measured) if is_changed else None


def _is_part_of_changed_sum(outcome: Outcome, measure: str, earlier: Sequence[Outcome]) -> bool:
    """Return whether the measure is the bytes moved over one axis, while the sum over all axes changed and shows it already."""
    sum_before = next(
        (earlier_outcome.measures[MOVED] for earlier_outcome in reversed(earlier) if MOVED in earlier_outcome.measures),
        None,
    )
    return measure.startswith(MOVED) and measure != MOVED and outcome.measures.get(MOVED) != sum_before


def changing_curves(nights: Sequence[Night]) -> list[Curve]:
    """Return the curves of green cases' measures that are not equal in all nights, the largest change in the last night first.

    Cases that are not green in the last night are left out. Other nights without a comparable value count as None.
    """
    last = nights[-1]
    all_curves: list[Curve] = []
    for name, outcome in last.outcomes.items():
        if outcome.verdict not in GREEN_VERDICTS:
            continue
        measures_by_night = [
            night.outcomes[name].measures if _is_comparable(name, night, last) else {} for night in nights
        ]
        for measure in outcome.measures:
            values = tuple(measures.get(measure) for measures in measures_by_night)
            all_curves.append(Curve(name, measure, values))
    changing = (curve for curve in all_curves if len(set(curve.known_values)) > 1)
    return sorted(changing, key=lambda curve: -_relative_change(curve.known_values[-2:]))


def _relative_change(pair: Sequence[float]) -> float:
    """Return the absolute change between two values, divided by the larger one."""
    before, after = pair
    return abs(after - before) / max(abs(before), abs(after), 1e-9)
