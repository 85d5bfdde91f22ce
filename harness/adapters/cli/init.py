"""What can be typed behind `harness init`."""

from __future__ import annotations

import argparse
from pathlib import Path


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "script", type=Path, metavar="TRAINER.py", help="one rank of it runs up to its first step; not edited"
    )
    parser.add_argument("--adapter", type=Path, metavar="FILE.py", help="default TRAINER_adapter.py beside it")
    parser.add_argument("--cases", type=Path, default=Path("cases"), metavar="DIR", help="default cases")
