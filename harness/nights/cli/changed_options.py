"""Options that the ring of nights adds to `harness matrix`: what a change can affect, and a Ray cluster."""

from __future__ import annotations

import argparse
from pathlib import Path


def add(parser: argparse.ArgumentParser) -> None:
    change = parser.add_argument_group("which cases a change can affect")
    change.add_argument(
        "--changed",
        metavar="BASE",
        help="those that run what changed since this commit of the trainer's repository; see --map",
    )
    add_map(change)
    parser.add_argument(
        "--on", metavar="ray[://HOST:PORT]", help="on the nodes of a Ray cluster, which have the harness installed"
    )


def add_map(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--map",
        type=Path,
        metavar="DIR",
        help="record there which functions each case runs; --changed reads it, from OUT/map by default",
    )
