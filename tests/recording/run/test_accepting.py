"""Accepting a golden that cases share of which some are not selected: they are named, and keep the noise they are judged by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from harness.core.case.case import Case
from harness.core.case.loading import load_all
from harness.core.judge import golden
from harness.core.plugin.items import accept_goldens
from harness.core.run.accepting import accept_golden_of
from harness.core.run.options import Options
from harness.recording.judged.recorded import NO_REFERENCE

CASES = """
defaults: {training: {dtype: float32, steps: 2, seed: 99}}
cases:
  one: {why: a test, dims: {dp_replicate: 2}}
  two: {why: a test, dims: {tp: 2}}
  three: {why: a test, dims: {tp: 2}, training: {steps: 3}}
"""


@pytest.fixture
def every(tmp_path: Path) -> list[Case]:
    (tmp_path / "cases").mkdir()
    (tmp_path / "cases" / "some.yaml").write_text(CASES)
    return load_all(tmp_path / "cases")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The kinds of noise that references were measured with; none is trained."""
    found: list[list[str]] = []

    def folder(case: Case, options: Options, noise: Sequence[str]) -> Path:
        found.append([*noise])
        return Path()

    monkeypatch.setenv("CI", "")
    monkeypatch.setattr("harness.core.run.accepting.reference_folder", folder)
    monkeypatch.setattr("harness.core.run.accepting.load_stored", lambda *_: NO_REFERENCE)
    return found


def by_command(case: Case, every: list[Case]) -> list[str]:
    return accept_golden_of(case, Options(), every, [case.name])


def by_pytest(case: Case, every: list[Case]) -> list[str]:
    return accept_goldens(case, Options(), [case.name]).splitlines()[:-1]


@pytest.mark.parametrize("accepting", [by_command, by_pytest])
def test_the_other_cases_of_a_golden_are_named_and_their_noise_is_measured(
    accepting: Callable[[Case, list[Case]], list[str]], every: list[Case], measured: list[list[str]], tmp_path: Path
) -> None:
    one, two, three = every
    (said,) = accepting(one, every)[1:]
    assert said.split(": ") == ["  it is also the golden of 1 other case", "two"]
    assert measured == [["float32 shares", "float32 parts"]]
    assert accepting(three, every)[1:] == []
    written = sorted(path.name for path in (tmp_path / "golden").iterdir())
    assert written == sorted(golden.golden_file(case).name for case in (two, three))
