"""`harness run CASE`: one case, judged. Or another node's part of one, and the servers that fork its ranks."""

from __future__ import annotations

import argparse
import functools
import shlex
import sys
from collections.abc import Callable
from typing import Any

from harness.core.case.case import Case
from harness.core.case.launching import requested_ranks
from harness.core.case.variants import with_dtype, with_seed
from harness.core.cli.answer import print_or_keep_document
from harness.core.cli.exit_codes import NOT_JUDGED, PASSED
from harness.core.cli.parsing import BadInput
from harness.core.cli.run import END_ALL, FIRST_NODE_PATIENCE, SERVER_ACTIONS, SHOW
from harness.core.cli.work.cases import case_of
from harness.core.cli.work.options import refuse_json, refuse_others, run_options_of, trainer_lines
from harness.core.cli.work.verdict_codes import exit_code
from harness.core.judge.judgement import Judgement
from harness.core.launch import resident_client
from harness.core.launch.torchrun import run_as_node
from harness.core.report.documents import case_document_here
from harness.core.report.outcome import Outcome, judged_outcome
from harness.core.report.output import print_error, print_lines
from harness.core.report.progress import show_stages
from harness.core.report.text import case_report
from harness.core.run.again import Reruns
from harness.core.run.folders import folder_of
from harness.core.run.matrix import attempt_case
from harness.core.run.options import Options
from harness.core.run.run_case import run_case

# ---- The processes that stay after a command, with torch imported, and fork the ranks of the next commands


def show_or_end_servers(action: str) -> None:
    """Print a line for each of this user's rank servers, and end them unless the action is SHOW.

    END leaves those of other environments, and says so; END_ALL ends them too.
    """
    ends_all = action == END_ALL
    is_ending = action != SHOW
    servers = resident_client.stop_servers(every=ends_all) if is_ending else resident_client.status_of_all()
    lines = [server_line(server, stop=is_ending and (ends_all or not server.get("stays"))) for server in servers]
    if is_ending and not ends_all and any(server.get("stays") for server in servers):
        lines.append("what is left is of other environments; `harness run --server end-all` ends it too")
    print_lines(*(lines or ["no rank server is here"]))


def server_line(server: dict[str, Any], *, stop: bool) -> str:
    """Return a line on one server: its process, whether it serves, ends or does not answer, its torch and its harness.

    server: what it answered; without "commands" it did not answer. stop: whether it is being ended.
    """
    if "commands" not in server:
        ends = ": killed" if stop else "; `harness run --server end` of its environment kills it"
        return f"pid {server['pid']} does not answer{ends}"
    noun = "command" if server["commands"] == 1 else "commands"
    served = f"{server['commands']} {noun}"
    if stop:
        state = f"ends with the {served} that it serves" if server["commands"] else "ended"
    elif server["commands"]:
        state = f"serves {served}"
    else:
        state = f"ends in {server['ends'] - server['idle']:.0f} s unless a command comes"
    return f"pid {server['pid']} {state}: torch {server['torch']}, harness of {server['root']}"


# ---- the command


def command(args: argparse.Namespace) -> int:
    """Run and judge the CASE that was typed, and return the exit code. With --join or --server do that instead, without
    CASE.

    Raises BadInput for options that do not go together.
    """
    other_action = "--join" if args.join else f"--server {args.server}" if args.server in SERVER_ACTIONS else ""
    if bool(other_action) == bool(args.case):
        raise BadInput(
            f"{other_action}: leave out CASE"
            if other_action
            else "run: name a CASE; `harness matrix --list` lists them"
        )
    if other_action:
        refuse_json(args, other_action)
    if args.join:
        refuse_others(args, "this node's part of a launch", {"--join", "--timeout"})
        return _join(args)
    if other_action:
        refuse_others(args, "rank servers that are there", {"--server"})
        show_or_end_servers(args.server)
        return PASSED
    return _run(args)


def _join(args: argparse.Namespace) -> int:
    """Run this node's ranks of a launch that another node began.

    Return PASSED if torchrun ended well, else NOT_JUDGED: the first node judges.
    """
    status = run_as_node(args.join / "run", seconds=args.timeout or FIRST_NODE_PATIENCE)
    if status:
        print_error(f"torchrun ended with code {status} here; the first node judges")
    return NOT_JUDGED if status else PASSED


def _run(args: argparse.Namespace) -> int:
    """Run a case, with seed and dtype changed as typed, print its report and return its exit code.

    A failing case is rerun as --again says. The reruns change the report and not the exit code. Raises BadInput if
    --torchrun-args start another number of ranks.
    """
    case = case_of(args)
    options = run_options_of(args)
    case = with_dtype(case if args.seed is None else with_seed(case, args.seed), args.dtype)
    ranks = requested_ranks(["torchrun", *options.torchrun_args])
    degrees = case.dims
    if ranks not in (None, degrees.world_size):
        raise BadInput(
            f"--torchrun-args: they start {ranks} ranks, but {case.name} is {degrees} = {degrees.world_size} ranks"
        )
    if options.torchrun_args:
        print_lines(
            f"on every other node: harness run --join {shlex.quote(str(folder_of(case, options)))}", to=sys.stderr
        )
    with show_stages(case.name, sys.stderr) as stage:
        judgement = run_case(case, options, stage)
        make_again = functools.partial(attempt_case, run_one=functools.partial(run_case, stage=stage))
        outcome = outcome_with_reruns(judgement, options, args.again, make_again)
    data = case_document_here(judgement)
    text = outcome.report or case_report(judgement)
    if outcome.repeats:
        data |= {"repeats": outcome.repeats, "cause": outcome.cause, "diagnosis": outcome.diagnosis or None}
    print_or_keep_document(args, "case", data, text, *trainer_lines(args))
    return exit_code(judgement)


def outcome_with_reruns(
    first: Judgement, options: Options, times: int, make: Callable[[Case, Options], Outcome]
) -> Outcome:
    """Return the outcome of a case that was judged; if it fails, with the outcomes of `times` reruns, which `make` runs."""
    return Reruns(times).outcome_with_reruns(
        first.case, options, lambda case, each: judged_outcome(first) if each is options else make(case, each)
    )
