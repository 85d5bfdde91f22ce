"""The arguments of `harness report`."""

from __future__ import annotations

import argparse
from pathlib import Path

from harness.core.cli.layout_options import add_degrees
from harness.core.cli.parsing import add_json, positive_int
from harness.core.plan.figures.gpus import MACHINES
from harness.recording.cli.forms import CHROME

FORMS = (MARKDOWN, ANNOTATIONS, FOLDERS, JUNIT) = ("markdown", "annotations", "folders", "junit")
"""What a run can be printed as."""


def add(parser: argparse.ArgumentParser) -> None:
    add_json(parser)
    parser.add_argument(
        "places",
        metavar="PLACE",
        nargs="*",
        type=Path,
        help="a case's folder: draw who holds what, and what moved. A folder of `harness matrix`: print its last run, "
        "shards merged. A recording, or PyTorch's profiler traces, a file per rank: print what its ranks really did. "
        "Flight Recorder dumps, a file per rank: say why the job hung. "
        "A folder of nights: print what changed",
    )
    run = parser.add_argument_group("a run")
    run.add_argument(
        "--as",
        choices=[*FORMS, CHROME],
        help="markdown for the summary of a CI job, GitHub's annotations, JUnit's XML, or the folders of the cases "
        f"that are not green. A recording: {CHROME}, traces for Perfetto and HolisticTraceAnalysis",
    )
    run.add_argument(
        "--html",
        type=Path,
        metavar="FILE",
        help="write one page for a browser, of cases too, or of the times of a recording or of traces",
    )
    run.add_argument(
        "--history",
        type=Path,
        metavar="DIR",
        action="append",
        default=[],
        help="earlier runs, verdicts.jsonl at any depth: print what changed since, or show them on the page of --html",
    )
    recording = parser.add_argument_group("a recording")
    recording.add_argument("--all", action="store_true", help="print every line, however many there are")
    add_degrees(recording)
    traces = parser.add_argument_group("profiler traces")
    traces.add_argument("--gpu", choices=MACHINES, help="compare rates with the links of its data sheet")
    traces.add_argument("--nodes-of", type=positive_int, metavar="N", help="GPUs of a node; default 8")
    nights = parser.add_argument_group("many nights")
    nights.add_argument(
        "--quarantine", type=Path, metavar="FILE", help="cases that a person has set aside until a day; YAML, only read"
    )
