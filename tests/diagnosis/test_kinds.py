"""Every kind of cause that diagnosis names stands on the page of causes, beside the file that proposes it."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path

import numpy as np

from harness.faults import all_faults
from harness.reference.config import PRESETS, RopeScaling, TrainingConfig
from harness.reference.fitted import families
from harness.reference.gradient_flow import gradient_flows, recomputed
from harness.reference.masks import unmasked_embedding
from harness.reference.variations import gathered_logits, over_cp, variations

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "causes.md").read_text(encoding="utf-8")


def kinds_of(source: Path) -> set[str]:
    """Of every cause that is written out."""
    calls = [node for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    place = {"Cause": 0, "stated": 2, "seen": 2}
    named = [call.args[place[call.func.id]] for call in calls if getattr(call.func, "id", "") in place and call.args]
    return {kind.value for kind in named if isinstance(kind, ast.Constant)}


def kinds_of_models() -> set[str]:
    """Of all ways in which a model may compute something else."""
    model = replace(PRESETS["debug"], rope_scaling=RopeScaling(), dropout=0.1, n_layers=3, vocab_size=259)
    every = variations(model, replace(TrainingConfig(), document_mask=True), (2, 4))
    every += [family.of(0.5) for family in families(model)] + over_cp((np.array([0, 2, 1]), np.array([0, 1, 0])))
    every += [*unmasked_embedding(2), recomputed(every[0])]
    return {variation.name for variation in [*every, gathered_logits(2), *gradient_flows((2,))]}


def on_the_page() -> dict[str, set[str]]:
    rows = re.findall(r"^\| `([\w/.]+)` \| (.+) \|$", PAGE, re.MULTILINE)
    return {file: set(text.split(", ")) for file, text in rows}


def test_the_page_lists_the_kinds_of_every_file() -> None:
    written = {source.name: kinds_of(source) for source in (ROOT / "harness" / "diagnosis").glob("*.py")}
    written["reference/variations.py"] = kinds_of_models()
    assert {file: kinds for file, kinds in written.items() if kinds} == on_the_page()


def test_faults_of_the_catalogue_are_named_by_kinds_that_the_page_lists() -> None:
    """In the table; or, where a variable is the kind, in the sentence after it."""
    listed = set().union(*on_the_page().values())
    after = PAGE[PAGE.index("Not written out there: ") :]
    assert [fault.name for fault in all_faults() if fault.named not in listed and fault.named not in after] == []
