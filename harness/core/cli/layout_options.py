"""What lets a person type a layout: a case, degrees, a model and lengths, or what a recorded job is judged by."""

from __future__ import annotations

import argparse

from harness.core.case import layout
from harness.core.cli.parsing import add_cases, positive_int

FILES = "torchtitan's .toml, accelerate's or NeMo's .yaml, NeMo's .py, DeepSpeed's .json"


def add_layout(parser: argparse.ArgumentParser, *, or_command: bool = False) -> None:
    """or_command: the words of a command may stand for CASE, behind "--"; `case` is then a list."""
    more = {"metavar": "CASE | -- COMMAND", "nargs": "*"} if or_command else {"metavar": "CASE", "nargs": "?"}
    parser.add_argument("case", help="a case or published layout by its name; or --dims", **more)  # type: ignore[arg-type]
    add_cases(parser)
    what = parser.add_argument_group("a layout that is in no file")
    what.add_argument("--dims", metavar="DEGREES|FILE", help=f"pp=16,dp_shard=128,tp=8; or a job's file: {FILES}")
    what.add_argument("--world", type=positive_int, metavar="N", help="how many ranks, where a file does not say it")
    what.add_argument("--model", metavar="NAME", help="8B, 70B, 405B; default a file's own, without a file debug")
    what.add_argument("--seq", type=positive_int, metavar="N", help="tokens of a sample; default 8192")
    what.add_argument("--batch", type=positive_int, metavar="N", help="samples of a step; default the fewest")
    what.add_argument("--microbatches", type=positive_int, metavar="N", help="of a pipeline; default two a stage")
    what.add_argument(
        "--stages-per-rank", type=positive_int, metavar="N", help="of a pipeline; default as its schedule"
    )
    what.add_argument(
        "--schedule", metavar="NAME", help="of a pipeline; default 1F1B, of several stages Interleaved1F1B"
    )
    what.add_argument("--checkpointing", metavar="KIND", help="of activations: full, layer, op; default none")
    what.add_argument("--cp-replicates", action="store_true", default=None, help="FSDP does not shard over cp")
    what.add_argument("--wrapper", metavar="NAME", help="over data ranks: fsdp2, zero1, ..; default a file's own")


def add_degrees(parser: argparse._ActionsContainer) -> None:
    """Let a person type what a recorded job was requested to be."""
    what = f"judge it by what was requested: dp_replicate=2,dp_shard=8, or {layout.FILES}"
    parser.add_argument("--layout", metavar="DEGREES", help=what)
