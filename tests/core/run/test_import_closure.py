"""Which files a run's evidence depends on: a change of one of these, and of no other, makes stored evidence void."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import ROOT
from harness.core.run import import_closure, sources
from harness.core.run.options import Options

INSIDE = [
    "harness/core/probe/backward.py",
    "harness/core/trainers/llama3/clip.py",
    "harness/core/trainers/support/names.py",
    "harness/reference/data.py",
    "harness/core/launch/rank.py",
    "harness/core/run/launches.py",
    "harness/core/evidence/records.py",
    "harness/core/case/features.py",
    "harness/faults/operators.py",
    "harness/faults/catalogue/mesh.py",
]
OUTSIDE = [
    "harness/core/report/text.py",
    "harness/core/checks/loss.py",
    "harness/core/causes/engine.py",
    "harness/core/cli/run.py",
    "harness/recording/recorder.py",
    "harness/faults/catalogue/clipping.py",
]
FAULT = f"{ROOT / 'harness' / 'faults' / 'catalogue' / 'mesh.py'}:hsdp_runs_as_fsdp"


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the sources, of which digests are made."""
    shutil.copytree(ROOT / "harness", tmp_path / "harness", ignore=shutil.ignore_patterns("__pycache__", "builtin"))
    for module in (import_closure, sources):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    """Sources are read once in a process."""
    for cached in (import_closure.module_files, import_closure.imports_of, sources.digest_of_evidence_sources):
        cached.cache_clear()


def digest_in(copy: Path) -> str:
    sources.digest_of_evidence_sources.cache_clear()  # a comment changes no import
    return sources.digest_of_run(Options(fault=FAULT.replace(str(ROOT), str(copy))))


def test_what_a_change_makes_void(copy: Path) -> None:
    before = digest_in(copy)
    changed = {}
    for name in (*INSIDE, *OUTSIDE):
        text = (copy / name).read_text()
        (copy / name).write_text(f"{text}\n# a comment\n")
        changed[name] = digest_in(copy) != before
        (copy / name).write_text(text)
    assert {name for name, void in changed.items() if void} == set(INSIDE)
    assert digest_in(copy) == before
