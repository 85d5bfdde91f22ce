"""Effects of the options that the ring of faults adds to commands of the core."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from harness.core.cli.exit_codes import NOT_JUDGED, PASSED
from harness.core.cli.parsing import BadInput
from harness.core.cli.work.cases import cases_of
from harness.core.cli.work.options import refuse_json, require_matplotlib
from harness.core.evidence.errors import error_text
from harness.core.report.output import print_lines
from harness.core.run.options import Options
from harness.core.run.selection import select_matching
from harness.faults import FaultError, load_fault


def fault_of(args: argparse.Namespace, trainer: str) -> dict[str, Any]:
    """Return {"fault": spec} for the fault of --fault, as fields of run options; empty without --fault. Raises FaultError."""
    return {"fault": checked_fault(args.fault)} if getattr(args, "fault", None) else {}


def checked_fault(spec: str) -> str:
    """Return a fault's spec with an absolute path, as ranks can load it. A name of the catalogue stays a name.

    Loads the fault; raises FaultError if that fails.
    """
    file, _, name = spec.rpartition(":")
    try:
        load_fault(spec)
    except FaultError:
        raise
    except (Exception, SystemExit) as error:
        raise FaultError(f"--fault {spec}: cannot be loaded: {error_text(Path(file), error)}") from error
    return f"{Path(file).resolve()}:{name}" if file else name


def plotted(args: argparse.Namespace) -> int | None:
    """Draw margins of recipes with noise, and print their tables, for `harness golden --plot`. None without --plot.

    Return 0, or 2 if no selected case has noise. Raises BadInput.
    """
    if not args.plot:
        return None
    refuse_json(args, "--plot")
    if args.accept:
        raise BadInput("--plot cannot be combined with --accept")
    chosen = select_matching(cases_of(args), args.expression)
    options = Options(out=args.out)
    require_matplotlib()
    from harness.faults import margins  # matplotlib takes half a second

    margins_drawn = []
    for users in margins.group_by_recipe(chosen):
        margin = margins.make_margin(users, options)
        print_lines(margins.margin_table(margin), margins.draw_margin(margin, options.out))
        margins_drawn.append(margin)
    if len(margins_drawn) > 1:
        print_lines(margins.draw_all(margins_drawn, options.out))
    return PASSED if margins_drawn else NOT_JUDGED
