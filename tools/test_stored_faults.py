"""A test that mutants of a diagnosis have to pass in addition to the others, on runs with faults.

Runs that `harness faults --out` stored are named as they were then, with the evidence that is shown before anything is
altered. tools/mutants.py puts it beside the tests; the runs' folder is in FAULTS_OUT.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest

from harness.core.causes import diagnose
from harness.core.checks import judge
from harness.core.judge.stored_trial import load_trial
from harness.core.report.cause_text import diagnosis_line
from harness.faults.attempt import accepted_attempts

OUT = Path(os.environ["FAULTS_OUT"])
NAMED = {one.fault: one for one in accepted_attempts(OUT / "faults.json") if one.cause and " raised: " not in one.cause}
UNALTERED: dict[str, Any] = {}  # the first time each is asked, no mutant is there yet
FOLDERS = [folder for folder in sorted(OUT.glob("*+*")) if folder.name.partition("+")[2] in NAMED]


@functools.cache
def judged(folder: Path) -> Any:
    trial = load_trial(folder)
    return trial, judge(trial)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_stored_run_with_a_fault_is_named_as_before(folder: Path) -> None:
    found, before = diagnose(*judged(folder)), NAMED[folder.name.partition("+")[2]]
    assert found is not None
    assert (diagnosis_line(found), found.kinds) == (before.cause, before.kinds)
    assert UNALTERED.setdefault(folder.name, found.evidence) == found.evidence
