"""Collectives: those of chosen steps on record, of all others only the last one, which a killed process leaves as well."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from harness.evidence.recording import Last
from harness.evidence.records import BACKGROUND
from harness.probe.clock import Clock
from harness.probe.collectives import CollectiveRecorder, _group_of, members
from harness.record.progress import Progress

MOST = 1000
"""Collectives of a group on record that are of no step, so that a job may be of any length: the first ones."""


class TracedCollectives(CollectiveRecorder):
    def __init__(self, clock: Clock, chosen: Callable[[], bool], progress: Progress) -> None:
        super().__init__(clock.where, None, lambda: clock.account)
        self._progress = progress
        self._clock, self._chosen = clock, chosen
        self._counts: Counter[str] = Counter()
        self._in_background: Counter[str] = Counter()
        self._latest: tuple[str, Any, int, int, str] | None = None
        self._ranks: dict[str, tuple[int, ...]] = {}
        self.failed = ""

    def _note(self, op: str, payload: Any, args: tuple[Any, ...]) -> None:
        """A call that cannot be read is not on record; it is made all the same."""
        if self.failed:
            return
        try:
            self._trace(op, payload, args)
        except Exception as error:
            self.failed = f"reading a call of {op} raised {error!r}"
            print(f"harness: no collective is recorded any more: {self.failed}", file=sys.stderr)

    def _trace(self, op: str, payload: Any, args: tuple[Any, ...]) -> None:
        group = _group_of(args)
        name = group.group_name
        if self.keep(group):  # a name comes again where a job destroys its groups and makes others
            self._ranks[name] = members(group)
        self._counts[name] += 1
        step, phase = self._clock.where()
        self._latest = (op, name, self._counts[name], step, phase)
        self._progress.note_collective(self._latest)
        if phase == BACKGROUND:
            self._in_background[name] += 1
        recorded = self._in_background[name] <= MOST if phase == BACKGROUND else self._chosen()
        if recorded:
            super()._note(op, payload, args)

    @property
    def last(self) -> Last | None:
        return last_of(self._latest, self._ranks) if self._latest else None


def last_of(latest: Any, ranks: dict[str, tuple[int, ...]]) -> Last:
    op, name, place, step, phase = latest
    when = "in the background" if phase == BACKGROUND else f"in step {step}, {phase}"
    return Last(f"{op} {when}", ranks.get(name, ()), name, place)
