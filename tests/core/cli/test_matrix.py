"""`harness matrix`: which part of the cases is run, what a run records, and what is shown of several. No rank is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.core.case.case import Case
from harness.core.cli import main
from harness.core.judge.judgement import Judgement
from harness.core.judge.result import Result, Verdict

FOUR = "cases: {a: {why: a test}, b: {why: a test}, c: {why: a test}, d: {why: a test}}"


@pytest.fixture
def matrix(cases: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    """Runs `harness matrix` where the cases of `broken` fail a check; answers exit code, cases run and what was told."""
    where = cases(FOUR)
    ran: list[str] = []

    def run(*arguments: str, broken: str = "") -> tuple[int, str, str]:
        def judged(case: Case, options: Any) -> Judgement:
            ran.append(case.name)
            verdict = Verdict.FAIL if case.name in broken else Verdict.PASS
            return Judgement(case, Path("x"), (Result("loss", verdict, 1),), None, 1.0)

        monkeypatch.setattr("harness.core.run.matrix.run_case", judged)
        ran.clear()
        capsys.readouterr()
        once = [] if "--again" in arguments else ["--again", "0"]
        code = main(["matrix", "--launcher", "torchrun", "-j", "1", *where, *once, *arguments])
        told = capsys.readouterr()
        return code, "".join(sorted(ran)), told.out + told.err

    return run


def verdicts(text: str) -> dict[str, str]:
    """Of the grid."""
    rows = [line.split() for line in text.splitlines()]
    return {row[0]: row[2] for row in rows if len(row) == 5 and row[-1] == "s"}


def test_a_run_is_recorded_and_reported_as_it_was_printed(matrix: Any, capsys: Any) -> None:
    code, ran, told = matrix(broken="b")
    assert (code, ran) == (1, "abcd")
    assert main(["report", "out"]) == 1
    reported = capsys.readouterr().out
    assert verdicts(reported) == verdicts(told) == {"a": "PASS", "b": "FAIL", "c": "PASS", "d": "PASS"}
    assert "4 cases: 3 PASS, 1 FAIL" in reported


def test_after_so_many_failures_no_other_case_begins_and_the_rest_is_resumed(matrix: Any) -> None:
    code, ran, told = matrix("--max-failures", "1", broken="a")
    assert (code, ran) == (1, "a")
    assert "3 more were not run after 1 failures: --resume runs them" in told.splitlines()
    code, rest, told = matrix("--resume")
    assert (code, rest) == (1, "bcd")
    assert verdicts(told) == {"a": "FAIL", "b": "PASS", "c": "PASS", "d": "PASS"}
    assert matrix("--resume")[:2] == (1, "")  # nothing is left to run


@pytest.mark.parametrize(("times", "ran"), [("0", "abcd"), ("1", "abbcd"), ("2", "abbbcd")])
def test_what_fails_is_made_again(matrix: Any, times: str, ran: str) -> None:
    code, made, told = matrix("--again", times, broken="b")
    assert (code, made) == (1, ran)
    assert (f"fails in {times} of {times}" in told) == (times != "0")


def test_the_last_that_failed_are_run_again(matrix: Any) -> None:
    matrix(broken="bd")
    assert matrix("--last-failed", broken="d")[:2] == (1, "bd")
    assert matrix("--last-failed")[:2] == (0, "d")
    code, ran, told = matrix("--last-failed")
    assert (code, ran, told) == (2, "", "harness: --last-failed: no selected case failed in the last run\n")


def test_shards_run_each_case_once_and_merge(matrix: Any, capsys: Any) -> None:
    parts = [matrix("--shard", f"{part}/3", "--out", f"out{part}")[1] for part in (1, 2, 3)]
    assert sorted("".join(parts)) == ["a", "b", "c", "d"]
    assert main(["report", "out1", "out2", "out3"]) == 0
    assert "4 cases: 4 PASS" in capsys.readouterr().out
    assert main(["report", "out1", "out3"]) == 2
    assert "shard 2/3 is not among these" in capsys.readouterr().out


def test_what_was_cut_short_is_named_and_not_green(matrix: Any, capsys: Any) -> None:
    matrix()
    file = Path("out/verdicts.jsonl")
    file.write_text(file.read_text()[:-5])
    assert main(["report", "out"]) == 2
    told = capsys.readouterr()
    assert "no verdict, its run was cut short" in told.out
    assert told.err == "harness: out/verdicts.jsonl:5: not a whole line of a run, ignored\n"


def test_durations_are_for_shards(matrix: Any) -> None:
    assert matrix("--durations", "x")[2].startswith("harness: --durations needs --shard")
    assert matrix("--shard", "1/2", "--durations", "x")[2].startswith("harness: x: cannot be read")
