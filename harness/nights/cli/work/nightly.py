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
    named = trainers.spec(args.trainer, None)
    options = prepared(args, named)
    cases, more = matrix.of_files(args)
    if more:
        tell(f"{more} more of other tiers are not run: --tier all")
    today = datetime.now(UTC).date()
    refuse_foreign_files(args, str(today))
    runs = last_runs(args.of) if args.of else [ran(cases, options, args.jobs, args.again)]
    folder = nights.keep(args.nights, runs, str(today))
    row = functools.partial(told, row_of(args.nights, runs), set_aside, today)
    searching = dataclasses.replace(options, trainer=named)
    until = time.monotonic() + 60 * args.minutes
    where = Where(repository(args), {case.name: case for case in cases}, searching, until, tell)
    nights.keep_culprits(folder, searched(row(), where))
    one = row(nights.culprits_in([args.nights]))
    stale = lapsed(set_aside, [one], today)
    report(one, runs, stale, args)
    judged = [outcome for outcome in one.nights[-1].outcomes.values() if not outcome.skipped]
    return worst([code(one), NOT_JUDGED if stale or not judged else PASSED])


def refuse_foreign_files(args: argparse.Namespace, day: str) -> None:
    """Raises EvidenceError, before anything is run, where what it will write would replace something else."""
    from harness.core.report.page import is_page

    refuse_foreign_file(args.out / "page.html", is_page)
    refuse_foreign_file(args.out / "history.txt", is_history)
    refuse_foreign_file(args.out / "summary.md", lambda text: is_history(text.removeprefix("```\n")))
    verdicts.refuse_other_lines(args.nights / day / verdicts.FILE, "run")
    verdicts.refuse_other_lines(args.nights / day / nights.CULPRITS, "cases")


def tell(text: str) -> None:
    say(text, to=sys.stderr)


def prepared(args: argparse.Namespace, named: str) -> Options:
    """Return options, with the commit's trainer in OUT/.trainer if one is named. named: as load takes it, without a source.
    Raises BadInput and BisectError."""
    if args.commit and (args.repo is None or args.of or args.trainer == own_commits.TRAINER):
        raise BadInput("--commit: it is of --repo, of a trainer that has sources, and without --of")
    if args.repo and args.source:
        raise BadInput("--source: leave it out, --repo has the sources")
    if args.repo and not args.of and args.trainer != own_commits.TRAINER:
        checkout = checked_out(args, named) if args.commit else args.repo
        of = TrainerSpec.parse(trainer_of(named, args.repo)(checkout))
        args.trainer, args.source = of.name, of.source or None
    return options_of(args, several_nodes=False)


def checked_out(args: argparse.Namespace, trainer: str) -> Path:
    """A clone of our own, so that nothing moves in the user's."""
    there = args.out / CHECKOUT
    commits.remove_clone(there)
    there.parent.mkdir(parents=True, exist_ok=True)
    checkout = commits.cloned(args.repo, there, files_of(trainer)).resolve()
    commits.git(checkout, "checkout", "--quiet", "--detach", commits.resolve(args.repo, args.commit))
    return checkout


def repository(args: argparse.Namespace) -> Path | None:
    """Return the repository to search in."""
    if args.repo or args.trainer != own_commits.TRAINER:
        return args.repo
    return ROOT if BUILTIN == ROOT and (ROOT / ".git").exists() else None


def ran(cases: Sequence[Case], options: Options, jobs: int | None, again: int) -> RecordedRun:
    record = verdicts.begin(cases, options, "")
    found, seconds = matrix.run(cases, options, record, jobs=jobs, again=again, remedy="")
    tell(summary(found, seconds))
    runs, _ = verdicts.read(record.file)
    return next(run for run in runs if run.run == record.run)


def row_of(folder: Path, runs: Sequence[RecordedRun]) -> list[nights.Night]:
    """The nights of this trainer, device and launcher, up to this one."""
    every, unread = runs_in([folder])
    for line in unread:
        complain(line)
    mine = {run.run for run in runs}
    for row in series(every).values():
        if at := [number for number, night in enumerate(row) if mine & {run.run for run in night.runs}]:
            return row[: at[-1] + 1]
    raise AssertionError("this night was kept there")


def report(one: Told, runs: Sequence[RecordedRun], stale: Sequence[str], args: argparse.Namespace) -> None:
    """What changed, on stdout and as history.txt, summary.md for a CI job, and page.html."""
    from harness.core.report.page import html  # jinja2 takes a twentieth of a second

    text = "\n".join([*lines(one), *(["", "QUARANTINE", *(f"  {line}" for line in stale)] if stale else [])])
    found = [culprit.report for culprit in one.culprits_of_last if culprit.report]
    text = "\n\n".join([text, *found])
    page = page_of(runs, [], runs_in([args.nights])[0], args.out / "page.html")
    write_text(args.out / "page.html", html(dataclasses.replace(page, since=one.since)))
    write_text(args.out / "history.txt", text + "\n")
    write_text(args.out / "summary.md", f"```\n{text}\n```\n\n{shown_as_markdown(runs, one.since)}")
    data = {"series": [as_document(one)], "quarantine": stale, "page": args.out / "page.html"}
    answer(args, "nightly", data, text, f"\n{args.out / 'page.html'}")
