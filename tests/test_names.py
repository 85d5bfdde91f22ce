"""Names by which one part finds another: in tables and texts, for adapters, and those of the release before."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import harness.adapter
from harness import old_names
from harness.core.rings import NAMES, Ring, rings

ROOT = Path(__file__).parents[1]
TEXT = re.compile(r"harness(\.\w+)+(:\w+(\.\w+)*)?")
MEANT_OTHERWISE = {
    "harness.retained_graphs",  # a key
    "harness.no_such_module",
    "harness.core.checks.no_check",
    "harness.core.checks.rate_below_one",
    "harness.faults.operator:call",
}
"""Texts of this form that are none, or that tests use because nothing is there."""
ELSEWHERE = ("torchtitan", "megatron", "deepspeed", "picotron")
"""Adapters whose modules import what a test's environment lacks."""


def texts() -> Iterator[tuple[str, str]]:
    """Yield texts in the tree that are a module of the harness, or something in one, with their file."""
    for folder in ("harness", "tests", "tools", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(path.read_bytes())
            for node in ast.walk(tree):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and TEXT.fullmatch(node.value):
                    yield str(path.relative_to(ROOT)), node.value


def resolves(text: str) -> bool:
    module, _, name = text.partition(":")
    if any(f".{trainer}" in module for trainer in ELSEWHERE):
        return importlib.util.find_spec(".".join(module.split(".")[:3])) is not None
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError:
        module, _, last = module.rpartition(".")
        found = getattr(importlib.import_module(module), last)
    for part in filter(None, name.split(".")):
        found = getattr(found, part)
    return found is not None


def test_every_text_that_names_something_of_the_harness_names_what_is_there() -> None:
    wrong = []
    for file, text in sorted({*texts()}):
        if (
            text in MEANT_OTHERWISE
            or "not_there" in text
            or Path(file).name in ("test_import_closure.py", "old_names.py")
        ):
            continue  # on purpose
        try:
            assert resolves(text)
        except Exception as error:
            wrong.append(f"{file}: {text}: {type(error).__name__}")
    assert wrong == []


@pytest.mark.parametrize("ring", NAMES)
def test_a_ring_is_one_table(ring: str) -> None:
    assert isinstance(rings()[ring], Ring)
    assert importlib.import_module(f"harness.{ring}").__doc__


def test_a_table_is_read_without_torch() -> None:
    code = "import sys\nfrom harness.core.rings import rings\nrings()\nassert not {'torch', 'numpy', 'yaml'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("name", dir(harness.adapter))
def test_what_adapters_import_is_there(name: str) -> None:
    assert getattr(harness.adapter, name) is not None


def test_a_name_that_adapters_cannot_import_is_told_with_those_that_they_can() -> None:
    with pytest.raises(AttributeError, match="harness.adapter has no 'note_los'; it has .*note_loss"):
        _ = harness.adapter.note_los


@pytest.mark.parametrize("old", ["harness.probe.values", "harness.trainers", "harness.judge.same_training"])
def test_an_old_name_is_the_same_object_as_the_name_of_today(old: str) -> None:
    now = old_names.name_of_today(old)
    assert now is not None and now != old
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        found = importlib.import_module(old)
    assert found is importlib.import_module(now)
    assert found.__spec__ is not None and found.__spec__.name == now


def test_every_old_name_leads_somewhere() -> None:
    assert [now for now in old_names.NOW.values() if importlib.util.find_spec(f"harness.{now}") is None] == []


def test_every_module_of_the_release_before_leads_somewhere() -> None:
    before = (ROOT / "tests" / "modules_of_before.txt").read_text(encoding="utf-8").split()
    now = {name: old_names.name_of_today(name) or name for name in before}
    assert before and [name for name, here in now.items() if importlib.util.find_spec(here) is None] == []


def test_old_names_warn_once_a_process() -> None:
    code = "import harness.evidence.text, harness.spec.case, harness.plan.slices"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr.count("FutureWarning") == 1


OF_BEFORE = {
    "harness.core.trainers.support": "harness.trainers.support",
    "harness.adapters.support": "harness.trainers.support",
    "harness.core.trainers": "harness.trainers",
    "harness.core.case.case": "harness.spec.case",
}


def test_an_adapter_of_before_runs_unchanged(tmp_path: Path) -> None:
    text = (ROOT / "tests" / "own_trainer.py").read_text(encoding="utf-8")
    for now, before in OF_BEFORE.items():
        text = re.sub(rf"\b{re.escape(now)}\b", before, text)
    assert "harness.core" not in text and "harness.adapters" not in text
    (tmp_path / "before.py").write_text(text, encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "harness",
        "run",
        "single",
        "--trainer",
        "before.py",
        "--server",
        "own",
        "--cases",
        "builtin",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stderr.count("is harness.core.case now") <= 1
