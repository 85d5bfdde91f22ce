"""The record of a run: nothing that ended is lost or counted twice, whatever cut it short."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from harness.core.case.case import Case
from harness.core.evidence.store import EvidenceError
from harness.core.report.outcome import Outcome
from harness.core.run import verdicts
from harness.core.run.options import Options
from harness.core.run.verdicts import RecordedRun, append_lines, begin_record, last_run, read_verdicts, resume_record
from harness.nights.merged import find_problems, merge_outcomes

CASES = [Case(name, "a test") for name in ("first", "second", "third")]
PASSED, FAILED = (
    Outcome("first", "PASS", 2, 1.5, checks={"loss": "PASS"}),
    Outcome("second", "FAIL", report="FAIL second"),
)


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return Options(out=tmp_path / "out")


def test_what_ended_is_read_as_it_was_written_and_what_did_not_is_missing(options: Options) -> None:
    record = begin_record(CASES, options, "1/2")
    record.append_outcome(PASSED)
    record.append_outcome(FAILED)
    run, unread = last_run(options.out)
    assert (run.outcomes, run.missing_cases, unread) == ({"first": PASSED, "second": FAILED}, ["third"], [])
    assert (run.begins["shard"], run.begins["trainer"]) == ("1/2", "llama3")


def test_a_line_that_was_cut_short_is_told_and_ignored_and_the_next_is_whole(options: Options) -> None:
    record = begin_record(CASES, options, "")
    record.append_outcome(PASSED)
    os.truncate(record.file, record.file.stat().st_size - 20)
    assert last_run(options.out)[0].missing_cases == ["first", "second", "third"]
    record.append_outcome(FAILED)
    run, unread = last_run(options.out)
    assert (list(run.outcomes), unread) == (["second"], [f"{record.file}:2: not a whole line of a run, ignored"])


@pytest.mark.parametrize(
    "line", ["[]", "7", '{"run": "x"}', '{"run": "x", "begins": {}}', '{"run": "x", "ended": {}}', "\0\0"]
)
def test_a_line_that_is_of_no_run_is_told_and_ignored(options: Options, line: str) -> None:
    record = begin_record(CASES, options, "")
    with open(record.file, "a") as file:
        file.write(line + "\n")
    record.append_outcome(PASSED)
    run, unread = last_run(options.out)
    assert (list(run.outcomes), len(unread)) == (["first"], 1)


def test_many_writers_of_one_file_leave_whole_lines(tmp_path: Path) -> None:
    file = tmp_path / "verdicts.jsonl"

    def write(number: int) -> None:
        for turn in range(20):
            append_lines(file, {"writer": number, "turn": turn, "text": "x" * 20_000})

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert sorted((one["writer"], one["turn"]) for one in found) == [(n, t) for n in range(8) for t in range(20)]


def test_a_run_that_is_resumed_goes_on_with_its_cases_and_outcomes(options: Options) -> None:
    begin_record(CASES[:2], options, "1/2").append_outcome(PASSED)
    record, run, _ = resume_record(CASES, options, None)
    record.append_outcome(FAILED)
    run, _ = last_run(options.out)
    assert (len(read_verdicts(record.file)[0]), list(run.outcomes), run.missing_cases, run.ended_twice) == (
        1,
        ["first", "second"],
        [],
        [],
    )


def test_only_what_would_be_the_same_run_is_resumed(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EvidenceError, match="verdicts.jsonl: no run is recorded there"):
        resume_record(CASES, options, None)
    begin_record(CASES, options, "1/2")
    with pytest.raises(EvidenceError, match="was another one: device cpu, now cuda; shard 1/2, now 2/2"):
        resume_record(CASES, replace(options, device="cuda"), "2/2")
    changed = [*CASES[:2], Case("third", "a test", runs=2)]
    with pytest.raises(EvidenceError, match="not selected now, or were changed since: third"):
        resume_record(changed, options, None)
    monkeypatch.setattr(verdicts, "digest_of_sources", lambda: "0123456789abcdef")
    with pytest.raises(EvidenceError, match="was another one: sources [0-9a-f]{12}, now 0123456789ab"):
        resume_record(CASES, options, None)


# ---- several as one


def run_of(run: str, cases: str, *done: Outcome, shard: str = "", trainer: str = "llama3") -> RecordedRun:
    begins = {"cases": dict.fromkeys(cases.split(), ""), "shard": shard, "trainer": trainer}
    return RecordedRun(run, Path(f"{run}/verdicts.jsonl"), begins, {one.case: one for one in done})


def test_merged_shards_lack_nothing_and_have_nothing_twice() -> None:
    shards = [run_of("a", "second", FAILED, shard="2/2"), run_of("b", "first", PASSED, shard="1/2")]
    assert (merge_outcomes(shards), find_problems(shards)) == ([FAILED, PASSED], ([], []))


def test_what_is_lacking_among_merged_shards_is_named() -> None:
    shards = [run_of("a", "first second", PASSED, shard="1/3"), run_of("b", "third", shard="3/3")]
    assert find_problems(shards)[0] == [
        "second: no verdict, its run was cut short",
        "third: no verdict, its run was cut short",
        "shard 2/3 is not among these",
    ]


def test_a_case_that_ended_in_two_runs_counts_once_with_its_last_outcome() -> None:
    again = replace(PASSED, verdict="FAIL")
    runs = [run_of("2", "first", again), run_of("1", "first second", PASSED, FAILED)]
    assert merge_outcomes(runs) == [again, FAILED]
    assert find_problems(runs) == ([], ["first: ended 2 times, the last counts"])


def test_runs_of_different_trainers_are_not_merged() -> None:
    runs = [run_of("1", "first", PASSED), run_of("2", "first", PASSED, trainer="mine.py")]
    with pytest.raises(ValueError, match="1/verdicts.jsonl and 2/verdicts.jsonl are of another trainer"):
        merge_outcomes(runs)
