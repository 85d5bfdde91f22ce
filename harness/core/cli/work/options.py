"""Options that several commands have: what they mean, and which cannot be combined."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import shlex
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from harness.core import rings, trainers
from harness.core.case import releases
from harness.core.case.usual_trainer import DefaultTrainer, default_trainer, find_configured_trainer
from harness.core.cli.parsing import BadInput
from harness.core.cli.typed import typed_options
from harness.core.launch import resident_client
from harness.core.run.folders import trainer_label
from harness.core.run.options import Options


def trainer_under_test(args: argparse.Namespace) -> str:
    """Return the trainer under test, as it is typed or as the repository has it. Raises BadInput if neither decides."""
    return args.trainer or default_trainer_or_refuse().name


def default_trainer_or_refuse() -> DefaultTrainer:
    """Return the default trainer. Raises BadInput if the configuration is wrong, or this folder has several adapters."""
    try:
        return default_trainer()
    except ValueError as error:
        raise BadInput(f"--trainer: {error}") from error


def trainer_lines(args: argparse.Namespace) -> list[str]:
    """Return a line on the trainer that was judged, if configuration or folder chose it, and one on a torch that was
    not tested.

    Empty if the trainer was typed or is built in, and torch is a tested one.
    """
    trainer = DefaultTrainer(args.trainer) if args.trainer else default_trainer_or_refuse()
    chosen_text = f"judged was {trainer_text(trainer.name)}, {trainer.reason}" if trainer.reason else ""
    return [line for line in (chosen_text, releases.untested_text(importlib.metadata.version("torch"))) if line]


def other_trainer_lines(judged_trainers: Iterable[str]) -> list[str]:
    """Return a line on each trainer of stored evidence that is another than the configuration names.

    Empty if no trainer is configured. Raises BadInput if the configuration cannot be used: then it is not known whose
    verdict is wanted.
    """
    try:
        configured_trainer = find_configured_trainer(Path.cwd())
    except ValueError as error:
        raise BadInput(str(error)) from error
    if configured_trainer is None:
        return []
    own_name = (
        Path(configured_trainer.name).stem if configured_trainer.name.endswith(".py") else configured_trainer.name
    )
    names = dict.fromkeys(trainer_label(trainer).partition("@")[0] for trainer in judged_trainers)
    return [
        f"judged was {name}, not {trainer_text(configured_trainer.name)} ({configured_trainer.reason})"
        for name in names
        if name != own_name
    ]


def trainer_text(trainer: str) -> str:
    """Return the trainer's name, or the path of its adapter relative to this folder if it is below."""
    path = Path(trainer)
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else trainer


def refuse_others(args: argparse.Namespace, action: str, effective: Collection[str]) -> None:
    """Raise BadInput for the first typed option that is not among the effective ones. action: what the command does."""
    for option in typed_options(args):
        if option not in effective:
            raise BadInput(f"{option} has no effect on {action}; leave it out")


def refuse_json(args: argparse.Namespace, option: str) -> None:
    """Raise BadInput if --json was typed. option: the one beside it that has no document."""
    if args.json:
        raise BadInput(f"--json: leave out {option}, which has no document")


def require_matplotlib() -> None:
    """Raise BadInput if matplotlib is not installed: pictures alone need it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BadInput("pictures need matplotlib: pip install matplotlib")


def run_options_of(args: argparse.Namespace, *, several_nodes: bool = True) -> Options:
    """Return the options of a run as they were typed, those of rings included, with the trainer's adapter loaded.

    It also chooses the kind of rank server. Raises BadInput before anything is started: for a trainer that cannot be
    loaded, and for options that do not go together. several_nodes: whether --torchrun-args is allowed.
    """
    try:
        trainer = trainers.absolute_spec(trainer_under_test(args), args.source, args.out)
        trainers.load_adapter(trainer)
    except ValueError as error:
        raise BadInput(f"--trainer: {error}") from error
    ring_options: dict[str, Any] = {}
    for options_of_ring in rings.functions_of("run_options"):
        ring_options |= options_of_ring(args, trainer)
    resident_client.choose_server_kind(args.server)
    torchrun_args = tuple(shlex.split(args.torchrun_args))
    if torchrun_args and args.launcher != "torchrun":
        raise BadInput("--torchrun-args needs --launcher torchrun")
    if torchrun_args and not several_nodes:
        raise BadInput("--torchrun-args: other nodes join one launch of one case; use `harness run`")
    _check_sharing(args)
    return Options(
        args.out,
        trainer,
        launcher=args.launcher,
        device=args.device,
        timeout=args.timeout or Options().timeout,
        torchrun_args=torchrun_args,
        ranks_per_gpu=args.ranks_per_gpu,
        backend=args.backend,
        cases=getattr(args, "cases", None) or "",
        **ring_options,
    )


def _check_sharing(args: argparse.Namespace) -> None:
    """Raise BadInput if ranks are to share GPUs, or a backend is typed, where there are no GPUs or several nodes."""
    if args.device == "cpu" and (args.ranks_per_gpu > 1 or args.backend):
        raise BadInput("--ranks-per-gpu and --backend need --device cuda")
    if args.torchrun_args and args.ranks_per_gpu > 1:
        raise BadInput("--ranks-per-gpu cannot be combined with --torchrun-args: ranks share the GPUs of one machine")
