"""Bisecting, over a repository of a dozen commits of one file that says how a run of it ends."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.core.case.case import Case
from harness.core.case.dims import ParallelDims
from harness.core.judge.finding import Finding
from harness.core.judge.judgement import Judgement
from harness.core.judge.result import Result, Verdict, diagnosis_of_one_cause
from harness.core.run.options import Options, Unsupported
from harness.core.run.rank_main import started_file
from harness.nights.bisect import BisectError, checkouts, side_by_side
from harness.nights.bisect.commits import bisect_commits
from harness.nights.bisect.search import JudgedRevision, SearchResult

CASE = Case("one", "a test", ParallelDims(dp_shard=2))


class Toy:
    name = "toy"
    files = ("/state",)

    def __init__(self, where: str = "") -> None:
        self.where = where

    def of(self, where: str) -> Toy:
        return Toy(where)


def judged(case: Case, options: Options) -> Judgement:
    """What the file `state` says: checks that fail, "raises" before the first step, "unsupported", or "interrupt".

    It leaves bytecode as a trainer does, and must not meet that of another commit.
    """
    checkout = Path(options.trainer.partition("@")[2])
    number, *said = (checkout / "state").read_text().split()
    bytecode = checkout / "__pycache__" / "state.pyc"
    bytecode.parent.mkdir(exist_ok=True)
    assert not bytecode.exists() or bytecode.read_text() == number
    bytecode.write_text(number)
    if "unsupported" in said:
        raise Unsupported("torchtitan is not installed")
    if "interrupt" in said:
        raise KeyboardInterrupt
    folder = options.out / f"{case.name}+toy"
    folder.mkdir(parents=True)
    for rank in range(0 if "raises" in said else 2):
        started_file(folder / "run", rank).touch()
    broken = ["completed"] if "raises" in said else said
    died = (
        (Finding.at(int(number) % 2, "exit code 0", f"raised: {said[-1]}", kind="process"),) if broken != said else ()
    )
    results = tuple(Result(check, Verdict.FAIL, findings=died) for check in broken) or (Result("loss", Verdict.PASS),)
    cause = (
        f"rank {int(number) % 2} raised: {said[-1]}" if "raises" in said else f"{' and '.join(said)} broke {case.name}"
    )
    diagnosis = diagnosis_of_one_cause(cause) if said else None
    return Judgement(case, folder, results, diagnosis, 0.0)


def git(repo: Path, *arguments: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    return subprocess.run(["git", "-C", str(repo), *who, *arguments], check=True, capture_output=True, text=True).stdout


def repository(folder: Path, states: list[str]) -> Path:
    if not (folder / ".git").exists():
        git(folder, "init", "--quiet", "-b", "main")
    for number, state in enumerate(states):
        (folder / "state").write_text(f"{number} {state}")
        (folder / "large").write_bytes(b"not needed")
        git(folder, "add", ".")
        git(folder, "commit", "--quiet", "-m", f"commit {number}")
    return folder


def search(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    states: list[str],
    cases: Sequence[Case] = (CASE,),
    *,
    good: str = "",
    bad: str = "HEAD",
    until: float = math.inf,
    run_case: Callable[[Case, Options], Judgement] = judged,
    **how: Any,
) -> tuple[SearchResult, list[str]]:
    (tmp_path / "repo").mkdir(parents=True)
    repo = repository(tmp_path / "repo", states)
    monkeypatch.setattr(checkouts, "run_case", run_case)
    monkeypatch.setattr(checkouts.trainers, "load_adapter", lambda spec: Toy(spec.partition("@")[2]))
    told: list[str] = []
    options = Options(out=tmp_path / "out", trainer="toy", **how)
    good = good or f"HEAD~{len(states) - 1}"
    return bisect_commits(repo, good, bad, cases, options, told.append, until=until), told


def test_the_first_commit_that_breaks_the_check_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, told = search(tmp_path, monkeypatch, [""] * 5 + ["traffic"] * 6)
    assert found.first is not None and found.before is not None
    assert (found.first.subject, found.before.subject) == ("commit 5", "commit 4")
    assert found.first.broken == {("one", "traffic")}
    assert found.first.folders["one"].is_dir()
    assert "commits left after it, about" in told[2]


def test_a_fault_that_is_requested_is_made_at_every_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str | None] = []

    def with_fault(case: Case, options: Options) -> Judgement:
        made.append(options.fault)
        return judged(case, options)

    found, _ = search(tmp_path, monkeypatch, ["", "", "loss"], run_case=with_fault, fault="faults.py:an_option")
    assert found.first is not None and found.first.subject == "commit 2"
    assert made == ["faults.py:an_option"] * 3


def test_each_case_that_the_commit_breaks_has_its_diagnosis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "load_trial", lambda folder: folder)
    monkeypatch.setattr(side_by_side, "first_step_facts", lambda trial: {"it shards over": trial.name})
    cases = [CASE, dataclasses.replace(CASE, name="two")]
    found, _ = search(tmp_path, monkeypatch, [""] * 2 + ["traffic"] * 3, cases)
    assert found.first is not None and found.before is not None
    lines = side_by_side.bisect_report(found).splitlines()
    assert lines[1:6] == [
        "  breaks          traffic of one",
        "  diagnosis       traffic broke one",
        "  breaks          traffic of two",
        "  diagnosis       traffic broke two",
        f"  last good       {found.before.name}",
    ]
    assert [line.split()[:3] for line in lines if " one+toy" in line or " two+toy" in line] == [
        ["it", "shards", "over"],
        ["it", "shards", "over"],
    ]


def test_a_cause_that_was_there_before_the_commit_is_said_to_be_older(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = JudgedRevision("a" * 40, "", "", "good", frozenset({("one", "loss")}), {"one": "the same"})
    bad = JudgedRevision("b" * 40, "", "", "bad", frozenset({("one", "loss"), ("one", "traffic")}), {"one": "the same"})
    monkeypatch.setattr(side_by_side, "_facts_table", lambda *sides: [])
    text = side_by_side.bisect_report(SearchResult(bad, good, (good, bad), (), 0.0))
    assert "breaks          traffic of one\n  diagnosis       the same (so it was before: look at the checks)" in text


def test_git_is_understood_whatever_language_the_user_speaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    monkeypatch.setenv("LANGUAGE", "de")
    found, _ = search(tmp_path, monkeypatch, [""] * 3 + ["traffic"] * 3)
    assert found.first is not None and found.first.subject == "commit 3"


def test_a_check_that_the_good_commit_breaks_too_is_no_clue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = search(tmp_path, monkeypatch, ["loss"] * 3 + [""] * 2 + ["loss traffic"] * 4)
    assert found.first is not None and found.first.subject == "commit 5"


def test_what_raises_before_its_first_step_is_skipped_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _ = search(tmp_path, monkeypatch, [""] * 2 + ["raises"] + [""] * 2 + ["traffic"] * 4)
    assert found.first is not None and found.first.subject == "commit 5"


def test_where_the_bad_commit_does_not_start_the_first_that_ends_with_its_words_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = [*[""] * 3, "loss", *["raises"] * 2, "unsupported", *["raises"] * 4]
    found, _ = search(tmp_path, monkeypatch, states)
    assert found.first is not None and found.before is not None
    assert (found.first.subject, found.before.subject) == ("commit 4", "commit 3")
    assert side_by_side.bisect_report(found).splitlines()[1:3] == [
        "  breaks          start of one",
        "  diagnosis       rank 0 raised: raises",
    ]


def test_what_does_not_start_for_another_reason_is_neither_good_nor_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _ = search(tmp_path, monkeypatch, ["", "raises TypeError", "raises KeyError", "raises KeyError"])
    assert found.first is None
    assert [one.subject for one in found.judged if one.verdict == "skip"] == ["commit 1"]


def test_where_the_good_commit_does_not_start_nothing_is_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        BisectError, match="the good commit .* cannot be judged: one, before its first step: rank 0 raised"
    ):
        search(tmp_path, monkeypatch, ["raises", "", "loss"])


def test_commits_that_cannot_be_judged_hide_the_first_bad_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = search(tmp_path, monkeypatch, ["", "raises", "unsupported", "loss", "traffic"])
    assert found.first is None
    assert sorted(name.rpartition("  ")[2] for name in found.candidates) == [f"commit {n}" for n in range(1, 5)]
    assert {one.subject: one.problem for one in found.judged if one.verdict == "skip"} == {
        "commit 1": "one, before its first step: rank 1 raised: raises",
        "commit 2": "one: torchtitan is not installed",
        "commit 3": "fails other checks than the bad one: loss",
    }
    text = side_by_side.bisect_report(found)
    assert text.startswith("the first bad commit is one of these")
    assert "torchtitan is not installed" in text


def test_two_commits_that_are_judged_alike_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BisectError, match=r"fails no check that the good one keeps \(broken on both sides: loss\)"):
        search(tmp_path, monkeypatch, ["loss", "", "loss"])


def test_a_commit_that_is_not_there_is_refused(tmp_path: Path) -> None:
    repo = repository(tmp_path, ["", ""])
    with pytest.raises(BisectError, match="no commit 'nonsense' there"):
        bisect_commits(repo, "nonsense", "HEAD", [CASE], Options(trainer="torchtitan"), print)


def test_a_trainer_without_other_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BisectError, match="trainer transformers has no other sources"):
        bisect_commits(tmp_path, "A", "B", [CASE], Options(trainer="transformers"), print)


def test_what_fixed_it_is_found_where_the_good_commit_is_the_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_by_side, "_facts_table", lambda *sides: [])
    states = ["traffic", "raises", *["traffic"] * 4, *[""] * 5]
    found, _ = search(tmp_path, monkeypatch, states, good="HEAD", bad="HEAD~10")
    assert found.fixed and found.first is not None and found.before is not None
    assert (found.first.subject, found.before.subject) == ("commit 6", "commit 5")
    assert side_by_side.bisect_report(found).splitlines()[:4] == [
        f"first good commit {found.first.name}",
        "  fixes           traffic of one",
        "  it was          traffic broke one",
        f"  last bad        {found.before.name}",
    ]


def test_commits_of_two_branches_are_searched_from_where_they_parted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkouts, "run_case", judged)
    monkeypatch.setattr(checkouts.trainers, "load_adapter", lambda spec: Toy(spec.partition("@")[2]))
    (tmp_path / "repo").mkdir()
    repo = repository(tmp_path / "repo", ["", ""])
    git(repo, "checkout", "--quiet", "-b", "other")
    repository(repo, ["", "traffic", "traffic"])
    git(repo, "checkout", "--quiet", "main")
    (repo / "state").write_text("9 ")
    git(repo, "commit", "--quiet", "-am", "commit 9")
    found = bisect_commits(repo, "main", "other", [CASE], Options(tmp_path / "out", "toy"), lambda line: None)
    assert found.first is not None and not found.fixed
    assert (found.first.subject, found.first.causes) == ("commit 1", {"one": "traffic broke one"})


def test_where_time_is_up_it_is_said_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = search(tmp_path, monkeypatch, [""] * 5 + ["traffic"] * 6, until=0.0)
    assert (found.first, found.candidates, len(found.judged)) == (None, (), 2)
    lines = side_by_side.bisect_report(found).splitlines()
    assert lines[0] == "time was up before the first bad commit was found"
    assert found.before is not None and lines[1] == f"  after           {found.before.name}"
    assert lines[2].startswith("  it is among     4 commits left after it")


OWN = """
import json, pathlib, sys
words = sys.argv[1:]
folder = pathlib.Path(words[words.index("--out") + 1]) / words[1]
state = {state!r}
if state == "refuses":
    sys.exit("harness: it does not know this case")
for rank in range(2):
    file = folder / "run" / "ranks" / f"rank_{{rank:02}}.started"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
result = {{"check": "loss", "verdict": "FAIL" if state else "PASS", "examined": 1, "note": ""}}
verdict = {{"verdict": result["verdict"], "cause": state or None, "results": [result]}}
(folder / "verdict.json").write_text(json.dumps(verdict))
"""


def test_a_commit_of_this_project_is_judged_by_itself(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    (repo / "harness").mkdir(parents=True)
    git(repo, "init", "--quiet")
    for number, state in enumerate(["", "", "refuses", "", "no mean", "no mean"]):
        (repo / "harness" / "__main__.py").write_text(OWN.format(state=state) + f"# {number}")
        git(repo, "add", ".")
        git(repo, "commit", "--quiet", "-m", f"commit {number}")
    found = bisect_commits(repo, "HEAD~5", "HEAD", [CASE], Options(tmp_path / "out"), lambda line: None)
    assert found.first is not None and found.first.causes == {"one": "no mean"}
    assert found.first.subject == "commit 4"
    problems = {one.subject: one.problem for one in found.judged if one.problem}
    assert problems in ({}, {"commit 2": "one: it does not know this case"})
    assert "nothing is shown side by side" in side_by_side.bisect_report(found)


def test_an_interrupt_leaves_the_repository_and_the_temporary_folder_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with pytest.raises(KeyboardInterrupt):
        search(tmp_path, monkeypatch, ["", "interrupt", "traffic"])
    repo = tmp_path / "repo"
    assert list(temporary.iterdir()) == []
    assert (git(repo, "status", "--porcelain"), git(repo, "symbolic-ref", "HEAD").strip()) == ("", "refs/heads/main")
    assert len(git(repo, "worktree", "list").splitlines()) == 1
    assert git(repo, "for-each-ref").splitlines() == [git(repo, "for-each-ref", "refs/heads/main").strip()]
