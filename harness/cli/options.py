"""What several commands let a person type, and what it means."""

from __future__ import annotations

import argparse
import difflib
import importlib.metadata
import importlib.util
import math
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from harness import trainers
from harness.affected.maps import clean_commit, repository_of
from harness.cli.typed import remember_typed, typed_options
from harness.evidence.errors import error_in
from harness.faults import FaultError, load_fault
from harness.launch import resident_client
from harness.launch.job import LONGEST
from harness.reference.config import DTYPES
from harness.run.folders import trainer_label
from harness.run.options import Options
from harness.spec import case_files, random_cases, releases
from harness.spec.case import Case
from harness.spec.loading import load_all
from harness.spec.named_case import load_one
from harness.spec.usual_trainer import Usual, configured, usual_trainer

Command = Callable[[argparse.Namespace], int]


class BadInput(Exception):
    """What was typed cannot be done. The message is for the person who typed it."""


# ---- what can be typed


class Usage(SystemExit):
    """What was typed is not understood, and that was said."""

    def __init__(self, message: str) -> None:
        super().__init__(2)
        self.message = message


class Parser(argparse.ArgumentParser):
    """Options are typed in full: another may begin like them one day, and main() looks for --bisect."""

    def __init__(self, **how: Any) -> None:
        super().__init__(allow_abbrev=False, **how)
        remember_typed(self)

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self._print_message(f"{self.prog}: error: {message}\n", sys.stderr)
        raise Usage(message)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """What a command does not know it says itself, with its own usage; argparse leaves that to the parser of all."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown and self._subparsers is None:
            near = [
                difflib.get_close_matches(word.partition("=")[0], self._option_string_actions, 1) for word in unknown
            ]
            meant = next((f"; did you mean {one[0]}?" for one in near if one), "")
            self.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
        return found, unknown


def add_command(commands: Any, name: str, command: Command, help: str, *, json: bool = True) -> argparse.ArgumentParser:
    """json: whether it has an answer that a program reads."""
    parser = commands.add_parser(
        name, help=help, description=f"{help[0].upper()}{help[1:]}" + ("" if help.endswith("?") else ".")
    )
    parser.set_defaults(command=command, json=False)
    if json:
        parser.add_argument("--json", action="store_true", help="print one JSON document, all else to stderr")
    return parser


def add_cases(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cases",
        metavar="DIR",
        help=f"folder of YAML files; default {case_files.USUAL}; {case_files.OURS}: those that come with the harness",
    )


def add_selection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-k", dest="expression", default="", metavar="EXPR", help='parts of names, as in pytest: "hsdp and not sgd"'
    )


def add_jobs(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("-j", "--jobs", type=positive_int, metavar="N", help=what)


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """What a case's recipe may be changed in."""
    parser.add_argument("--seed", type=int, metavar="N", help="another seed; goldens do not apply")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        metavar="DTYPE",
        help=f"judge by the recipe in {', '.join(DTYPES)}, for a trainer that computes in no other",
    )


def add_how_to_run(parser: argparse.ArgumentParser, more: Sequence[str] = (), what: str = "") -> Any:
    """Return the group of these options. more, what: other choices of --server, and what they mean."""
    how = parser.add_argument_group("how ranks are started")
    add_trainer(how)
    how.add_argument(
        "--source", metavar="PATH|VERSION", help="a checkout of that trainer, or a release that pip brings"
    )
    how.add_argument("--launcher", default="local", choices=("local", "torchrun"))
    how.add_argument(
        "--torchrun-args", default="", metavar="ARGS", help='for several nodes: "--nnodes 2 --rdzv-endpoint HOST:PORT"'
    )
    how.add_argument(
        "--server",
        choices=(*resident_client.KINDS, *more),
        help=f"the process that forks ranks: resident is kept for the next commands, own ends with this one; default resident, "
        f"in CI own{what}",
    )
    how.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    how.add_argument("--ranks-per-gpu", type=positive_int, default=1, metavar="N", help="may share one; default 1")
    how.add_argument(
        "--backend",
        choices=("nccl", "gloo"),
        default="",
        help="on GPUs; default nccl, gloo where ranks share one it cannot",
    )
    add_out(how, help="where evidence goes; default out")
    usual = Options().timeout
    how.add_argument("--timeout", type=seconds, metavar="S", help=f"seconds for one launch; default {usual:g}")
    return how


def add_trainer(parser: Any) -> None:
    parser.add_argument(
        "--trainer",
        metavar="NAME|FILE.py",
        help="the trainer under test; default harness_trainer of the pytest configuration, else the one *_adapter.py or "
        "adapter.py of this folder, else llama3, which comes with the harness",
    )


def add_out(parser: Any, help: str) -> None:
    parser.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help=help)


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text}")
    return value


def seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= LONGEST:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most {LONGEST:g} seconds, got {text}")
    return value


def add_again(parser: argparse._ActionsContainer, *, usual: int) -> None:
    """Let a person say how often a failing case is made again, in fresh ranks; `usual` times where it is not said."""
    what = f"make a failing case again N times, in fresh ranks, to see whether it always fails; default {usual}"
    parser.add_argument("--again", type=count, default=usual, metavar="N", help=what)


def positive_int(text: str) -> int:
    return int(positive(str(int(text))))


def count(text: str) -> int:
    """Return a whole number from 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number from 0, got {text}")
    return int(text)


# ---- what it means


def trainer_under_test(args: argparse.Namespace) -> str:
    """Return the trainer under test, as it is typed or as the repository has it. Raises BadInput."""
    return args.trainer or usual().name


def usual() -> Usual:
    """Return the trainer for who types none. Raises BadInput."""
    try:
        return usual_trainer()
    except ValueError as error:
        raise BadInput(f"--trainer: {error}") from error


def which_trainer(args: argparse.Namespace) -> list[str]:
    """Return a line on the trainer that was judged, if configuration or folder chose it, and one on a torch that is not among
    those tried."""
    found = Usual(args.trainer) if args.trainer else usual()
    because = f"judged was {shown(found.name)}, {found.because}" if found.because else ""
    return [line for line in (because, releases.untested(importlib.metadata.version("torch"))) if line]


def other_trainers(judged: Iterable[str]) -> list[str]:
    """Return a line on each trainer of stored evidence that is another than the configuration names. Raises BadInput for a
    configuration that names none: then whose verdict is wanted is not known."""
    try:
        found = configured(Path.cwd())
    except ValueError as error:
        raise BadInput(str(error)) from error
    if found is None:
        return []
    own = Path(found.name).stem if found.name.endswith(".py") else found.name
    names = dict.fromkeys(trainer_label(trainer).partition("@")[0] for trainer in judged)
    return [f"judged was {name}, not {shown(found.name)} ({found.because})" for name in names if name != own]


def shown(trainer: str) -> str:
    """Return it as a person reads it here."""
    path, here = Path(trainer), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else trainer


def refuse_others(args: argparse.Namespace, what: str, effective: Collection[str]) -> None:
    """Raises BadInput for the first typed option that is not among the effective ones. what: the command does, in words."""
    for option in typed_options(args):
        if option not in effective:
            raise BadInput(f"{option} has no effect on {what}; leave it out")


def no_document(args: argparse.Namespace, option: str) -> None:
    """Raises BadInput where a document is wanted of what has none."""
    if args.json:
        raise BadInput(f"--json: leave out {option}, which has no document")


def needs_matplotlib() -> None:
    """Raises BadInput where it is not installed: it is needed by pictures alone."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BadInput("pictures need matplotlib: pip install matplotlib")


def folder_of(args: argparse.Namespace, usual: str = case_files.USUAL) -> Path:
    """Raises CaseError where there is none."""
    return case_files.folder_of(args.cases or usual)


def cases_of(args: argparse.Namespace, usual: str = case_files.USUAL) -> list[Case]:
    """Raises CaseError."""
    return load_all(folder_of(args, usual))


def case_of(args: argparse.Namespace) -> Case:
    return random_cases.named(args.case) or load_one(args.case, folder_of(args))


def options_of(args: argparse.Namespace, *, several_nodes: bool = True) -> Options:
    """Raises BadInput and FaultError, before anything is started."""
    try:
        trainer = trainers.spec(trainer_under_test(args), args.source, args.out)
        trainers.load(trainer)
    except ValueError as error:
        raise BadInput(f"--trainer: {error}") from error
    fault = checked_fault(args.fault) if getattr(args, "fault", None) else None
    resident_client.choose(args.server)
    torchrun_args = tuple(shlex.split(args.torchrun_args))
    if torchrun_args and args.launcher != "torchrun":
        raise BadInput("--torchrun-args: they are for --launcher torchrun only")
    if torchrun_args and not several_nodes:
        raise BadInput("--torchrun-args: other nodes join one launch of one case; use `harness run`")
    _check_sharing(args)
    shared = {"ranks_per_gpu": args.ranks_per_gpu, "backend": args.backend, "map": recorded_map(args, trainer)}
    how = (args.launcher, args.device, args.timeout or Options().timeout, fault, torchrun_args)
    return Options(args.out, trainer, *how, cases=getattr(args, "cases", None) or "", **shared)


def recorded_map(args: argparse.Namespace, trainer: str) -> Path | None:
    """Return where to record what cases run, None for nowhere. Raises BadInput, and CaseError without a clean repository."""
    if getattr(args, "map", None) is None or getattr(args, "changed", None):
        return None
    if args.device == "cuda" and sys.version_info < (3, 12):
        raise BadInput("--map: on GPUs it needs Python 3.12, for what runs on the threads of backward")
    clean_commit(repository_of(trainer))
    return args.map.resolve()


def _check_sharing(args: argparse.Namespace) -> None:
    """Raises BadInput."""
    if args.device == "cpu" and (args.ranks_per_gpu > 1 or args.backend):
        raise BadInput("--ranks-per-gpu and --backend are for --device cuda")
    if args.torchrun_args and args.ranks_per_gpu > 1:
        raise BadInput("--ranks-per-gpu: ranks share the GPUs of one machine; leave out it or --torchrun-args")


def checked_fault(spec: str) -> str:
    """The fault as ranks can load it, from whatever folder they run in. Raises FaultError."""
    file, _, name = spec.rpartition(":")
    try:
        load_fault(spec)
    except FaultError:
        raise
    except (Exception, SystemExit) as error:
        raise FaultError(f"--fault {spec}: cannot be loaded: {error_in(Path(file), error)}") from error
    return f"{Path(file).resolve()}:{name}" if file else name
