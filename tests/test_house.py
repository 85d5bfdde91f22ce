"""The house itself: a core and six rings, imports that go one way, modules that say what is in them."""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tools.code_reads import KEPT, counts_of_parts

ROOT = Path(__file__).resolve().parent.parent
RINGS = ("recording", "clusters", "nights", "adapters", "faults", "hypotheses")
ARROWS = frozenset({("clusters", "recording"), ("clusters", "adapters"), ("nights", "recording")})
"""Which ring may import which other. All of them may import the core."""
CROSSING: frozenset[tuple[str, str]] = frozenset()
"""Imports (module, module) that still cross the wrong way. None may be added."""
ROOMS = (
    *("evidence", "blame", "case", "plan", "probe", "launch", "trainers", "judge", "checks", "causes", "report", "run"),
    *("cli", "plugin"),
)
"""The core's, in the order in which they may import each other. What lies beside them, such as rings.py, is for all."""
OF_ITS_OWN = {
    "evidence": {"evidence"},
    "case": {"evidence", "case"},
    "probe": {"evidence", "probe"},
}
PUBLIC = {"harness", "harness.__main__", "harness.adapter", "harness.old_names", "harness.plugin"}
"""Modules beside the core and the rings."""
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((*ROOT.glob("harness/**/*.py"), *ROOT.glob("harness/reference/*.py")))
}


@cache
def trees() -> dict[str, ast.Module]:
    return {module: ast.parse(path.read_text(encoding="utf-8")) for module, path in FILES.items()}


def ring_of(module: str) -> str:
    """Return the core or the ring that a module is in; empty for those beside them, and for the reference."""
    top = module.split(".")[1] if module.startswith("harness.") else ""
    return top if top in ("core", *RINGS) else ""


def room_of(module: str) -> str:
    """Return the room of a module of the core."""
    parts = module.split(".")
    return parts[2] if parts[:2] == ["harness", "core"] and len(parts) > 2 and parts[2] in ROOMS else ""


def of_reference(module: str) -> bool:
    return module.startswith("harness.reference")


def imported(module: str, tree: ast.AST) -> Iterator[str]:
    """The modules of the harness that it imports, wherever in the file; `from package import module` is that module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            assert not node.level or of_reference(module), f"{module}: imports are absolute"
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


def crossings() -> set[tuple[str, str]]:
    """Return every import out of a ring, or out of the core, that no arrow allows."""
    found = ((module, other) for module, tree in trees().items() for other in imported(module, tree))
    return {
        (module, other)
        for module, other in found
        if ring_of(module) and ring_of(other) not in ("", ring_of(module))
        if ring_of(module) == "core" or (ring_of(other) != "core" and (ring_of(module), ring_of(other)) not in ARROWS)
    }


def test_the_core_imports_no_ring_and_rings_import_others_where_an_arrow_allows_it() -> None:
    assert crossings() == CROSSING


def test_arrows_between_rings_are_few_in_use_and_in_no_circle() -> None:
    used = {(ring_of(module), ring_of(other)) for module, tree in trees().items() for other in imported(module, tree)}
    assert used >= ARROWS and len(ARROWS) <= 8
    graph = {ring: {to for start, to in ARROWS if start == ring} for ring in RINGS}
    assert set(TopologicalSorter(graph).static_order()) == {*RINGS}


def test_the_reference_imports_nothing_of_the_harness_but_itself() -> None:
    wrong = [
        f"{module} imports {other}"
        for module, tree in trees().items()
        if of_reference(module)
        for other in imported(module, tree)
        if other.startswith("harness.") and not of_reference(other)
    ]
    assert wrong == []


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_of_the_core_imports_only_rooms_before_it(room: str) -> None:
    allowed = {"", *OF_ITS_OWN.get(room, set(ROOMS[: ROOMS.index(room) + 1]))}
    wrong = [
        f"{module} imports {other}"
        for module, tree in trees().items()
        if room_of(module) == room
        for other in imported(module, tree)
        if room_of(other) not in allowed
    ]
    assert wrong == []


def test_everything_is_in_the_core_in_a_ring_or_public() -> None:
    beside = {module for module in FILES if not ring_of(module) and not of_reference(module)}
    assert beside == PUBLIC
    rooms = {module.split(".")[2] for module in FILES if module.startswith("harness.core.") and module.count(".") > 2}
    assert rooms == {*ROOMS}


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
    diagnosis = [
        tree for module, tree in trees().items() if room_of(module) == "causes" or ring_of(module) == "hypotheses"
    ]
    named = {node.value for tree in diagnosis for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert checks - named == set()


def test_what_makes_code_hard_to_read_becomes_less() -> None:
    """`python -m tools.code_reads --list RULE` names the places; `--keep` writes what was reached."""
    kept = json.loads(KEPT.read_text(encoding="utf-8"))
    now = counts_of_parts(ROOT)
    risen = {
        f"{part} {rule}": (kept[part][rule], count)
        for part, counts in now.items()
        for rule, count in counts.items()
        if count > kept[part][rule]
    }
    assert risen == {}
