"""What can be typed behind `harness plan`."""

from __future__ import annotations

import argparse

from harness.core.cli.layout_options import add_layout
from harness.core.cli.parsing import add_json, positive_int
from harness.core.plan.figures.gpus import GPU_GIGABYTES


def add(parser: argparse.ArgumentParser) -> None:
    add_json(parser)
    add_layout(parser)
    parser.add_argument(
        "--gpu", default="H100", choices=GPU_GIGABYTES, help="whose memory is compared; default H100 of 80 GB"
    )
    fits = parser.add_argument_group("which layouts fit: with --model and --world alone")
    fits.add_argument("--gpu-memory", metavar="GB", help="of a GPU; default as --gpu is sold")
    fits.add_argument("--nodes-of", type=positive_int, metavar="N", help="GPUs of a node; default 8")
