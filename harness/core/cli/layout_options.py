"""What lets a person type a layout: a case, degrees, a model and lengths, or what a recorded job is judged by."""

from __future__ import annotations

import argparse

from harness.core.case import layout
from harness.core.cli.parsing import add_cases, positive_int

LAYOUT_FILES_HELP = "torchtitan's .toml, accelerate's or NeMo's .yaml, NeMo's .py, DeepSpeed's .json"


def add_layout(parser: argparse.ArgumentParser, *, accepts_command: bool = False) -> None:
    """Add the options by which a person types a layout: CASE, --dims, the model and its lengths.

    accepts_command: the words of a command may stand for CASE, behind "--"; `case` is then a list.
    """
    positional_kwargs = (
        {"metavar": "CASE | -- COMMAND", "nargs": "*"} if accepts_command else {"metavar": "CASE", "nargs": "?"}
    )
    parser.add_argument("case", help="a case or published layout by its name; or --dims", **positional_kwargs)  # type: ignore[arg-type]
    add_cases(parser)
    group = parser.add_argument_group("a layout that is in no file")
    group.add_argument(
        "--dims", metavar="DEGREES|FILE", help=f"pp=16,dp_shard=128,tp=8; or a job's file: {LAYOUT_FILES_HELP}"
    )
    group.add_argument("--world", type=positive_int, metavar="N", help="how many ranks, where a file does not say it")
    group.add_argument("--model", metavar="NAME", help="8B, 70B, 405B; default a file's own, without a file debug")
    group.add_argument("--seq", type=positive_int, metavar="N", help="tokens of a sample; default 8192")
    group.add_argument("--batch", type=positive_int, metavar="N", help="samples of a step; default the fewest")
    group.add_argument("--microbatches", type=positive_int, metavar="N", help="of a pipeline; default two a stage")
    group.add_argument(
        "--stages-per-rank", type=positive_int, metavar="N", help="of a pipeline; default as its schedule"
    )
    group.add_argument(
        "--schedule", metavar="NAME", help="of a pipeline; default 1F1B, of several stages Interleaved1F1B"
    )
    group.add_argument("--checkpointing", metavar="KIND", help="of activations: full, layer, op; default none")
    group.add_argument("--cp-replicates", action="store_true", default=None, help="FSDP does not shard over cp")
    group.add_argument("--wrapper", metavar="NAME", help="over data ranks: fsdp2, zero1, ..; default a file's own")


def add_degrees(parser: argparse._ActionsContainer) -> None:
    """Add --layout, the degrees by which a recorded job is judged."""
    help_text = f"judge it by what was requested: dp_replicate=2,dp_shard=8, or {layout.LAYOUT_FILES}"
    parser.add_argument("--layout", metavar="DEGREES", help=help_text)
