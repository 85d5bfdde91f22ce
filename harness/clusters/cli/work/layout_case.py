"""A layout as a person names or types it: a case, a published layout of layouts/, or degrees, a model and lengths."""

from __future__ import annotations

import argparse

from harness.clusters.fitting import traits_of
from harness.clusters.request import Request, RequestedLayout
from harness.core.case import case_files
from harness.core.case.case import Case
from harness.core.case.loading import load_all
from harness.core.case.traits import USUAL_TRAITS
from harness.core.cli.parsing import BadInput
from harness.core.cli.work.cases import case_of

DIMS_OPTIONS = (
    *("dims", "world", "model", "seq", "batch", "microbatches", "stages_per_rank", "schedule", "checkpointing"),
    *("wrapper", "cp_replicates"),
)


def layout_of_arguments(args: argparse.Namespace) -> RequestedLayout:
    """Return the layout that a command's options name (a case, or one of layouts/) or spell out with --dims.

    Raises BadInput for both or neither, or options of --dims beside a CASE; CaseError for an unknown case or a wrong
    layout.
    """
    if bool(args.case) == bool(args.dims):
        raise BadInput("name a CASE, or pass a layout with --dims")
    if args.case:
        if unused := [key for key in DIMS_OPTIONS if getattr(args, key) is not None]:
            raise BadInput(f"--{unused[0].replace('_', '-')} is of --dims, and {args.case} is a CASE")
        published = _published_layout(args)
        traits = traits_of(published) if published else USUAL_TRAITS
        return RequestedLayout(case=published or case_of(args), traits=traits, set_aside=())
    if args.cases:
        raise BadInput("--cases cannot be combined with --dims, which is a layout without a case")
    return Request(**{key: getattr(args, key) for key in DIMS_OPTIONS}).resolve()


def _published_layout(args: argparse.Namespace) -> Case | None:
    """Return the published layout that CASE names. None if there is none, or if --cases names another folder."""
    published_cases = () if args.cases else load_all(case_files.LAYOUTS)
    return next((case for case in published_cases if case.name == args.case), None)
