"""Which cases a command means, in a repository of somebody's own: those in cases/, those of a folder, those built in."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from harness import BUILTIN, ROOT
from harness.core.case import case_files
from harness.core.case.loading import load_all
from harness.core.cli import main

MINE = "cases: {mine: {why: a test, dims: {dp_shard: 2}}}"


@pytest.fixture(autouse=True)
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one, which is the current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_without_a_folder_of_cases_the_remedy_is_named(repository: Path, capsys: Any) -> None:
    assert main(["matrix", "--list"]) == 2
    told = capsys.readouterr().err
    assert f"no folder 'cases' in {repository}" in told
    assert "--cases DIR" in told and "--cases builtin" in told


def test_cases_in_the_current_folder_are_the_usual_ones(repository: Path, capsys: Any) -> None:
    (repository / "cases").mkdir()
    (repository / "cases" / "some.yaml").write_text(MINE)
    assert main(["matrix", "--list"]) == 0
    assert capsys.readouterr().out.splitlines() == ["cases/some.yaml", "  mine   2 ranks  a test"]


def test_those_of_this_project_are_had_anywhere(capsys: Any) -> None:
    assert main(["matrix", "--list", "--cases", "builtin", "-k", "hsdp_2x2 and not (accum or valid)"]) == 0
    assert " hsdp_2x2 " in capsys.readouterr().out


def test_what_is_built_in_lies_at_the_top_of_a_checkout() -> None:
    assert BUILTIN == ROOT
    assert {case.file.split("/")[0] for case in load_all()} == {"cases"}


def test_a_folder_is_typed_again_as_it_is_selected_here(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, others = str(repository / "cases" / "a.yaml"), str(repository / "others" / "a.yaml")
    built_in = "cases/data_parallel.yaml"
    assert case_files.cases_arguments("") == case_files.cases_arguments(mine) == []
    assert case_files.cases_arguments(others) == ["--cases", "others"]
    assert case_files.cases_arguments(built_in) == ["--cases", "builtin"]
    monkeypatch.chdir(ROOT)
    assert case_files.cases_arguments(built_in) == []


@pytest.mark.parametrize("words", ["report out/x", "golden --plot --cases builtin"])
def test_pictures_say_what_they_lack(
    words: str, repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (repository / "out" / "x").mkdir(parents=True)
    (repository / "out" / "x" / "case.json").touch()
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "matplotlib" else found(name))
    assert main(words.split()) == 2
    assert capsys.readouterr().err == "harness: pictures need matplotlib: pip install matplotlib\n"


def test_a_file_of_cases_is_no_folder_and_its_folder_is_named(repository: Path, capsys: Any) -> None:
    (repository / "cases").mkdir()
    (repository / "cases" / "mine.yaml").write_text("cases: {}\n")
    assert main(["run", "mine", "--cases", "cases/mine.yaml"]) == 2
    assert "--cases cases," in capsys.readouterr().err


def test_a_catalogue_of_ones_own_is_about_ones_own_cases(repository: Path, capsys: Any) -> None:
    (repository / "mine.py").write_text(
        "from harness.faults import fault\n\n\n"
        '@fault(breaks="x", bug="x", case="mine", caught_by="loss", named="x")\ndef wrong(): ...\n'
    )
    assert main(["faults", "--file", "mine.py"]) == 2
    assert f"no folder 'cases' in {repository}" in capsys.readouterr().err
