"""The report on many nights: what broke, what was fixed and what grew."""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Sequence
from pathlib import Path

from harness.core.cli.answer import answer
from harness.core.cli.exit_codes import BROKEN, NOT_JUDGED, PASSED, worst
from harness.core.report.output import complain
from harness.nights import quarantine
from harness.nights.changes import State
from harness.nights.history import runs_in, series
from harness.nights.history_text import Told, as_document, lapsed, lines, told
from harness.nights.nights import culprits_in


def shown(args: argparse.Namespace, folders: Sequence[Path], set_aside: Path | None) -> int:
    """Print what changed. Return 1 if a case is broken in the last night and not set aside.

    Return 2 if one was not judged, or if an entry of the quarantine needs its person.
    """
    runs, unread = runs_in(folders)
    for line in unread:
        complain(line)
    entries = quarantine.load(set_aside) if set_aside else ()
    today = datetime.datetime.now(datetime.UTC).date()
    culprits = culprits_in(folders)
    all_series = [told(nights, entries, today, culprits) for nights in series(runs).values()]
    stale = lapsed(entries, all_series, today)
    text = "\n\n\n".join("\n".join(lines(series_changes)) for series_changes in all_series)
    quarantined = ["", "QUARANTINE", *(f"  {line}" for line in stale)] if stale else []
    answer(args, "history", {"series": list(map(as_document, all_series)), "quarantine": stale}, text, *quarantined)
    return worst([*map(code, all_series), NOT_JUDGED if stale else PASSED])


def code(series_changes: Told) -> int:
    """Return the exit code of the last night. Flaky cases and larger costs never change it."""
    lacking: Sequence[object] = [*series_changes.nights[-1].lacking, *series_changes.of(State.UNJUDGED)]
    return worst([BROKEN if series_changes.of(State.BROKEN) else PASSED, NOT_JUDGED if lacking else PASSED])
