"""What changed, as a person reads it over coffee: what broke first, each cause once, then what was fixed, is flaky, or grew."""

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
    """What is printed of one series. set_aside: broken, and in quarantine. culprits: the commits that were found."""

    nights: Sequence[Night]
    changes: Sequence[Change]
    set_aside: Mapping[str, Quarantine] = field(default_factory=dict)
    more: Sequence[More] = ()
    culprits: Culprits = field(default_factory=dict)
    less: Sequence[More] = ()

    def culprit(self, change: Change) -> Culprit | None:
        return self.culprits.get((change.case, of_night(change.now)))

    @property
    def culprits_of_last(self) -> list[Culprit]:
        """Return the culprits of what changed in the last night, each once."""
        return list(dict.fromkeys(found for one in self.changes if one.new and (found := self.culprit(one))))

    @property
    def since(self) -> dict[str, str]:
        """Return, by broken case, the commit that broke it, or why it was not found."""
        return {one.case: str(found) for one in self.of(State.BROKEN) if (found := self.culprit(one))}

    def of(self, state: State, *, new: bool | None = None) -> list[Change]:
        some = [one for one in self.changes if one.state == state and one.case not in self.set_aside]
        return [one for one in some if new is None or one.new == new]


def told(
    nights: Sequence[Night], quarantine: Sequence[Quarantine], day: datetime.date, culprits: Culprits | None = None
) -> Told:
    found = changes(nights)
    entries = {entry.case: entry for entry in quarantine if entry.holds(day)}
    aside = {
        one.case: entries[one.case]
        for one in found
        if one.state == State.BROKEN and one.case in entries and entries[one.case].cause in one.text
    }
    return Told(nights, found, aside, grown(nights), culprits or {}, shrunk(nights))


def lapsed(quarantine: Sequence[Quarantine], every: Sequence[Told], day: datetime.date) -> list[str]:
    """Entries that set nothing aside, each with the reason."""
    known = {name for one in every for night in one.nights for name in night.outcomes}
    aside = {name for one in every for name in one.set_aside}
    broken = {change.case: change.text for one in every for change in one.of(State.BROKEN)}
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


def as_document(one: Told) -> dict[str, Any]:
    """Return the data of one series. A night is named by its first run, in `nights`."""
    last = one.nights[-1]
    return {
        "trainer": last.runs[0].trainer,
        "device": last.of("device"),
        "launcher": last.of("launcher"),
        "nights": [
            {"run": of_night(night), **{key: night.of(key) for key in ("began", "commit", "torch", "sources")}}
            for night in one.nights
        ],
        "lacking": last.lacking,
        "changes": [_change_data(change, one) for change in one.changes],
        "set_aside": list(one.set_aside.values()),
        "more": one.more,
        "less": one.less,
        "curves": curves(one.nights),
    }


def _change_data(change: Change, told: Told) -> dict[str, Any]:
    before = change.before
    return {
        "case": change.case,
        "state": change.state,
        "text": change.text,
        "new": change.new,
        "set_aside": change.state == State.BROKEN and change.case in told.set_aside,
        "now": of_night(change.now),
        "before": of_night(before) if before else None,
        "between": differs(before, change.now) if before else {},
        "again": change.again,
        "culprit": told.culprit(change),
        "bisect": _to_bisect(change, told),
    }


def lines(one: Told) -> list[str]:
    """Return the lines on one series."""
    first, last = one.nights[0], one.nights[-1]
    title = f"{last.runs[0].trainer} on {last.of('device')} by {last.of('launcher')}"
    nights = f"{len(one.nights)} night{'s' * (len(one.nights) > 1)}"
    head = [f"{title}: {nights}", f"  first  {first}", f"  last   {last}"]
    head += [f"  lacking in the last: {text}" for text in last.lacking]
    parts = [
        *_changes("NEWLY BROKEN", one.of(State.BROKEN, new=True), one),
        *_changes("STILL BROKEN", one.of(State.BROKEN, new=False), one),
        *_changes("NOT JUDGED", one.of(State.UNJUDGED), one),
        *_changes("FLAKY, of the same sources, torch, device and request", one.of(State.FLAKY), one),
        *_listed("NEWLY FIXED", (_fixed(change, one) for change in one.of(State.FIXED))),
        *_listed("SET ASIDE, broken and expected to be", map(str, one.set_aside.values())),
        *_listed("MORE", map(str, one.more)),
        *_listed("LESS", map(str, one.less)),
    ] or ["", "nothing changed"]
    if not last.of("device").startswith("cuda"):
        parts += ["", "seconds are compared on GPUs only"]
    return [*head, *parts]


def is_history(text: str) -> bool:
    """Return whether a text begins with the lines on a series."""
    return re.match(r".+ on .+ by .+: \d+ nights?\n  first  ", text) is not None


def _changes(title: str, some: Sequence[Change], told: Told) -> list[str]:
    """Each cause once, with its cases and the nights between which it came."""
    shared: dict[tuple[str, int, int], list[Change]] = {}
    for one in some:
        shared.setdefault((one.text, id(one.now), id(one.before)), []).append(one)
    found = ["", title] if shared else []
    for same in shared.values():
        one = same[0]
        found += wrapped(", ".join(each.case for each in same), "  ")
        found += wrapped(one.text, "    ")
        found += [f"    now     {one.now}"]
        found += (
            [
                f"    before  {one.before}",
                *wrapped(f"changed between: {differs_text(differs(one.before, one.now))}", "    "),
            ]
            if (one.before)
            else ["    before  the same in all these nights"]
        )
        found += since(told.culprit(one))
        found += [f"    again   {one.again}"] if one.again else []
        found += [f"    bisect  {command}"] if (command := _to_bisect(one, told)) else []
    return found


def since(culprit: Culprit | None) -> list[str]:
    return wrapped(f"since   {culprit}", "    ", "        ") if culprit else []


def _to_bisect(change: Change, told: Told) -> str:
    """Empty where the commit is known."""
    culprit = told.culprit(change)
    return "" if culprit and culprit.name else bisect_command(change)


def bisect_command(change: Change) -> str:
    """Return the command for two commits of a trainer, else two releases of torch; empty where neither is known."""
    before, now = change.before, change.now
    if change.state != State.BROKEN or before is None:
        return ""
    good, bad = (night.of("commit").removesuffix("-dirty") for night in (before, now))
    trainer = TrainerSpec.parse(now.of("trainer"))
    named = usual_trainer.typed(trainer.name)
    if good and bad and good != bad:
        words = [*named, "--repo", trainer.source or ".", "--good", good, "--bad", bad, "-k", change.case]
        return f"harness bisect {shlex.join(words)}"
    older, newer = (night.of("torch").partition("+")[0] for night in (before, now))
    if older == newer or not older:
        return ""
    source = ["--source", trainer.source] if trainer.source else []
    words = ["--over", f"torch=={older},{newer}", *named, *source, "-k", change.case]
    return f"harness bisect {shlex.join(words)}"


def _fixed(change: Change, told: Told) -> str:
    culprit = told.culprit(change)
    by = f"; fixed by {culprit}" if culprit and culprit.name else f"; what did it was {culprit}" if culprit else ""
    return f"{change.case}: broken until {change.before}{by}"


def _listed(title: str, texts: Iterable[str]) -> list[str]:
    found = [line for text in texts for line in wrapped(text, "  ", "  ")]
    return ["", title, *found] if found else []
