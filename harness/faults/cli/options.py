"""What the ring of faults adds to commands of the core."""

from __future__ import annotations

import argparse


def add_fault(parser: argparse.ArgumentParser) -> None:
    """Add --fault to `harness run`. Its value is the text that was typed, not checked; None by default."""
    parser.add_argument(
        "--fault", metavar="FILE.py:NAME", help="a deliberate mistake to make, or a NAME of the catalogue"
    )


def add_plot(parser: argparse.ArgumentParser) -> None:
    """Add the flag --plot to `harness golden`, False by default. It replaces what the command does otherwise."""
    parser.add_argument(
        "--plot", action="store_true", help="pictures and a table: correct runs, bounds, small mistakes"
    )
