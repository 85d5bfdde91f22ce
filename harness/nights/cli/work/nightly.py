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
from harness.core.case.trainer_spec import CHECKOUT, TrainerSpec
from harness.core.cli.answer import answer
from harness.core.cli.exit_codes import NOT_JUDGED, PASSED, worst
from harness.core.cli.parsing import BadInput
from harness.core.cli.typed import typed_options
from harness.core.cli.work import matrix
from harness.core.cli.work.options import options_of, trainer_under_test
from harness.core.evidence.own_folders import refuse_foreign_file
from harness.core.evidence.store import write_text
from harness.core.report.grid import summary
from harness.core.report.output import complain, say
from harness.core.run import verdicts
from harness.core.run.options import Options
from harness.core.run.verdicts import RecordedRun
from harness.nights import nights, quarantine
from harness.nights.bisect import commits, own_commits
from harness.nights.bisect.checkouts import files_of, trainer_of
from harness.nights.bisect.culprits import Where, searched
from harness.nights.cli.work.history_report import code
from harness.nights.cli.work.run_report import last_runs, shown_as_markdown
from harness.nights.history import runs_in, series
from harness.nights.history_text import Told, as_document, is_history, lapsed, lines, told
from harness.nights.page import page_of


def command(args: argparse.Namespace) -> int:
    """Return the exit code of `harness report` of the nights with this one; 2 also where every case was skipped."""
    if args.of and (unused := {"--jobs", "--again", "--map"} & {*typed_options(args)}):
        raise BadInput(f"{min(unused)}: leave it out; with --of nothing is run")
    set_aside = quarantine.load(args.quarantine) if args.quarantine else ()
    args.trainer = trainer_under_test(args)
    trainer_name = trainers.spec(args.trainer, None)
    options = prepared(args, trainer_name)
    cases, count_of_other_tiers = matrix.of_files(args)
    if count_of_other_tiers:
        tell(f"{count_of_other_tiers} more of other tiers are not run: --tier all")
    today = datetime.now(UTC).date()
    refuse_foreign_files(args, str(today))
    runs = last_runs(args.of) if args.of else [ran(cases, options, args.jobs, args.again)]
    folder = nights.keep(args.nights, runs, str(today))
    changes_with = functools.partial(told, row_of(args.nights, runs), set_aside, today)
    searching = dataclasses.replace(options, trainer=trainer_name)
    until = time.monotonic() + 60 * args.minutes
    search_settings = Where(repository(args), {case.name: case for case in cases}, searching, until, tell)
    nights.keep_culprits(folder, searched(changes_with(), search_settings))
    series_changes = changes_with(nights.culprits_in([args.nights]))
    stale = lapsed(set_aside, [series_changes], today)
    report(series_changes, runs, stale, args)
    judged_outcomes = [outcome for outcome in series_changes.nights[-1].outcomes.values() if not outcome.skipped]
    return worst([code(series_changes), NOT_JUDGED if stale or not judged_outcomes else PASSED])


def refuse_foreign_files(args: argparse.Namespace, day: str) -> None:
    """Raise EvidenceError, before anything is run, where what the command will write would replace something else."""
    from harness.core.report.page import is_page

    refuse_foreign_file(args.out / "page.html", is_page)
    refuse_foreign_file(args.out / "history.txt", is_history)
    refuse_foreign_file(args.out / "summary.md", lambda text: is_history(text.removeprefix("```\n")))
    verdicts.refuse_other_lines(args.nights / day / verdicts.FILE, "run")
    verdicts.refuse_other_lines(args.nights / day / nights.CULPRITS, "cases")


def tell(text: str) -> None:
    """Print a line of progress on stderr."""
    say(text, to=sys.stderr)


def prepared(args: argparse.Namespace, trainer_name: str) -> Options:
    """Return options, with the commit's trainer in OUT/.trainer if one is named. Raises BadInput and BisectError.

    trainer_name: as load takes it, without a source.
    """
    if args.commit and (args.repo is None or args.of or args.trainer == own_commits.TRAINER):
        raise BadInput("--commit: it is of --repo, of a trainer that has sources, and without --of")
    if args.repo and args.source:
        raise BadInput("--source: leave it out, --repo has the sources")
    if args.repo and not args.of and args.trainer != own_commits.TRAINER:
        checkout = checked_out(args, trainer_name) if args.commit else args.repo
        trainer_spec = TrainerSpec.parse(trainer_of(trainer_name, args.repo)(checkout))
        args.trainer = trainer_spec.name
        args.source = trainer_spec.source or None
    return options_of(args, several_nodes=False)


def checked_out(args: argparse.Namespace, trainer: str) -> Path:
    """Make a clone of our own with the commit, so that nothing moves in the user's. Return its folder."""
    folder = args.out / CHECKOUT
    commits.remove_clone(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    checkout = commits.cloned(args.repo, folder, files_of(trainer)).resolve()
    commits.git(checkout, "checkout", "--quiet", "--detach", commits.resolve(args.repo, args.commit))
    return checkout


def repository(args: argparse.Namespace) -> Path | None:
    """Return the repository to search in."""
    if args.repo or args.trainer != own_commits.TRAINER:
        return args.repo
    return ROOT if BUILTIN == ROOT and (ROOT / ".git").exists() else None


def ran(cases: Sequence[Case], options: Options, jobs: int | None, again: int) -> RecordedRun:
    """Run the cases and record their verdicts. Return the run as it is recorded."""
    record = verdicts.begin(cases, options, "")
    outcomes, seconds = matrix.run(cases, options, record, jobs=jobs, again=again, remedy="")
    tell(summary(outcomes, seconds))
    runs, _ = verdicts.read(record.file)
    return next(run for run in runs if run.run == record.run)


def row_of(folder: Path, runs: Sequence[RecordedRun]) -> list[nights.Night]:
    """Return the nights of this trainer, device and launcher, up to this one."""
    all_runs, unread = runs_in([folder])
    for line in unread:
        complain(line)
    run_names = {run.run for run in runs}
    for nights_of_kind in series(all_runs).values():
        last = None
        for index, night in enumerate(nights_of_kind):
            if any(run.run in run_names for run in night.runs):
                last = index
        if last is not None:
            return nights_of_kind[: last + 1]
    raise AssertionError("this night was kept there")


def report(series_changes: Told, runs: Sequence[RecordedRun], stale: Sequence[str], args: argparse.Namespace) -> None:
    """Write what changed to stdout, history.txt, summary.md for a CI job, and page.html.

    stale: a sentence for each entry of the quarantine that sets nothing aside.
    """
    from harness.core.report.page import html  # jinja2 takes a twentieth of a second

    text_lines = lines(series_changes)
    if stale:
        text_lines = [*text_lines, "", "QUARANTINE", *(f"  {line}" for line in stale)]
    bisect_reports = [culprit.report for culprit in series_changes.culprits_of_last if culprit.report]
    text = "\n\n".join(["\n".join(text_lines), *bisect_reports])
    page = page_of(runs, [], runs_in([args.nights])[0], args.out / "page.html")
    write_text(args.out / "page.html", html(dataclasses.replace(page, since=series_changes.since)))
    write_text(args.out / "history.txt", text + "\n")
    write_text(args.out / "summary.md", f"```\n{text}\n```\n\n{shown_as_markdown(runs, series_changes.since)}")
    data = {"series": [as_document(series_changes)], "quarantine": stale, "page": args.out / "page.html"}
    answer(args, "nightly", data, text, f"\n{args.out / 'page.html'}")
