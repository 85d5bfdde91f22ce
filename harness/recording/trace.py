"""Collectives: those of chosen steps on record, of all others only the last one, which a killed process leaves as well."""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from harness.core.evidence.codec import encoded_without_values
from harness.core.evidence.recording import BESIDE_SUFFIX, MAX_OTHER_GROUPS, Beside, Last, issued_text
from harness.core.evidence.records import BACKGROUND, CHECKPOINT
from harness.core.probe.clock import Clock
from harness.core.probe.collectives import CollectiveRecorder, global_ranks_of, group_of_call
from harness.core.probe.own_groups import DirectCall, name_of_group
from harness.recording.progress import Progress

MOST_BEFORE = 8
"""Collectives of a group before the last one that a killed process leaves, for members come to unlike numbers."""
MOST_BACKGROUND = 1000
"""Collectives of a group on record that are of no step, so that a job may be of any length: the first ones."""


class TracedCollectives(CollectiveRecorder):
    """The recorder of collectives, which keeps those of chosen steps, and of all others only the last one.

    chosen: answers whether what happens now is recorded. progress: is told each collective as it is issued.
    """

    def __init__(self, clock: Clock, chosen: Callable[[], bool], progress: Progress) -> None:
        super().__init__(clock.step_and_phase, None, lambda: clock.account)
        self._progress = progress
        self._clock = clock
        self._chosen = chosen
        self._counts: dict[str, int] = {}  # the group used last comes last
        self._in_background: Counter[str] = Counter()
        self._latest: tuple[Any, ...] | None = None
        self._before: dict[str, deque[str]] = defaultdict(lambda: deque(maxlen=MOST_BEFORE))
        self._ranks: dict[str, tuple[int, ...]] = {}
        self._placed: set[int] = set()
        self._beside: dict[str, set[tuple[str, str]]] = defaultdict(set)
        self._file: Path | None = None
        self.failed = ""

    def _note_operator(self, op: str, payload: Any, args: tuple[Any, ...]) -> None:
        """Record a call. One that cannot be read is not on record, and is made all the same."""
        if self.failed:
            return
        try:
            group = group_of_call(args)
            if not self._has_ranks(group):
                self.own_groups.note_unknown_group_call(op, group, payload)
                return
            self.own_groups.note_dispatched_call()
            if self._note_latest(op, group):
                super()._note_operator(op, payload, args)
        except Exception as error:
            self._raise_error(op, error)

    def _note_direct_call(self, call: DirectCall, group: dist.ProcessGroup) -> None:
        if not self.failed and self._has_ranks(group) and self._note_latest(call.op, group):
            super()._note_direct_call(call, group)

    def _raise_error(self, op: str, error: Exception) -> None:
        """Note the first error of the recorder itself; nothing more is recorded then."""
        if not self.failed:
            self.failed = f"reading a call of {op} raised {error!r}"
            print(f"harness: no collective is recorded any more: {self.failed}", file=sys.stderr)

    def _is_recorded(self, phase: str) -> bool:
        return phase == BACKGROUND or self._chosen()

    def _has_ranks(self, group: dist.ProcessGroup) -> bool:
        """Return whether torch has the group's ranks, and keep them by its name.

        A name comes again where a job destroys its groups and makes others.
        """
        if self.keep_alive(group) or id(group) not in self._placed:
            if not (ranks := global_ranks_of(group)):
                return False
            self._placed.add(id(group))
            self._ranks[name_of_group(group)] = ranks
        return True

    def _note_latest(self, op: str, group: dist.ProcessGroup) -> bool:
        """Note the call as the last one. Return whether it is on record, too."""
        name = name_of_group(group)
        self._counts[name] = self._counts.pop(name, 0) + 1
        step, phase = self._clock.step_and_phase()
        counts = [*self._counts.items()][-1 - MAX_OTHER_GROUPS :]  # a copy: other threads issue as well
        others = {other: count for other, count in counts if other != name}
        self._latest = (text := issued_text(op, step, phase), name, self._counts[name], [*self._before[name]], others)
        self._before[name].appendleft(text)
        self._progress.note_collective(self._latest)
        if phase != BACKGROUND:
            return self._chosen()
        if (op, thread := threading.current_thread().name) not in self._beside[name]:
            self._note_concurrent(op, name, thread)
        self._in_background[name] += 1
        return self._in_background[name] <= MOST_BACKGROUND

    def _note_concurrent(self, op: str, name: str, thread: str) -> None:
        """Note that another thread issues over this group, if training goes on meanwhile.

        The note is written at once, so that a process that is killed while both wait leaves it as well.
        """
        if self._clock.is_training_thread_busy():
            self._beside[name].add((op, thread))
            if self._file is not None:
                self._file.with_suffix(BESIDE_SUFFIX).write_text(
                    json.dumps(encoded_without_values(self.concurrent_calls))
                )

    @property
    def concurrent_calls(self) -> tuple[Beside, ...]:
        """Return what other threads issue over groups that the training thread also uses."""
        trains: dict[str, set[str]] = defaultdict(set)
        for call in tuple(self.records):
            if call.step and call.phase not in (BACKGROUND, CHECKPOINT):
                trains[call.group].add(call.op)
        background_calls = []
        for name, calls in sorted((name, tuple(calls)) for name, calls in [*self._beside.items()]):
            if calls and trains[name]:
                ops, threads = (tuple(sorted(set(kind))) for kind in zip(*calls, strict=True))
                background_calls.append(Beside(name, self._ranks[name], ops, threads, tuple(sorted(trains[name]))))
        return tuple(background_calls)

    @property
    def last(self) -> Last | None:
        """Return the last collective, with those before it in its group; None before the first one."""
        if self._latest is None:
            return None
        text, name, number, before, others = self._latest
        return Last(text, self._ranks.get(name, ()), name, number, tuple(before), others)

    def write_concurrent_beside(self, record: Path, *, finished: bool) -> None:
        """Set the record beside which notes of other threads are written; if finished, remove that file."""
        self._file = record
        if finished:
            record.with_suffix(BESIDE_SUFFIX).unlink(missing_ok=True)
