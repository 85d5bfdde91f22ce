"""The house itself: imports go one way through the rooms, files and functions are short, every module says what is in it."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = (
    *("reference", "evidence", "spec", "plan", "probe", "record", "launch", "trainers", "faults"),
    *("judge", "traces", "checks", "diagnosis", "report", "affected", "run"),
    *("preflight", "bisect", "onboarding", "cli", "plugin"),
)
OF_ITS_OWN = {
    "evidence": {"reference", "evidence"},
    "spec": {"reference", "evidence", "spec"},
    "probe": {"evidence", "probe"},
    "record": {"evidence", "probe", "record"},
    "affected": {"reference", "evidence", "spec", "affected"},
}
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((*ROOT.glob("harness/**/*.py"), *ROOT.glob("harness/reference/*.py")))
}


@cache
def trees() -> dict[str, ast.Module]:
    return {module: ast.parse(path.read_text(encoding="utf-8")) for module, path in FILES.items()}


def room_of(module: str) -> str:
    return module.split(".")[1] if module.startswith("harness.") else ""


def imported(module: str, tree: ast.AST) -> Iterator[str]:
    """The modules of the harness that it imports, wherever in the file; `from package import module` is that module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            assert not node.level or room_of(module) == "reference", f"{module}: imports are absolute"
            package = "harness.reference." if node.level else ""
            for alias in node.names:
                full = f"{package}{node.module}.{alias.name}"
                yield full if full in FILES else package + node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def at_the_top(tree: ast.Module) -> ast.Module:
    """Without functions, and without what only a type checker reads."""
    kept = [
        node
        for node in tree.body
        if not isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
    ]
    return ast.Module(body=kept, type_ignores=[])


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_rooms_before_it(room: str) -> None:
    allowed = OF_ITS_OWN.get(room, set(ROOMS[: ROOMS.index(room) + 1]))
    wrong = [
        f"{module} imports {other}"
        for module, tree in trees().items()
        if room_of(module) == room
        for other in imported(module, tree)
        if other.startswith("harness.") and room_of(other) not in allowed
    ]
    assert wrong == []


def test_every_folder_of_the_harness_is_a_room() -> None:
    assert {room_of(module) for module, path in FILES.items() if path.parent != ROOT / "harness"} <= {*ROOMS, ""}


def test_modules_import_each_other_in_no_circle() -> None:
    graph = {module: {*imported(module, at_the_top(tree))} & {*FILES} - {module} for module, tree in trees().items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of modules: {' -> '.join(error.args[1])}")


def test_every_module_says_what_is_in_it() -> None:
    said = {module: ast.get_docstring(tree) or "" for module, tree in trees().items()}
    assert [module for module, text in said.items() if not text or "TODO" in text] == []


def test_no_message_names_a_page_that_an_installed_harness_lacks() -> None:
    """Docstrings may: who reads them has the sources."""
    said = [
        f"{module}: {node.value}"
        for module, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "docs/" in node.value
        if node.value not in texts_alone(tree)
    ]
    assert said == []


def texts_alone(tree: ast.Module) -> set[object]:
    """Docstrings, and texts below a constant."""
    alone = (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))
    return {node.value for node in alone if isinstance(node, ast.Constant)}


def test_no_two_files_of_tests_share_a_name() -> None:
    names = [path.name for path in ROOT.glob("tests/**/*.py") if path.name != "conftest.py"]
    twice = sorted({name for name in names if names.count(name) > 1})
    assert twice == [], f"tests with one name: {', '.join(twice)}; pytest needs them different"


def test_the_probe_needs_torch_numpy_and_the_standard_library_only() -> None:
    known = {*sys.stdlib_module_names, "torch", "torchao", "numpy", "harness"}
    wrong = [
        f"{module} imports {other}"
        for module, tree in trees().items()
        if room_of(module) == "probe"
        for other in imported(module, tree)
        if other.split(".")[0] not in known
    ]
    assert not wrong


def test_every_check_is_known_to_diagnosis() -> None:
    """One that is not would stand as "not explained" under every cause that breaks it besides."""
    checks = {module.split(".")[-1] for module in trees() if module.startswith("harness.core.checks.")}
    diagnosis = [tree for module, tree in trees().items() if room_of(module) == "diagnosis"]
    named = {node.value for tree in diagnosis for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert checks - named == set()
