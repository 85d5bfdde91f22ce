"""`harness record -- COMMAND`: any training job as it is, and what its ranks really did."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import uuid
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

from harness.core.case import layout
from harness.core.case.launching import requested_ranks
from harness.core.cli.answer import print_or_keep_document
from harness.core.cli.exit_codes import BROKEN, INTERRUPTED
from harness.core.cli.parsing import BadInput
from harness.core.evidence.store import write_text
from harness.core.launch.process import die_with_parent
from harness.core.report.output import print_error
from harness.recording import injection
from harness.recording.chosen import StepSelection
from harness.recording.cli.work import same_training
from harness.recording.cli.work.recording_report import about_anomalies, about_recording, show_recording
from harness.recording.judged.stored_recording import STARTED, load_recording


def command(args: argparse.Namespace) -> int:
    """Record a command and print the page. Return the command's own exit code if it is not 0, else that of the checks.

    A job that fails does not become another job because it is recorded. A layout that cannot be read is refused before the
    command trains to its end. Raises CaseError.
    """
    if args.layout is not None:
        check_layout(args.layout, requested_ranks(args.words))
    extra_environment = same_training.recorder_variables(args)
    if injection.is_recording(args.out) and not args.force:
        raise BadInput(f"{args.out}: a recording is there already; choose another -o, or --force to overwrite it")
    code = run_recorded(args, args.out, extra_environment)
    if code in (-signal.SIGINT, INTERRUPTED):
        show_recording(args, args.out, args.layout, ended=False)
        if args.layout is not None:
            judge_command = shlex.join(["harness", "report", "--layout", args.layout, str(args.out)])
            print_error(f"interrupted: not judged by its layout; `{judge_command}` does")
        if args.same_as is not None:
            noise = [] if args.noise_of is None else ["--noise-of", str(args.noise_of)]
            after_options = ["--after", str(args.after)] if args.after else []
            options = ["--numbers", *after_options, *noise]
            judge_command = shlex.join(["harness", "compare", *options, str(args.same_as), str(args.out)])
            print_error(f"interrupted: not compared with {args.same_as}; `{judge_command}` compares what was recorded")
        return INTERRUPTED
    if code:
        show_recording(args, args.out, args.layout)
        return code if 0 < code < 126 else BROKEN
    return show_recording(args, args.out, args.layout) if args.same_as is None else answer_by_both(args)


def answer_by_both(args: argparse.Namespace) -> int:
    """Answer for the recording by the one that is trusted, and by its layout if one is given. Return the worse exit code."""
    recording = load_recording(args.out)
    itself = about_anomalies(recording) if args.layout is None else about_recording(recording, args.layout)
    numbers = same_training.about_numbers(args.same_as, args.out, noise_of=args.noise_of, after=args.after)
    about = same_training.merge_answers(numbers, itself)
    print_or_keep_document(args, about.kind, about.document, about.text)
    return about.code


def check_layout(text: str, ranks: int | None) -> None:
    """Raise CaseError for a layout that cannot be read, and BadInput for one of another number of ranks.

    ranks: the number that the command asks for, None where it does not say.
    """
    dims = layout.parse_layout(text, ranks or layout.MANY_RANKS)
    if ranks is not None and dims.world_size != ranks:
        raise BadInput(f"--layout: {dims} = {dims.world_size} ranks, but the command starts {ranks}")


def run_recorded(
    args: argparse.Namespace, directory: Path, extra_environment: Mapping[str, str] = MappingProxyType({})
) -> int:
    """Run the command, and return its exit code. extra_environment: more variables for it.

    Raises BadInput where it cannot be run.
    """
    words = args.words[1:] if args.words[:1] == ["--"] else args.words
    if not words:
        raise BadInput("nothing to record: `harness record -- torchrun --nproc-per-node 8 train.py`")
    steps = ",".join(filter(None, (args.steps or "1-3", f"/{args.every}" if args.every else "")))
    try:
        StepSelection.parse(steps)
    except ValueError as error:
        raise BadInput(f"--steps: {error}") from error
    injection.make_fresh_folder(directory)
    launch = uuid.uuid4().hex[:12]
    try:
        ends_too = partial(
            die_with_parent, os.getpid(), signal_number=signal.SIGTERM
        )  # and its launcher ends the ranks
        code = injection.run_recorded_command(
            words,
            directory,
            steps,
            extra_environment={injection.LAUNCH_VARIABLE: launch, **extra_environment},
            before_exec=ends_too,
        )
    except injection.CommandError as error:
        raise BadInput(str(error)) from error
    launch_facts = {"launch": launch, "command": shlex.join(words), "code": code, "steps": steps}
    launch_facts["ranks"] = requested_ranks(words)
    launch_facts["same_as"] = str(args.same_as.resolve()) if getattr(args, "same_as", None) else ""
    launch_facts["after"] = getattr(args, "after", 0)
    write_text(
        directory / STARTED, json.dumps(launch_facts | {"nothing": _why_no_evidence(directory, words, code)}, indent=1)
    )
    return code


def _why_no_evidence(directory: Path, words: list[str], code: int) -> str:
    """Return why no rank left evidence, empty if one did."""
    return "" if injection.is_recording(directory) else injection.why_no_evidence(directory, words, code)
