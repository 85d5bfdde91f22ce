"""`harness compare A B`: what differs between two runs of a matrix, in the structure of two recorded jobs, or in their numbers.

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
from harness.recording.traces.job import job_of
from harness.recording.traces.kineto import load_trace

OF = ("name", "one", "other")
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
    found, *_ = _read(recording)
    if not found:
        raise EvidenceError(f"{recording}: no rank left evidence, nothing to keep")
    refuse_foreign_file(snapshot, _is_snapshot)
    write_text(snapshot, yaml.safe_dump(dict(found), sort_keys=False, width=120, allow_unicode=True))
    say(f"{snapshot}: the structure of {recording}, to be reviewed and committed")
    return PASSED


def _between(args: argparse.Namespace, one: Path, other: Path) -> int:
    runs = [folder for folder in (one, other) if verdicts.file_in(folder)]
    if len(runs) == 1:
        raise BadInput(f"compare: {runs[0]} is a run of a matrix, and the other is not")
    if runs:
        refuse_others(args, "runs of a matrix", {"--json"})
        return _runs(args, one, other)
    if any(map(_holds_traces, (one, other))):
        refuse_others(args, "profiler traces", {"--json"})
        return _traces(args, one, other)
    refuse_others(args, "recordings", {"--json", *OF_RECORDINGS})
    return _recordings(args, one, other)


def _recordings(args: argparse.Namespace, one: Path, other: Path) -> int:
    """Print in what the structure of two recorded jobs differs, and their numbers if both have them. Return the worse code."""
    same_training.check_after(args)
    if args.numbers:
        numbers = _numbers(args, one, other)
        answer(args, numbers.kind, numbers.document, numbers.text)
        return numbers.code
    without = next((path for path in (one, other) if not _has_numbers(path)), None)
    if args.structure or without is not None:
        what = "a comparison of structure alone" if args.structure else f"{without}, which has no numbers"
        refuse_others(args, what, {"--structure", "--with", *OF_COMMAND})
        by_structure = _structures(one, other)
        answer(args, by_structure.kind, by_structure.document, by_structure.text)
        return by_structure.code
    by_structure = _structures(one, other)
    numbers = _numbers(args, one, other)
    text = f"{by_structure.text}\n\n{numbers.text}"
    answer(args, by_structure.kind, lambda: by_structure.document() | {"numbers": numbers.document()}, text)
    return worst([by_structure.code, numbers.code])


def _numbers(args: argparse.Namespace, one: Path, other: Path) -> Shown:
    return same_training.about_numbers(one, other, noise_of=args.noise_of, after=args.after)


def _has_numbers(path: Path) -> bool:
    """Return whether it is a recording whose ranks left numbers."""
    return path.suffix not in SNAPSHOTS and not (path / CASE_FILE).exists() and bool(sketch_files(path))


def _runs(args: argparse.Namespace, one: Path, other: Path) -> int:
    """2 where nothing was compared, or something of a case was not."""
    a, b = last_runs([one, other])
    cases = compared_cases(a, b)
    on_gpus = all(run.begins.get("device") == "cuda" for run in (a, b))
    of = of_runs(a, b)
    data = {"one": one, "other": other, "of": "runs", "runs": [dict(zip(OF, each, strict=True)) for each in of]}
    text = "\n".join(compared_runs(str(one), str(other), of, cases, on_gpus=on_gpus))
    answer(args, "comparison", data | {"cases": cases}, text)
    if any(each.found for each in cases):
        return BROKEN
    return NOT_JUDGED if not cases or any(each.problem for each in cases) else PASSED


def _structures(one: Path, other: Path) -> Shown:
    """Return in what the structure of two recorded jobs differs. Raises EvidenceError."""
    (a, a_costs, a_figures), (b, b_costs, b_figures) = _read(one), _read(other)
    found, outside, moved = differences(a, b), compared_outside(a, b), shifts(a_figures, b_figures)
    data = {"one": one, "other": other, "of": "structure", "differences": found, "outside": outside}
    data |= {"costs": (a_costs, b_costs), "figures": moved}
    text = "\n".join(compared(str(one), str(other), found, moved, outside))
    if not (a and b):
        return Shown("comparison", lambda: data, f"{text}\nnothing to compare", NOT_JUDGED)
    return Shown("comparison", lambda: data, text, BROKEN if found else PASSED)


def _holds_traces(path: Path) -> bool:
    """Return whether it is a profiler trace, or a folder of them and of nothing else."""
    elsewhere = path.suffix in SNAPSHOTS or (path / CASE_FILE).exists() or holds_recording(path)
    return path.exists() and not elsewhere and bool(files_of(path, TRACE))


def _traces(args: argparse.Namespace, one: Path, other: Path) -> int:
    """Print in what the traces of two jobs differ. Return 2 where nothing differs and something was not seen."""
    if without := [path for path in (one, other) if not _holds_traces(path)]:
        raise BadInput(f"compare: {without[0]} has no profiler traces, and the other has")
    jobs = (job_of([load_trace(file) for file in files_of(path, TRACE)]) for path in (one, other))
    a, b = of_both(*jobs)
    found, notes = differences(traced_structure(a), traced_structure(b)), not_compared(a, b)
    moved = shifts(traced_figures(a), traced_figures(b))
    data = {"one": one, "other": other, "of": "traces", "differences": found, "figures": moved, "not_compared": notes}
    answer(args, "comparison", data, "\n".join(compared(str(one), str(other), found, moved, notes=notes)))
    seen = a.numbers and b.numbers and not any(job.recording.provides.lack(NEEDED) for job in (a, b))
    return BROKEN if found else PASSED if seen else NOT_JUDGED


def _read(path: Path) -> tuple[Mapping[str, Any], Costs, Figures]:
    """Raises EvidenceError."""
    if path.suffix in SNAPSHOTS:
        return _load_snapshot(path), {}, {}
    of_a_case = (path / CASE_FILE).exists()
    recording: Recording = as_recording(load_run(path / "run")) if of_a_case else load_recording(path)
    return (structure(recording), costs(recording), figures(recording)) if recording.summaries else ({}, {}, {})


def _is_snapshot(text: str) -> bool:
    """Return whether a text is a snapshot, of this version or an older one."""
    try:
        found = document_of(text)
    except (yaml.YAMLError, ValueError):
        return False
    return isinstance(found, dict) and {"ranks", "ended", "models", "parameters", "axes"} <= found.keys()


def _load_snapshot(path: Path) -> Mapping[str, Any]:
    """Raises EvidenceError."""
    remedy = f"`harness compare {path} RECORDING --accept` writes it"
    try:
        found = document_of(read_text(path))
    except OSError as error:
        missing = f"; {remedy}" * isinstance(error, FileNotFoundError)
        raise EvidenceError(f"{path}: cannot be read: {error.strerror}{missing}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise EvidenceError(f"{path}: not a snapshot, nor valid YAML: {error}") from error
    if not isinstance(found, dict) or "ranks" not in found:
        raise EvidenceError(f"{path}: not a snapshot; {remedy}")
    if SECTION not in found:
        raise EvidenceError(f"{path}: an older snapshot, which lacks collectives {SECTION}; {remedy} anew")
    return found
