"""What profiler traces and Flight Recorder dumps of a job show."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from harness.core import rings
from harness.core.case import case_files
from harness.core.case import layout as spec
from harness.core.case.case import Case, CaseError
from harness.core.case.loading import load_all
from harness.core.cli.answer import print_or_keep_document
from harness.core.cli.work.options import refuse_json
from harness.core.cli.work.verdict_codes import exit_code_of_verdict
from harness.core.evidence.own_folders import replace_own
from harness.core.judge.result import verdict_of_all
from harness.core.plan.figures.gpus import MACHINES
from harness.core.plan.figures.links import GPUS_PER_NODE
from harness.core.report.output import print_lines
from harness.recording.judged.traced import judge_traces
from harness.recording.pages.hang_page import hang_document, hang_page
from harness.recording.pages.recording_documents import traces_document as document_of
from harness.recording.pages.recording_layout import layout_report
from harness.recording.pages.trace_page import report_without_layout, trace_page
from harness.recording.traces.analyzer import analysis_of
from harness.recording.traces.dumps import load_dumps
from harness.recording.traces.files import DUMP, TRACE, files_of_paths
from harness.recording.traces.hang import hang_of
from harness.recording.traces.job import job_of
from harness.recording.traces.kineto import load_trace
from harness.recording.traces.timeline import Timeline, timeline_of_traces
from harness.recording.traces.times import times_of, with_links


def show_traces(args: argparse.Namespace, places: Sequence[Path], layout: str | None) -> int:
    """Print what the job's traces show, judged by the layout if one is given. Return the exit code.

    Raises EvidenceError and CaseError.
    """
    job = job_of([load_trace(file) for file in files_of_paths(places, TRACE)])
    case = None
    dims = None
    if layout:
        case = plan_of_layout(layout, job.recording.world)
        dims = case.dims if case else spec.parse_layout(layout, job.recording.world)
    results, diagnosis = judge_traces(job, dims)
    times = times_of(job)
    if times and args.gpu:
        times = with_links(times, MACHINES[args.gpu], args.nodes_of or GPUS_PER_NODE)
    text = layout_report(dims, results, diagnosis) if dims else report_without_layout(results)
    page_text = trace_page(job, text, times, case, gpu_text(args))
    if args.html:
        refuse_json(args, "--html")
        write_times(args.html, f"traces in {job.recording.directory}", page_text, timeline_of_traces(job), kernels=True)
    else:
        print_or_keep_document(args, "traces", lambda: document_of(job, dims, (results, diagnosis), times), page_text)
    return exit_code_of_verdict(verdict_of_all(results))


def gpu_text(args: argparse.Namespace) -> str:
    """Return whose links are compared, and of how many GPUs a node is taken to be."""
    return f"{args.gpu}, with {args.nodes_of or GPUS_PER_NODE} GPUs a node" if args.gpu else ""


def plan_of_layout(layout: str, world: int) -> Case | None:
    """Return the case of a published layout by its name, or of a job's file. None for degrees alone."""
    if "=" in layout:
        return None
    if published := next((case for case in load_all(case_files.LAYOUTS) if case.name == layout), None):
        return published
    try:
        return rings.function_for("called", "layout_of_traces")(layout, world)
    except CaseError:  # a file from which its degrees are read and not all that a plan needs
        return None


def write_times(file: Path, title: str, text: str, timeline: Timeline | None, *, kernels: bool) -> None:
    """Write a page for a browser and print its path.

    text: of the report. timeline: the step to draw. Raises EvidenceError if the file is neither empty nor a page of the
    harness: only such files are replaced.
    """
    from harness.core.report.page import is_page, page_html  # jinja2 takes a twentieth of a second
    from harness.recording.pages.timeline_page import page_of_times

    replace_own(file, page_html(page_of_times(title, text, timeline, kernels=kernels)), is_page)
    print_lines(file)


def show_dumps(args: argparse.Namespace, places: Sequence[Path]) -> int:
    """Print why the job hung, by its Flight Recorder dumps. Return the exit code. Raises EvidenceError."""
    dumps = load_dumps(files_of_paths(places, DUMP))
    hang = hang_of(dumps)
    analysis = analysis_of(dumps)
    directory = places[0] if len(places) == 1 else dumps[0].path.parent
    print_or_keep_document(
        args, "dumps", lambda: hang_document(hang, analysis, directory), hang_page(hang, analysis, directory)
    )
    return exit_code_of_verdict(hang.verdict)
