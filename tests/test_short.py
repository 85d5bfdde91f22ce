"""`pytest --short`: what it leaves out is counted as deselected, and how to run it is said; without it nothing is left out."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import ROOT

CASES = "cases/data_parallel.yaml"
TESTS = """
import pytest

@pytest.mark.slow("near")
def test_slow(): ...

def test_quick(): ...

@pytest.mark.slow("near", after=1)
@pytest.mark.parametrize("one", [1, pytest.param(2, id="two")])
def test_some(one): ...

@pytest.mark.slow("near", after=2)
@pytest.mark.parametrize("one", [1, pytest.param(2, marks=pytest.mark.slow("near"))])
def test_all_but_one_that_is_slow_itself(one): ...
"""
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


@pytest.mark.slow(
    "pytest in pytest; test_short_leaves_out_cases_and_says_how_many_checks_and_how_to_run_them has one as well"
)
@pytest.mark.parametrize("workers", [2, pytest.param(0, marks=pytest.mark.slow("with workers it is counted as well"))])
def test_tests_marked_slow_are_deselected_by_short_alone(workers: int, tmp_path: Path) -> None:
    test = tmp_path / "test_some.py"
    test.write_text(TESTS)
    conftest = (ROOT / "conftest.py").read_text()
    (tmp_path / "conftest.py").write_text(conftest)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "short_cases.txt").touch()
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    for words, summary in ((["--short"], "3 passed, 3 deselected"), ([], "6 passed")):
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-n", str(workers), *words]
        done = subprocess.run([*command, "test_some.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0 and summary in done.stdout, done.stdout + done.stderr


def slow_mark(expression: ast.AST) -> ast.Call | None:
    """Return the expression where it is a mark "slow"."""
    return (
        expression if isinstance(expression, ast.Call) and ast.unparse(expression.func) == "pytest.mark.slow" else None
    )


def marked_functions(tree: ast.Module) -> Iterator[tuple[str, ast.Call | None]]:
    """Yield each test of a file with its mark "slow", also where that has a name of its own."""
    named = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    for function in tree.body:
        if isinstance(function, ast.FunctionDef) and function.name.startswith("test_"):
            marks = [slow_mark(named.get(ast.unparse(mark), mark)) for mark in function.decorator_list]
            yield function.name, next(filter(None, marks), None)


def named_in(mark: ast.Call) -> list[str]:
    """Return the tests and files that a mark's reason names."""
    words = ast.literal_eval(mark.args[0]).split()
    return [word.rstrip(",;") for word in words if word.startswith(("test_", "tests/"))]


def test_every_test_that_a_reason_names_exists() -> None:
    trees = {path: ast.parse(path.read_text()) for path in sorted((ROOT / "tests").rglob("test_*.py"))}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    functions = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    names = [name for node in nodes if (mark := slow_mark(node)) for name in named_in(mark)]
    assert names and [name for name in names if name not in functions and not (ROOT / name).exists()] == []


def test_what_is_left_out_whole_names_a_test_that_stays() -> None:
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    functions = [(path.name, *marked) for path in paths for marked in marked_functions(ast.parse(path.read_text()))]
    whole = [(file, name, mark) for file, name, mark in functions if mark and not mark.keywords]
    stay = {name for _, name, _ in functions} - {name for _, name, _ in whole}
    assert whole
    for file, name, mark in whole:
        near = named_in(mark)
        assert near, (file, name)
        for kept in near:
            assert kept in stay or (kept.startswith("tests/") and (ROOT / kept).exists()), (file, name, kept)
