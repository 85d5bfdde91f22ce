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
from harness.core.cli.answer import answer
from harness.core.cli.exit_codes import BROKEN, NOT_JUDGED, PASSED, SKIP_COMMIT, worst
from harness.core.cli.parsing import BadInput
from harness.core.cli.work.options import no_document, refuse_others
from harness.core.evidence.own_folders import refuse_foreign_file
from harness.core.evidence.reading import read_text
from harness.core.evidence.store import CASE_FILE, EvidenceError, load_run, write_text
from harness.core.report.output import complain, say
from harness.core.run import verdicts
from harness.nights.cli.work.run_report import last_runs
from harness.nights.comparison import compared_cases, of_runs
from harness.nights.pages.compared_runs import Costs, compared_runs
from harness.recording.cli.work import same_training
from harness.recording.cli.work.record import record
from harness.recording.cli.work.recording_report import Shown
from harness.recording.judged.figures import Figures, figures, shifts
from harness.recording.judged.outside_passes import SECTION
from harness.recording.judged.run_as_recording import as_recording
from harness.recording.judged.same_training import sketch_files
from harness.recording.judged.stored_recording import Recording, holds_recording, load_recording
from harness.recording.judged.structure import compared_outside, costs, differences, structure
from harness.recording.pages.compared import compared
from harness.recording.traces.compared import NEEDED, not_compared, of_both, traced_figures, traced_structure
from harness.recording.traces.files import TRACE, files_of
from harness.recording.traces.job import TracedJob, job_of
from harness.recording.traces.kineto import load_trace

OF = ("name", "one", "other")
"""Keys of the document for a value that the runs differ in."""
SNAPSHOTS = (".yaml", ".yml")
OF_COMMAND = ("--json", "--out", "--steps", "--every")
"""Options of a command that is recorded first."""
OF_RECORDINGS = ("--numbers", "--structure", "--after", "--noise-of")
"""Options of what is compared of two recordings."""


def command(args: argparse.Namespace) -> int:
    """Return 1 where verdicts or structure differ.

    With a command, return 125 where it could not be recorded: `git bisect run` skips this commit.
    """
    if args.good is not None:
        refuse_others(args, "a command that is recorded and compared", {"--with", *OF_COMMAND, *OF_RECORDINGS})
        return _with_command(args)
    if len(args.folders) != 2 or args.words:
        raise BadInput("compare: two runs, two recordings, or --with A -- COMMAND")
    first, second = map(Path, args.folders)
    if args.accept:
        refuse_others(args, "a snapshot that is accepted", {"--accept", "--json"})
        return _accept(args, first, second)
    return _between(args, first, second)


def _with_command(args: argparse.Namespace) -> int:
    """Record the command, and compare the recording with --with. Return the exit code."""
    args.words = [*args.folders, *args.words]  # behind -- all words look alike
    try:
        code = record(args, args.out)
    except BadInput as error:
        args.failed = str(error)
        complain(args.failed)
        return SKIP_COMMIT
    recording = load_recording(args.out)
    if code or len(recording.summaries) < max(recording.world, 1):
        args.failed = (
            f"the command ended with code {code}, {len(recording.summaries)} ranks left evidence: not compared"
        )
        complain(args.failed)
        return SKIP_COMMIT
    return _recordings(args, args.good, args.out)


def _accept(args: argparse.Namespace, snapshot: Path, recording: Path) -> int:
    """Write a snapshot. Raises BadInput and EvidenceError."""
    no_document(args, "--accept")
    if snapshot.suffix not in SNAPSHOTS or recording.suffix in SNAPSHOTS:
        raise BadInput("--accept: `harness compare FILE.yaml RECORDING --accept` writes FILE.yaml")
    recorded_structure, *_ = _read(recording)
    if not recorded_structure:
        raise EvidenceError(f"{recording}: no rank left evidence, nothing to keep")
    refuse_foreign_file(snapshot, _is_snapshot)
    write_text(snapshot, yaml.safe_dump(dict(recorded_structure), sort_keys=False, width=120, allow_unicode=True))
    say(f"{snapshot}: the structure of {recording}, to be reviewed and committed")
    return PASSED


def _between(args: argparse.Namespace, first: Path, second: Path) -> int:
    """Compare two runs, the traces of two jobs, or two recordings. Return the exit code."""
    runs = [folder for folder in (first, second) if verdicts.file_in(folder)]
    if len(runs) == 1:
        raise BadInput(f"compare: {runs[0]} is a run of a matrix, and the other is not")
    if runs:
        refuse_others(args, "runs of a matrix", {"--json"})
        return _runs(args, first, second)
    if any(map(_holds_traces, (first, second))):
        refuse_others(args, "profiler traces", {"--json"})
        return _traces(args, first, second)
    refuse_others(args, "recordings", {"--json", *OF_RECORDINGS})
    return _recordings(args, first, second)


def _recordings(args: argparse.Namespace, first: Path, second: Path) -> int:
    """Print in what the structure of two recorded jobs differs, and their numbers if both have them. Return the worse code."""
    same_training.check_after(args)
    if args.numbers:
        numbers = _numbers(args, first, second)
        answer(args, numbers.kind, numbers.document, numbers.text)
        return numbers.code
    path_without_numbers = next((path for path in (first, second) if not _has_numbers(path)), None)
    if args.structure or path_without_numbers is not None:
        subject = (
            "a comparison of structure alone" if args.structure else f"{path_without_numbers}, which has no numbers"
        )
        refuse_others(args, subject, {"--structure", "--with", *OF_COMMAND})
        by_structure = _structures(first, second)
        answer(args, by_structure.kind, by_structure.document, by_structure.text)
        return by_structure.code
    by_structure = _structures(first, second)
    numbers = _numbers(args, first, second)
    text = f"{by_structure.text}\n\n{numbers.text}"
    answer(args, by_structure.kind, lambda: by_structure.document() | {"numbers": numbers.document()}, text)
    return worst([by_structure.code, numbers.code])


def _numbers(args: argparse.Namespace, first: Path, second: Path) -> Shown:
    """Return in what the numbers of two recordings differ."""
    return same_training.about_numbers(first, second, noise_of=args.noise_of, after=args.after)


def _has_numbers(path: Path) -> bool:
    """Return whether it is a recording whose ranks left numbers."""
    return path.suffix not in SNAPSHOTS and not (path / CASE_FILE).exists() and bool(sketch_files(path))


def _runs(args: argparse.Namespace, first: Path, second: Path) -> int:
    """Print in what two runs of a matrix differ. Return the exit code.

    That is 2 where nothing was compared, or something of a case was not.
    """
    first_run, second_run = last_runs([first, second])
    cases = compared_cases(first_run, second_run)
    on_gpus = all(run.begins.get("device") == "cuda" for run in (first_run, second_run))
    run_differences = of_runs(first_run, second_run)
    data = {
        "one": first,
        "other": second,
        "of": "runs",
        "runs": [dict(zip(OF, difference, strict=True)) for difference in run_differences],
    }
    text = "\n".join(compared_runs(str(first), str(second), run_differences, cases, on_gpus=on_gpus))
    answer(args, "comparison", data | {"cases": cases}, text)
    if any(case.found for case in cases):
        return BROKEN
    return NOT_JUDGED if not cases or any(case.problem for case in cases) else PASSED


def _structures(first: Path, second: Path) -> Shown:
    """Return in what the structure of two recorded jobs differs. Raises EvidenceError."""
    first_structure, first_costs, first_figures = _read(first)
    second_structure, second_costs, second_figures = _read(second)
    structure_differences = differences(first_structure, second_structure)
    outside_differences = compared_outside(first_structure, second_structure)
    figure_shifts = shifts(first_figures, second_figures)
    data = {
        "one": first,
        "other": second,
        "of": "structure",
        "differences": structure_differences,
        "outside": outside_differences,
        "costs": (first_costs, second_costs),
        "figures": figure_shifts,
    }
    text = "\n".join(compared(str(first), str(second), structure_differences, figure_shifts, outside_differences))
    if not (first_structure and second_structure):
        return Shown("comparison", lambda: data, f"{text}\nnothing to compare", NOT_JUDGED)
    return Shown("comparison", lambda: data, text, BROKEN if structure_differences else PASSED)


def _holds_traces(path: Path) -> bool:
    """Return whether it is a profiler trace, or a folder of them and of nothing else."""
    is_other_kind = path.suffix in SNAPSHOTS or (path / CASE_FILE).exists() or holds_recording(path)
    return path.exists() and not is_other_kind and bool(files_of(path, TRACE))


def _traces(args: argparse.Namespace, first: Path, second: Path) -> int:
    """Print in what the traces of two jobs differ. Return 2 where nothing differs and something was not seen."""
    if paths_without_traces := [path for path in (first, second) if not _holds_traces(path)]:
        raise BadInput(f"compare: {paths_without_traces[0]} has no profiler traces, and the other has")
    first_job, second_job = of_both(_load_job(first), _load_job(second))
    structure_differences = differences(traced_structure(first_job), traced_structure(second_job))
    notes = not_compared(first_job, second_job)
    figure_shifts = shifts(traced_figures(first_job), traced_figures(second_job))
    data = {
        "one": first,
        "other": second,
        "of": "traces",
        "differences": structure_differences,
        "figures": figure_shifts,
        "not_compared": notes,
    }
    lines = compared(str(first), str(second), structure_differences, figure_shifts, notes=notes)
    answer(args, "comparison", data, "\n".join(lines))
    if structure_differences:
        return BROKEN
    has_numbers = first_job.numbers and second_job.numbers
    is_all_seen = has_numbers and not any(job.recording.provides.lack(NEEDED) for job in (first_job, second_job))
    return PASSED if is_all_seen else NOT_JUDGED


def _load_job(path: Path) -> TracedJob:
    """Return the job whose traces lie there. Raises EvidenceError for traces that are not of one job."""
    return job_of([load_trace(file) for file in files_of(path, TRACE)])


def _read(path: Path) -> tuple[Mapping[str, Any], Costs, Figures]:
    """Return the structure of a recording, a case or a snapshot, and its costs and figures. Raises EvidenceError."""
    if path.suffix in SNAPSHOTS:
        return _load_snapshot(path), {}, {}
    is_case = (path / CASE_FILE).exists()
    recording: Recording = as_recording(load_run(path / "run")) if is_case else load_recording(path)
    return (structure(recording), costs(recording), figures(recording)) if recording.summaries else ({}, {}, {})


def _is_snapshot(text: str) -> bool:
    """Return whether a text is a snapshot, of this version or an older one."""
    try:
        document = document_of(text)
    except (yaml.YAMLError, ValueError):
        return False
    return isinstance(document, dict) and {"ranks", "ended", "models", "parameters", "axes"} <= document.keys()


def _load_snapshot(path: Path) -> Mapping[str, Any]:
    """Return the structure in a snapshot. Raises EvidenceError for a file that holds none, or an older one."""
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
