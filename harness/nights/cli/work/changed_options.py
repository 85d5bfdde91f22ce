"""The work of the options that the ring of nights adds to `harness matrix`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.core import trainers
from harness.core.case.case import Case
from harness.core.case.trainer_repository import clean_commit, repository_of
from harness.core.cli.parsing import BadInput
from harness.core.cli.work.options import run_options_of
from harness.core.run.options import Options
from harness.core.run.supported import reason_unsupported
from harness.nights.affected.selecting import AffectedCases, select_affected
from harness.nights.ray_cluster import RayCluster


def map_option(args: argparse.Namespace, trainer: str) -> dict[str, Any]:
    """Return {"map": folder in which to record what cases run, or None}, as a field of run options.

    Raises BadInput, and CaseError without a clean repository.
    """
    return {"map": map_folder(args, trainer)}


def map_folder(args: argparse.Namespace, trainer: str) -> Path | None:
    """Return the folder in which to record what cases run, absolute. None without --map, and with --changed.

    Raises BadInput on GPUs with a Python before 3.12, and CaseError without a clean repository of the trainer.
    """
    if getattr(args, "map", None) is None or getattr(args, "changed", None):
        return None
    if args.device == "cuda" and sys.version_info < (3, 12):
        raise BadInput("--map: on GPUs it needs Python 3.12, for what runs on the threads of backward")
    clean_commit(repository_of(trainer))
    return args.map.resolve()


def select_changed(cases: Sequence[Case], args: argparse.Namespace) -> AffectedCases | None:
    """Return the cases that can be affected by what changed since --changed, with reasons. None without that option.

    Cases that would be skipped are left out. Raises CaseError.
    """
    if not args.changed:
        return None
    options = run_options_of(args)
    runnable = [case for case in cases if not reason_unsupported(case, options)]
    return select_affected(
        runnable,
        args.changed,
        options.trainer,
        trainers.load_adapter(options.trainer).name,
        args.map or args.out / "map",
    )


def cluster_of_options(args: argparse.Namespace, options: Options) -> RayCluster | None:
    """Return the Ray cluster on whose nodes cases run; None without --on. Raises LaunchError if there is no such cluster."""
    return RayCluster(args.on, options.device) if args.on else None
