"""The text on what changed: newly broken cases first, each cause once, then what was fixed, is flaky, or grew."""

from __future__ import annotations

import datetime
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.core.case import usual_trainer
from harness.core.case.trainer_spec import TrainerSpec
from harness.core.report.text import wrapped
from harness.nights.changes import Change, More, State, changes, curves, differs, differs_text, grown, shrunk
from harness.nights.history import Night
from harness.nights.nights import Culprit, Culprits, of_night
from harness.nights.quarantine import Quarantine


@dataclass(frozen=True)
class Told:
    """Everything that is printed of one series of nights."""

    nights: Sequence[Night]
    changes: Sequence[Change]
    set_aside: Mapping[str, Quarantine] = field(default_factory=dict)  # by case: broken, and in quarantine
    more: Sequence[More] = ()  # measures that grew
    culprits: Culprits = field(default_factory=dict)  # the commits that were found
    less: Sequence[More] = ()  # measures that shrank

    def culprit(self, change: Change) -> Culprit | None:
        """Return what broke or fixed the case in the night of the change. None if it was not searched for."""
        return self.culprits.get((change.case, of_night(change.now)))

    @property
    def culprits_of_last(self) -> list[Culprit]:
        """Return the culprits of what changed in the last night, each once."""
        culprits = (self.culprit(change) for change in self.changes if change.new)
        return list(dict.fromkeys(culprit for culprit in culprits if culprit))

    @property
    def since(self) -> dict[str, str]:
        """Return, by broken case, the commit that broke it, or why it was not found."""
        return {change.case: str(culprit) for change in self.of(State.BROKEN) if (culprit := self.culprit(change))}

    def of(self, state: State) -> list[Change]:
        """Return the changes to a state, without the cases that are set aside."""
        return [change for change in self.changes if change.state == state and change.case not in self.set_aside]

    @property
    def newly_broken(self) -> list[Change]:
        """Return the cases that broke in the last night."""
        return [change for change in self.of(State.BROKEN) if change.new]

    @property
    def still_broken(self) -> list[Change]:
        """Return the cases that broke in an earlier night."""
        return [change for change in self.of(State.BROKEN) if not change.new]


def told(
    nights: Sequence[Night], quarantine: Sequence[Quarantine], day: datetime.date, culprits: Culprits | None = None
) -> Told:
    """Return all that is printed of a series. day: of today, at which entries of the quarantine may have ended."""
    all_changes = changes(nights)
    entries = {entry.case: entry for entry in quarantine if entry.holds(day)}
    set_aside = {
        change.case: entries[change.case]
        for change in all_changes
        if change.state == State.BROKEN and change.case in entries and entries[change.case].cause in change.text
    }
    return Told(nights, all_changes, set_aside, grown(nights), culprits or {}, shrunk(nights))


def lapsed(quarantine: Sequence[Quarantine], all_series: Sequence[Told], day: datetime.date) -> list[str]:
    """Return a sentence for each entry that sets nothing aside, with the reason."""
    known: set[str] = set()
    aside: set[str] = set()
    broken: dict[str, str] = {}
    for series_changes in all_series:
        for night in series_changes.nights:
            known.update(night.outcomes)
        aside.update(series_changes.set_aside)
        broken |= {change.case: change.text for change in series_changes.of(State.BROKEN)}
    lines = []
    for entry in quarantine:
        if entry.case not in known:
            lines.append(f"{entry.case}: no case of that name is in these nights; take it out")
        elif not entry.holds(day):
            lines.append(f"{entry.case}: ended on {entry.until}; {entry.person} takes it out or dates it anew")
        elif entry.case in broken:
            lines.append(f"{entry.case}: set aside for {entry.cause!r}, broken by another cause: {broken[entry.case]}")
        elif entry.case not in aside:
            lines.append(f"{entry.case}: not broken in the last night; {entry.person} takes it out")
    return lines


def as_document(series_changes: Told) -> dict[str, Any]:
    """Return the data of one series. A night is named by its first run, in `nights`."""
    last = series_changes.nights[-1]
    return {
        "trainer": last.runs[0].trainer,
        "device": last.of("device"),
        "launcher": last.of("launcher"),
        "nights": [_night_data(night) for night in series_changes.nights],
        "lacking": last.lacking,
        "changes": [_change_data(change, series_changes) for change in series_changes.changes],
        "set_aside": list(series_changes.set_aside.values()),
        "more": series_changes.more,
        "less": series_changes.less,
        "curves": curves(series_changes.nights),
    }


def _night_data(night: Night) -> dict[str, str]:
    return {"run": of_night(night), **{key: night.of(key) for key in ("began", "commit", "torch", "sources")}}


def _change_data(change: Change, series_changes: Told) -> dict[str, Any]:
    """Return the data of one change, with its nights named by their first runs."""
    before = change.before
    return {
        "case": change.case,
        "state": change.state,
        "text": change.text,
        "new": change.new,
        "set_aside": change.state == State.BROKEN and change.case in series_changes.set_aside,
        "now": of_night(change.now),
        "before": of_night(before) if before else None,
        "between": differs(before, change.now) if before else {},
        "again": change.again,
        "culprit": series_changes.culprit(change),
        "bisect": _to_bisect(change, series_changes),
    }


def lines(series_changes: Told) -> list[str]:
    """Return the lines on one series."""
    first = series_changes.nights[0]
    last = series_changes.nights[-1]
    title = f"{last.runs[0].trainer} on {last.of('device')} by {last.of('launcher')}"
    count = len(series_changes.nights)
    nights = f"{count} nights" if count > 1 else f"{count} night"
    head = [f"{title}: {nights}", f"  first  {first}", f"  last   {last}"]
    head += [f"  lacking in the last: {text}" for text in last.lacking]
    flaky_title = "FLAKY, of the same sources, torch, device and request"
    parts = [
        *_changes("NEWLY BROKEN", series_changes.newly_broken, series_changes),
        *_changes("STILL BROKEN", series_changes.still_broken, series_changes),
        *_changes("NOT JUDGED", series_changes.of(State.UNJUDGED), series_changes),
        *_changes(flaky_title, series_changes.of(State.FLAKY), series_changes),
        *_listed("NEWLY FIXED", (_fixed(change, series_changes) for change in series_changes.of(State.FIXED))),
        *_listed("SET ASIDE, broken and expected to be", map(str, series_changes.set_aside.values())),
        *_listed("MORE", map(str, series_changes.more)),
        *_listed("LESS", map(str, series_changes.less)),
    ]
    if not parts:
        parts = ["", "nothing changed"]
    if not last.of("device").startswith("cuda"):
        parts += ["", "seconds are compared on GPUs only"]
    return [*head, *parts]


def is_history(text: str) -> bool:
    """Return whether a text begins with the lines on a series."""
    return re.match(r".+ on .+ by .+: \d+ nights?\n  first  ", text) is not None


def _changes(title: str, shown_changes: Sequence[Change], series_changes: Told) -> list[str]:
    """Return the lines on changes, each cause once, with its cases and the nights between which it came."""
    changes_by_cause: dict[tuple[str, int, int], list[Change]] = {}
    for change in shown_changes:
        changes_by_cause.setdefault((change.text, id(change.now), id(change.before)), []).append(change)
    text_lines = ["", title] if changes_by_cause else []
    for sharing in changes_by_cause.values():
        change = sharing[0]
        text_lines += wrapped(", ".join(shared_change.case for shared_change in sharing), "  ")
        text_lines += wrapped(change.text, "    ")
        text_lines.append(f"    now     {change.now}")
        if change.before:
            text_lines.append(f"    before  {change.before}")
            text_lines += wrapped(f"changed between: {differs_text(differs(change.before, change.now))}", "    ")
        else:
            text_lines.append("    before  the same in all these nights")
        text_lines += since(series_changes.culprit(change))
        if change.again:
            text_lines.append(f"    again   {change.again}")
        if command := _to_bisect(change, series_changes):
            text_lines.append(f"    bisect  {command}")
    return text_lines


def since(culprit: Culprit | None) -> list[str]:
    """Return the lines on the commit that did it; none without a culprit."""
    return wrapped(f"since   {culprit}", "    ", "        ") if culprit else []


def _to_bisect(change: Change, series_changes: Told) -> str:
    """Return the command that searches for the commit; empty where the commit is known."""
    culprit = series_changes.culprit(change)
    return "" if culprit and culprit.name else bisect_command(change)


def bisect_command(change: Change) -> str:
    """Return the command for two commits of a trainer, else two releases of torch; empty where neither is known."""
    before = change.before
    now = change.now
    if change.state != State.BROKEN or before is None:
        return ""
    good, bad = (night.of("commit").removesuffix("-dirty") for night in (before, now))
    trainer = TrainerSpec.parse(now.of("trainer"))
    trainer_words = usual_trainer.typed(trainer.name)
    if good and bad and good != bad:
        words = [*trainer_words, "--repo", trainer.source or ".", "--good", good, "--bad", bad, "-k", change.case]
        return f"harness bisect {shlex.join(words)}"
    older, newer = (night.of("torch").partition("+")[0] for night in (before, now))
    if older == newer or not older:
        return ""
    source = ["--source", trainer.source] if trainer.source else []
    words = ["--over", f"torch=={older},{newer}", *trainer_words, *source, "-k", change.case]
    return f"harness bisect {shlex.join(words)}"


def _fixed(change: Change, series_changes: Told) -> str:
    """Return the line on a fixed case, with the commit that fixed it if it was searched for."""
    line = f"{change.case}: broken until {change.before}"
    culprit = series_changes.culprit(change)
    if not culprit:
        return line
    return f"{line}; fixed by {culprit}" if culprit.name else f"{line}; what did it was {culprit}"


def _listed(title: str, texts: Iterable[str]) -> list[str]:
    """Return an empty line, the title, and the texts, indented and wrapped. Nothing without texts."""
    body: list[str] = []
    for text in texts:
        body += wrapped(text, "  ", "  ")
    return ["", title, *body] if body else []
