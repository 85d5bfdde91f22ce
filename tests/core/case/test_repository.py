"""The repository around the current folder: its name, and paths as they are typed in it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from harness.core.case.repository import path_from_here, repository_name_here


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "clone"
    (folder / "sub").mkdir(parents=True)
    subprocess.run(["git", "init", "--quiet", str(folder)], check=True)
    return folder


@pytest.mark.parametrize(
    ("remote", "name"),
    [
        ("", "clone"),
        ("https://example.com/us/train.git", "train"),
        ("git@example.com:us/train.git", "train"),
        ("git@example.com:train", "train"),
        ("/srv/train/", "train"),
    ],
)
def test_a_repository_is_called_as_its_remote_or_its_folder(
    repository: Path, monkeypatch: pytest.MonkeyPatch, remote: str, name: str
) -> None:
    if remote:
        subprocess.run(["git", "-C", str(repository), "remote", "add", "origin", remote], check=True)
    monkeypatch.chdir(repository)
    assert repository_name_here() == name
    monkeypatch.chdir(repository / "sub")
    assert repository_name_here() == f"{name}/sub"


def test_paths_in_the_repository_are_relative_and_others_stay(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository / "sub")
    assert path_from_here(repository / "sub" / "adapter.py") == "adapter.py"
    assert path_from_here(repository / "cases") == "../cases"
    assert path_from_here("other/adapter.py") == "other/adapter.py"
    assert path_from_here(repository.parent / "elsewhere") == str(repository.parent / "elsewhere")


def test_outside_of_a_repository_paths_below_the_folder_are_relative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if repository_name_here() == "":  # whatever folder the system keeps temporary files in
        assert path_from_here(tmp_path / "cases") == "cases"
        assert path_from_here(tmp_path.parent / "cases") == str(tmp_path.parent / "cases")
