"""Several jobs of one command, each with rank numbers of its own: kept apart, and told as that."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from literal_recording import summary, with_changes

from harness.core.case.dims import ParallelDims
from harness.core.cli import main
from harness.core.cli.exit_codes import BROKEN
from harness.core.evidence.recording import RankRecord, record_file, save_record, summary_line
from harness.core.evidence.records import RankEvidence
from harness.core.judge.result import Verdict
from harness.recording import place
from harness.recording.folders import JOB_FILE, job_folders
from harness.recording.judged.anomalies import find_anomalies
from harness.recording.judged.recorded_layout import judge_recording
from harness.recording.judged.stored_recording import Recording, load_recording
from harness.recording.pages.recording_jobs import job_rows
from harness.recording.pages.recording_layout import jobs_report

SCRIPT = str(Path(__file__).parents[1] / "two_jobs_script.py")


def of_job(monkeypatch: pytest.MonkeyPatch, **names: str) -> None:
    for name in (*place.JOB_VARIABLES, "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, text in names.items():
        monkeypatch.setenv(name, text)


def claimed(directory: Path, rank: int) -> str:
    folder = place.claim_folder(directory, rank)
    assert folder is not None
    return str(folder.relative_to(directory))


def test_ranks_of_two_jobs_have_a_folder_each_in_whatever_order_they_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for port, rank in (("1", 0), ("2", 1), ("2", 0), ("1", 1)):
        of_job(monkeypatch, MASTER_PORT=port)
        found.append(claimed(tmp_path, rank))
    assert found == [".", "jobs/2", "jobs/2", "."]


def test_ranks_that_come_back_are_together_in_a_folder_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_job(monkeypatch, REPLICA_GROUP_ID="1", MASTER_PORT="1")
    assert [claimed(tmp_path, rank) for rank in (0, 1, 1, 0)] == [".", ".", "jobs/2", "jobs/2"]


def test_after_a_restart_by_torchrun_a_rank_is_in_its_old_place_though_the_port_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for attempt in ("0", "1"):
        of_job(monkeypatch, TORCHELASTIC_RUN_ID="a", MASTER_PORT=f"1{attempt}", TORCHELASTIC_RESTART_COUNT=attempt)
        found.append(claimed(tmp_path, 0))
    assert found == [".", "."]


@pytest.mark.slow(
    "three real jobs, one killed; test_of_a_rank_that_comes_back_alone_the_others_are_not_missed has literal ranks"
)
def test_a_replica_group_that_is_killed_and_comes_back_is_told(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["record", "-o", str(out), "--", sys.executable, SCRIPT]) == BROKEN
    recording = load_recording(out)
    jobs = [recording, *recording.others]
    assert [job.job for job in jobs] == [f"REPLICA_GROUP_ID={group} MASTER_PORT={29500 + group}" for group in (0, 1, 1)]
    assert [(job.world, sorted(job.summaries), job.summaries[0].progress.ended) for job in jobs] == [
        (1, [0], "ok"),
        (1, [0], ""),
        (1, [0], "ok"),
    ]
    assert len({job.summaries[0].contents.by_step[3] for job in jobs}) == 1
    assert [(odd.label, odd.ranks) for odd in find_anomalies(recording)] == [("ENDED UNHEARD", (0,)), ("REACHED", (0,))]
    rows = [text for _, text in job_rows(recording)]
    assert "it had left, and came back" in rows[3] and "[1-3]" in rows[4]


def stored(directory: Path, jobs: int) -> Recording:
    """Each of two ranks of two, that launcher 10, 11, .. started."""
    for number, folder in zip(range(jobs), job_folders(directory), strict=False):
        (folder / "processes").mkdir(parents=True)
        (folder / "ranks").mkdir()
        (folder / "processes" / JOB_FILE).write_text(f"MASTER_PORT={number}")
        for rank in range(2):
            one = summary(rank, 2, launch="this", ended="" if rank else "ok")
            record_file(folder, rank).write_bytes(summary_line(one))
            told = json.dumps({"host": "h", "pid": 20 + 2 * number + rank, "parent": 10 + number})
            (folder / "processes" / f"rank_{rank:05d}.0").write_text(told)
    (directory / "recording.json").write_text(json.dumps({"launch": "this", "command": "train", "code": 1}))
    (directory / "processes" / "h-11.ends").write_text(json.dumps({1: -9}))
    return load_recording(directory)


def test_each_of_several_jobs_is_judged_by_a_layout_of_its_own_ranks_and_by_no_other(tmp_path: Path) -> None:
    """Two jobs of two ranks, of which the second one is fed the same on both."""
    recording = stored(tmp_path, 2)
    for job, fed in zip(recording.jobs, ((1, 2), (3, 3)), strict=True):
        for rank, one in job.summaries.items():
            left = with_changes(one, fed={1: fed[rank]}, ended="ok", shown=1, steps_seen=1)
            evidence = RankEvidence(rank, 2, parameters=(), groups=(), collectives=(), steps=())
            save_record(record_file(job.directory, rank), left, RankRecord(evidence, (), ended="ok", steps_seen=1))
    both = load_recording(tmp_path)
    found = [
        {one.check: one.verdict for one in judge_recording(job, ParallelDims(dp_replicate=2))[0]} for job in both.jobs
    ]
    assert [one["samples"] for one in found] == [Verdict.PASS, Verdict.FAIL]
    of_all = [judge_recording(job, ParallelDims(dp_replicate=4)) for job in both.jobs]
    assert {one.verdict for results, _ in of_all for one in results} == {Verdict.UNKNOWN}
    lines = jobs_report(
        ParallelDims(dp_replicate=2), [judge_recording(job, ParallelDims(dp_replicate=2)) for job in both.jobs]
    )
    assert lines[0].startswith("FAIL") and [line.split()[:3] for line in lines if line.startswith("  job")] == [
        ["job", "1", "UNKNOWN,"],
        ["job", "2", "FAIL,"],
    ]


def test_what_a_launcher_heard_is_of_the_job_whose_ranks_it_started(tmp_path: Path) -> None:
    recording = stored(tmp_path, 2)
    assert (recording.exits, recording.others[0].exits) == ({}, {1: -9})
    assert load_recording(tmp_path / "jobs" / "2").exits == {1: -9}


def test_of_a_rank_that_comes_back_alone_the_others_are_not_missed(tmp_path: Path) -> None:
    stored(tmp_path, 2)
    os.remove(record_file(tmp_path / "jobs" / "2", 1))
    assert "NO EVIDENCE" not in {one.label for one in find_anomalies(load_recording(tmp_path))}
