"""`harness join DIR`: another node's part of `harness run --launcher torchrun --torchrun-args`; the first node judges."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from harness.cli.exit_codes import NOT_JUDGED, PASSED
from harness.cli.options import add_command, seconds
from harness.launch.torchrun import join
from harness.report.output import complain


def add(commands: Any) -> None:
    parser = add_command(
        commands,
        "join",
        command,
        "on every other node: its part of what `harness run` started on the first",
        json=False,
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="OUT/CASE on the shared disk")
    parser.add_argument(
        "--timeout", type=seconds, default=600.0, metavar="S", help="seconds to wait for the first node"
    )


def command(args: argparse.Namespace) -> int:
    status = join(args.folder / "run", seconds=args.timeout)
    if status:
        complain(f"torchrun ended with code {status} here; the first node judges")
    return NOT_JUDGED if status else PASSED
