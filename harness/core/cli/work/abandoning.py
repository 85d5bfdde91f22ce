"""Ending a process whose threads are at work, after Ctrl-C."""

from __future__ import annotations

import os
from typing import NoReturn

from harness.core.cli.exit_codes import INTERRUPTED
from harness.core.launch import describe_running_jobs
from harness.core.report.output import print_error
from harness.core.report.progress import Progress


def abandon(progress: Progress, unit: str, remedy: str = "") -> NoReturn:
    """Print how far a run came and which jobs are running, and end this process with code INTERRUPTED, whatever its
    threads wait for.

    The rank server sees it and kills what it started. unit: what is counted, such as "cases". remedy: added to the
    message.
    """
    progress.clear()
    summary = f"interrupted after {len(progress.done)} of {len(progress.weights)} {unit}{remedy}"
    print_error("\n  ".join([summary, *describe_running_jobs()]))
    os._exit(INTERRUPTED)
