"""What changed from night to night: of each case what it is now, since when, and what differs between the two nights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from harness.core.evidence.text import bytes_text
from harness.core.judge.measures import BLOCKED, MOVED, PARAMETERS, PEAK, SECONDS
from harness.core.judge.result import Verdict
from harness.core.report.outcome import GREEN, Outcome
from harness.nights.history import Night

SLOWER, LARGER_PEAK, NIGHTS = 1.1, 1.02, 5
"""Times the most of the last NIGHTS nights before: seconds and an allocator's peak vary by themselves. Bytes held and moved do
not: one more is reported."""


class State(StrEnum):
    BROKEN, UNJUDGED, FIXED, FLAKY = "broken", "not judged", "fixed", "flaky"


@dataclass(frozen=True)
class Change:
    """A state of a case that is not the one before."""

    case: str
    state: State
    text: str  # its cause or reason
    now: Night  # the first night in which it is so
    before: Night | None  # the last night in which it was not; None if it always was
    new: bool = True  # it is so since the last night
    again: str = ""


@dataclass(frozen=True)
class More:
    """A measure of a case that grew, or that shrank."""

    case: str
    measure: str
    was: float
    now: float

    def __str__(self) -> str:
        """Show the difference: numbers of four digits may look alike."""
        if self.measure == SECONDS:
            return f"{self.case}: {self.measure} {self.was:.3g} s, now {self.now:.3g} s"
        by, word = bytes_text(abs(self.now - self.was)), "more" if self.now > self.was else "less"
        return f"{self.case}: {self.measure} {bytes_text(self.was)}, now {by} {word}"


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
    def known(self) -> tuple[float, ...]:
        return tuple(value for value in self.values if value is not None)


def changes(nights: Sequence[Night]) -> list[Change]:
    """Return the change of every case of the last two nights; flaky ones of all nights."""
    tables = [night.outcomes for night in nights]
    names = list(dict.fromkeys(name for table in reversed(tables[-2:]) for name in table))
    found = [change for name in names if (change := _change(name, nights, tables))]
    flaky = [
        one for name in dict.fromkeys(n for table in tables for n in table) if (one := _flaky(name, nights, tables))
    ]
    return [*found, *flaky]


def state(outcome: Outcome | None) -> str:
    """good, broken or not judged. A skipped case was not judged."""
    if outcome is None:
        return State.UNJUDGED
    return "good" if outcome.verdict in GREEN else State.BROKEN if outcome.verdict == Verdict.FAIL else State.UNJUDGED


def _change(name: str, nights: Sequence[Night], tables: Sequence[dict[str, Outcome]]) -> Change | None:
    """None for what is good and was, and for what was skipped in all nights."""
    seen = [index for index, table in enumerate(tables) if name in table]
    last = len(nights) - 1
    states = {index: state(tables[index].get(name)) for index in (*seen, last)}
    order = sorted(states)
    since = next((i for i in reversed(order) if states[i] != states[last]), None)
    first = next(index for index in order if since is None or index > since)
    outcome = tables[last].get(name)
    before = None if since is None else nights[since]
    if states[last] == "good":
        fixed = since is not None and first == last and states[since] == State.BROKEN
        return Change(name, State.FIXED, "", nights[last], before) if fixed else None
    if outcome is not None and outcome.skipped and since is None:
        return None
    text = (outcome.cause or outcome.reason) if outcome else "it is not in the last night, and was in the one before"
    again = outcome.again if outcome else ""
    return Change(name, State(states[last]), text, nights[first], before, first == last, again)


def _flaky(name: str, nights: Sequence[Night], tables: Sequence[dict[str, Outcome]]) -> Change | None:
    """Good and broken with the same sources, torch, GPU and request."""
    good: dict[tuple[str, ...], Night] = {}
    broken: dict[tuple[str, ...], tuple[Night, Outcome]] = {}
    for night, table in zip(nights, tables, strict=True):
        if name in table and (same := night.sources_of(name)) is not None:
            if state(table[name]) == "good":
                good[same] = night
            elif state(table[name]) == State.BROKEN:
                broken[same] = night, table[name]
    for same, (night, outcome) in broken.items():
        if same in good:
            return Change(name, State.FLAKY, outcome.cause or outcome.reason, night, good[same], again=outcome.again)
    return None


def differs(one: Night, other: Night) -> dict[str, tuple[str, str]]:
    """Return in what the nights differ, as far as it is recorded: what it was and what it is, by name."""
    pairs = {key: (one.of(key) or "unknown", other.of(key) or "unknown") for key in ("commit", "torch", "sources")}
    pairs["trainer"] = (one.runs[0].trainer, other.runs[0].trainer)
    pairs["harness"] = pairs.pop("sources")
    return {name: (was, now) for name, (was, now) in pairs.items() if was != now}


def differs_text(pairs: Mapping[str, tuple[str, str]]) -> str:
    return "; ".join(f"{name} {was}, now {now}" for name, (was, now) in pairs.items()) or "nothing that is recorded"


# ---- what grew and what shrank


def grown(nights: Sequence[Night]) -> list[More]:
    """In the last night, of cases that were green then and before, requested alike, on the same kind of GPU."""
    return _changed(nights, 1)


def shrunk(nights: Sequence[Night]) -> list[More]:
    """The same, of measures that became less."""
    return _changed(nights, -1)


def _changed(nights: Sequence[Night], sign: int) -> list[More]:
    last = nights[-1]
    found: list[More] = []
    for name, outcome in last.outcomes.items():
        if outcome.verdict in GREEN:
            earlier = [night.outcomes[name] for night in nights[:-1] if _comparable(name, night, last)][-NIGHTS:]
            found += [more for measure in outcome.measures if (more := _more(outcome, measure, earlier, sign))]
    return found


def _comparable(name: str, night: Night, last: Night) -> bool:
    one = night.outcomes.get(name)
    alike = one is not None and one.verdict in GREEN and one.gpu == last.outcomes[name].gpu
    return alike and night.requested(name) == last.requested(name)


def _more(outcome: Outcome, measure: str, earlier: Sequence[Outcome], sign: int) -> More | None:
    """Seconds count on GPUs alone, and against several nights. sign: 1 for what grew, -1 for what shrank."""
    known = [one.measures[measure] for one in earlier if measure in one.measures]
    if not known or (measure == SECONDS and (not outcome.gpu or len(known) < 3)):
        return None
    if measure == PARAMETERS or measure.startswith(BLOCKED) or _in_sum(outcome, measure, earlier):
        return None
    varies = measure in (SECONDS, PEAK)
    was = known[-1] if not varies else max(known) if sign > 0 else min(known)
    factor = {SECONDS: SLOWER, PEAK: LARGER_PEAK}.get(measure, 1.0)
    now = outcome.measures[measure]
    changed = now > was * factor if sign > 0 else now * factor < was
    return More(outcome.case, measure, was, now) if changed else None


def _in_sum(outcome: Outcome, measure: str, earlier: Sequence[Outcome]) -> bool:
    """Whether it is bytes over one axis, and the sum over all axes has changed and shows it."""
    before = next((one.measures[MOVED] for one in reversed(earlier) if MOVED in one.measures), None)
    return measure.startswith(MOVED) and measure != MOVED and outcome.measures.get(MOVED) != before


def curves(nights: Sequence[Night]) -> list[Curve]:
    """Return every measure that two nights or more have and that is not always the same. The last night's largest change comes
    first."""
    last = nights[-1]
    found: list[Curve] = []
    for name, outcome in last.outcomes.items():
        if outcome.verdict in GREEN:
            rows = [night.outcomes[name].measures if _comparable(name, night, last) else {} for night in nights]
            found += [Curve(name, measure, tuple(row.get(measure) for row in rows)) for measure in outcome.measures]
    return sorted((one for one in found if len(set(one.known)) > 1), key=lambda one: -_relative(one.known[-2:]))


def _relative(pair: Sequence[float]) -> float:
    before, now = pair
    return abs(now - before) / max(abs(before), abs(now), 1e-9)
