"""The arguments of `harness compare`."""

from __future__ import annotations

import argparse
from pathlib import Path

from harness.core.cli.parsing import add_json
from harness.recording.cli import same_training
from harness.recording.cli.record import add_recording


def add(parser: argparse.ArgumentParser) -> None:
    add_json(parser)
    parser.add_argument(
        "folders",
        metavar="A B",
        nargs="*",
        help="folders of `harness matrix` or `harness run`, recordings, or FILE.yaml, a snapshot of one",
    )
    parser.add_argument(
        "--accept", action="store_true", help="write the structure of the recording B to the snapshot A, FILE.yaml"
    )
    parser.add_argument(
        "--with",
        dest="good",
        type=Path,
        metavar="A",
        help="record -- COMMAND and compare it with this; for git bisect run",
    )
    parser.add_argument(
        "-o", "--out", type=Path, default=Path("out/compared"), metavar="DIR", help="for that recording"
    )
    same_training.add_comparison(parser)
    add_recording(parser, words="*")  # options may stand behind A and B
