"""`harness history`: what broke, what was fixed and what grew from night to night."""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.cli.answer import answer
from harness.cli.exit_codes import BROKEN, NOT_JUDGED, PASSED, worst
from harness.cli.options import add_command
from harness.report.output import complain
from harness.run.changes import State
from harness.run.history import runs_in, series
from harness.run.history_text import Told, as_document, lapsed, lines, told
from harness.run.nights import culprits_in
from harness.spec import quarantine


def add(commands: Any) -> None:
    parser = add_command(commands, "history", command, "say what changed from night to night")
    parser.add_argument(
        "folders", metavar="DIR", nargs="+", type=Path, help="with verdicts.jsonl of many runs, at any depth"
    )
    parser.add_argument(
        "--quarantine", type=Path, metavar="FILE", help="cases that a person has set aside until a day; YAML, only read"
    )


def command(args: argparse.Namespace) -> int:
    """1: a case is broken in the last night and not set aside. 2: one was not judged, or the quarantine needs its person."""
    runs, unread = runs_in(args.folders)
    for line in unread:
        complain(line)
    entries = quarantine.load(args.quarantine) if args.quarantine else ()
    today = datetime.datetime.now(datetime.UTC).date()
    culprits = culprits_in(args.folders)
    every = [told(nights, entries, today, culprits) for nights in series(runs).values()]
    stale = lapsed(entries, every, today)
    text = "\n\n\n".join("\n".join(lines(one)) for one in every)
    quarantined = ["", "QUARANTINE", *(f"  {line}" for line in stale)] if stale else []
    answer(args, "history", {"series": list(map(as_document, every)), "quarantine": stale}, text, *quarantined)
    return worst([*map(code, every), NOT_JUDGED if stale else PASSED])


def code(one: Told) -> int:
    """Of the last night; what is flaky or grew is told and changes nothing."""
    lacking: Sequence[object] = [*one.nights[-1].lacking, *one.of(State.UNJUDGED)]
    return worst([BROKEN if one.of(State.BROKEN) else PASSED, NOT_JUDGED if lacking else PASSED])
