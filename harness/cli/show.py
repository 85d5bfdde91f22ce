"""`harness show DIR`: what a recorded job really ran, on one page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from harness.cli.exit_codes import BROKEN, NOT_JUDGED, PASSED
from harness.cli.options import add_command
from harness.judge.stored_recording import Recording, load_recording
from harness.report.output import say
from harness.report.recording_page import odd, page


def add(commands: Any) -> None:
    parser = add_command(commands, "show", command, "show what a recorded job really ran, on one page")
    parser.add_argument("directory", metavar="DIR", type=Path, help="what `harness record` wrote")


def command(args: argparse.Namespace) -> int:
    return shown(args.directory)


def shown(directory: Path) -> int:
    """Raises EvidenceError."""
    recording = load_recording(directory)
    say(page(recording))
    return exit_code(recording)


def exit_code(recording: Recording) -> int:
    """Broken where something is odd that no job means to have; not judged where no rank left evidence."""
    if not recording.summaries:
        return NOT_JUDGED
    return BROKEN if odd(recording) or recording.code else PASSED
