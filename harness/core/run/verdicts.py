"""The record of runs: OUT/verdicts.jsonl, a line for each run that begins and for each case that came to its end.

Whole lines are appended, each on disk before the next case is counted, and none is ever changed. So a run that was killed
can be resumed, runs at the same time may share OUT, and the file remembers how long cases took. An incomplete line is
reported and ignored; its case then has no verdict.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.core import trainers
from harness.core.case import case as requested
from harness.core.case.case import Case
from harness.core.case.repository import repository_name_here
from harness.core.case.trainer_spec import TrainerSpec
from harness.core.evidence.reading import open_regular_file, parse_json, read_bytes
from harness.core.evidence.store import EvidenceError
from harness.core.report import outcome as outcomes
from harness.core.report.outcome import Outcome
from harness.core.run.communication import device_text
from harness.core.run.launches import commit_of_trainer
from harness.core.run.options import Options
from harness.core.run.sources import digest_of_adapter, digest_of_sources

VERDICTS_FILE = "verdicts.jsonl"
MAX_FILE_BYTES = 128_000_000  # bytes
SHARD_PATTERN = re.compile(r"[1-9]\d{0,5}/[1-9]\d{0,5}")
KEYS_THAT_MUST_AGREE = ("trainer", "device", "launcher", "torch", "commit", "sources", "adapter", "shard")
"""Keys of a run's first line in which it must agree with the run that it resumes."""


@dataclass(frozen=True)
class RecordedRun:
    """One run, as a file of verdicts records it."""

    run: str
    """Its id, which begins with date and time."""
    file: Path
    """File that records it."""
    begins: dict[str, Any]
    """Its first line, by key as make_beginning returns it; `cases` has a digest by name."""
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    """Outcomes by case; the last one if a case ended more than once."""
    ended_twice: list[str] = field(default_factory=list)
    """Names of cases that ended more than once."""

    @property
    def trainer(self) -> str:
        """Return the trainer's name, and the last part of its source's path: a clone may lie anywhere."""
        return self.begins.get("name") or short_name(self.begins.get("trainer", ""))

    @property
    def missing_cases(self) -> list[str]:
        """Return the names of the cases that began with the run and never ended."""
        return [name for name in self.begins["cases"] if name not in self.outcomes]


def name_of_trainer(spec: str) -> str:
    """Return the trainer's name, and the last part of its source's path: equal wherever its adapter and its source lie."""
    return str(TrainerSpec(trainers.load_adapter(spec).name, Path(TrainerSpec.parse(spec).source).name))


def short_name(spec: str) -> str:
    """Return the trainer's name without the folders of its adapter and its source. It loads no adapter."""
    trainer = TrainerSpec.parse(spec)
    return str(TrainerSpec(Path(trainer.name).stem if trainer.is_file else trainer.name, Path(trainer.source).name))


# ---- reading


def read_verdicts(path: Path) -> tuple[list[RecordedRun], list[str]]:
    """Return the runs of a file in the order of beginning, and a sentence on each line that is not a whole line of a run.

    Raises EvidenceError if the file cannot be read.
    """
    runs: dict[str, RecordedRun] = {}
    unread: list[str] = []
    try:
        lines = read_bytes(path, MAX_FILE_BYTES).split(b"\n")
    except OSError as error:
        raise EvidenceError(f"{path}: cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        if line and not _add_line(line, runs, path):
            unread.append(f"{path}:{number}: not a whole line of a run, ignored")
    return list(runs.values()), unread


def _add_line(line: bytes, runs: dict[str, RecordedRun], path: Path) -> bool:
    """Add what a line records to the runs; return False, and add nothing, if it is no line of a run.

    A case that ended before is noted in `ended_twice`, and its last outcome counts.
    """
    try:
        value = parse_json(line)
        if b"\\ud" in line.lower():
            json.dumps(
                value, ensure_ascii=False
            ).encode()  # ValueError for half of a surrogate pair, which no file can hold
        if "begins" in value:
            begins = value["begins"]
            if not all(isinstance(part, str) for name, part in begins.items() if name != "cases" and part is not None):
                return False
            if not SHARD_PATTERN.fullmatch(begins.get("shard") or "1/1"):
                return False
            runs[value["run"]] = RecordedRun(
                value["run"], path, {"shard": "", **begins, "cases": dict(begins["cases"])}
            )
            return True
        run = runs[value["run"]]
        outcome = outcomes.outcome_from_json(value["ended"])
    except (ValueError, TypeError, KeyError, AttributeError):
        return False
    if outcome.case in run.outcomes:
        run.ended_twice.append(outcome.case)
    run.outcomes[outcome.case] = outcome
    return True


def verdicts_file_in(out: Path) -> Path | None:
    """Return the file of verdicts in a folder, or the path itself if it is such a file; None if nothing was recorded."""
    file = out / VERDICTS_FILE if out.is_dir() else out
    return file if file.suffix == ".jsonl" and file.exists() else None


def last_run(out: Path) -> tuple[RecordedRun, list[str]]:
    """Return the run that began last, and a sentence on each line that could not be read.

    Raises EvidenceError if there is no run.
    """
    file = verdicts_file_in(out)
    runs, unread = read_verdicts(file) if file else ([], [])
    if not runs:
        raise EvidenceError(
            f"{out / VERDICTS_FILE}: no run is recorded there; `harness matrix` records one in its --out"
        )
    return runs[-1], unread


# ---- writing


class RunRecord:
    """The record of one run in OUT/verdicts.jsonl, to which any thread may add outcomes."""

    def __init__(self, out: Path, run: str) -> None:
        self.file = out / VERDICTS_FILE
        self.run = run

    def append_outcome(self, outcome: Outcome) -> None:
        append_lines(self.file, {"run": self.run, "ended": outcomes.outcome_to_json(outcome)})


def begin_record(cases: Sequence[Case], options: Options, shard: str) -> RunRecord:
    """Append the first line of a new run to OUT/verdicts.jsonl, and return its record.

    Raises EvidenceError if it cannot be written.
    """
    record = RunRecord(options.out, f"{datetime.now(UTC):%Y%m%dT%H%M%S.%f}-{uuid.uuid4().hex[:6]}")
    append_lines(record.file, {"run": record.run, "begins": make_beginning(cases, options, shard)})
    return record


def resume_record(
    cases: Sequence[Case], options: Options, shard: str | None
) -> tuple[RunRecord, RecordedRun, list[str]]:
    """Return the record of the last run in OUT, to go on with, that run, and a sentence on each line that could not be
    read.

    Raises EvidenceError if it had another trainer, device, commit or other thing of KEYS_THAT_MUST_AGREE, or cases that
    are not selected or were changed since. shard: None for that of the run.
    """
    run, unread = last_run(options.out)
    begins_now = make_beginning(cases, options, run.begins["shard"] if shard is None else shard)
    differing_keys = [name for name in KEYS_THAT_MUST_AGREE if (run.begins.get(name) or "") != begins_now[name]]
    if differing_keys:
        differences_text = "; ".join(
            f"{name} {run.begins.get(name) or 'none'}, now {begins_now[name] or 'none'}" for name in differing_keys
        )
        raise EvidenceError(f"--resume: the last run in {options.out} was another one: {differences_text}")
    if changed := [name for name, digest in run.begins["cases"].items() if begins_now["cases"].get(name) != digest]:
        raise EvidenceError(
            f"--resume: the last run in {options.out} had cases that are not selected now, or were changed since: "
            + _some_names(changed)
        )
    return RunRecord(options.out, run.run), run, unread


def _some_names(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def make_beginning(cases: Sequence[Case], options: Options, shard: str) -> dict[str, Any]:
    """Return the first line of a run, by key: trainer, device, versions, digests of its cases, and where and when it
    began."""
    return {
        "began": f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
        "machine": platform.node(),
        "trainer": options.trainer,
        "name": name_of_trainer(options.trainer),
        "repository": repository_name_here(),
        "device": device_text(options),
        "launcher": options.launcher,
        "torch": importlib.metadata.version("torch"),
        "commit": commit_of_trainer(options.trainer),
        "sources": digest_of_sources()[:12],
        "adapter": digest_of_adapter(options.trainer),
        "shard": shard,
        "cases": {case.name: _digest_of_case(case) for case in cases},
    }


def _digest_of_case(case: Case) -> str:
    """Return twelve digits of what a case requests, the same wherever it is written."""
    value = {name: part for name, part in requested.to_json(case).items() if name != "file"}
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def refuse_other_lines(file: Path, key: str) -> None:
    """Raise EvidenceError for a file that is there and does not begin as ours do, with an object whose first key is
    `key`."""
    begins = f'{{"{key}": '.encode()
    try:
        with open_regular_file(file) as file_handle:
            start = file_handle.read(len(begins))
    except FileNotFoundError:
        return
    except OSError as error:
        raise EvidenceError(f"{file}: cannot be read: {error.strerror}; choose another --out") from error
    if not begins.startswith(start):
        raise EvidenceError(f"{file}: is there, and this harness did not write it; choose another --out")


def append_lines(file: Path, *values: dict[str, Any]) -> None:
    """Append a line of JSON for each value, at least one; all are on disk when this returns. A line that was cut short
    is ended before.

    Raises EvidenceError if the file cannot be written, or was not written by this harness.
    """
    refuse_other_lines(file, next(iter(values[0])))
    line = b"".join(json.dumps(value).encode() + b"\n" for value in values)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "ab+", buffering=0) as file_handle:
            fcntl.flock(file_handle, fcntl.LOCK_EX)
            end = file_handle.seek(0, os.SEEK_END)
            if end and os.pread(file_handle.fileno(), 1, end - 1) != b"\n":
                line = b"\n" + line
            while line:
                line = line[file_handle.write(line) :]
            os.fsync(file_handle.fileno())
    except OSError as error:
        raise EvidenceError(f"{file}: cannot be written: {error.strerror}; choose another --out") from error
