"""A layout as a person names or types it: a case, a published layout of layouts/, or degrees, a model and lengths."""

from __future__ import annotations

import argparse

from harness.cli.options import BadInput, add_cases, case_of, positive_int
from harness.preflight.fitting import traits_of
from harness.preflight.request import Asked, Request
from harness.spec import case_files
from harness.spec.case import Case
from harness.spec.loading import load_all
from harness.spec.traits import USUAL

FILES = "torchtitan's .toml, accelerate's or NeMo's .yaml, NeMo's .py, DeepSpeed's .json"
KEYS = (
    *("dims", "world", "model", "seq", "batch", "microbatches", "stages_per_rank", "schedule", "checkpointing"),
    *("wrapper", "cp_replicates"),
)


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


def layout_case(args: argparse.Namespace) -> Asked:
    """Raises BadInput and CaseError."""
    if bool(args.case) == bool(args.dims):
        raise BadInput("name a CASE, or give a layout by --dims")
    if args.case:
        if unused := [key for key in KEYS if getattr(args, key) is not None]:
            raise BadInput(f"--{unused[0].replace('_', '-')} is of --dims, and {args.case} is a CASE")
        published = _published(args)
        traits = traits_of(published) if published else USUAL
        return Asked(case=published or case_of(args), traits=traits, set_aside=())
    if args.cases:
        raise BadInput("--cases: leave it out; --dims is a layout of no file of cases")
    return Request(**{key: getattr(args, key) for key in KEYS}).asked()


def _published(args: argparse.Namespace) -> Case | None:
    """Layouts have no folder of their own on the command line: their names are known beside those of cases."""
    known = () if args.cases else load_all(case_files.LAYOUTS)
    return next((case for case in known if case.name == args.case), None)
