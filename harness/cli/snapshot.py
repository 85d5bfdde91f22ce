"""`harness snapshot DIR FILE.yaml --accept`: the structure of a recorded job, reviewed and kept in git."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from harness.cli.answer import answer
from harness.cli.exit_codes import BROKEN, NOT_JUDGED, PASSED
from harness.cli.options import add_command, no_document
from harness.evidence.reading import read_text
from harness.evidence.store import EvidenceError, write_text
from harness.judge.outside_passes import SECTION
from harness.judge.stored_recording import load_recording
from harness.judge.structure import Difference, compared_outside, differences, structure
from harness.report.compared import compared
from harness.report.compared_runs import Costs
from harness.report.output import say
from harness.spec.loading import document_of


def add(commands: Any) -> None:
    parser = add_command(commands, "snapshot", command, "keep the structure of a recorded job, to compare others with")
    parser.add_argument("directory", metavar="DIR", type=Path, help="what `harness record` wrote")
    parser.add_argument("file", metavar="FILE.yaml", type=Path, help="where it is kept")
    parser.add_argument("--accept", action="store_true", help="write it; without this what would change is shown")


def command(args: argparse.Namespace) -> int:
    """Without --accept as `compare`."""
    recording = load_recording(args.directory)
    if not recording.summaries:
        raise EvidenceError(f"{args.directory}: no rank left evidence, nothing to keep")
    found = structure(recording)
    text = yaml.safe_dump(found, sort_keys=False, width=120, allow_unicode=True)
    if args.accept:
        no_document(args, "--accept")
        write_text(args.file, text)
        say(f"{args.file}: the structure of {args.directory}, to be reviewed and committed")
        return PASSED
    if not args.file.exists():
        args.failed = f"{args.file}: no such file; --accept writes it"
        say(text.rstrip(), args.failed)
        return NOT_JUDGED
    kept = load_snapshot(args.file)
    changed = differences(kept, found)
    answer_structures(args, (args.file, args.directory), changed, ({}, {}), compared_outside(kept, found))
    return BROKEN if changed else PASSED


def answer_structures(
    args: argparse.Namespace,
    of: tuple[Path, Path],
    found: Sequence[Difference],
    cost: tuple[Costs, Costs],
    outside: str,
) -> None:
    """Say in what the structure of two recorded jobs differs."""
    data = {"one": of[0], "other": of[1], "of": "structure", "differences": found, "outside": outside}
    text = "\n".join(compared(str(of[0]), str(of[1]), found, cost, outside))
    answer(args, "comparison", data | {"costs": cost}, text)


def load_snapshot(path: Path) -> Mapping[str, Any]:
    """Raises EvidenceError."""
    try:
        found = document_of(read_text(path))
    except OSError as error:
        raise EvidenceError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise EvidenceError(f"{path}: not a snapshot, nor valid YAML: {error}") from error
    if not isinstance(found, dict) or "ranks" not in found:
        raise EvidenceError(f"{path}: not a snapshot; `harness snapshot DIR {path} --accept` makes one")
    if SECTION not in found:
        remedy = f"look at it again, and keep it by `harness snapshot DIR {path} --accept`"
        raise EvidenceError(f"{path}: of a version that kept nothing of collectives {SECTION}; {remedy}")
    return found
