"""What judges a recording by another one of the same training, in another layout."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from harness.core.case import layout
from harness.core.case.dims import AXES, ParallelDims
from harness.core.case.launching import requested_ranks
from harness.core.cli.exit_codes import BROKEN, NOT_JUDGED, PASSED, worst_code
from harness.core.cli.parsing import BadInput
from harness.core.judge.result import Verdict
from harness.core.plan.grid import coordinate_of_rank
from harness.recording import injection
from harness.recording.cli.same_training import NOISE_SUFFIX
from harness.recording.cli.work.recording_report import RecordingAnswer
from harness.recording.judged.same_training import judge_training, require_sketch_files
from harness.recording.judged.stored_recording import load_recording
from harness.recording.pages.same_training import same_training_document, same_training_text, verdict_of
from harness.recording.sketches import BY_ROWS, load_sketches


def recorder_variables(args: argparse.Namespace) -> dict[str, str]:
    """Return the variables for the recorder in the ranks. Raises BadInput and CaseError."""
    variables = {injection.NOISE_VARIABLE: args.noise} if args.noise else {}
    if args.same_as is not None:
        load_recording(args.same_as)  # before the command trains to its end
        trusted = load_sketches(require_sketch_files(args.same_as)[0])
        if (
            args.rows
            and trusted is not None
            and not any(sketch.kind.startswith(BY_ROWS) for sketch in trusted.sketches)
        ):
            raise BadInput(
                f"--rows: {args.same_as} has no sketches of rows; record it with --rows {args.rows}, or leave it out"
            )
    elif args.after or args.noise_of:
        raise BadInput(f"{'--after' if args.after else '--noise-of'}: name the trusted recording by --same-as")
    check_after(args)
    if args.rows < 0:
        raise BadInput(f"--rows {args.rows}: a number of blocks, such as 16")
    if args.rows:
        variables[injection.ROWS_VARIABLE] = str(args.rows)
    if args.sharded:
        variables[injection.SHARDED_VARIABLE] = json.dumps(_declared_shardings(args))
    return variables


def check_after(args: argparse.Namespace) -> None:
    """Raise BadInput for --after with a step below 0."""
    if args.after < 0:
        raise BadInput(f"--after {args.after}: a step of A, from whose checkpoint the job went on")


def _declared_shardings(args: argparse.Namespace) -> list[tuple[str, int, list[int], str]]:
    """Return, for each --sharded: pattern, dim, by rank which part it holds, and the axis. Raises BadInput."""
    ranks = requested_ranks(args.words)
    if args.layout is None or ranks is None:
        raise BadInput("--sharded: give the axis's ranks by --layout, and a command that says how many ranks it starts")
    dims = layout.parse_layout(args.layout, ranks)
    return [parse_declared(text, dims) for text in args.sharded]


def parse_declared(text: str, dims: ParallelDims) -> tuple[str, int, list[int], str]:
    """Parse PATTERN=AXIS:DIM. Return pattern, dim, by rank which part it holds, and the axis. Raises BadInput."""
    pattern, _, axis_and_dim = text.rpartition("=")
    axis, _, dim = axis_and_dim.partition(":")
    if not pattern or axis not in AXES or not dim.isdecimal():
        raise BadInput(f"--sharded: {text!r}: write PATTERN=AXIS:DIM, such as '*.w1.weight=tp:0'")
    return pattern, int(dim), [coordinate_of_rank(dims, rank)[axis] for rank in range(dims.world_size)], axis


def about_numbers(first: Path, second: Path, *, noise_of: Path | None = None, after: int = 0) -> RecordingAnswer:
    """Return whether the second recording is the same training as the first.

    noise_of: the recording of the first one's noise. Without it, the recording beside the first one is taken, if it is there.
    Raises EvidenceError.
    """
    beside = Path(f"{first}{NOISE_SUFFIX}")
    noise = beside if noise_of is None and beside.is_dir() else noise_of
    judged = judge_training(first, second, noise, after)
    code = {Verdict.PASS: PASSED, Verdict.FAIL: BROKEN}.get(verdict_of(judged), NOT_JUDGED)
    text = same_training_text(judged)
    recorded_after = load_recording(second).after
    if recorded_after != after:
        text += f"\n\n{second} was recorded with --after {recorded_after}, and is compared here with --after {after}"
    return RecordingAnswer("same_training", lambda: same_training_document(judged), text, code)


def merge_answers(numbers: RecordingAnswer, recording: RecordingAnswer) -> RecordingAnswer:
    """Return the answers on numbers and on the recording itself as one: the worse comes first, and decides the exit code."""
    code = worst_code([numbers.code, recording.code])
    texts_in_order = [numbers, recording] if numbers.code == code else [recording, numbers]
    verdict = {PASSED: Verdict.PASS, BROKEN: Verdict.FAIL}.get(code, Verdict.UNKNOWN)

    def document() -> dict[str, Any]:
        of_numbers = numbers.document()
        verdicts = {"numbers": of_numbers["verdict"], "recording": recording.document()}
        return of_numbers | {"verdict": verdict, **verdicts}

    return RecordingAnswer(numbers.kind, document, "\n\n".join(part.text for part in texts_in_order if part.text), code)
