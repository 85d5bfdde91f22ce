"""The command line: harness run | bisect | check | report | matrix | faults | golden | plan | join.

Exit codes: 0 every law holds, 1 a law is broken, 2 something could not be judged (bad input, UNKNOWN, all skipped, a
fault that never fired), 130 interrupted. With --bisect 2 becomes 125: `git bisect run` skips that commit.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import os
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness import ROOT, trainers
from harness.bisect import versions
from harness.bisect.commits import bisect
from harness.bisect.search import BisectError
from harness.bisect.side_by_side import bisect_report
from harness.checks import golden as golden_law
from harness.checks import run_check
from harness.evidence.format import FORMAT
from harness.evidence.records import Run
from harness.evidence.store import EvidenceError, load, write_text
from harness.faults import Fault, FaultError, faults_of_file, load_fault
from harness.judge import golden
from harness.judge.golden import GoldenError
from harness.judge.judgement import Judgement
from harness.judge.result import Result, Verdict
from harness.judge.trial import Trial
from harness.launch import LaunchError, preload
from harness.launch.torchrun import join
from harness.plan.make_plan import make_plan
from harness.report.grid import Outcome, matrix_report
from harness.report.output import OutputError, any_letters, say
from harness.report.plan_text import plan_text
from harness.report.progress import Progress
from harness.report.stored import store_report
from harness.report.text import case_report, finding_text, provenance
from harness.run import catalogue, unaimed_faults
from harness.run.folders import folder_of
from harness.run.judging import judge_folder
from harness.run.launches import commit_of
from harness.run.matrix import run_all
from harness.run.options import Options, Unsupported
from harness.run.reference_cache import reference_folder
from harness.run.run_case import run_case
from harness.run.selection import ALL_TIERS, matching, of_tier, weight
from harness.run.supported import unsupported
from harness.spec import composition, coverage, random_cases
from harness.spec.case import TIERS, Case, CaseError
from harness.spec.loading import find_case, load_all
from harness.spec.variants import in_dtype, reseeded
from reference.config import DTYPES
from reference.record import ReferenceRun

PASSED, BROKEN, NOT_JUDGED, SKIP_COMMIT, INTERRUPTED = 0, 1, 2, 125, 130
JOBS = {"cpu": 2, "cuda": 1}  # by device; on two cores 2 took 10 to 20 % less time than 1, and 4 no less than 2

USUAL_JOBS = "default " + ", ".join(f"{count} on {device}" for device, count in JOBS.items())


class BadInput(Exception):
    """What was typed cannot be done. The message is for the person who typed it."""


EXPECTED = (BadInput, BisectError, CaseError, EvidenceError, FaultError, GoldenError, LaunchError, OutputError)


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    any_letters()
    try:
        args = parser().parse_args(argv)
    except SystemExit as stop:  # it has said what was wrong
        code = NOT_JUDGED if stop.code else PASSED
    else:
        with one_interrupt():
            code = _do(args)
    return SKIP_COMMIT if code == NOT_JUDGED and "--bisect" in argv else code


@contextmanager
def one_interrupt() -> Iterator[None]:
    """The first Ctrl-C ends what is under way; while that is cleaned up, another would leave a traceback and processes."""

    def interrupted(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if usual and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, interrupted)
    yield
    if signal.getsignal(signal.SIGINT) is interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _do(args: argparse.Namespace) -> int:
    try:
        return args.command(args)
    except EXPECTED as error:
        complain(str(error))
    except Unsupported as reason:
        complain(f"skipped, nothing was judged: {reason}")
    except KeyboardInterrupt:
        complain("interrupted; nothing was judged, the ranks are killed")
        return INTERRUPTED
    except (Exception, SystemExit):  # a mistake of ours, or an exit of a trainer's, must look like no verdict
        traceback.print_exc()
    return NOT_JUDGED


def complain(text: str) -> None:
    say(f"harness: {text}", to=sys.stderr)


# ---- the commands


def run(args: argparse.Namespace) -> int:
    case, options = case_of(args), options_of(args)
    case = in_dtype(case if args.seed is None else reseeded(case, args.seed), args.dtype)
    if options.torchrun_args:
        say(f"on every other node: harness join {shlex.quote(str(folder_of(case, options)))}", to=sys.stderr)
    judgement = run_case(case, options)
    say(case_report(judgement))
    return exit_code(judgement)


def run_bisect(args: argparse.Namespace) -> int:
    """0: the first bad commit or version is found. 2: skipped ones hide it."""
    tell = functools.partial(say, to=sys.stderr)
    cases = matching(load_all(args.cases), args.expression)
    commits = {"repo": args.repo, "good": args.good, "bad": args.bad}
    if args.over is None and None in commits.values():
        raise BadInput("bisect: --repo, --good and --bad are needed, or --over PACKAGE==GOOD,..,BAD")
    if args.over is not None and any(commits.values()):
        raise BadInput("bisect --over: leave out --repo, --good and --bad, which are for commits")
    if args.over is not None:
        found = versions.search(versions.versions(args.over), cases, args.cases, options_of(args), tell)
    else:
        args.source = str(args.repo)
        found = bisect(args.repo, args.good, args.bad, cases, options_of(args), tell)
    say(bisect_report(found))
    return PASSED if found.first_bad else NOT_JUDGED


def check(args: argparse.Namespace) -> int:
    """What cannot be read in one folder is said, and keeps no other from being judged."""
    judgements, codes = [], []
    for folder in _case_folders(args.folders):
        try:
            judgements.append(judge_folder(folder))
        except EvidenceError as error:
            complain(str(error))
            codes.append(NOT_JUDGED)
    if judgements:
        say(*(f"{case_report(judgement)}\n" for judgement in judgements), provenance(judgements))
    for judgement in judgements:
        try:
            store_report(judgement)
        except EvidenceError as error:  # somebody else's evidence is judged all the same
            complain(f"the report was not stored: {error}")
    return worst([*codes, *map(exit_code, judgements)])


def run_matrix(args: argparse.Namespace) -> int:
    if args.compose:
        return show_composition(load_all(args.cases))
    if args.all:
        return show_pairs(load_all(args.cases), args.trainer, accept=args.accept)
    cases, more = cases_of_matrix(args)
    if args.list:
        say(listing(cases))
        return PASSED
    progress = Progress({case.name: weight(case) for case in cases}, sys.stderr)
    try:
        outcomes = run_all(cases, options_of(args), jobs=args.jobs or JOBS[args.device], progress=progress)
    except KeyboardInterrupt:
        abandon(progress, "cases")
    say(matrix_report(outcomes, progress.elapsed()))
    if more:
        say(f"{more} more of other tiers were not run: --tier all")
    return matrix_code(outcomes)


def run_faults(args: argparse.Namespace) -> int:
    """0: every fault caught as it should be. 1: one is not. 2: one never fired or was not tried, or the control fails."""
    known = faults_of_file(args.file) if args.file else catalogue.known()
    chosen = catalogue.matching(known, args.expression)
    if args.list:
        say(catalogue.listing(chosen))
        return PASSED
    cases, options, jobs = load_all(args.cases), options_of(args), args.jobs or JOBS[args.device]
    if args.unaimed:
        return search_unaimed(chosen, cases, options, accept=args.accept)
    tried = [catalogue.control(), *chosen]
    needed = catalogue.needed(tried, cases)
    names = {case.name: weight(case) for case in needed}
    progress = Progress(names | {fault.name: names[fault.case] for fault in tried}, sys.stderr)
    try:
        based = catalogue.baselines(needed, options, jobs=jobs, curves=not args.laws_only, progress=progress)
        control, *done = catalogue.attempts(tried, based, options, jobs=jobs, progress=progress)
    except KeyboardInterrupt:
        abandon(progress, "cases and faults")
    write_text(args.out / "faults.json", catalogue.to_json(done))
    say(catalogue.report(done, control, progress.elapsed()))
    if args.accept:
        say(catalogue.accept(done, catalogue.known()))
        unaimed_faults.accept()
        return NOT_JUDGED
    return faults_code(done, control)


def search_unaimed(faults: Sequence[Fault], cases: Sequence[Case], options: Options, *, accept: bool) -> int:
    """Of the faults whose own case is in no tier but nightly: does the default tier notice them?"""
    found = [unaimed_faults.search(fault, cases, options) for fault in unaimed_faults.elsewhere(faults, cases)]
    if accept:
        unaimed_faults.accept(found)
    stored = {one.fault: one for one in (*unaimed_faults.load(), *found)}
    say(
        unaimed_faults.report(
            catalogue.from_json(catalogue.STORED.read_text(encoding="utf-8")), cases, list(stored.values())
        )
    )
    return NOT_JUDGED if accept else worst(PASSED if one.case else BROKEN for one in found)


def faults_code(done: Sequence[catalogue.Attempt], control: catalogue.Attempt) -> int:
    unproven = {catalogue.Outcome.UNFIRED, catalogue.Outcome.NOT_TRIED}
    if control.outcome is not catalogue.Outcome.MISSED:
        return NOT_JUDGED
    codes = {catalogue.Outcome.CAUGHT: PASSED} | dict.fromkeys(unproven, NOT_JUDGED)
    return worst(codes.get(attempt.outcome, BROKEN) for attempt in done)


def show_pairs(cases: Sequence[Case], trainer: str, *, accept: bool) -> int:
    """Every pair of options with its case or its reason; a pair with neither is a gap in the matrix."""
    if accept:
        page = ROOT / "docs" / "coverage.md"
        write_text(page, coverage.with_table(page.read_text(encoding="utf-8"), cases))
    found = coverage.pairs(cases, trainers.load(trainer).unsupported)
    say(coverage.pairs_text(found))
    return NOT_JUDGED if any(pair.missing for pair in found) else PASSED


def show_composition(cases: Sequence[Case]) -> int:
    """Which cases the default tier needs, and which add nothing; nothing is moved. Those that notice faults are needed."""
    stored = catalogue.from_json(catalogue.STORED.read_text(encoding="utf-8"))
    demanded = {case for _, case in unaimed_faults.noticed(stored, cases, unaimed_faults.load())}
    say(composition.proposal_text(cases, composition.propose(cases, demanded)))
    return NOT_JUDGED if composition.missing(cases) else PASSED


def join_nodes(args: argparse.Namespace) -> int:
    """Another node's part of `harness run --launcher torchrun --torchrun-args`; the first node judges."""
    status = join(args.folder / "run", seconds=args.timeout)
    if status:
        complain(f"torchrun ended with code {status} here; the first node judges")
    return NOT_JUDGED if status else PASSED


def draw(args: argparse.Namespace) -> int:
    """A picture beside each folder's evidence. Needs all ranks' evidence: a rank that left none has nothing to show."""
    from harness.report.pictures import PICTURE, draw_folder

    folders = _case_folders(args.folders)
    for folder in folders:
        draw_folder(folder)
        say(folder / PICTURE)
    return PASSED


def goldens(args: argparse.Namespace) -> int:
    every = load_all(args.cases)
    chosen = matching(every, args.expression)
    recipes = {golden.recipe_name(case): case for case in chosen}
    options = Options(out=args.out)
    if args.plot:
        return _margins(chosen, options)
    noises = {name: _noise_keys(name, every) for name in recipes}
    code = worst(_golden(case, options, noises[name], accept=args.accept) for name, case in recipes.items())
    stored = {path for folder in {golden.home(case) for case in every} for path in folder.glob("*.json")}
    for path in sorted(stored - {golden.path_of(case) for case in every}):
        say(f"{path.name}: no case uses it; delete it")
    return code


def show_plan(args: argparse.Namespace) -> int:
    case = case_of(args)
    say(plan_text(case, make_plan(case)))
    return PASSED


# ---- their parts


def case_of(args: argparse.Namespace) -> Case:
    return random_cases.named(args.case) or find_case(args.case, load_all(args.cases))


def cases_of_matrix(args: argparse.Namespace) -> tuple[list[Case], int]:
    """And how many more there are in other tiers."""
    if args.random:
        if args.expression:
            raise BadInput("--random: leave out -k, which is for cases of files")
        options, seed = options_of(args), 1 if args.seed is None else args.seed
        return random_cases.first(args.random, seed, lambda case: unsupported(case, options), dtype=args.dtype), 0
    selected = matching(load_all(args.cases), args.expression)
    cases = of_tier(selected, args.tier)
    cases = [in_dtype(case if args.seed is None else reseeded(case, args.seed), args.dtype) for case in cases]
    return cases, len(selected) - len(cases)


def options_of(args: argparse.Namespace) -> Options:
    """Raises BadInput and FaultError, before anything is started."""
    try:
        trainer = trainers.spec(args.trainer, args.source, args.out)
        preload(trainers.load(trainer).preload)
    except ValueError as error:
        raise BadInput(f"--trainer: {error}") from error
    fault = checked_fault(args.fault) if getattr(args, "fault", None) else None
    torchrun_args = tuple(shlex.split(args.torchrun_args))
    if torchrun_args and args.launcher != "torchrun":
        raise BadInput("--torchrun-args: they are for --launcher torchrun only")
    if torchrun_args and args.command in (run_faults, run_bisect):
        raise BadInput("--torchrun-args: other nodes join one launch of one case; use `harness run`")
    return Options(args.out, trainer, args.launcher, args.device, args.timeout, fault, torchrun_args)


def checked_fault(spec: str) -> str:
    """The fault as ranks can load it, from whatever folder they run in. Raises FaultError."""
    try:
        load_fault(spec)
    except FaultError:
        raise
    except (Exception, SystemExit) as error:
        raise FaultError(f"--fault {spec}: cannot be loaded: {error!r}") from error
    file, _, name = spec.rpartition(":")
    return f"{Path(file).resolve()}:{name}" if file else name


def exit_code(judgement: Judgement) -> int:
    if judgement.fired is False:
        return NOT_JUDGED
    return {Verdict.PASS: PASSED, Verdict.XFAIL: PASSED, Verdict.FAIL: BROKEN}.get(judgement.verdict, NOT_JUDGED)


def worst(codes: Iterable[int]) -> int:
    """A broken law outweighs what could not be judged, which outweighs a pass."""
    found = set(codes)
    return next((code for code in (BROKEN, NOT_JUDGED, PASSED) if code in found), NOT_JUDGED)


def matrix_code(outcomes: Sequence[Outcome]) -> int:
    """Cases that were skipped count for nothing; if no other is left, nothing was judged."""
    ran = [outcome for outcome in outcomes if not outcome.skipped]
    return worst(exit_code(outcome.judgement) if outcome.judgement else NOT_JUDGED for outcome in ran)


def abandon(progress: Progress, what: str) -> None:
    """Ends this process at once, whatever its threads wait for. The rank server sees it and kills what it started."""
    progress.clear()
    complain(f"interrupted after {len(progress.done)} of {len(progress.weights)} {what}")
    os._exit(INTERRUPTED)


def listing(cases: Sequence[Case]) -> str:
    width = max(len(case.name) for case in cases)
    lines = []
    for file in dict.fromkeys(case.file for case in cases):
        lines += [file] if file else []
        lines += [
            f"  {case.name:<{width}}  {case.dims.world_size:>2} ranks  {case.why}"
            for case in cases
            if case.file == file
        ]
    return "\n".join(lines)


def _case_folders(folders: Sequence[Path]) -> list[Path]:
    """The folders themselves, or for a folder of such folders those in it."""
    found = []
    for folder in folders:
        inside = sorted(path.parent for path in folder.glob("*/case.json"))
        found += inside if inside and not (folder / "case.json").exists() else [folder]
    return found


def _margins(cases: Sequence[Case], options: Options) -> int:
    from harness.run import margins

    pictured = []
    for users in margins.recipes(cases):
        one = margins.margin(users, options)
        say(margins.table(one), margins.draw(one, options.out))
        pictured.append(one)
    if len(pictured) > 1:
        say(margins.draw_all(pictured, options.out))
    return PASSED if pictured else NOT_JUDGED


def _noise_keys(recipe: str, cases: Sequence[Case]) -> list[str]:
    """What the golden must tell for all cases of its recipe to be judged."""
    users = [case for case in cases if golden.recipe_name(case) == recipe and not case.exact]
    return list(dict.fromkeys(key for case in users for key in (case.noise_key, case.golden_noise_key)))


def _golden(case: Case, options: Options, noise: Sequence[str], *, accept: bool) -> int:
    """Compare one recipe's reference with its golden, or accept it and measure its noise, which is never a pass."""
    reference = load(reference_folder(case, options, noise if accept else ()) / "reference.npz", ReferenceRun)
    if accept:
        review = golden.review_command(case)
        say(golden.accept(case, reference), f"  accepted, not judged: review `{review}`")
        return NOT_JUDGED
    result = _against_golden(case, reference)
    say(f"{golden.path_of(case).name}: {result.verdict}" + (f": {result.note}" if result.note else ""))
    for finding in result.findings:
        say(finding_text(finding, "  "))
    return {Verdict.PASS: PASSED, Verdict.FAIL: BROKEN}.get(result.verdict, NOT_JUDGED)


def _against_golden(case: Case, reference: ReferenceRun) -> Result:
    """The law `golden`, which looks at no rank."""
    accepted, problem = None, ""
    try:
        accepted = golden.load(case)
    except GoldenError as error:
        problem = str(error)
    trial = Trial(case, make_plan(case), Run("", 0, (), {}), reference, golden=accepted, golden_problem=problem)
    return run_check("golden", golden_law.check, trial)


# ---- what can be typed


class Parser(argparse.ArgumentParser):
    """Options are typed in full: another may begin like them one day, and main() looks for --bisect."""

    def __init__(self, **how: Any) -> None:
        super().__init__(allow_abbrev=False, **how)


class Version(argparse.Action):
    """What a report of a mistake begins with."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        say(version_text())
        parser.exit()


def version_text() -> str:
    def installed(package: str) -> str:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return "not installed"

    commit = commit_of(str(ROOT)) or "unknown"
    return (
        f"harness {installed('harness')}, commit {commit}, records {FORMAT}, torch {installed('torch')},"
        f" Python {sys.version.split()[0]}"
    )


def parser() -> argparse.ArgumentParser:
    top = Parser(prog="harness", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--version", action=Version, nargs=0, help="of the harness, its records, torch and Python")
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    one = _command(commands, "run", run, "run one case and judge it")
    one.add_argument("case", metavar="CASE")
    one.add_argument("--fault", metavar="FILE.py:NAME", help="a deliberate mistake to make, or a NAME of the catalogue")
    one.add_argument(
        "--bisect", action="store_true", help="exit 125 where nothing could be judged, for `git bisect run`"
    )
    one.add_argument("--seed", type=int, metavar="N", help="another seed; goldens do not apply")
    _dtype(one)
    _how_to_run(one)
    search = _command(
        commands, "bisect", run_bisect, "find what broke a law: a commit of a trainer, or a version of a package"
    )
    search.add_argument("--repo", type=Path, metavar="PATH", help="a clone of the trainer; only read")
    search.add_argument("--good", metavar="COMMIT")
    search.add_argument("--bad", metavar="COMMIT")
    search.add_argument(
        "--over",
        metavar="PACKAGE==GOOD,..,BAD",
        help="versions instead, each made with pip, or VERSION@PYTHON that has it",
    )
    _selection(search)
    _how_to_run(search)
    stored = commands.add_parser("check", help="judge stored evidence; starts nothing")
    stored.set_defaults(command=check)
    stored.add_argument(
        "folders", metavar="DIR", nargs="+", type=Path, help="what `harness run` wrote, or a folder of such"
    )
    node = commands.add_parser("join", help="on every other node: its part of what `harness run` started on the first")
    node.set_defaults(command=join_nodes)
    node.add_argument("folder", metavar="DIR", type=Path, help="OUT/CASE on the shared disk")
    node.add_argument(
        "--timeout", type=_positive, default=600.0, metavar="S", help="seconds to wait for the first node"
    )
    pictures = commands.add_parser(
        "report", help="draw stored evidence: who holds what, which groups moved what, losses"
    )
    pictures.set_defaults(command=draw)
    pictures.add_argument("folders", metavar="DIR", nargs="+", type=Path, help="as for check")
    many = _command(commands, "matrix", run_matrix, "run and judge all cases, or those that -k selects")
    _selection(many)
    tiers = (*TIERS, ALL_TIERS)
    many.add_argument("--tier", choices=tiers, default="default", help="which cases; all but default are for the night")
    many.add_argument("-j", "--jobs", type=_positive_int, metavar="N", help=f"cases at a time; {USUAL_JOBS}")
    many.add_argument("--seed", type=int, metavar="N", help="another seed for every case; goldens do not apply")
    _dtype(many)
    many.add_argument(
        "--random",
        type=_positive_int,
        metavar="N",
        help="instead, N cases of options drawn at random; --seed draws others",
    )
    many.add_argument("--list", action="store_true", help="only list the cases")
    many.add_argument("--all", action="store_true", help="only list every pair of options, with its case or its reason")
    many.add_argument(
        "--compose", action="store_true", help="only propose which cases to move into the default tier, and out of it"
    )
    many.add_argument("--accept", action="store_true", help="with --all: make the table of docs/coverage.md anew")
    _how_to_run(many)
    wrong = _command(
        commands, "faults", run_faults, "make every deliberate mistake of the catalogue: which are caught?"
    )
    wrong.add_argument(
        "-k", dest="expression", default="", metavar="EXPR", help="words of name, case, bug, kind of bug and laws"
    )
    wrong.add_argument("-j", "--jobs", type=_positive_int, metavar="N", help=f"at a time; {USUAL_JOBS}")
    wrong.add_argument(
        "--file", type=Path, metavar="FILE.py", help="a catalogue of your own in place of harness/faults"
    )
    wrong.add_argument(
        "--list", action="store_true", help="only list the faults, and what each was named when it was last accepted"
    )
    wrong.add_argument(
        "--laws-only", action="store_true", help="do not measure weaker tests, which takes half of the time"
    )
    wrong.add_argument(
        "--unaimed", action="store_true", help="instead, try faults of nightly cases on those of the default tier"
    )
    wrong.add_argument(
        "--accept", action="store_true", help="store what was measured, with the README's table; never a pass"
    )
    _how_to_run(wrong)
    gold = _command(commands, "golden", goldens, "compare the reference with its accepted curves, or accept it")
    _selection(gold)
    gold.add_argument("--accept", action="store_true", help="rewrite the goldens; never a pass, refused in CI")
    gold.add_argument("--plot", action="store_true", help="pictures and a table: correct runs, bounds, small mistakes")
    gold.add_argument("--out", type=Path, default=Path("out"), metavar="DIR")
    _command(commands, "plan", show_plan, "show what a case's layout must look like").add_argument(
        "case", metavar="CASE"
    )
    return top


def _command(commands: Any, name: str, function: Callable, help: str) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=help)
    command.set_defaults(command=function)
    command.add_argument("--cases", type=Path, default=ROOT / "cases", metavar="DIR", help="folder of YAML files")
    return command


def _selection(command: argparse.ArgumentParser) -> None:
    command.add_argument("-k", dest="expression", default="", metavar="EXPR", help='as in pytest: "hsdp and not sgd"')


def _dtype(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--dtype", choices=DTYPES, help="judge by the recipe in this dtype, for a trainer that computes in no other"
    )


def _how_to_run(command: argparse.ArgumentParser) -> None:
    command.add_argument("--trainer", default="llama3", metavar="NAME", help="the trainer under test; default llama3")
    command.add_argument(
        "--source", metavar="PATH|VERSION", help="a checkout of that trainer, or a release that pip brings"
    )
    command.add_argument("--launcher", default="local", choices=("local", "torchrun"))
    command.add_argument("--torchrun-args", default="", metavar="ARGS", help="for several nodes; see docs/running.md")
    command.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    command.add_argument(
        "--out", type=Path, default=Path("out"), metavar="DIR", help="where evidence goes; default out"
    )
    command.add_argument(
        "--timeout", type=_positive, default=120.0, metavar="S", help="seconds for one launch; default 120"
    )


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


def _positive_int(text: str) -> int:
    return int(_positive(str(int(text))))
