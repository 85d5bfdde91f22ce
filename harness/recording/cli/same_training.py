"""What can be typed of a recording that is judged by another one of the same training, in another layout."""

from __future__ import annotations

import argparse
from pathlib import Path

DTYPES = ("compute", "float64", "float32", "bfloat16", "float16")
NOISE_SUFFIX = "_noise"
"""What the folder of the noise is called, behind the name of the recording whose noise it is."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what `record` takes."""
    parser.add_argument(
        "--same-as", type=Path, metavar="A", help="judge gradients and updates by A, a recording of the same training"
    )
    add_noise_of(parser)
    parser.add_argument(
        "--noise",
        nargs="?",
        const="compute",
        choices=DTYPES,
        metavar="DTYPE",
        help="alter the first weights by one rounding of DTYPE; default that of the forward pass",
    )
    parser.add_argument(
        "--sharded",
        action="append",
        default=[],
        metavar="PATTERN=AXIS:DIM",
        help="plain tensors of which each rank along AXIS of --layout holds a part of DIM",
    )

    parser.add_argument(
        "--rows",
        type=int,
        default=0,
        metavar="N",
        help="sketch N blocks of rows of each gradient, in both recordings, so that wrong rows are found",
    )


def add_comparison(parser: argparse.ArgumentParser) -> None:
    """Add what `compare` takes."""
    alone = parser.add_mutually_exclusive_group()
    alone.add_argument("--numbers", action="store_true", help="compare gradients and updates alone, by sketches")
    alone.add_argument(
        "--structure", action="store_true", help="compare the structure alone; default both, as recorded"
    )
    add_noise_of(parser)


def add_noise_of(parser: argparse.ArgumentParser) -> None:
    """Add where noise is recorded, and what was resumed."""
    parser.add_argument(
        "--after",
        type=int,
        default=0,
        metavar="STEP",
        help="the job went on from the checkpoint that A's job saved after this step",
    )
    parser.add_argument(
        "--noise-of",
        type=Path,
        metavar="N",
        help=f"the recording of A's noise; default A{NOISE_SUFFIX} where it is there",
    )
