"""Recordings that are damaged, of another launch, or larger than any job are not read, and are no finding about the job."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from literal_recording import hsdp

from harness.core.cli.exit_codes import NOT_JUDGED, PASSED
from harness.core.evidence.recording import record_file, summary_line
from harness.recording.cli.work.recording_report import exit_code
from harness.recording.judged.stored_recording import STARTED, load_recording


def recorded(directory: Path, changed: Any = None, **told: Any) -> Path:
    """Summaries of an HSDP job on four ranks; `changed` alters what rank 1 left."""
    (directory / "ranks").mkdir(parents=True)
    for rank in range(4):
        line = json.loads(summary_line(hsdp(rank, launch="this")))
        if rank == 1 and changed:
            changed(line["summary"])
        record_file(directory, rank).write_bytes(json.dumps(line).encode() + b"\n")
    (directory / STARTED).write_text(json.dumps({"launch": "this", "command": "train", "code": 0} | told))
    return directory


def test_a_recording_of_one_launch_is_read_whole(tmp_path: Path) -> None:
    recording = load_recording(recorded(tmp_path))
    assert (sorted(recording.summaries), recording.unreadable, exit_code(recording)) == ([0, 1, 2, 3], {}, PASSED)


@pytest.mark.parametrize(
    "changed",
    [
        {"launch": "another"},
        {"world": 10**9},
        {"world": 1},
        {"rank": 10**9},
        {"rank": 2},
        {"rank": -1},
        {"idle": ["0-1000000000"]},
        {"idle": ["0-1000000000:2"]},
    ],
)
def test_what_cannot_be_of_this_job_is_unreadable_and_judges_nothing(changed: dict[str, Any], tmp_path: Path) -> None:
    recording = load_recording(recorded(tmp_path, lambda summary: summary.update(changed)))
    assert (sorted(recording.summaries), list(recording.unreadable)) == ([0, 2, 3], [1])
    assert exit_code(recording) == NOT_JUDGED


def test_without_the_recordings_own_file_ranks_of_two_launches_are_told_apart(tmp_path: Path) -> None:
    (recorded(tmp_path, lambda summary: summary.update(launch="another")) / STARTED).unlink()
    assert list(load_recording(tmp_path).unreadable) == [1]


def test_a_pipe_in_the_place_of_a_record_is_not_waited_for(tmp_path: Path) -> None:
    path = record_file(recorded(tmp_path), 1)
    path.unlink()
    os.mkfifo(path)
    assert list(load_recording(tmp_path).unreadable) == [1]
