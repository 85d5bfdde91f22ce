"""`harness bisect`: what failed a check."""

from __future__ import annotations

import argparse
import functools
import sys

from harness.core.case.loading import load_all
from harness.core.cli.answer import print_or_keep_document
from harness.core.cli.exit_codes import NOT_JUDGED, PASSED
from harness.core.cli.parsing import BadInput
from harness.core.cli.work.cases import folder_of
from harness.core.cli.work.options import run_options_of
from harness.core.report.output import print_lines
from harness.core.run.selection import select_matching
from harness.nights.bisect import commits, versions
from harness.nights.bisect.side_by_side import bisect_data, bisect_report


def command(args: argparse.Namespace) -> int:
    """Run the search, print its report, and return the exit code.

    Return 0 if the first bad commit or version is found, or the one that fixed it, and 2 if skipped ones hide it.
    Raises BadInput for options that cannot be combined.
    """
    tell = functools.partial(print_lines, to=sys.stderr)
    folder = folder_of(args)
    cases = select_matching(load_all(folder), args.expression)
    range_of_commits = (args.repo, args.good, args.bad)
    if args.over is None and None in range_of_commits:
        raise BadInput("bisect needs --repo, --good and --bad, or --over PACKAGE==GOOD,..,BAD")
    if args.over is not None and any(range_of_commits):
        raise BadInput("--over cannot be combined with --repo, --good and --bad, which search commits")
    if args.over is None and args.source:
        raise BadInput("--source cannot be combined with --repo: each commit has its own sources")
    options = run_options_of(args, several_nodes=False)
    if args.over is not None:
        search_result = versions.search_versions(versions.parse_versions(args.over), cases, folder, options, tell)
    else:
        search_result = commits.bisect_commits(args.repo, args.good, args.bad, cases, options, tell)
    print_or_keep_document(args, "bisect", lambda: bisect_data(search_result), bisect_report(search_result))
    return PASSED if search_result.first else NOT_JUDGED
