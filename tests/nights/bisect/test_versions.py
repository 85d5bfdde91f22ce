"""Bisecting over versions of a package that does not exist, in environments that are scripts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from harness.core import cli, trainers
from harness.core.case.case import Case
from harness.core.case.dims import ParallelDims
from harness.core.judge.judgement import Judgement
from harness.core.judge.result import Result, Verdict, diagnosis_of_one_cause
from harness.core.run.options import Options
from harness.core.run.rank_main import started_file
from harness.core.trainers.support import environments
from harness.core.trainers.support.environments import EnvironmentFailed, environment
from harness.nights.bisect import BisectError, versions
from harness.nights.bisect.search import JudgedRevision, SearchResult
from harness.nights.bisect.side_by_side import bisect_report
from harness.nights.bisect.versions import Version, interpreter_with, search_versions

CASE = Case("one", "a test", ParallelDims(dp_shard=2))


def script(path: Path, version: str, said: str = "") -> Path:
    """An interpreter in which the package toy has that version, and in which the harness says that."""
    path.write_text(f'#!/bin/sh\nif [ "$2" = -c ]; then echo {version}; else echo "{said}" >&2; fi\n')
    path.chmod(0o755)
    return path


def judged(folder: Path) -> Judgement:
    """As the folder's version has it in STATES: checks that fail, "raises" before the first step."""
    said = STATES[folder.parent.name].split()
    for rank in range(0 if "raises" in said else 2):
        started_file(folder / "run", rank).touch()
    results = tuple(Result(check, Verdict.FAIL) for check in said) or (Result("loss", Verdict.PASS),)
    diagnosis = diagnosis_of_one_cause(f"{' and '.join(said)} broke") if said else None
    return Judgement(CASE, folder, results, diagnosis, 0.0)


STATES: dict[str, str] = {}


def searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: Sequence[str]) -> tuple[SearchResult, list[str]]:
    found = []
    STATES.clear()
    for number, state in enumerate(states, start=1):
        STATES[f"toy=={number}.0"] = state
        found.append(f"{number}.0@{script(tmp_path / f'python{number}', f'{number}.0+cpu')}")
    monkeypatch.setattr(versions, "judge_folder", judged)
    told: list[str] = []
    wanted = versions.parse_versions("toy==" + ",".join(found))
    return search_versions(wanted, [CASE], tmp_path, Options(out=tmp_path / "out"), told.append), told


def test_the_first_version_that_breaks_the_check_is_found_in_few_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, told = searched(tmp_path, monkeypatch, [""] * 4 + ["traffic"] * 5)
    assert found.first is not None and found.before is not None
    assert (found.first.commit, found.before.commit) == ("toy==5.0", "toy==4.0")
    assert found.first.folders["one"] == tmp_path / "out" / "bisect" / "toy==5.0" / "one"
    assert [line.split()[:2] for line in told] == [
        ["good", "toy==1.0"],
        ["bad", "toy==9.0"],
        ["bad", "toy==5.0"],
        ["good", "toy==3.0"],
        ["good", "toy==4.0"],
    ]


def test_a_check_that_the_good_version_breaks_too_is_no_clue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = searched(tmp_path, monkeypatch, ["loss", "loss", "", "loss traffic"])
    assert found.first is not None and found.first.commit == "toy==4.0"


def test_versions_that_cannot_be_judged_hide_the_first_bad_one_and_the_reason_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _ = searched(tmp_path, monkeypatch, ["", "raises", "traffic", "traffic"])
    assert (found.first, found.candidates) == (None, ("toy==2.0", "toy==3.0"))
    text = bisect_report(found)
    assert text.startswith("the first bad version is one of these")
    assert "one, before its first step: raises broke" in text
    assert "3 versions judged, 1 skipped" in text


def test_a_version_that_cannot_be_judged_among_good_ones_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _ = searched(tmp_path, monkeypatch, ["", "raises", "", "traffic"])
    assert found.first is not None and found.first.commit == "toy==4.0"


def test_two_versions_that_are_judged_alike_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BisectError, match="the bad version fails no check that the good one keeps"):
        searched(tmp_path, monkeypatch, ["", "traffic", ""])


def test_what_the_harness_says_there_is_the_reason(tmp_path: Path) -> None:
    said = "harness: skipped, nothing was judged: torchtitan is not installed"
    wanted = versions.parse_versions(f"toy==1.0@{script(tmp_path / 'python', '1.0', said)},2.0")
    judge = versions.VersionJudge({"toy==1.0": wanted[0]}, [CASE], tmp_path, Options(out=tmp_path / "out"), print)
    found = judge.judge_revision("toy==1.0")
    assert found.problem == "one: skipped, nothing was judged: torchtitan is not installed"


def test_a_prepared_interpreter_with_another_version_is_not_judged(tmp_path: Path) -> None:
    python = script(tmp_path / "python", "1.5")
    with pytest.raises(BisectError, match="has toy 1.5, not 2.0"):
        interpreter_with(Version("toy", "2.0", python), tmp_path, print)


@pytest.mark.parametrize("typed", ["toy", "toy==1.0", "toy==1.0,", "==1.0,2.0", "toy==1.0,2.0 3.0"])
def test_what_is_no_list_of_versions_is_refused(typed: str) -> None:
    with pytest.raises(BisectError, match="expected PACKAGE==GOOD,..,BAD, as in torch==2.11.0,2.12.0@PYTHON,2.13.0"):
        versions.parse_versions(typed)


def test_the_package_may_be_written_once_or_each_time() -> None:
    assert versions.parse_versions("toy==1.0,toy==2.0") == versions.parse_versions("toy==1.0,2.0")
    with pytest.raises(BisectError, match="--over toy==2.0: no interpreter at /nowhere/python"):
        versions.parse_versions("toy==1.0,2.0@/nowhere/python")


def test_an_environment_sees_what_this_one_has_and_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def do(command: Sequence[str]) -> None:
        made.append(" ".join(command[1:]))
        if "venv" in command:
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", command[-1]], check=True)

    monkeypatch.setattr(environments, "run_command", do)
    folder, told = tmp_path / "toy==1.0", []
    for _ in range(2):
        python = environment("toy==1.0", folder, told.append)
    assert made == [f"-P -m venv {folder}", "-P -m pip install --quiet --disable-pip-version-check toy==1.0"]
    assert told == [f"making an environment with toy==1.0 in {folder}"]
    answer = environments.run_python(python, ["-c", "import numpy, harness; print(numpy.__version__)"])
    assert answer.returncode == 0, answer.stderr


def test_an_environment_that_cannot_be_made_is_skipped_with_pips_complaint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complaint = "ERROR: No matching distribution found for toy==1.0"
    monkeypatch.setattr(
        versions, "environment", lambda *_: environments.run_command([sys.executable, "-c", f"exit({complaint!r})"])
    )
    judge = versions.VersionJudge({"toy==1.0": Version("toy", "1.0")}, [CASE], tmp_path, Options(out=tmp_path), print)
    assert complaint in judge.judge_revision("toy==1.0").problem


def test_a_release_of_the_trainer_is_brought_alone_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer: list[str] = []

    def pip(command: Sequence[str]) -> None:
        answer.append(" ".join(command[6:]))
        Path(command[command.index("--target") + 1], "torchtitan").mkdir(parents=True)

    monkeypatch.setattr(environments, "run_command", pip)
    told = {trainers.absolute_spec("torchtitan", "0.2.2", tmp_path / "out") for _ in range(2)}
    there = tmp_path / "out" / ".environments" / "torchtitan-0.2.2"
    assert told == {f"torchtitan@{there}"} and (there / "torchtitan").is_dir()
    assert len(answer) == 1 and answer[0].startswith("--disable-pip-version-check --no-deps --target ")
    assert [path.name for path in there.parent.iterdir()] == ["torchtitan-0.2.2"]


def test_a_release_that_there_is_not_says_what_pip_says_and_what_else_may_be_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pip(_: Sequence[str]) -> None:
        raise EnvironmentFailed("pip: ERROR: No matching distribution found for torchtitan==9.9")

    monkeypatch.setattr(environments, "run_command", pip)
    typed = ["run", "fsdp_2", "--trainer", "torchtitan", "--source", "9.9", "--out", str(tmp_path)]
    assert cli.main(typed) == cli.NOT_JUDGED
    assert capsys.readouterr().err.strip() == (
        "harness: --trainer: no torchtitan 9.9: pip: ERROR: No matching distribution found for torchtitan==9.9; or give"
        " --source a checkout of it"
    )


@pytest.mark.parametrize(
    ("typed", "complaint"),
    [
        ([], "bisect needs --repo, --good and --bad, or --over"),
        (
            ["--over", "toy==1,2", "--good", "A"],
            "--over cannot be combined with --repo, --good and --bad, which search commits",
        ),
    ],
)
def test_commits_or_versions_are_needed_and_not_both(
    typed: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bisect", *typed]) == cli.NOT_JUDGED
    assert complaint in capsys.readouterr().err


def test_halfway_is_the_middle_of_what_nobody_looked_at() -> None:
    names = [f"toy=={number}" for number in range(6)]
    at = {0: "good", 2: "skip", 5: "bad"}
    judged = {names[i]: JudgedRevision(names[i], "", "", verdict) for i, verdict in at.items()}
    assert versions.next_to_judge(names, judged) == "toy==3"
