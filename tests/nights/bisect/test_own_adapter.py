"""Bisecting where the adapter lies in the trainer's repository."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_bisect import git

from harness.core import trainers
from harness.core.case.case import Case
from harness.core.case.dims import ParallelDims
from harness.core.judge.judgement import Judgement
from harness.core.judge.result import Result, Verdict, diagnosis_of_one_cause
from harness.core.run.options import Options
from harness.core.run.rank_main import started_file
from harness.nights.bisect import BisectError, checkouts
from harness.nights.bisect.commits import bisect_commits

CASE = Case("one", "a test", ParallelDims(dp_shard=2))

ADAPTER = """
from harness.core.trainers import Adapter

class Own(Adapter):
    name = {name!r}

    def unsupported(self, case):
        return None

    def start(self, case, weights, device):
        raise NotImplementedError

adapter = Own()
"""


def test_an_adapter_that_lies_in_the_trainers_repository_is_of_each_commit_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it is called says whether its loss is right, in place of ranks."""

    def judged(case: Case, options: Options) -> Judgement:
        folder = options.out / case.name
        folder.mkdir(parents=True)
        for rank in range(2):
            started_file(folder / "run", rank).touch()
        broken = trainers.load_adapter(options.trainer).name == "broken"
        verdict, why = (Verdict.FAIL, diagnosis_of_one_cause("no mean")) if broken else (Verdict.PASS, None)
        return Judgement(case, folder, (Result("loss", verdict, 1),), why, 0.0)

    monkeypatch.setattr(checkouts, "run_case", judged)
    repo = tmp_path / "repo"
    repo.mkdir()
    git(repo, "init", "--quiet")
    for number, text in enumerate([ADAPTER.format(name="right"), "1 +", ADAPTER.format(name="broken")]):
        (repo / "mine.py").write_text(f"{text}\n# {number}")
        git(repo, "add", ".")
        git(repo, "commit", "--quiet", "-m", f"commit {number}")
    found = bisect_commits(
        repo, "HEAD~2", "HEAD", [CASE], Options(tmp_path / "out", str(repo / "mine.py")), lambda line: None
    )
    assert [(one.subject, one.verdict) for one in found.judged] == [
        ("commit 0", "good"),
        ("commit 2", "bad"),
        ("commit 1", "skip"),
    ]
    assert "cannot be loaded" in found.judged[2].problem
    (tmp_path / "mine.py").write_text(ADAPTER.format(name="right"))
    with pytest.raises(BisectError, match="has no `of`, and is no file in"):
        bisect_commits(repo, "HEAD~2", "HEAD", [CASE], Options(trainer=str(tmp_path / "mine.py")), print)


def test_a_commit_older_than_the_adapters_adoption_is_judged_by_todays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of the tree says whether the loss is right, in place of ranks."""
    seen: dict[str, str] = {}

    def judged(case: Case, options: Options) -> Judgement:
        adapter = Path(options.trainer)
        checkout = adapter.parents[1]
        subject = git(checkout, "log", "-1", "--format=%s").strip()
        seen[subject] = trainers.load_adapter(options.trainer).name
        folder = options.out / case.name
        folder.mkdir(parents=True)
        for rank in range(2):
            started_file(folder / "run", rank).touch()
        broken = (checkout / "loss").read_text() == "wrong"
        verdict, why = (Verdict.FAIL, diagnosis_of_one_cause("no mean")) if broken else (Verdict.PASS, None)
        return Judgement(case, folder, (Result("loss", verdict, 1),), why, 0.0)

    monkeypatch.setattr(checkouts, "run_case", judged)
    repo = tmp_path / "repo"
    repo.mkdir()
    git(repo, "init", "--quiet", "-b", "main")
    adapter = repo / "adapters" / "mine.py"
    for number in range(8):  # it breaks at 3, and is adopted at 5
        (repo / "loss").write_text("wrong" if number >= 3 else "right")
        (repo / "number").write_text(str(number))
        if number >= 5:
            adapter.parent.mkdir(exist_ok=True)
            adapter.write_text(ADAPTER.format(name=f"at_{number}"))
        git(repo, "add", ".")
        git(repo, "commit", "--quiet", "-m", f"commit {number}")
    adapter.write_text(ADAPTER.format(name="today"))
    found = bisect_commits(repo, "HEAD~7", "HEAD", [CASE], Options(tmp_path / "out", str(adapter)), lambda line: None)
    assert found.first is not None and found.before is not None
    assert (found.first.subject, found.before.subject) == ("commit 3", "commit 2")
    assert seen == {f"commit {n}": "today" if n < 5 else f"at_{n}" for n in (int(s[-1]) for s in seen)}
    assert {one.subject for one in found.judged if one.note} == {s for s, name in seen.items() if name == "today"}
    assert [one for one in found.judged if one.verdict == "skip"] == []
    assert git(repo, "status", "--porcelain").split() == ["M", "adapters/mine.py"]
