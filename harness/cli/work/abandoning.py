"""Leaving what many threads are at, after Ctrl-C."""

from __future__ import annotations

import os
from typing import NoReturn

from harness.cli.exit_codes import INTERRUPTED
from harness.launch import standing
from harness.report.output import complain
from harness.report.progress import Progress


def abandon(progress: Progress, what: str, remedy: str = "") -> NoReturn:
    """Ends this process at once, whatever its threads wait for. The rank server sees it and kills what it started."""
    progress.clear()
    first = f"interrupted after {len(progress.done)} of {len(progress.weights)} {what}{remedy}"
    complain("\n  ".join([first, *standing()]))
    os._exit(INTERRUPTED)
