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
from harness.core.report.text import wrap_text
from harness.nights.changes import (
    Change,
    MeasureChange,
    State,
    changing_curves,
    differences_text,
    find_changes,
    find_grown_measures,
    find_shrunk_measures,
    night_differences,
)
from harness.nights.history import Night
from harness.nights.nights import Culprit, Culprits, name_of_night
from harness.nights.quarantine import QuarantineEntry


@dataclass(frozen=True)
class SeriesChanges:
    """The changes in one series of nights (one trainer, device and launcher), as they are printed."""

    nights: Sequence[Night]
    changes: Sequence[Change]
    quarantined: Mapping[str, QuarantineEntry] = field(default_factory=dict)  # by case: broken, and in quarantine
    grown_measures: Sequence[MeasureChange] = ()  # measures that grew
    culprits: Culprits = field(default_factory=dict)  # the commits that were found
    shrunk_measures: Sequence[MeasureChange] = ()  # measures that shrank

    def culprit_of(self, change: Change) -> Culprit | None:
        """Return the result of the search for what broke or fixed the case in the night of the change.

        None if there was no search.
        """
        return self.culprits.get((change.case, name_of_night(change.now)))

    @property
    def culprits_of_last(self) -> list[Culprit]:
        """Return the culprits of the changes that are new in the last night, each once. Changes without one are left out."""
        culprits = (self.culprit_of(change) for change in self.changes if change.new)
        return list(dict.fromkeys(culprit for culprit in culprits if culprit))

    @property
    def culprit_texts(self) -> dict[str, str]:
        """Return by broken case the text on the commit that broke it, or on why it was not found.

        Cases that are set aside, and those that were not searched for, are left out.
        """
        return {
            change.case: str(culprit)
            for change in self.changes_to(State.BROKEN)
            if (culprit := self.culprit_of(change))
        }

    def changes_to(self, state: State) -> list[Change]:
        """Return the changes whose cases are in this state, without the cases that are set aside."""
        return [change for change in self.changes if change.state == state and change.case not in self.quarantined]

    @property
    def newly_broken(self) -> list[Change]:
        """Return the changes of the cases that broke in the last night, without those that are set aside."""
        return [change for change in self.changes_to(State.BROKEN) if change.new]

    @property
    def still_broken(self) -> list[Change]:
        """Return the changes of the cases that broke before the last night and still are, without those that are set aside."""
        return [change for change in self.changes_to(State.BROKEN) if not change.new]


def build_series_changes(
    nights: Sequence[Night], quarantine: Sequence[QuarantineEntry], day: datetime.date, culprits: Culprits | None = None
) -> SeriesChanges:
    """Return the changes in a series of nights, with the grown and shrunk measures.

    A broken case is set aside if an active entry of the quarantine names it and a part of its cause. day: today.
    """
    all_changes = find_changes(nights)
    entries = {entry.case: entry for entry in quarantine if entry.is_active(day)}
    set_aside = {
        change.case: entries[change.case]
        for change in all_changes
        if change.state == State.BROKEN and change.case in entries and entries[change.case].cause in change.text
    }
    return SeriesChanges(
        nights, all_changes, set_aside, find_grown_measures(nights), culprits or {}, find_shrunk_measures(nights)
    )


def lapsed_entries(
    quarantine: Sequence[QuarantineEntry], all_series: Sequence[SeriesChanges], day: datetime.date
) -> list[str]:
    """Return a sentence for each entry of the quarantine that sets nothing aside, with the reason. Empty if all are in use.

    An entry lapses if no night has its case, its day is over, the cause is another one, or the case is not broken.
    """
    known: set[str] = set()
    aside: set[str] = set()
    broken: dict[str, str] = {}
    for series_changes in all_series:
        for night in series_changes.nights:
            known.update(night.outcomes)
        aside.update(series_changes.quarantined)
        broken |= {change.case: change.text for change in series_changes.changes_to(State.BROKEN)}
    lines = []
    for entry in quarantine:
        if entry.case not in known:
            lines.append(f"{entry.case}: no case of that name is in these nights; take it out")
        elif not entry.is_active(day):
            lines.append(f"{entry.case}: ended on {entry.until}; {entry.person} takes it out or dates it anew")
        elif entry.case in broken:
            lines.append(f"{entry.case}: set aside for {entry.cause!r}, broken by another cause: {broken[entry.case]}")
        elif entry.case not in aside:
            lines.append(f"{entry.case}: not broken in the last night; {entry.person} takes it out")
    return lines


def series_document(series_changes: SeriesChanges) -> dict[str, Any]:
    """Return the JSON data of one series.

    Changes refer to a night by the name of its first run, as it is listed in "nights".
    """
    last = series_changes.nights[-1]
    return {
        "trainer": last.runs[0].trainer,
        "device": last.recorded_value("device"),
        "launcher": last.recorded_value("launcher"),
        "nights": [_night_data(night) for night in series_changes.nights],
        "lacking": last.lacking_verdicts,
        "changes": [_change_data(change, series_changes) for change in series_changes.changes],
        "set_aside": list(series_changes.quarantined.values()),
        "more": series_changes.grown_measures,
        "less": series_changes.shrunk_measures,
        "curves": changing_curves(series_changes.nights),
    }


def _night_data(night: Night) -> dict[str, str]:
    """Return the name of a night, and when it began, its commit, torch and sources; empty values where they were not
    recorded.
    """
    return {
        "run": name_of_night(night),
        **{key: night.recorded_value(key) for key in ("began", "commit", "torch", "sources")},
    }


def _change_data(change: Change, series_changes: SeriesChanges) -> dict[str, Any]:
    """Return the JSON data of one change. Its nights are named by their first runs; "before" is None if it was always so."""
    before = change.before
    return {
        "case": change.case,
        "state": change.state,
        "text": change.text,
        "new": change.new,
        "set_aside": change.state == State.BROKEN and change.case in series_changes.quarantined,
        "now": name_of_night(change.now),
        "before": name_of_night(before) if before else None,
        "between": night_differences(before, change.now) if before else {},
        "again": change.again,
        "culprit": series_changes.culprit_of(change),
        "bisect": _command_if_unknown(change, series_changes),
    }


def series_lines(series_changes: SeriesChanges) -> list[str]:
    """Return the lines of text on one series: its nights, then titled parts on broken, flaky, fixed and quarantined
    cases and measures.

    Empty parts are left out; if all are empty, a line says "nothing changed".
    """
    first = series_changes.nights[0]
    last = series_changes.nights[-1]
    title = f"{last.runs[0].trainer} on {last.recorded_value('device')} by {last.recorded_value('launcher')}"
    count = len(series_changes.nights)
    nights = f"{count} nights" if count > 1 else f"{count} night"
    head = [f"{title}: {nights}", f"  first  {first}", f"  last   {last}"]
    head += [f"  lacking in the last: {text}" for text in last.lacking_verdicts]
    flaky_title = "FLAKY, of the same sources, torch, device and request"
    parts = [
        *_change_lines("NEWLY BROKEN", series_changes.newly_broken, series_changes),
        *_change_lines("STILL BROKEN", series_changes.still_broken, series_changes),
        *_change_lines("NOT JUDGED", series_changes.changes_to(State.UNJUDGED), series_changes),
        *_change_lines(flaky_title, series_changes.changes_to(State.FLAKY), series_changes),
        *_titled_lines(
            "NEWLY FIXED", (_fixed_text(change, series_changes) for change in series_changes.changes_to(State.FIXED))
        ),
        *_titled_lines("SET ASIDE, broken and expected to be", map(str, series_changes.quarantined.values())),
        *_titled_lines("MORE", map(str, series_changes.grown_measures)),
        *_titled_lines("LESS", map(str, series_changes.shrunk_measures)),
    ]
    if not parts:
        parts = ["", "nothing changed"]
    if not last.recorded_value("device").startswith("cuda"):
        parts += ["", "seconds are compared on GPUs only"]
    return [*head, *parts]


def is_history(text: str) -> bool:
    """Return whether a text was written from series_lines: it begins with a series' title and first night."""
    return re.match(r".+ on .+ by .+: \d+ nights?\n  first  ", text) is not None


def _change_lines(title: str, shown_changes: Sequence[Change], series_changes: SeriesChanges) -> list[str]:
    """Return the title and the lines on changes.

    Changes with one cause between the same nights are printed once, with all cases. Empty without changes.
    """
    changes_by_cause: dict[tuple[str, int, int], list[Change]] = {}
    for change in shown_changes:
        changes_by_cause.setdefault((change.text, id(change.now), id(change.before)), []).append(change)
    text_lines = ["", title] if changes_by_cause else []
    for sharing in changes_by_cause.values():
        change = sharing[0]
        text_lines += wrap_text(", ".join(shared_change.case for shared_change in sharing), "  ")
        text_lines += wrap_text(change.text, "    ")
        text_lines.append(f"    now     {change.now}")
        if change.before:
            text_lines.append(f"    before  {change.before}")
            text_lines += wrap_text(
                f"changed between: {differences_text(night_differences(change.before, change.now))}", "    "
            )
        else:
            text_lines.append("    before  the same in all these nights")
        text_lines += culprit_lines(series_changes.culprit_of(change))
        if change.again:
            text_lines.append(f"    again   {change.again}")
        if command := _command_if_unknown(change, series_changes):
            text_lines.append(f"    bisect  {command}")
    return text_lines


def culprit_lines(culprit: Culprit | None) -> list[str]:
    """Return the wrapped lines that begin with "since" and name the culprit's commit, or why it was not found.

    Empty without a culprit.
    """
    return wrap_text(f"since   {culprit}", "    ", "        ") if culprit else []


def _command_if_unknown(change: Change, series_changes: SeriesChanges) -> str:
    """Return the `harness bisect` command for a change. Empty if a search has found the commit, or no command is possible."""
    culprit = series_changes.culprit_of(change)
    return "" if culprit and culprit.name else bisect_command(change)


def bisect_command(change: Change) -> str:
    """Return the `harness bisect` command for a newly or still broken case: over commits of the trainer, else over
    releases of torch.

    Empty if the case is not broken, was never otherwise, or neither commits nor releases of the two nights differ and
    are known.
    """
    before = change.before
    now = change.now
    if change.state != State.BROKEN or before is None:
        return ""
    good, bad = (night.recorded_value("commit").removesuffix("-dirty") for night in (before, now))
    trainer = TrainerSpec.parse(now.recorded_value("trainer"))
    trainer_words = usual_trainer.trainer_arguments(trainer.name)
    if good and bad and good != bad:
        words = [*trainer_words, "--repo", trainer.source or ".", "--good", good, "--bad", bad, "-k", change.case]
        return f"harness bisect {shlex.join(words)}"
    older, newer = (night.recorded_value("torch").partition("+")[0] for night in (before, now))
    if older == newer or not older:
        return ""
    source = ["--source", trainer.source] if trainer.source else []
    words = ["--over", f"torch=={older},{newer}", *trainer_words, *source, "-k", change.case]
    return f"harness bisect {shlex.join(words)}"


def _fixed_text(change: Change, series_changes: SeriesChanges) -> str:
    """Return the line on a fixed case, with the commit that fixed it, or why a search did not find it.

    Without a search, neither.
    """
    line = f"{change.case}: broken until {change.before}"
    culprit = series_changes.culprit_of(change)
    if not culprit:
        return line
    return f"{line}; fixed by {culprit}" if culprit.name else f"{line}; what did it was {culprit}"


def _titled_lines(title: str, texts: Iterable[str]) -> list[str]:
    """Return an empty line, the title, and the texts, indented and wrapped. Nothing without texts."""
    body: list[str] = []
    for text in texts:
        body += wrap_text(text, "  ", "  ")
    return ["", title, *body] if body else []
