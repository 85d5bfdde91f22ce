"""What can be typed behind `harness record`."""

from __future__ import annotations

import argparse
from pathlib import Path

from harness.core.cli.layout_options import add_degrees
from harness.core.cli.parsing import add_json
from harness.recording.cli import same_training


def add(parser: argparse.ArgumentParser) -> None:
    add_json(parser)
    add_recording(parser)
    parser.add_argument(
        "-o", "--out", type=Path, default=Path("out/recording"), metavar="DIR", help="default out/recording"
    )
    parser.add_argument("--force", action="store_true", help="put it in the place of the recording that is there")
    same_training.add_options(parser)
    add_degrees(parser)


def add_recording(parser: argparse.ArgumentParser, words: str = argparse.REMAINDER) -> None:
    parser.add_argument("--steps", default="", metavar="SPANS", help="what is recorded; default 1-3; such as 1-3,100")
    parser.add_argument("--every", type=int, default=0, metavar="N", help="every N-th step as well")
    parser.add_argument("words", nargs=words, metavar="-- COMMAND", help="torchrun .. train.py ..")
