"""pytest over cases/: what is collected, that a case runs once, and that nothing which was not judged looks green."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from interrupting import interrupt

from harness import ROOT
from harness.core.checks import all_checks

NOTHING = "nothing was judged: all checks of all cases skipped or not applicable, which is not a pass"
Pytest = Callable[..., subprocess.CompletedProcess[str]]
WATCH = """
from harness.core.plugin import items
run_case = items.run_case
def noted(case, options):
    with open("runs", "a") as file:
        file.write(case.name + "\\n")
    return run_case(case, options)
items.run_case = noted
"""
BREAKING = """
import dataclasses
from harness.core.plugin import checks
options_of = checks.options_of_config
checks.options_of_config = lambda config: dataclasses.replace(options_of(config), fault="wrong.py:fatal")
"""
CONFIGURATION = "[pytest]\naddopts = -ra\nharness_cases = cases\n"
FATAL = """
from harness.faults import fault

@fault(breaks="nothing", bug="none", case="pair", caught_by="completed", named="")
def fatal(fired):
    fired()
    raise RuntimeError("on purpose")
"""
TWO = "cases: {one: {why: a test}, pair: {why: a test, dims: {dp_replicate: 2}}}"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Variables with which the commands of this file, and no others, share a rank server; it ends with them."""
    with_server = {"HARNESS_SERVER": "resident", "XDG_RUNTIME_DIR": str(tmp_path_factory.mktemp("run"))}
    yield with_server
    stop = [sys.executable, "-m", "harness", "run", "--server", "end"]
    subprocess.run(stop, env=os.environ | with_server | {"PYTHONPATH": str(ROOT)}, check=True, capture_output=True)


@pytest.fixture
def in_project(tmp_path: Path, served: dict[str, str]) -> Pytest:
    """pytest in a repository with cases of its own, which has no conftest.py; the harness is the real one."""
    (tmp_path / "cases").mkdir()
    (tmp_path / "cases" / "some.yaml").write_text(TWO)
    (tmp_path / "pytest.ini").write_text(CONFIGURATION)

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **served, **variables}
        command = [sys.executable, "-m", "pytest", "-p", "harness.plugin", "-p", "no:cacheprovider", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)

    return run


def cause(done: subprocess.CompletedProcess[str]) -> str:
    return done.stdout + done.stderr


def test_without_cases_in_the_configuration_the_plugin_takes_no_part(in_project: Pytest, tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_own.py").write_text(
        "import pytest, sys\ndef test_own():\n"
        "    loaded = sorted(m for m in sys.modules if m.startswith('harness'))\n"
        "    assert loaded == ['harness', 'harness.old_names', 'harness.plugin']\n"
        "    assert not {'torch', 'numpy', 'yaml'} & set(sys.modules)\n"
        "@pytest.mark.skip\ndef test_skipped(): pass\n"
    )
    done = in_project()
    assert done.returncode == 0 and "1 passed, 1 skipped" in done.stdout, cause(done)
    assert in_project("-k", "skipped").returncode == 0  # whether that is green is not ours to say
    assert in_project("cases").returncode == 5, "no tests"
    requested = in_project("--harness-device=cuda")
    assert (
        requested.returncode == 4 and "--harness-device=cuda: there are no cases; harness_cases in" in requested.stderr
    )


@pytest.mark.slow("pytest in pytest; test_an_item_is_a_check_of_a_case_in_a_file collects cases")
def test_testpaths_need_not_name_the_cases(in_project: Pytest, tmp_path: Path) -> None:
    (tmp_path / "checks").mkdir()
    (tmp_path / "checks" / "test_own.py").write_text("def test_own(): pass\n")
    (tmp_path / "pytest.ini").write_text(CONFIGURATION + "testpaths = checks\n")
    found = in_project("--collect-only", "-q").stdout
    assert "checks/test_own.py::test_own" in found and "cases/some.yaml::pair::loss" in found
    assert "some.yaml" not in in_project("--collect-only", "-q", "checks").stdout  # typed: no more than that


def test_the_configuration_may_name_the_trainer_beside_it(in_project: Pytest, tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text(CONFIGURATION + "harness_trainer = adapters/mine.py\n")
    done = in_project("--collect-only")
    assert done.returncode == 4 and f"--harness-trainer: {tmp_path}/pytest.ini: " in done.stderr, cause(done)


def test_a_folder_of_cases_that_is_not_there_is_a_usage_error(in_project: Pytest, tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nharness_cases = caes\n")
    done = in_project()
    assert done.returncode == 4 and f"ERROR: harness_cases: no folder {tmp_path}/caes" in done.stderr, cause(done)


def test_an_item_is_a_check_of_a_case_in_a_file(in_project: Pytest) -> None:
    done = in_project("--collect-only", "-q")
    wanted = [f"cases/some.yaml::{case}::{check}" for case in ("one", "pair") for check in all_checks()]
    assert done.stdout.splitlines()[: len(wanted) + 1] == [*wanted, ""]


def test_collecting_imports_no_torch(in_project: Pytest, tmp_path: Path) -> None:
    (tmp_path / "watch.py").write_text(
        "import sys\ndef pytest_sessionfinish():\n    assert 'torch' not in sys.modules, 'torch'\n"
    )
    done = in_project("--collect-only", "-q", "-p", "watch", PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert done.returncode == 0, cause(done)


def test_the_words_of_k_are_cases_and_checks(in_project: Pytest) -> None:
    done = in_project("--collect-only", "-q", "-k", "pair and grad")
    wanted = [f"cases/some.yaml::pair::{check}" for check in all_checks() if "grad" in check]
    assert done.stdout.splitlines()[: len(wanted) + 1] == [*wanted, ""] and len(wanted) > 1


def test_two_workers_run_each_case_once_and_junit_has_every_check(in_project: Pytest, tmp_path: Path) -> None:
    (tmp_path / "watch.py").write_text(WATCH)
    arguments = ("-n", "2", "-v", "--junitxml", "junit.xml", "-p", "watch")
    done = in_project(*arguments, PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert done.returncode == 0, cause(done)
    workers = re.findall(r"\[(gw\d)\].* PASSED cases/some.yaml::(\w+)::", done.stdout)
    silent = re.search(r"^(\d+) checks in 2 cases did not apply and were not judged: ", done.stdout, re.MULTILINE)
    assert silent is not None and len(workers) + int(silent.group(1)) == 2 * len(all_checks())
    assert len(set(workers)) == 2  # each case on one worker
    assert sorted((tmp_path / "runs").read_text().split()) == ["one", "pair"]
    items = ElementTree.parse(tmp_path / "junit.xml").findall(".//testcase")
    assert {item.get("name") for item in items} < set(all_checks()) and len(items) == len(workers)
    assert "skipped" not in done.stdout and "SKIPPED" not in done.stdout


@pytest.mark.slow(
    "real ranks under pytest; test_two_workers_run_each_case_once_and_junit_has_every_check notes which ran"
)
def test_one_check_of_one_case_runs_that_case_only(in_project: Pytest, tmp_path: Path) -> None:
    done = in_project("cases/some.yaml::one::gradients")
    assert done.returncode == 0 and "1 passed" in done.stdout, cause(done)
    assert [path.name for path in tmp_path.glob("out/[!.]*")] == ["one"]


@pytest.mark.slow("real ranks under pytest; test_a_missing_golden_fails shows what a check says")
def test_a_check_that_is_broken_says_so_without_a_traceback(in_project: Pytest, tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(FATAL)
    (tmp_path / "breaking.py").write_text(BREAKING)
    arguments = (
        "-p",
        "breaking",
        "-k",
        "pair and (completed or update)",
        "--harness-timeout",
        "77",
    )
    done = in_project(*arguments, PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert done.returncode == 1, cause(done)
    assert (
        len(re.findall(r"^ranks \[0,1\] raised: .*on purpose", done.stdout, re.MULTILINE)) == 2
    )  # each check's account
    assert len(re.findall(r"^FAILED cases/some.yaml::pair::\w+ - ranks \[", done.stdout, re.MULTILINE)) == 2
    assert "update UNKNOWN: no evidence from 2 ranks" in done.stdout  # unknown fails too
    assert "again             pytest -k pair" in done.stdout
    assert "excinfo" not in done.stdout and "def runtest" not in done.stdout
    assert "2 failed" in done.stdout
    assert json.loads((tmp_path / "out/pair+fatal/run/job.json").read_text())["timeout"] == 77


@pytest.mark.slow("real ranks under pytest; test_a_missing_golden_fails shows what a check says")
def test_a_check_that_does_not_apply_is_counted_and_alone_it_is_not_green(in_project: Pytest) -> None:
    done = in_project("-k", "one and determinism")
    assert done.returncode == 1, cause(done)
    assert "1 check in 1 case did not apply and were not judged: --harness-not-applicable shows each" in done.stdout
    assert NOTHING in done.stdout and "skipped in" not in done.stdout


@pytest.mark.slow(
    "real ranks under pytest; test_cuda_without_gpus_is_skipped_with_the_reason_and_not_green skips with a reason"
)
def test_checks_that_do_not_apply_are_shown_on_request_with_the_reason(in_project: Pytest) -> None:
    done = in_project("-k", "one and (completed or determinism)", "--harness-not-applicable")
    assert done.returncode == 0, cause(done)
    assert "1 passed, 1 skipped, " in done.stdout
    assert "determinism not applicable: the case requests one run" in done.stdout


def test_cuda_without_gpus_is_skipped_with_the_reason_and_not_green(in_project: Pytest) -> None:
    done = in_project("-k", "pair", "--harness-device", "cuda", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1, cause(done)
    count = len(all_checks())
    assert re.search(rf"SKIPPED \[{count}\] .*: not run: needs 2 GPUs, and 0 are visible", done.stdout)
    assert f"{count} skipped" in done.stdout and NOTHING in done.stdout


def test_a_mistake_in_a_file_is_its_message_and_nothing_else(in_project: Pytest, tmp_path: Path) -> None:
    (tmp_path / "cases" / "bad.yaml").write_text("cases: {pair: {why: x, dim: {tp: 2}}}")
    done = in_project()
    assert done.returncode == 2, cause(done)
    assert "bad.yaml: case 'pair': unknown key 'dim' (did you mean 'dims'?)" in done.stdout
    assert "Traceback" not in cause(done) and "raise " not in done.stdout


@pytest.mark.slow("pytest in pytest; the first is refused in the same way", after=1)
@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--harness-trainer", "lama"), "--harness-trainer: no trainer is named 'lama'; known: "),
        (("--harness-timeout", "0"), "--harness-timeout must be above 0"),
        (("--harness-timeout", "inf"), "--harness-timeout must be above 0"),
    ],
)
def test_a_wrong_option_is_a_usage_error(in_project: Pytest, arguments: tuple[str, ...], problem: str) -> None:
    done = in_project(*arguments)
    assert done.returncode == 4
    assert f"ERROR: {problem}" in done.stderr


def test_a_folder_that_pytest_takes_for_a_place_of_tests_is_told(in_project: Pytest, tmp_path: Path) -> None:
    elsewhere = tmp_path.with_name(f"{tmp_path.name}_elsewhere")
    elsewhere.mkdir()
    done = in_project("--collect-only", "--harness-out", str(elsewhere))
    assert done.returncode == 4 and f"not here: write --harness-out={elsewhere}" in done.stderr, cause(done)


@pytest.mark.slow("real ranks under pytest; test_a_wrong_option_is_a_usage_error refuses options")
def test_a_golden_is_not_accepted_in_ci(in_project: Pytest) -> None:
    done = in_project("-k", "one and golden", "--harness-accept-golden", CI="true")
    assert done.returncode == 1, cause(done)
    assert "goldens are not accepted in CI" in done.stdout
    assert "Traceback" not in cause(done)


@pytest.mark.slow("real ranks under pytest; test_a_missing_golden_fails is judged in the same way")
def test_an_accepted_golden_is_no_pass(in_project: Pytest, tmp_path: Path) -> None:
    done = in_project("-k", "one and golden", "--harness-accept-golden", CI="")
    assert done.returncode == 1, cause(done)
    assert "accepted, not a pass: review `git add -N golden/ && git diff golden/`" in done.stdout
    assert len(list(tmp_path.glob("golden/*.json"))) == 1
    assert list(tmp_path.glob("out/one")) == []  # the reference alone


def test_a_missing_golden_fails(in_project: Pytest, tmp_path: Path) -> None:
    (tmp_path / "cases" / "some.yaml").write_text("cases: {one: {why: a test, training: {steps: 1, seed: 7}}}")
    done = in_project("-k", "golden or loss")
    assert done.returncode == 1, cause(done)
    assert "golden UNKNOWN: " in done.stdout and "make it with `harness golden --accept -k" in done.stdout
    assert "1 failed, 2 passed" in done.stdout


@pytest.mark.slow("real ranks under pytest; tests/core/cli/test_interrupts.py interrupts commands")
@pytest.mark.parametrize("workers", ["0", "2"])
def test_ctrl_c_leaves_no_process(tmp_path: Path, workers: str) -> None:
    (tmp_path / "cases").mkdir()
    (tmp_path / "cases" / "some.yaml").write_text("cases: {long: {why: a test, training: {steps: 500}}}")
    (tmp_path / "pytest.ini").write_text(CONFIGURATION)
    arguments = ["-p", "harness.plugin", "-p", "no:cacheprovider", "-n", workers, "cases"]
    started = lambda: any(tmp_path.glob("out/.reference/*.partial/logs/*.log"))  # noqa: E731
    code, _ = interrupt(arguments, when=started, cwd=tmp_path, module="pytest")
    assert code == 2


@pytest.mark.slow("real ranks under pytest; test_an_item_is_a_check_of_a_case_in_a_file collects cases")
def test_cases_of_other_tiers_are_left_out_unless_requested(in_project: Pytest, tmp_path: Path) -> None:
    two = "cases: {one: {why: a test}, late: {why: a test, tier: nightly}}"
    (tmp_path / "cases" / "some.yaml").write_text(two)

    def collected(*arguments: str) -> set[str]:
        return set(re.findall(r"::(\w+)::completed", in_project("--collect-only", "-q", *arguments).stdout))

    assert collected() == {"one"}
    assert collected("-m", "harness_nightly") == {"late"}
    assert collected("-m", "harness") == {"one", "late"}
    assert collected("-m", "not slow") == {"one"}  # a mark of somebody's own
    assert collected("cases/some.yaml::late") == {"late"}
