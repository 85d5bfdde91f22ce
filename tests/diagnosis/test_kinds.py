"""Every kind of cause that diagnosis names stands on the page of causes, beside the file that proposes it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from harness.diagnosis import request, structure_facts
from harness.faults import all_faults

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "causes.md").read_text(encoding="utf-8")


def kinds_of(source: Path) -> set[str]:
    """Of every cause that is written out."""
    calls = [node for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    place = {"Cause": 0, "Row": 1, "stated": 2, "seen": 2}
    named = [call.args[place[call.func.id]] for call in calls if getattr(call.func, "id", "") in place and call.args]
    return {kind.value for kind in named if isinstance(kind, ast.Constant)}


def on_the_page() -> dict[str, set[str]]:
    rows = re.findall(r"^\| `([\w/.]+)` \| (.+) \|$", PAGE, re.MULTILINE)
    return {file: set(text.split(", ")) for file, text in rows}


def test_the_page_lists_the_kinds_of_every_file() -> None:
    written = {source.name: kinds_of(source) for source in (ROOT / "harness" / "diagnosis").glob("*.py")}
    written["request.py"] |= {*request.KINDS.values()}
    written["structure_facts.py"] |= {row.kind for row in structure_facts.TABLE}
    assert {file: kinds for file, kinds in written.items() if kinds} == on_the_page()


def test_faults_of_the_catalogue_are_named_by_kinds_that_the_page_lists() -> None:
    """In the table; or, where a variable is the kind, in the sentence after it."""
    listed = set().union(*on_the_page().values())
    after = PAGE[PAGE.index("Not written out there: ") :]
    assert [fault.name for fault in all_faults() if fault.named not in listed and fault.named not in after] == []
