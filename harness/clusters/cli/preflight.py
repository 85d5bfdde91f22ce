"""What can be typed behind `harness preflight`."""

from __future__ import annotations

import argparse

from harness.core.case import layout
from harness.core.cli.layout_options import add_layout
from harness.core.cli.parsing import add_jobs, add_json, add_out, add_trainer, positive_int, seconds_within_limit
from harness.core.plan.figures.gpus import GPU_GIGABYTES


def add(parser: argparse.ArgumentParser) -> None:
    add_json(parser)
    add_layout(parser, accepts_command=True)
    parser.add_argument(
        "--config",
        metavar="FILE.toml|MODULE:FUNCTION",
        help="or torchtitan's own configuration, with --world: a file, or what returns one",
    )
    parser.add_argument("--layout", metavar="DEGREES", help=f"of a command: dp_shard=512, or {layout.LAYOUT_FILES}")
    how = parser.add_argument_group("how")
    add_trainer(how)
    how.add_argument("--source", metavar="PATH|VERSION", help="a checkout of that trainer, or a release")
    how.add_argument("--steps", type=positive_int, default=1, metavar="N", help="default 1; what grows shows in 3")
    how.add_argument("--ranks", default="auto", metavar="LIST", help="auto, or such as 0-7,512")
    how.add_argument("--seed", type=int, default=0, metavar="N", help="of the ranks that are drawn")
    how.add_argument(
        "--gpu", default="H100", choices=GPU_GIGABYTES, help="whose memory is compared; default H100 of 80 GB"
    )
    how.add_argument("--fault", metavar="NAME", help="a deliberate mistake to make")
    how.add_argument(
        "--timeout", type=seconds_within_limit, default=600.0, metavar="S", help="seconds for one rank; default 600"
    )
    add_jobs(how, "ranks at a time; default as many as there are cores")  # type: ignore[arg-type]
    add_out(how, help="where evidence goes; default out")
