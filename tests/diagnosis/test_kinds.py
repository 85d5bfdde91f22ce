"""Every kind of cause that diagnosis names stands on the page of causes, beside the file that proposes it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from harness.faults import all_faults

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "causes.md").read_text(encoding="utf-8")


def kinds_of(source: Path) -> set[str]:
    """The first words of every Cause and Variation that is written out."""
    calls = [node for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    named = [call for call in calls if getattr(call.func, "id", "") in ("Cause", "Variation") and call.args]
    return {call.args[0].value for call in named if isinstance(call.args[0], ast.Constant)}


def on_the_page() -> dict[str, set[str]]:
    rows = re.findall(r"^\| `(\w+\.py)` \| (.+) \|$", PAGE, re.MULTILINE)
    return {file: set(text.split(", ")) for file, text in rows}


def test_the_page_lists_the_kinds_of_every_file() -> None:
    sources = [*(ROOT / "harness" / "diagnosis").glob("*.py"), ROOT / "reference" / "variations.py"]
    written = {source.name: kinds_of(source) for source in sources}
    assert {file: kinds for file, kinds in written.items() if kinds} == on_the_page()


def test_faults_of_the_catalogue_are_named_by_kinds() -> None:
    """Some are variables where a cause is made; the page has them in a sentence."""
    listed = set().union(*on_the_page().values())
    assert {fault.named for fault in all_faults()} - listed <= MADE_UP_THERE
    assert all(kind in PAGE for kind in MADE_UP_THERE)


MADE_UP_THERE = {
    "another setting",
    "beta2",
    "collectives out of order",
    "copied",
    "gradients scaled",
    "growing",
    "label smoothing",
    "not deterministic",
    "not explained",
    "ranks wait",
    "retained",
    "traffic of no plan",
}
