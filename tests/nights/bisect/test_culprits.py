"""A night as one command: what changed is searched for once a cause, and what could not be searched for says why."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from literal_nights import nights, run

from harness.core.case.case import Case
from harness.core.cli import main
from harness.core.report import outcome as outcomes
from harness.core.report.outcome import Outcome
from harness.core.run.options import Options
from harness.core.run.verdicts import RecordedRun
from harness.nights.bisect import BisectError, commits, culprits
from harness.nights.bisect.culprits import SearchSettings, find_culprits
from harness.nights.bisect.search import JudgedRevision, SearchResult
from harness.nights.history_text import SeriesChanges, build_series_changes, series_lines
from harness.nights.nights import culprits_by_case

DAY = datetime.date(2026, 3, 5)
CAUSE, OTHER = "HSDP ran as FSDP", "the loss has no mean"
GUILTY = "d7cabfb6c  2024-10-31  replace _flatten (#667)"


def case(name: str, verdict: str = "FAIL", cause: str = CAUSE, ranks: int = 4, **more: Any) -> Outcome:
    return Outcome(name, verdict, ranks, cause=cause if verdict == "FAIL" else "", checks={"loss": "PASS"}, **more)


def where(*names: str, **changes: Any) -> SearchSettings:
    named = {name: Case(name, "a test") for name in names}
    return dataclasses.replace(SearchSettings(Path("/titan"), named, Options(), math.inf, lambda line: None), **changes)


def found_at(earlier: str, later: str, *, fixed: bool = False) -> SearchResult:
    judged = (JudgedRevision(earlier, "", "", "good"), JudgedRevision(later, "", "", "bad"))
    return SearchResult(judged[1], judged[0], judged, (), 1.0, fixed=fixed)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What is searched for, (case, good, bad); HSDP breaks at "x", other causes at no commit that HSDP breaks at."""
    calls: list[tuple[str, ...]] = []

    def bisect(
        repo: Path, good: str, bad: str, cases: Sequence[Case], options: Options, tell: Any, **_: Any
    ) -> SearchResult:
        calls.append((cases[0].name, good, bad))
        if cases[0].name == "tp" and (good, bad) == ("w", "x"):
            raise BisectError("the bad commit fails no check that the good one keeps")
        fixed = int(good[1:] or 0) > int(bad[1:] or 0)
        return found_at("w", "x", fixed=fixed) if cases[0].name != "tp" else found_at("y", "z")

    monkeypatch.setattr(commits, "bisect_commits", bisect)
    monkeypatch.setattr(culprits, "bisect_report", lambda found: "a report")
    return calls


def of(*runs: RecordedRun) -> SeriesChanges:
    return build_series_changes(nights(*runs), (), DAY)


def test_cases_of_one_cause_are_searched_for_once_by_the_one_of_fewest_ranks(asked: list[tuple[str, ...]]) -> None:
    names = ("hsdp_2x8", "hsdp_2x2")
    good = run(1, *(case(name, "PASS") for name in names))
    one = of(good, run(2, case("hsdp_2x8", ranks=16), case("hsdp_2x2")))
    (found,) = find_culprits(one, where(*names))
    assert asked == [("hsdp_2x2", "c1", "c2")]
    assert (found.cases, found.name, found.cause) == (("hsdp_2x2", "hsdp_2x8"), "x", CAUSE)


def test_another_cause_is_first_tried_on_the_commit_that_was_found(asked: list[tuple[str, ...]]) -> None:
    names = ("hsdp", "cp", "tp")
    good = run(1, *(case(name, "PASS") for name in names))
    one = of(good, run(2, case("hsdp"), case("cp", cause="another"), case("tp", cause=OTHER)))
    found = find_culprits(one, where(*names))
    assert asked == [("hsdp", "c1", "c2"), ("cp", "w", "x"), ("tp", "w", "x"), ("tp", "c1", "c2")]
    assert [one.name for one in found] == ["x", "x", "z"]


def test_the_last_night_that_held_is_searched_from_though_later_ones_were_not_judged(
    asked: list[tuple[str, ...]],
) -> None:
    row = [run(1, case("hsdp", "PASS")), run(2, case("hsdp", "ERROR")), run(3, case("hsdp"))]
    find_culprits(of(*row), where("hsdp"))
    assert asked == [("hsdp", "c1", "c3")]


def test_what_was_fixed_is_searched_for_after_what_broke_and_what_was_always_broken_is_not(
    asked: list[tuple[str, ...]],
) -> None:
    row = [run(1, case("a"), case("b", "PASS"), case("c")), run(2, case("a", "PASS"), case("b"), case("c"))]
    found = find_culprits(of(*row), where("a", "b", "c"))
    assert asked == [("b", "c1", "c2"), ("a", "c2", "c1")]
    assert [(one.cases, one.fixed, one.cause) for one in found] == [(("b",), False, CAUSE), (("a",), True, CAUSE)]
    shown = build_series_changes(nights(*row), (), DAY, culprits_by_case(found))
    assert "  a: broken until night 1, commit c1, torch 2.13.0; fixed by x" in series_lines(shown)


@pytest.mark.parametrize(
    ("begins", "changes", "problem"),
    [
        (
            {"commit": "c1", "torch": "2.14"},
            {},
            "both nights are of commit c1; also changed: torch 2.13.0, now 2.14",
        ),
        ({"commit": ""}, {}, "the commit of one of the two nights is not known"),
        ({"commit": "c2-dirty"}, {}, "c2-dirty: sources were changed since the commit, it is not known to what"),
        ({}, {"repo": None}, "no repository of the trainer was named: --repo"),
        ({}, {"cases": {}}, "hsdp is not among the cases that are here"),
        ({}, {"until": 0.0}, "time was up before it was begun"),
    ],
)
def test_what_is_not_searched_for_says_why(
    asked: list[tuple[str, ...]], begins: dict[str, Any], changes: dict[str, Any], problem: str
) -> None:
    one = of(run(1, case("hsdp", "PASS")), run(2, case("hsdp"), **begins))
    (found,) = find_culprits(one, where("hsdp", **changes))
    assert (found.problem, found.name, asked) == (problem, "", [])


def test_a_search_that_fails_is_told_with_what_else_changed_and_the_next_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def bisect(repo: Path, good: str, bad: str, cases: Sequence[Case], *_: Any, **__: Any) -> SearchResult:
        if cases[0].name == "a":
            raise BisectError("the bad commit fails no check that the good one keeps")
        raise OSError("no space left")

    monkeypatch.setattr(commits, "bisect_commits", bisect)
    good = run(1, case("a", "PASS"), case("b", "PASS"))
    one = of(good, run(2, case("a"), case("b", cause=OTHER), torch="2.14"))
    problems = [found.problem for found in find_culprits(one, where("a", "b"))]
    assert problems[0] == (
        "the bad commit fails no check that the good one keeps; also changed: torch 2.13.0, now 2.14"
    )
    assert "OSError('no space left')" in problems[1]


def test_a_night_of_an_earlier_commit_blames_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """It went back behind what fixed it."""
    monkeypatch.setattr(culprits, "bisect_report", lambda found: "a report")
    monkeypatch.setattr(commits, "bisect_commits", lambda *_, **__: found_at("w", "x", fixed=True))
    (found,) = find_culprits(of(run(1, case("hsdp", "PASS")), run(2, case("hsdp"))), where("hsdp"))
    assert (found.name, found.problem, found.report) == (
        "",
        "the later night is of an earlier commit, or of one on another branch",
        "a report",
    )


def test_commits_that_hide_it_and_time_that_was_up_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(culprits, "bisect_report", lambda found: "")
    good = JudgedRevision("a" * 40, "", "", "good")
    hidden = SearchResult(None, good, (good,), ("b", "c"), 1.0)
    late = SearchResult(None, good, (good,), (), 1.0, unfinished="4 commits left after it, about 2 steps")
    said = []
    for found in (hidden, late):
        monkeypatch.setattr(commits, "bisect_commits", lambda *_, found=found, **__: found)
        one = of(run(1, case("hsdp", "PASS")), run(2, case("hsdp")))
        said += [str(each) for each in find_culprits(one, where("hsdp", until=time.monotonic() + 60))]
    assert said == [
        "not found: commits that could not be judged hide it: b, c",
        "not found: time was up: 4 commits left after it, about 2 steps, it is one of them",
    ]


# ---- the command


def write(folder: Path, one: RecordedRun) -> Path:
    folder.mkdir(parents=True)
    rows = [{"run": one.run, "begins": one.begins}]
    rows += [{"run": one.run, "ended": outcomes.outcome_to_json(done)} for done in one.outcomes.values()]
    (folder / "verdicts.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return folder


def test_a_night_is_kept_compared_searched_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def bisect(*_: Any, **__: Any) -> SearchResult:
        return dataclasses.replace(found_at("e1fbcedbc", "d7cabfb6c"), seconds=2.0)

    monkeypatch.setattr(commits, "bisect_commits", bisect)
    monkeypatch.setattr(
        JudgedRevision, "name", property(lambda one: GUILTY if one.commit == "d7cabfb6c" else one.commit)
    )
    names = ("hsdp_2x2_valid", "fsdp_4_valid")
    write(tmp_path / "nights" / "2026-03-04", run(1, *(case(name, "PASS") for name in names)))
    parts = [
        write(tmp_path / "a", run(2, case(names[0]), shard="1/2")),
        write(tmp_path / "b", run(3, case(names[1], "PASS"), shard="2/2", commit="c2")),
    ]
    typed = ["nightly", str(tmp_path / "nights"), "--of", *map(str, parts), "--trainer", "torchtitan"]
    typed += ["--repo", "/titan", "--out", str(tmp_path / "out")]
    assert main(typed) == 1
    shown = capsys.readouterr().out
    assert "NEWLY BROKEN\n  hsdp_2x2_valid\n    HSDP ran as FSDP\n" in shown
    assert f"    since   {GUILTY}\n" in shown and "harness bisect" not in shown
    assert f"Since {GUILTY}".replace("  ", " ") in (tmp_path / "out" / "page.html").read_text().replace("  ", " ")
    assert "Since d7cabfb6c 2024-10-31 replace" in (tmp_path / "out" / "summary.md").read_text()
    assert main(["report", str(tmp_path / "nights")]) == 1
    assert f"    since   {GUILTY}\n" in capsys.readouterr().out
    assert main(typed) == 1, "the same shards are the same night"
    assert "2 nights" in capsys.readouterr().out


def test_a_night_in_which_everything_is_skipped_is_not_judged(tmp_path: Path) -> None:
    part = write(tmp_path / "a", run(1, case("hsdp_2x2_valid", "SKIPPED", reason="no GPU")))
    typed = ["nightly", str(tmp_path / "nights"), "--of", str(part), "--trainer", "torchtitan"]
    assert main([*typed, "--out", str(tmp_path / "out")]) == 2


def test_a_commit_needs_its_repository(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    typed = ["nightly", str(tmp_path), "--trainer", "torchtitan", "--commit", "abc", "--out", str(tmp_path / "out")]
    assert main(typed) == 2
    assert "--commit needs --repo" in capsys.readouterr().err
