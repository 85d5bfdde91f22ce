"""`pytest --short`: what it leaves out is counted as deselected, and how to run it is said; without it nothing is left out."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness import ROOT

CASES = "cases/data_parallel.yaml"
SHORT_CASES = set((ROOT / "tests" / "short_cases.txt").read_text().split())


def collected(*words: str) -> tuple[set[str], str]:
    """Return the cases that are collected in a file of cases, and what pytest prints."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q", *words, CASES]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120).stdout
    return set(re.findall(r"::(\w+)::completed", printed)), printed


def test_short_leaves_out_cases_and_says_how_many_checks_and_how_to_run_them() -> None:
    every, printed = collected()
    assert "ALL=1" not in printed and not every <= SHORT_CASES
    kept, printed = collected("--short")
    assert kept == every & SHORT_CASES
    (count,) = re.findall(r"^--short left out (\d+) tests: `make test ALL=1`", printed, re.MULTILINE)
    checks = printed.count("::") // 2 // len(kept)
    assert int(count) == checks * len(every - kept)


@pytest.mark.parametrize("workers", [2, pytest.param(0, marks=pytest.mark.slow("with workers it is counted as well"))])
def test_tests_marked_slow_are_deselected_by_short_alone(workers: int, tmp_path: Path) -> None:
    test = tmp_path / "test_some.py"
    test.write_text("import pytest\n@pytest.mark.slow('near')\ndef test_slow(): ...\ndef test_quick(): ...\n")
    conftest = (ROOT / "conftest.py").read_text()
    (tmp_path / "conftest.py").write_text(conftest)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "short_cases.txt").touch()
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for words, summary in ((["--short"], "1 passed, 1 deselected"), ([], "2 passed")):
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-n", str(workers), *words]
        done = subprocess.run([*command, "test_some.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and summary in done.stdout, done.stdout + done.stderr
