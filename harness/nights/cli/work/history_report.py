"""The report on many nights: what broke, what was fixed and what grew."""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Sequence
from pathlib import Path

from harness.core.cli.answer import print_or_keep_document
from harness.core.cli.exit_codes import BROKEN, NOT_JUDGED, PASSED, worst_code
from harness.core.report.output import print_error
from harness.nights import quarantine
from harness.nights.changes import State
from harness.nights.history import group_nights, read_runs
from harness.nights.history_text import (
    SeriesChanges,
    build_series_changes,
    lapsed_entries,
    series_document,
    series_lines,
)
from harness.nights.nights import read_culprits


def show_history(args: argparse.Namespace, folders: Sequence[Path], set_aside: Path | None) -> int:
    """Print what changed over the nights below the folders. Return the worst exit code of the series.

    Return 1 if a case is broken in the last night and not set aside. Return 2 if one was not judged, or if an entry of
    the quarantine sets nothing aside. set_aside: the quarantine file, or None.
    """
    runs, unread = read_runs(folders)
    for line in unread:
        print_error(line)
    entries = quarantine.load_quarantine(set_aside) if set_aside else ()
    today = datetime.datetime.now(datetime.UTC).date()
    culprits = read_culprits(folders)
    all_series = [build_series_changes(nights, entries, today, culprits) for nights in group_nights(runs).values()]
    stale = lapsed_entries(entries, all_series, today)
    text = "\n\n\n".join("\n".join(series_lines(series_changes)) for series_changes in all_series)
    quarantined = ["", "QUARANTINE", *(f"  {line}" for line in stale)] if stale else []
    print_or_keep_document(
        args, "history", {"series": list(map(series_document, all_series)), "quarantine": stale}, text, *quarantined
    )
    return worst_code([*map(exit_code_of_series, all_series), NOT_JUDGED if stale else PASSED])


def exit_code_of_series(series_changes: SeriesChanges) -> int:
    """Return the exit code of a series' last night: 1 if a case is broken and not set aside.

    Return 2 if a case or shard lacks a verdict or was not judged, else 0. Flaky cases and larger costs never change it.
    """
    lacking: Sequence[object] = [
        *series_changes.nights[-1].lacking_verdicts,
        *series_changes.changes_to(State.UNJUDGED),
    ]
    return worst_code(
        [BROKEN if series_changes.changes_to(State.BROKEN) else PASSED, NOT_JUDGED if lacking else PASSED]
    )
