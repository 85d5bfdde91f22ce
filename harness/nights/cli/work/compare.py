"""`harness compare A B`: the differences of two runs of a matrix, or of two recorded jobs in structure or numbers.

A snapshot is the structure of a recorded job, reviewed and kept in git; --accept writes it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from harness.core.case.yaml_documents import document_of
from harness.core.cli.answer import print_or_keep_document
from harness.core.cli.exit_codes import BROKEN, NOT_JUDGED, PASSED, SKIP_COMMIT, worst_code
from harness.core.cli.parsing import BadInput
from harness.core.cli.work.options import refuse_json, refuse_others
from harness.core.evidence.own_folders import refuse_foreign_file
from harness.core.evidence.reading import read_text
from harness.core.evidence.store import CASE_FILE, EvidenceError, load_run, write_text
from harness.core.report.output import print_error, print_lines
from harness.core.run import verdicts
from harness.nights.cli.work.run_report import read_last_runs
from harness.nights.comparison import compare_cases, differences_of_runs
from harness.nights.pages.compared_runs import Costs, lines_on_two_runs
from harness.recording.cli.work import same_training
from harness.recording.cli.work.record import run_recorded
from harness.recording.cli.work.recording_report import RecordingAnswer
from harness.recording.judged.figures import Figures, figures_of_recording, find_shifts
from harness.recording.judged.outside_passes import SECTION
from harness.recording.judged.run_as_recording import recording_of_run
from harness.recording.judged.same_training import sketch_files
from harness.recording.judged.stored_recording import Recording, holds_recording, load_recording
from harness.recording.judged.structure import costs, differences, outside_steps_text, structure
from harness.recording.pages.compared import comparison_lines
from harness.recording.traces.compared import (
    NEEDED_EVIDENCE,
    not_compared_texts,
    traced_figures,
    traced_structure,
    with_common_ranks,
)
from harness.recording.traces.files import TRACE, files_of_kind
from harness.recording.traces.job import TracedJob, job_of
from harness.recording.traces.kineto import load_trace

DIFFERENCE_KEYS = ("name", "one", "other")
"""Keys of the document for a value that the runs differ in."""
SNAPSHOT_SUFFIXES = (".yaml", ".yml")
COMMAND_OPTIONS = ("--json", "--out", "--steps", "--every")
"""Options of a command that is recorded first."""
RECORDING_OPTIONS = ("--numbers", "--structure", "--after", "--noise-of")
"""Options of what is compared of two recordings."""


def command(args: argparse.Namespace) -> int:
    """Compare two runs, recordings, traces or snapshots, print the differences, and return the exit code: 1 where any differ.

    With --with, a command is recorded first; return 125 if that fails: `git bisect run` skips this commit. --accept
    writes a snapshot instead. Raises BadInput for options that cannot be combined.
    """
    if args.good is not None:
        refuse_others(args, "a command that is recorded and compared", {"--with", *COMMAND_OPTIONS, *RECORDING_OPTIONS})
        return _record_and_compare(args)
    if len(args.folders) != 2 or args.words:
        raise BadInput("compare: two runs, two recordings, or --with A -- COMMAND")
    first, second = map(Path, args.folders)
    if args.accept:
        refuse_others(args, "a snapshot that is accepted", {"--accept", "--json"})
        return _accept_snapshot(args, first, second)
    return _compare(args, first, second)


def _record_and_compare(args: argparse.Namespace) -> int:
    """Run and record the command, and compare the recording with --with. Return the exit code.

    Return 125 if the command fails, or a rank leaves no evidence; nothing is compared then.
    """
    args.words = [*args.folders, *args.words]  # behind -- all words look alike
    try:
        code = run_recorded(args, args.out)
    except BadInput as error:
        args.failed = str(error)
        print_error(args.failed)
        return SKIP_COMMIT
    recording = load_recording(args.out)
    if code or len(recording.summaries) < max(recording.world, 1):
        args.failed = (
            f"the command ended with code {code}, {len(recording.summaries)} ranks left evidence: not compared"
        )
        print_error(args.failed)
        return SKIP_COMMIT
    return _compare_recordings(args, args.good, args.out)


def _accept_snapshot(args: argparse.Namespace, snapshot: Path, recording: Path) -> int:
    """Write the structure of a recording to a snapshot file, and return 0.

    Raises BadInput for a wrong suffix, and EvidenceError for a recording without evidence or a foreign file.
    """
    refuse_json(args, "--accept")
    if snapshot.suffix not in SNAPSHOT_SUFFIXES or recording.suffix in SNAPSHOT_SUFFIXES:
        raise BadInput("--accept: `harness compare FILE.yaml RECORDING --accept` writes FILE.yaml")
    recorded_structure, *_ = _read_structure(recording)
    if not recorded_structure:
        raise EvidenceError(f"{recording}: no rank left evidence, nothing to keep")
    refuse_foreign_file(snapshot, _is_snapshot)
    write_text(snapshot, yaml.safe_dump(dict(recorded_structure), sort_keys=False, width=120, allow_unicode=True))
    print_lines(f"{snapshot}: the structure of {recording}, to be reviewed and committed")
    return PASSED


def _compare(args: argparse.Namespace, first: Path, second: Path) -> int:
    """Compare two places by their kind: runs of a matrix, traces of two jobs, else recordings. Return the exit code.

    Raises BadInput for places of two kinds, and for options that are of another kind.
    """
    runs = [folder for folder in (first, second) if verdicts.verdicts_file_in(folder)]
    if len(runs) == 1:
        raise BadInput(f"compare: {runs[0]} is a matrix run and the other is not; name two of one kind")
    if runs:
        refuse_others(args, "runs of a matrix", {"--json"})
        return _compare_runs(args, first, second)
    if any(map(_holds_traces, (first, second))):
        refuse_others(args, "profiler traces", {"--json"})
        return _compare_traces(args, first, second)
    refuse_others(args, "recordings", {"--json", *RECORDING_OPTIONS})
    return _compare_recordings(args, first, second)


def _compare_recordings(args: argparse.Namespace, first: Path, second: Path) -> int:
    """Print how two recorded jobs differ in structure, and in numbers if both have them. Return the worse exit code.

    --numbers and --structure limit it to one of the two.
    """
    same_training.check_after(args)
    if args.numbers:
        numbers = _compare_numbers(args, first, second)
        print_or_keep_document(args, numbers.kind, numbers.document, numbers.text)
        return numbers.code
    path_without_numbers = next((path for path in (first, second) if not _has_numbers(path)), None)
    if args.structure or path_without_numbers is not None:
        subject = (
            "a comparison of structure alone" if args.structure else f"{path_without_numbers}, which has no numbers"
        )
        refuse_others(args, subject, {"--structure", "--with", *COMMAND_OPTIONS})
        by_structure = _compare_structures(first, second)
        print_or_keep_document(args, by_structure.kind, by_structure.document, by_structure.text)
        return by_structure.code
    by_structure = _compare_structures(first, second)
    numbers = _compare_numbers(args, first, second)
    text = f"{by_structure.text}\n\n{numbers.text}"
    print_or_keep_document(
        args, by_structure.kind, lambda: by_structure.document() | {"numbers": numbers.document()}, text
    )
    return worst_code([by_structure.code, numbers.code])


def _compare_numbers(args: argparse.Namespace, first: Path, second: Path) -> RecordingAnswer:
    """Return how the numbers of two recordings differ, as text, data and exit code."""
    return same_training.about_numbers(first, second, noise_of=args.noise_of, after=args.after)


def _has_numbers(path: Path) -> bool:
    """Return whether the path is a recording whose ranks left numbers. False for snapshots and cases."""
    return path.suffix not in SNAPSHOT_SUFFIXES and not (path / CASE_FILE).exists() and bool(sketch_files(path))


def _compare_runs(args: argparse.Namespace, first: Path, second: Path) -> int:
    """Print how two runs of a matrix differ. Return 1 if a case differs.

    Else return 2 if nothing was compared, or a part of a case was not, and 0 otherwise.
    """
    first_run, second_run = read_last_runs([first, second])
    cases = compare_cases(first_run, second_run)
    on_gpus = all(run.begins.get("device") == "cuda" for run in (first_run, second_run))
    run_differences = differences_of_runs(first_run, second_run)
    data = {
        "one": first,
        "other": second,
        "of": "runs",
        "runs": [dict(zip(DIFFERENCE_KEYS, difference, strict=True)) for difference in run_differences],
    }
    text = "\n".join(lines_on_two_runs(str(first), str(second), run_differences, cases, on_gpus=on_gpus))
    print_or_keep_document(args, "comparison", data | {"cases": cases}, text)
    if any(case.found for case in cases):
        return BROKEN
    return NOT_JUDGED if not cases or any(case.problem for case in cases) else PASSED


def _compare_structures(first: Path, second: Path) -> RecordingAnswer:
    """Return how the structure of two recorded jobs differs, as text, data and exit code: 1 if it does, 0 if not.

    The exit code is 2 if one of them has no evidence. Raises EvidenceError.
    """
    first_structure, first_costs, first_figures = _read_structure(first)
    second_structure, second_costs, second_figures = _read_structure(second)
    structure_differences = differences(first_structure, second_structure)
    outside_differences = outside_steps_text(first_structure, second_structure)
    figure_shifts = find_shifts(first_figures, second_figures)
    data = {
        "one": first,
        "other": second,
        "of": "structure",
        "differences": structure_differences,
        "outside": outside_differences,
        "costs": (first_costs, second_costs),
        "figures": figure_shifts,
    }
    text = "\n".join(
        comparison_lines(str(first), str(second), structure_differences, figure_shifts, outside_differences)
    )
    if not (first_structure and second_structure):
        return RecordingAnswer("comparison", lambda: data, f"{text}\nnothing to compare", NOT_JUDGED)
    return RecordingAnswer("comparison", lambda: data, text, BROKEN if structure_differences else PASSED)


def _holds_traces(path: Path) -> bool:
    """Return whether the path is a profiler trace, or a folder with traces that holds no case and no recording."""
    is_other_kind = path.suffix in SNAPSHOT_SUFFIXES or (path / CASE_FILE).exists() or holds_recording(path)
    return path.exists() and not is_other_kind and bool(files_of_kind(path, TRACE))


def _compare_traces(args: argparse.Namespace, first: Path, second: Path) -> int:
    """Print how the traces of two jobs differ. Return 1 if structure differs, 2 if not all could be seen, else 0.

    Raises BadInput if one place has no traces.
    """
    if paths_without_traces := [path for path in (first, second) if not _holds_traces(path)]:
        raise BadInput(f"compare: {paths_without_traces[0]} has no profiler traces, and the other has")
    first_job, second_job = with_common_ranks(_load_job(first), _load_job(second))
    structure_differences = differences(traced_structure(first_job), traced_structure(second_job))
    notes = not_compared_texts(first_job, second_job)
    figure_shifts = find_shifts(traced_figures(first_job), traced_figures(second_job))
    data = {
        "one": first,
        "other": second,
        "of": "traces",
        "differences": structure_differences,
        "figures": figure_shifts,
        "not_compared": notes,
    }
    lines = comparison_lines(str(first), str(second), structure_differences, figure_shifts, notes=notes)
    print_or_keep_document(args, "comparison", data, "\n".join(lines))
    if structure_differences:
        return BROKEN
    has_numbers = first_job.step_numbers and second_job.step_numbers
    is_all_seen = has_numbers and not any(
        job.recording.provides.find_lack(NEEDED_EVIDENCE) for job in (first_job, second_job)
    )
    return PASSED if is_all_seen else NOT_JUDGED


def _load_job(path: Path) -> TracedJob:
    """Return the job whose traces lie there. Raises EvidenceError for traces that are not of one job."""
    return job_of([load_trace(file) for file in files_of_kind(path, TRACE)])


def _read_structure(path: Path) -> tuple[Mapping[str, Any], Costs, Figures]:
    """Return (structure, costs, figures) of a recording, a case or a snapshot. Raises EvidenceError.

    A snapshot has no costs and figures. All three are empty if no rank left evidence.
    """
    if path.suffix in SNAPSHOT_SUFFIXES:
        return _load_snapshot(path), {}, {}
    is_case = (path / CASE_FILE).exists()
    recording: Recording = recording_of_run(load_run(path / "run")) if is_case else load_recording(path)
    return (
        (structure(recording), costs(recording), figures_of_recording(recording))
        if recording.summaries
        else ({}, {}, {})
    )


def _is_snapshot(text: str) -> bool:
    """Return whether a file's text is a snapshot, of this version or an older one. False if it is no YAML."""
    try:
        document = document_of(text)
    except (yaml.YAMLError, ValueError):
        return False
    return isinstance(document, dict) and {"ranks", "ended", "models", "parameters", "axes"} <= document.keys()


def _load_snapshot(path: Path) -> Mapping[str, Any]:
    """Return the structure in a snapshot. Raises EvidenceError if it cannot be read, is no snapshot, or an older one."""
    remedy = f"`harness compare {path} RECORDING --accept` writes it"
    try:
        snapshot = document_of(read_text(path))
    except OSError as error:
        advice = f"; {remedy}" if isinstance(error, FileNotFoundError) else ""
        raise EvidenceError(f"{path}: cannot be read: {error.strerror}{advice}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise EvidenceError(f"{path}: not a snapshot, nor valid YAML: {error}") from error
    if not isinstance(snapshot, dict) or "ranks" not in snapshot:
        raise EvidenceError(f"{path}: not a snapshot; {remedy}")
    if SECTION not in snapshot:
        raise EvidenceError(f"{path}: an older snapshot, which lacks collectives {SECTION}; {remedy} anew")
    return snapshot
