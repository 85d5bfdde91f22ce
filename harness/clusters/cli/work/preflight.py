"""`harness preflight`: a production layout, before a cluster is spent on it: some of its ranks, each run alone and judged.

It takes a case or a layout with a trainer that has an adapter, torchtitan's configuration file, or any command that trains.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

from harness.clusters import commands, config_file, data
from harness.clusters.chosen import ChosenRanks, choose_ranks
from harness.clusters.cli.work.layout_case import layout_of_arguments
from harness.clusters.judging import judge_lone_ranks
from harness.clusters.launches import run_lone_ranks
from harness.clusters.text import command_text, preflight_text
from harness.core import rings, trainers
from harness.core.case import layout, traits
from harness.core.case.case import Case, CaseError, to_json
from harness.core.case.trainer_spec import TrainerSpec
from harness.core.cli.answer import print_or_keep_document
from harness.core.cli.exit_codes import NOT_JUDGED
from harness.core.cli.parsing import BadInput
from harness.core.cli.typed import typed_options
from harness.core.cli.work.options import refuse_others, trainer_under_test
from harness.core.cli.work.verdict_codes import exit_code_of_verdict
from harness.core.evidence.store import CASE_FILE, write_text
from harness.core.judge.result import verdict_of_all
from harness.core.run.folders import make_fresh_folder
from harness.core.run.options import Unsupported
from harness.recording import injection

CONFIG_OPTIONS = (
    *("--config", "--world", "--trainer", "--source", "--steps", "--ranks", "--seed", "--gpu", "--fault", "--timeout"),
    *("--jobs", "--out", "--json"),
)


def command(args: argparse.Namespace) -> int:
    """Run some ranks of a case alone, or with --layout of a command, judge them and print that. Return the exit code.

    Raises BadInput, CaseError and EvidenceError, and Unsupported for a case that a trainer cannot run so.
    """
    words = args.case
    args.case = words[0] if words else None
    if args.layout:
        return _preflight_command(args, words)
    if len(words) > 1:
        raise BadInput(f"one CASE, not {len(words)}; a command needs --layout and --world")
    return _preflight_case(args)


def _preflight_command(args: argparse.Namespace, words: list[str]) -> int:
    """Run a user's command as some ranks of a layout, each alone; judge and print. Return the exit code.

    By default these are the first and the last rank. Raises BadInput, CaseError and EvidenceError.
    """
    if not words or not args.world or args.dims or args.config:
        raise BadInput(
            "--layout is of a command: `harness preflight --world 512 --layout dp_shard=512 -- python train.py`"
        )
    refuse_others(
        args, "a command's ranks", {"--layout", "--world", "--ranks", "--timeout", "--jobs", "--out", "--json"}
    )
    dims = layout.parse_layout(args.layout, args.world)
    if dims.world_size != args.world:
        raise BadInput(f"--layout: {dims} = {dims.world_size} ranks, --world says {args.world}")
    ends = tuple(sorted({0, args.world - 1}))
    selected = (
        ChosenRanks({"first and last": ends}, args.seed)
        if args.ranks == "auto"
        else _parse_ranks(args.ranks, args.world)
    )
    try:
        run = commands.run_command_alone(
            words, selected.ranks, args.world, args.out / "preflight_command", args.jobs, args.timeout
        )
    except injection.CommandError as error:
        raise BadInput(str(error)) from error
    verdicts = commands.judge_command(run, dims)
    facts = (words, dims, selected, run, verdicts)
    print_or_keep_document(args, "preflight", lambda: data.command_document(*facts), command_text(*facts))
    return exit_code_of_verdict(verdict_of_all(verdicts.results))


def _preflight_case(args: argparse.Namespace) -> int:
    """Run some ranks of a case with a trainer that has an adapter; judge and print. Return the exit code.

    With a fault that no rank ran into, the exit code is NOT_JUDGED. Evidence goes into a fresh folder of --out.
    """
    if args.ranks != "auto" and "--seed" in typed_options(args):
        raise BadInput("--seed draws ranks and --ranks names them: use one of the two")
    case, set_aside = _requested_case(args)
    trainer = _trainer_spec(args)
    adapter = _load_adapter(trainer)
    case = traits.with_trainer_choices(case, trainers.traits_by_launch(case, trainer))
    if reason := adapter.unsupported_alone(case):
        raise Unsupported(f"{case.name}: {adapter.name}: {reason}")
    selected = choose_ranks(case, args.seed) if args.ranks == "auto" else _parse_ranks(args.ranks, case.dims.world_size)
    fault = rings.function_for("called", "checked_fault")(args.fault) if args.fault else None
    folder = make_fresh_folder(args.out / f"preflight_{case.name}")
    write_text(folder / CASE_FILE, json.dumps(to_json(case), indent=1))
    flown = run_lone_ranks(
        case, selected.ranks, folder, trainer=trainer, fault=fault, timeout=args.timeout, at_once=args.jobs
    )
    began = time.monotonic()
    verdicts = judge_lone_ranks(case, flown)
    facts = (case, selected, flown, verdicts, time.monotonic() - began)
    options = {"set_aside": set_aside, "gpu": args.gpu}
    print_or_keep_document(
        args, "preflight", lambda: data.case_document(*facts, **options), preflight_text(*facts, **options)
    )
    unfired = fault is not None and not any(evidence.fault for evidence in flown.run.ranks.values())
    return NOT_JUDGED if unfired else exit_code_of_verdict(verdict_of_all(verdicts.results))


def _requested_case(args: argparse.Namespace) -> tuple[Case, tuple[str, ...]]:
    """Return the case with --steps steps, and the parts of a configuration that are not run.

    Raises BadInput and CaseError.
    """
    if args.config is not None:
        if args.case or args.dims or not args.world:
            raise BadInput("--config needs --world, and neither CASE nor --dims")
        refuse_others(args, "a configuration of torchtitan's", CONFIG_OPTIONS)
        configured = _case_of_config(args)
        return replace(
            configured.case, training=replace(configured.case.training, steps=args.steps)
        ), configured.set_aside
    requested = layout_of_arguments(args)
    case = requested.case
    if args.case and args.steps > case.training.steps:
        raise BadInput(f"--steps {args.steps}: case {case.name} trains {case.training.steps} steps; give at most these")
    return replace(case, training=replace(case.training, steps=args.steps)), requested.set_aside


def _case_of_config(args: argparse.Namespace) -> config_file.CaseFromFile:
    """Return the case of --config: a function of a module or of a FILE.py, else a file. Raises BadInput and CaseError."""
    if ":" not in args.config:
        return config_file.read_titan_file(Path(args.config), args.world)
    trainer = TrainerSpec.parse(_trainer_spec(args))
    if trainer.name != "torchtitan":
        raise BadInput("--config MODULE:FUNCTION needs --trainer torchtitan")
    from harness.clusters import config_function  # imports torch

    return config_function.case_from_function(args.config, args.world, trainer.source or None)


def _trainer_spec(args: argparse.Namespace) -> str:
    """Return the trainer as NAME, FILE.py or NAME@SOURCE; a release may be installed for it. Raises BadInput."""
    try:
        return trainers.absolute_spec(trainer_under_test(args), args.source, args.out)
    except ValueError as error:
        raise BadInput(f"--trainer: {error}") from error


def _load_adapter(trainer: str) -> trainers.Adapter:
    """Return the trainer's adapter. Raises BadInput."""
    try:
        return trainers.load_adapter(trainer)
    except ValueError as error:
        raise BadInput(f"--trainer: {error}") from error


def _parse_ranks(text: str, world: int) -> ChosenRanks:
    """Return the ranks that --ranks names, such as 0-7,512.

    CaseError if that is no list of ranks, or a rank is not in the world.
    """
    try:
        spans = [span.partition("-") for span in text.split(",")]
        ranks: list[int] = []
        for first, dash, last in spans:
            ranks += range(int(first), int(last if dash else first) + 1)
    except ValueError as error:
        raise CaseError(f"--ranks {text!r}: write auto, or ranks and spans of them: 0-7,512") from error
    if wrong := [rank for rank in ranks if rank >= world]:
        raise CaseError(f"--ranks {text!r}: the layout has no rank {wrong[0]}; its ranks are 0 to {world - 1}")
    return ChosenRanks({"as requested": tuple(sorted(set(ranks)))}, 0)
