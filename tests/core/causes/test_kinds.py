"""Every kind of cause that diagnosis names stands in the list of docs/causes.md, and no other does."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

from diagnosed import LISTED, is_listed

from harness.faults import all_faults

ROOT = Path(__file__).parents[3]
PLACE = {"Cause": 0, "fact_with_text": 2, "fact_of_first_finding": 2}
"""Which argument of a call is the kind."""


def strings(node: ast.AST) -> set[str]:
    return {one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)}


def named_in(source: Path) -> Iterator[str]:
    """Kinds that calls write out or hold in a variable, those of a table of rows, and those that a table gives fields."""
    module = importlib.import_module(".".join(source.relative_to(ROOT).with_suffix("").parts))
    for function in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if not isinstance(function, ast.FunctionDef):
            continue
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
        for call in (call for call in calls if getattr(call.func, "id", "") in PLACE):
            kind = call.args[PLACE[call.func.id]]
            if isinstance(kind, ast.Constant):
                yield kind.value
            elif isinstance(kind, ast.Name) and isinstance(value := getattr(module, kind.id, None), str):
                yield value
            elif isinstance(kind, ast.Name):
                given = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
                for one in (one for one in given if [ast.unparse(to) for to in one.targets] == [kind.id]):
                    yield from strings(one.value)
    for name in ("KINDS", "KIND_OF_FIELD"):
        yield from getattr(module, name, {}).values()
    for name in ("FINDING_ROWS", "STRUCTURE_ROWS"):
        yield from (row.kind for row in getattr(module, name, ()) if hasattr(row, "kind"))


def named() -> set[str]:
    folders = (
        ROOT / "harness" / "core" / "causes",
        ROOT / "harness" / "hypotheses",
        ROOT / "harness" / "recording" / "judged",
    )
    return {kind for folder in folders for source in folder.glob("[a-z]*.py") for kind in named_in(source)}


def test_the_page_lists_every_kind_and_no_other() -> None:
    assert sorted(named()) == sorted(LISTED)


def test_faults_of_the_catalogue_are_named_by_kinds_that_the_page_lists() -> None:
    assert [fault.name for fault in all_faults() if not is_listed(fault.named)] == []
