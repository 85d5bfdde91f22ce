"""git is asked, and runs nothing that the repository names."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from harness.core.evidence.git import run_git
from harness.core.run.commit import commit_of
from harness.nights.bisect.commits import resolve_commit, temporary_clone


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Its configuration and attributes name programs, each of which would leave a file."""
    folder = tmp_path / "repo"
    folder.mkdir()

    def typed(*words: str) -> None:
        identity = ["-c", "user.name=A", "-c", "user.email=a@b"]
        subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True)

    typed("init", "--quiet")
    (folder / ".gitattributes").write_text("*.py filter=own.name diff=own\n")
    (folder / "train.py").write_text("a = 1\n")
    typed("add", ".")
    typed("commit", "--quiet", "-m", "first")
    ran = tmp_path / "ran"
    ran.mkdir()
    hook = folder / ".git" / "hooks" / "post-checkout"
    hook.write_text(f"#!/bin/sh\ntouch {ran}/hook\n")
    hook.chmod(0o755)
    monitor = tmp_path / "monitor"
    monitor.write_text(f"#!/bin/sh\ntouch {ran}/fsmonitor\n")
    monitor.chmod(0o755)
    typed("config", "core.fsmonitor", str(monitor))
    for kind in ("clean", "smudge"):
        typed("config", f"filter.own.name.{kind}", f"touch {ran}/{kind}; cat")
    typed("config", "filter.own.name.required", "true")
    typed("config", "core.hooksPath", str(hook.parent))
    (folder / "train.py").write_text("a = 2\n")  # so that git compares its content
    return folder


def ran(repository: Path) -> list[str]:
    return sorted(path.name for path in (repository.parent / "ran").iterdir())


def test_a_commit_is_named_without_running_a_program(repository: Path) -> None:
    subprocess.run(["git", "status"], cwd=repository, check=True, capture_output=True)
    assert "fsmonitor" in ran(repository)  # the repository is as dangerous as it is meant to be
    for left in (repository.parent / "ran").iterdir():
        left.unlink()
    assert commit_of(str(repository)).endswith("-dirty")
    assert ran(repository) == []


def test_a_repository_is_cloned_and_checked_out_without_running_a_program(repository: Path) -> None:
    commit = resolve_commit(repository, "HEAD")
    with temporary_clone(repository, ("/train.py",)) as checkout:
        run_git(checkout, "checkout", "--quiet", "--detach", commit)
        assert (checkout / "train.py").read_text() == "a = 1\n"
    assert ran(repository) == []


def test_a_folder_that_is_no_repository_has_no_commit(tmp_path: Path) -> None:
    assert commit_of(str(tmp_path)) == ""
