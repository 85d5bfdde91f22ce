"""The wheel, installed beside nothing else of this project, in an empty repository of somebody's own.

It is built here without a network, by the setuptools at hand, and lies in a folder before the packages of this environment.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness import ROOT, __version__

pytestmark = pytest.mark.slow("builds the wheel and runs commands of it in an environment; the rest uses the sources")

SOURCES = (
    "harness",
    "reference",
    "cases",
    "layouts",
    "golden",
    "upstream_bugs",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)
COPY_FOLDER = functools.partial(shutil.copytree, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
CASES = """
defaults: {training: {seed: 77}}
cases:
  hsdp_2x2: {dims: {dp_replicate: 2, dp_shard: 2}, why: Two replicas of two shards.}
  fsdp_2: {dims: {dp_shard: 2}, why: Two shards.}
"""
ADAPTER = """
import own_fsdp
own_fsdp.KNOWN["seed"] = ...
adapter = own_fsdp.Fsdp("blocks")
"""
CONFIGURATION = """
[tool.pytest.ini_options]
testpaths = ["tests"]
harness_cases = ["cases"]
harness_trainer = "adapter.py"
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which pip laid it."""
    for needed in ("setuptools", "pip"):
        pytest.importorskip(needed, reason=f"no {needed} here, so no wheel is built; `make` installs it")
    folder = tmp_path_factory.mktemp("wheel")
    (folder / "sources").mkdir()
    for path in (ROOT / name for name in SOURCES):
        copy = COPY_FOLDER if path.is_dir() else shutil.copy
        copy(path, folder / "sources" / path.name)
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input")
    alone = ("--no-deps", "--no-index")
    done(*pip, "wheel", *alone, "--no-build-isolation", "-w", str(folder), str(folder / "sources"), cwd=folder)
    wheel = next(folder.glob("*.whl"))
    done(*pip, "install", *alone, "--target", str(folder / "packages"), str(wheel), cwd=folder)
    return folder / "packages"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Somebody's own: a trainer, its adapter, two cases, tests, and no conftest.py."""
    for name in ("own_trainer.py", "own_fsdp.py"):
        shutil.copy(ROOT / "tests" / name, tmp_path / name)
    (tmp_path / "adapter.py").write_text(ADAPTER)
    (tmp_path / "pyproject.toml").write_text(CONFIGURATION)
    for name, text in (("cases/mine.yaml", CASES), ("tests/test_mine.py", "def test_mine(): pass\n")):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    return tmp_path


def done(*command: str, cwd: Path, packages: Path | None = None, code: int = 0) -> str:
    """What it printed; fails where it exits otherwise."""
    environment = {**os.environ, "CI": "", "PYTHONPATH": str(packages or "")}
    ended = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == code, f"{' '.join(command)}\n{ended.stdout}{ended.stderr}"
    return ended.stdout + ended.stderr


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if "__pycache__" not in path.parts}


def test_nothing_but_the_harness_is_installed_and_its_cases_and_goldens_are_in_it(installed: Path) -> None:
    top = {re.sub(r"-.*", "-info", path.name) for path in installed.iterdir()}
    assert top == {"harness", "llama_parallel_harness-info", "bin"}
    for folder in ("cases", "layouts", "golden", "upstream_bugs"):
        assert files(installed / "harness" / "builtin" / folder) == files(ROOT / folder)
    assert files(installed / "harness" / "reference") == files(ROOT / "reference")
    data = {path for path in (ROOT / "harness").rglob("*.*") if path.suffix in (".json", ".html", ".yaml")}
    names = {str(path.relative_to(ROOT)) for path in data if "builtin" not in path.parts}
    assert names >= {"harness/faults/results.json", "harness/core/report/schema.json", "harness/core/report/page.html"}
    assert [name for name in sorted(names) if not (installed / name).is_file()] == []


def test_the_wheel_has_the_package_s_version_and_the_commit_of_an_archive(installed: Path, tmp_path: Path) -> None:
    version = (sys.executable, "-P", "-m", "harness", "--version")
    assert done(*version, cwd=tmp_path, packages=installed).startswith(f"harness {__version__}, commit unknown, ")
    assert len(list(installed.glob(f"*-{__version__}.dist-info/licenses/LICENSE"))) == 1
    archived = shutil.copytree(installed, tmp_path / "packages")
    (archived / "harness" / "commit.txt").write_text("0123abc\n")
    assert done(*version, cwd=tmp_path, packages=archived).startswith(f"harness {__version__}, commit 0123abc, ")


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no repository here, so git makes no archive")
def test_git_writes_the_commit_into_an_archive() -> None:
    git = functools.partial(subprocess.run, cwd=ROOT, capture_output=True, check=True)
    packed = git(["git", "archive", "HEAD", "harness/commit.txt"]).stdout
    told = git(["tar", "-xO"], input=packed).stdout.decode().strip()
    assert git(["git", "rev-parse", told]).stdout == git(["git", "rev-parse", "HEAD"]).stdout


def test_in_somebodys_repository_every_command_is_about_its_own_cases(installed: Path, repository: Path) -> None:
    harness, before = str(installed / "bin" / "harness"), files(installed)
    where = done(sys.executable, "-c", "import harness; print(harness.__file__)", cwd=repository, packages=installed)
    assert where.strip() == str(installed / "harness" / "__init__.py")
    told = done(harness, "run", "fsdp_2", cwd=repository, packages=installed, code=2)
    assert "judged was adapter.py" in told and f"{repository}/golden/" in told
    assert "make it with `harness golden --accept -k fsdp_2`" in told
    done(harness, "golden", "--accept", cwd=repository, packages=installed)
    assert len(list((repository / "golden").iterdir())) == 1
    told = done(harness, "matrix", "-k", "fsdp", cwd=repository, packages=installed)
    assert re.search(r"s: 1 PASS$", told, re.MULTILINE), told
    told = done(sys.executable, "-m", "pytest", "-k", "hsdp", cwd=repository, packages=installed)
    assert " 1 deselected" not in told and re.search(r"\d+ passed, \d+ deselected", told), told
    assert "skipped" not in told and "checks in 1 case did not apply and were not judged" in told
    assert files(installed) == before  # nothing is written beside the code


def test_the_catalogue_and_the_cases_of_this_project_are_had_in_an_empty_folder(
    installed: Path, tmp_path: Path
) -> None:
    harness = (sys.executable, "-P", "-m", "harness")
    listed = done(*harness, "faults", "--list", "-k", "hsdp_runs_as_fsdp", cwd=tmp_path, packages=installed)
    assert "-> HSDP ran as FSDP: " in listed
    told = done(*harness, "faults", "-k", "hsdp_runs_as_fsdp", "--checks-only", cwd=tmp_path, packages=installed)
    assert "1 fault in " in told and "1 CAUGHT" in told
    told = done(*harness, "run", "single", cwd=tmp_path, packages=installed, code=2)
    assert "--cases builtin" in told
    assert "16,384" in done(*harness, "plan", "llama3_405b_16384", cwd=tmp_path, packages=installed)
    told = done(*harness, "run", "single", "--cases", "builtin", cwd=tmp_path, packages=installed)
    assert told.startswith("PASS single")
