"""`harness plan CASE`: what must be true of a case's layout, and what it costs; or which layouts fit."""

from __future__ import annotations

import argparse
import re

from harness.clusters.cli.work.layout_case import layout_of_arguments
from harness.clusters.fitting import FittingRequest, find_fitting_layouts
from harness.clusters.pages import layout_documents
from harness.clusters.pages.fitting_text import fitting_text
from harness.core.cli.answer import print_or_keep_document
from harness.core.cli.exit_codes import NOT_JUDGED, PASSED
from harness.core.cli.parsing import BadInput
from harness.core.cli.work.options import refuse_others
from harness.core.plan.figures.gpus import GPU_GIGABYTES, MACHINES
from harness.core.plan.make_plan import make_plan
from harness.core.report.plan_text import plan_text
from harness.reference.config import PRESETS

LIST_OPTIONS = ("--json", "--world", "--model", "--seq", "--batch", "--gpu", "--gpu-memory", "--nodes-of")


def command(args: argparse.Namespace) -> int:
    """Print the plan of a layout, or, with --model and --world alone, the layouts that fit. Return the exit code."""
    if args.model and args.world and not args.case and not args.dims:
        refuse_others(args, "a list of layouts that fit", LIST_OPTIONS)
        return print_fitting_layouts(args)
    if args.gpu_memory or args.nodes_of:
        raise BadInput("--gpu-memory and --nodes-of are for a list of layouts: --model and --world, without a layout")
    requested = layout_of_arguments(args)
    case = requested.case
    plan = make_plan(case, requested.traits)
    text = plan_text(case, plan, args.gpu, set_aside=requested.set_aside)
    print_or_keep_document(
        args, "plan", lambda: layout_documents.plan_document(case, plan, args.gpu, requested.set_aside), text
    )
    return PASSED


def print_fitting_layouts(args: argparse.Namespace) -> int:
    """Print the layouts that fit. Return PASSED, or NOT_JUDGED if none does. Raises BadInput and CaseError."""
    if args.model not in PRESETS:
        raise BadInput(f"--model {args.model!r}: choose one of {', '.join(PRESETS)}")
    memory = 1e9 * (parse_gigabytes(args.gpu_memory) if args.gpu_memory else GPU_GIGABYTES[args.gpu])
    required = (PRESETS[args.model], args.world, memory, args.nodes_of or 8)
    fits = find_fitting_layouts(FittingRequest(*required, seq=args.seq, batch=args.batch, machine=MACHINES[args.gpu]))
    request = {
        "model": args.model,
        "world": args.world,
        "gpu": args.gpu,
        "memory": memory,
        "nodes_of": args.nodes_of or 8,
    }
    print_or_keep_document(
        args, "layouts", lambda: layout_documents.layouts_document(request, fits), fitting_text(fits)
    )
    return PASSED if fits.layouts else NOT_JUDGED


def parse_gigabytes(text: str) -> float:
    """Return the number in "80", "80GB" or "80 GB". BadInput for other texts and for 0."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:GB)?\s*", text, re.IGNORECASE)
    if not match or not float(match[1]):
        raise BadInput(f"--gpu-memory {text!r}: expected a size such as 80GB")
    return float(match[1])
