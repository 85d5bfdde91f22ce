"""`harness nightly`: the matrix, what changed since the nights before, the commits that did it, and a report of all that."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from harness import BUILTIN, ROOT
from harness.core import trainers
from harness.core.case.case import Case
from harness.core.case.trainer_spec import CHECKOUT_FOLDER, TrainerSpec
from harness.core.cli.answer import print_or_keep_document
from harness.core.cli.exit_codes import NOT_JUDGED, PASSED, worst_code
from harness.core.cli.parsing import BadInput
from harness.core.cli.typed import typed_options
from harness.core.cli.work import matrix
from harness.core.cli.work.options import run_options_of, trainer_under_test
from harness.core.evidence.own_folders import refuse_foreign_file
from harness.core.evidence.store import write_text
from harness.core.report.grid import counts_text
from harness.core.report.output import print_error, print_lines
from harness.core.run import verdicts
from harness.core.run.options import Options
from harness.core.run.verdicts import RecordedRun
from harness.nights import nights, quarantine
from harness.nights.bisect import commits, own_commits
from harness.nights.bisect.checkouts import files_of_trainer, trainer_by_checkout
from harness.nights.bisect.culprits import SearchSettings, find_culprits
from harness.nights.cli.work.history_report import exit_code_of_series
from harness.nights.cli.work.run_report import markdown_of_runs, read_last_runs
from harness.nights.history import group_nights, read_runs
from harness.nights.history_text import (
    SeriesChanges,
    build_series_changes,
    is_history,
    lapsed_entries,
    series_document,
    series_lines,
)
from harness.nights.page import build_page


def command(args: argparse.Namespace) -> int:
    """Run the matrix, or take the runs of --of; add them to the nights, search for culprits, and write the report.

    Return 1 if a case is broken in the last night. Return 2 if one was not judged, an entry of the quarantine sets
    nothing aside, or every case was skipped. Raises BadInput for options that cannot be combined.
    """
    if args.of and (unused := {"--jobs", "--again", "--map"} & {*typed_options(args)}):
        raise BadInput(f"{min(unused)} cannot be combined with --of, which runs nothing")
    set_aside = quarantine.load_quarantine(args.quarantine) if args.quarantine else ()
    args.trainer = trainer_under_test(args)
    trainer_name = trainers.absolute_spec(args.trainer, None)
    options = prepare_options(args, trainer_name)
    cases, count_of_other_tiers = matrix.select_cases_of_files(args)
    if count_of_other_tiers:
        print_progress(f"{count_of_other_tiers} more of other tiers are not run: --tier all")
    today = datetime.now(UTC).date()
    refuse_foreign_files(args, str(today))
    runs = read_last_runs(args.of) if args.of else [run_cases(cases, options, args.jobs, args.again)]
    folder = nights.append_runs(args.nights, runs, str(today))
    changes_with = functools.partial(build_series_changes, nights_up_to(args.nights, runs), set_aside, today)
    searching = dataclasses.replace(options, trainer=trainer_name)
    until = time.monotonic() + 60 * args.minutes
    search_settings = SearchSettings(
        repository_to_search(args), {case.name: case for case in cases}, searching, until, print_progress
    )
    nights.append_culprits(folder, find_culprits(changes_with(), search_settings))
    series_changes = changes_with(nights.read_culprits([args.nights]))
    stale = lapsed_entries(set_aside, [series_changes], today)
    write_report(series_changes, runs, stale, args)
    judged_outcomes = [outcome for outcome in series_changes.nights[-1].outcomes.values() if not outcome.skipped]
    return worst_code([exit_code_of_series(series_changes), NOT_JUDGED if stale or not judged_outcomes else PASSED])


def refuse_foreign_files(args: argparse.Namespace, day: str) -> None:
    """Raise EvidenceError if a file that the command will write is there and is not the harness's.

    Called before anything is run.
    day: the name of the day's folder.
    """
    from harness.core.report.page import is_page

    refuse_foreign_file(args.out / "page.html", is_page)
    refuse_foreign_file(args.out / "history.txt", is_history)
    refuse_foreign_file(args.out / "summary.md", lambda text: is_history(text.removeprefix("```\n")))
    verdicts.refuse_other_lines(args.nights / day / verdicts.VERDICTS_FILE, "run")
    verdicts.refuse_other_lines(args.nights / day / nights.CULPRITS_FILE, "cases")


def print_progress(text: str) -> None:
    """Print a line of progress on stderr."""
    print_lines(text, to=sys.stderr)


def prepare_options(args: argparse.Namespace, trainer_name: str) -> Options:
    """Return the run options. With --repo, they run the trainer of that repository, or of --commit, cloned to OUT/.trainer.

    With --of, and for our own trainer, --repo changes nothing here. trainer_name: as load_adapter takes it, without a
    source. Changes args.trainer and args.source. Raises BadInput and BisectError.
    """
    if args.commit and (args.repo is None or args.of or args.trainer == own_commits.OWN_TRAINER):
        raise BadInput("--commit needs --repo and a trainer with sources, and cannot be combined with --of")
    if args.repo and args.source:
        raise BadInput("--source cannot be combined with --repo, which has the sources")
    if args.repo and not args.of and args.trainer != own_commits.OWN_TRAINER:
        checkout = check_out_commit(args, trainer_name) if args.commit else args.repo
        trainer_spec = TrainerSpec.parse(trainer_by_checkout(trainer_name, args.repo)(checkout))
        args.trainer = trainer_spec.name
        args.source = trainer_spec.source or None
    return run_options_of(args, several_nodes=False)


def check_out_commit(args: argparse.Namespace, trainer: str) -> Path:
    """Clone --repo into OUT/.trainer and check out --commit there. Return the clone's folder. An earlier clone is deleted.

    The user's own clone is only read. Raises BisectError.
    """
    folder = args.out / CHECKOUT_FOLDER
    commits.remove_clone(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    checkout = commits.make_clone(args.repo, folder, files_of_trainer(trainer)).resolve()
    commits.run_git(checkout, "checkout", "--quiet", "--detach", commits.resolve_commit(args.repo, args.commit))
    return checkout


def repository_to_search(args: argparse.Namespace) -> Path | None:
    """Return the repository in which to search for commits: --repo, or for our own trainer the checkout of this harness.

    None if no repository is known.
    """
    if args.repo or args.trainer != own_commits.OWN_TRAINER:
        return args.repo
    return ROOT if BUILTIN == ROOT and (ROOT / ".git").exists() else None


def run_cases(cases: Sequence[Case], options: Options, jobs: int | None, again: int) -> RecordedRun:
    """Run the cases, record their verdicts in OUT, and print the counts. Return the run as it was recorded.

    jobs: cases at a time. again: how often a failing case is rerun.
    """
    record = verdicts.begin_record(cases, options, "")
    outcomes, seconds = matrix.run_cases(cases, options, record, jobs=jobs, again=again, remedy="")
    print_progress(counts_text(outcomes, seconds))
    runs, _ = verdicts.read_verdicts(record.file)
    return next(run for run in runs if run.run == record.run)


def nights_up_to(folder: Path, runs: Sequence[RecordedRun]) -> list[nights.Night]:
    """Return the nights of the series that these runs belong to, up to their own. The runs must be in the folder.

    folder: of nights. Lines that cannot be read are printed.
    """
    all_runs, unread = read_runs([folder])
    for line in unread:
        print_error(line)
    run_names = {run.run for run in runs}
    for nights_of_kind in group_nights(all_runs).values():
        last = None
        for index, night in enumerate(nights_of_kind):
            if any(run.run in run_names for run in night.runs):
                last = index
        if last is not None:
            return nights_of_kind[: last + 1]
    raise AssertionError("this night was kept there")


def write_report(
    series_changes: SeriesChanges, runs: Sequence[RecordedRun], stale: Sequence[str], args: argparse.Namespace
) -> None:
    """Print what changed, and write it to OUT/history.txt, OUT/summary.md for a CI job, and OUT/page.html.

    runs: of this night. stale: a sentence for each entry of the quarantine that sets nothing aside.
    """
    from harness.core.report.page import page_html  # jinja2 takes a twentieth of a second

    text_lines = series_lines(series_changes)
    if stale:
        text_lines = [*text_lines, "", "QUARANTINE", *(f"  {line}" for line in stale)]
    bisect_reports = [culprit.report for culprit in series_changes.culprits_of_last if culprit.report]
    text = "\n\n".join(["\n".join(text_lines), *bisect_reports])
    page = build_page(runs, [], read_runs([args.nights])[0], args.out / "page.html")
    write_text(args.out / "page.html", page_html(dataclasses.replace(page, since=series_changes.culprit_texts)))
    write_text(args.out / "history.txt", text + "\n")
    write_text(args.out / "summary.md", f"```\n{text}\n```\n\n{markdown_of_runs(runs, series_changes.culprit_texts)}")
    data = {"series": [series_document(series_changes)], "quarantine": stale, "page": args.out / "page.html"}
    print_or_keep_document(args, "nightly", data, text, f"\n{args.out / 'page.html'}")
