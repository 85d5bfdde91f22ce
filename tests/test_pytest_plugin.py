"""pytest over cases/: what is collected, that a case runs once, and that nothing which was not judged looks green."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest
from test_cli import FAULTS, interrupt

from harness import ROOT
from harness.checks import all_checks

Pytest = Callable[..., subprocess.CompletedProcess[str]]
WATCH = """
import conftest
run_case = conftest.run_case
def noted(case, options):
    with open("runs", "a") as file:
        file.write(case.name + "\\n")
    return run_case(case, options)
conftest.run_case = noted
"""
BREAKING = """
import dataclasses
import conftest
options = conftest.options
conftest.options = lambda config: dataclasses.replace(options(config), fault="wrong.py:fatal")
"""
TWO = "cases: {one: {why: a test}, pair: {why: a test, dims: {dp_replicate: 2}}}"


@pytest.fixture
def in_project(tmp_path: Path) -> Pytest:
    """pytest in a folder with cases of its own; the conftest and the harness are the real ones."""
    (tmp_path / "cases").mkdir()
    (tmp_path / "cases" / "some.yaml").write_text(TWO)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -ra\ntestpaths = cases\n")

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
        command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)

    return run


def cause(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout + done.stderr


def test_an_item_is_a_law_of_a_case_in_a_file(in_project: Pytest) -> None:
    done = in_project("--collect-only", "-q")
    wanted = [f"cases/some.yaml::{case}::{law}" for case in ("one", "pair") for law in all_checks()]
    assert done.stdout.splitlines()[: len(wanted) + 1] == [*wanted, ""]


def test_collecting_imports_no_torch(in_project: Pytest, tmp_path: Path) -> None:
    (tmp_path / "watch.py").write_text(
        "import sys\ndef pytest_sessionfinish():\n    assert 'torch' not in sys.modules, 'torch'\n"
    )
    done = in_project("--collect-only", "-q", "-p", "watch", PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert done.returncode == 0, cause(done)


def test_the_words_of_k_are_cases_and_laws(in_project: Pytest) -> None:
    done = in_project("--collect-only", "-q", "-k", "pair and grad")
    assert done.stdout.splitlines()[:2] == [f"cases/some.yaml::pair::{law}" for law in ("grad_norm", "gradients")]


def test_two_workers_run_each_case_once_and_junit_has_every_law(in_project: Pytest, tmp_path: Path) -> None:
    (tmp_path / "watch.py").write_text(WATCH)
    arguments = ("-n", "2", "-v", "--junitxml", "junit.xml", "-p", "watch")
    done = in_project(*arguments, PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert done.returncode == 0, cause(done)
    workers = re.findall(r"\[(gw\d)\].* (?:PASSED|SKIPPED) cases/some.yaml::(\w+)::", done.stdout)
    assert len(workers) == 2 * len(all_checks())
    assert len(set(workers)) == 2  # each case on one worker
    assert sorted((tmp_path / "runs").read_text().split()) == ["one", "pair"]
    items = ElementTree.parse(tmp_path / "junit.xml").findall(".//testcase")
    assert {item.get("name") for item in items} == set(all_checks()) and len(items) == len(workers)
    assert "determinism not applicable: the case requests one run" in done.stdout


def test_one_law_of_one_case_runs_that_case_only(in_project: Pytest, tmp_path: Path) -> None:
    done = in_project("cases/some.yaml::one::gradients")
    assert done.returncode == 0 and "1 passed" in done.stdout, cause(done)
    assert [path.name for path in tmp_path.glob("out/[!.]*")] == ["one"]


def test_a_law_that_is_broken_says_so_without_a_traceback(in_project: Pytest, tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(FAULTS)
    (tmp_path / "breaking.py").write_text(BREAKING)
    arguments = ("-p", "breaking", "-k", "pair and (completed or gradients)", "--case-timeout", "77")
    done = in_project(*arguments, PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert done.returncode == 1, cause(done)
    assert len(re.findall(r"^ranks \[0,1\] raised: .*on purpose", done.stdout, re.MULTILINE)) == 2  # each law's account
    assert len(re.findall(r"^FAILED cases/some.yaml::pair::\w+ - ranks \[", done.stdout, re.MULTILINE)) == 2
    assert "gradients UNKNOWN: no evidence from 2 ranks" in done.stdout  # unknown fails too
    assert "again             pytest -k pair" in done.stdout
    assert "excinfo" not in done.stdout and "def runtest" not in done.stdout
    assert "2 failed" in done.stdout
    assert json.loads((tmp_path / "out/pair+fatal/run/job.json").read_text())["timeout"] == 77


def test_only_skips_are_not_green(in_project: Pytest) -> None:
    done = in_project("-k", "one and determinism")
    assert done.returncode == 1, cause(done)
    assert "nothing was judged: all laws of all cases skipped, which is not a pass" in done.stdout


def test_cuda_without_gpus_is_skipped_with_the_reason_and_not_green(in_project: Pytest) -> None:
    done = in_project("-k", "pair", "--device", "cuda", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1, cause(done)
    count = len(all_checks())
    assert re.search(rf"SKIPPED \[{count}\] .*: not run: needs 2 GPUs, 0 visible", done.stdout)
    assert f"{count} skipped" in done.stdout


def test_a_mistake_in_a_file_is_its_message_and_nothing_else(in_project: Pytest, tmp_path: Path) -> None:
    (tmp_path / "cases" / "bad.yaml").write_text("cases: {pair: {why: x, dim: {tp: 2}}}")
    done = in_project()
    assert done.returncode == 2, cause(done)
    assert "bad.yaml: case 'pair': unknown key 'dim'; did you mean 'dims'?" in done.stdout
    assert "Traceback" not in cause(done) and "raise " not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--trainer", "lama"), "--trainer: no trainer is named 'lama'; known: "),
        (("--case-timeout", "0"), "--case-timeout must be above 0, got 0"),
    ],
)
def test_a_wrong_option_is_a_usage_error(in_project: Pytest, arguments: tuple[str, ...], problem: str) -> None:
    done = in_project(*arguments)
    assert done.returncode == 4
    assert f"ERROR: {problem}" in done.stderr


def test_a_golden_is_not_accepted_in_ci(in_project: Pytest) -> None:
    done = in_project("-k", "one and golden", "--accept-golden", CI="true")
    assert done.returncode == 1, cause(done)
    assert "goldens are not accepted in CI" in done.stdout
    assert "Traceback" not in cause(done)


def test_an_accepted_golden_is_no_pass(in_project: Pytest, tmp_path: Path) -> None:
    """In a copy of the harness, which has goldens of its own."""
    shutil.copytree(ROOT / "harness", tmp_path / "harness", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "conftest.py", tmp_path / "harness_conftest.py")
    arguments = ("-p", "harness_conftest", "-k", "one and golden")
    command = [sys.executable, "-m", "pytest", *arguments, "--accept-golden"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "CI": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, cause(done)
    assert "accepted, not a pass: review `git diff golden/`" in done.stdout
    assert len(list(tmp_path.glob("golden/*.json"))) == 1
    assert list(tmp_path.glob("out/one")) == []  # the reference alone


def test_a_missing_golden_fails(in_project: Pytest, tmp_path: Path) -> None:
    (tmp_path / "cases" / "some.yaml").write_text("cases: {one: {why: a test, training: {steps: 1, seed: 7}}}")
    done = in_project("-k", "golden or loss")
    assert done.returncode == 1, cause(done)
    assert "golden UNKNOWN: " in done.stdout and "make it with `harness golden --accept --cases " in done.stdout
    assert "1 failed, 2 passed" in done.stdout


@pytest.mark.parametrize("workers", ["0", "2"])
def test_ctrl_c_leaves_no_process(tmp_path: Path, workers: str) -> None:
    (tmp_path / "cases").mkdir()
    (tmp_path / "cases" / "some.yaml").write_text("cases: {long: {why: a test, training: {steps: 500}}}")
    arguments = ["-p", "conftest", "-p", "no:cacheprovider", "-n", workers, "cases"]
    started = lambda: any(tmp_path.glob("out/.reference/*.partial/logs/*.log"))  # noqa: E731
    code, _ = interrupt(arguments, when=started, cwd=tmp_path, module="pytest")
    assert code == 2


def test_cases_of_other_tiers_are_left_out_unless_asked_for(in_project: Pytest, tmp_path: Path) -> None:
    two = "cases: {one: {why: a test}, late: {why: a test, tier: nightly}}"
    (tmp_path / "cases" / "some.yaml").write_text(two)

    def collected(*arguments: str) -> set[str]:
        return set(re.findall(r"::(\w+)::completed", in_project("--collect-only", "-q", *arguments).stdout))

    assert collected() == {"one"}
    assert collected("--tier", "nightly") == {"late"}
    assert collected("--tier", "all") == {"one", "late"}
    assert collected("cases/some.yaml::late") == {"late"}
