"""A recording as profiler traces: what stands in them, and that their reader finds the same groups, steps and phases there."""

from __future__ import annotations

import gzip
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from forked_jobs import TORCHRUN, Main
from json_documents import valid

from harness.core.cli import main
from harness.core.evidence.recording import RankRecord, RecordedStep
from harness.core.evidence.records import Collective, Group, RankEvidence
from harness.core.evidence.step import StepEvidence
from harness.recording.traces.export import trace_of
from harness.recording.traces.job import job_of
from harness.recording.traces.kineto import load_trace
from harness.recording.traces.timeline import timeline_of_records

NOTHING = StepEvidence(0, (), None, None, None, {}, {}, {}, {})


def record(rank: int, *, late: float = 0.0, host: str = "a") -> RankRecord:
    """Two steps of 10 s: a gather that blocks 1 s, a sum that comes `late`, and a send in another thread."""
    calls = []
    for step in (1, 2):
        at = 100.25 + 10 * step
        of = {"dtype": "bfloat16", "step": step}
        calls += [
            Collective("all_gather", (0, 1), "7", bytes=64, phase="forward", seq=step, began=at, blocked=1.0, **of),
            Collective(
                "all_reduce",
                (0, 1),
                "7",
                bytes=8,
                phase="backward",
                seq=step + 2,
                began=at + 4 + late,
                blocked=2 - late,
                **of,
            ),
        ]
    background = {"phase": "background", "step": 0, "seq": 0, "began": 105.0, "blocked": 0.5}
    calls.append(Collective("send", (0, 1), "7", "float32", 16, peer=1 - rank, **background))
    steps = tuple(replace(NOTHING, step=step) for step in (1, 2))
    evidence = RankEvidence(rank, 2, (), (Group("7", (0, 1), "gloo", "dp"),), tuple(calls), steps)
    recorded = tuple(RecordedStep(step, {}, began=100.0 + 10 * step, seconds=10.0) for step in (1, 2))
    return RankRecord(evidence, recorded, ended="ok", steps_seen=2, host=host)


def test_a_trace_has_fields_and_arguments_as_torch_writes_them() -> None:
    one = record(0)
    trace = trace_of(one, one.evidence.collectives)
    assert trace["distributedInfo"]["pg_config"] == [
        {"pg_name": "7", "pg_desc": "dp", "backend_config": "gloo", "pg_size": 2, "ranks": [0, 1]}
    ]
    events = {(e["name"], e["ts"]): e for e in trace["traceEvents"] if e["ph"] == "X"}
    assert all({"ph", "ts", "dur", "pid", "tid", "name", "cat", "args"} <= set(event) for event in events.values())
    gather = events["record_param_comms", 110.25e6]
    assert (gather["dur"], gather["pid"], gather["cat"]) == (1e6, 0, "cpu_op")
    told = {"Collective name": "_allgather_base", "dtype": "BFloat16", "In msg nelems": 16, "Out msg nelems": 32}
    told |= {"Group size": 2, "Process Group Name": "7", "Process Group Ranks": "[0, 1]", "bytes": 64}
    assert told.items() <= gather["args"].items()
    assert events["ProfilerStep#1", 110e6]["dur"] == 10e6
    assert events["backward", 114.25e6]["dur"] == 2e6
    assert events["record_param_comms", 105e6]["tid"] != gather["tid"]


def test_its_reader_finds_the_same_collectives_again(tmp_path: Path) -> None:
    files = []
    for rank in (0, 1):
        one = record(rank)
        files.append(tmp_path / f"rank{rank}.json")
        files[-1].write_text(json.dumps(trace_of(one, one.evidence.collectives)))
    job = job_of([load_trace(file) for file in files])
    assert job.step_numbers == (1, 2)
    seen = [
        (
            c.collective.op,
            c.collective.phase,
            c.collective.step,
            c.collective.bytes,
            c.collective.dtype,
            c.collective.ranks,
        )
        for c in job.ranks[1].calls
    ]
    mine = [(c.op, c.phase, c.step, c.bytes, c.dtype, c.ranks) for c in record(1).evidence.collectives if c.step]
    assert (seen, job.ranks[1].calls_left_out) == (mine, 1)


@pytest.mark.parametrize(("host", "compared"), [("a", 4), ("b", 0)])
def test_who_came_last_is_known_on_one_machine_only(host: str, compared: int) -> None:
    found = timeline_of_records({0: record(0), 1: record(1, late=1.5, host=host)})
    assert found is not None
    assert (found.step, found.compared_collectives) == (2, compared)
    waited = {each.lane: each.waited for each in found.ranks[0]}
    assert waited == {"all_gather over 2": 0.0, "all_reduce over 2": 1.5 if compared else 0.0}
    assert (found.times_last[1], found.caused_waiting.get(1, 0.0)) == ((2, 3.0) if compared else (0, 0.0))


def test_a_recorded_job_is_exported_drawn_and_judged_as_its_traces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], forked_main: Main
) -> None:
    out, script = tmp_path / "out", Path(__file__).parents[2] / "recorded_script.py"
    command = [sys.executable, *TORCHRUN, "2", str(script)]
    assert forked_main(["record", "-o", str(out), "--", *command]) == 0
    capsys.readouterr()
    assert main(["report", str(out), "--as", "chrome"]) == 0
    files = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert [file.name for file in files] == ["rank_00000.json.gz", "rank_00001.json.gz"]
    events = json.loads(gzip.decompress(files[0].read_bytes()))["traceEvents"]
    assert {e["name"] for e in events} >= {"ProfilerStep#1", "forward", "backward", "record_param_comms"}
    assert main(["report", "--json", str(out / "chrome"), "--layout", "dp_shard=2"]) == 0
    document: Any = valid(capsys.readouterr().out, "traces")
    assert {one["check"] for one in document["results"] if one["verdict"] == "PASS"} >= {"collective_order", "exchange"}
    assert main(["report", str(out), "--html", str(tmp_path / "page.html")]) == 0
    assert '<svg class="strips"' in (tmp_path / "page.html").read_text()


def test_forms_that_are_of_something_else_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ranks").mkdir()
    (tmp_path / "recording.json").write_text("{}")
    assert main(["report", str(tmp_path), "--as", "junit"]) == 2
    assert main(["report", str(tmp_path), "--as", "chrome"]) == 2  # nothing to export
    capsys.readouterr()
