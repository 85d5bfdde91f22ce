"""The trainer under test where none is typed, for every command and the pytest plugin. It is the one in the repository's
pytest configuration, else the one adapter of this folder, else the trainer that comes with the harness."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.core.case.repository import path_from_here
from harness.core.case.trainer_spec import CHECKOUT_FOLDER

BUILTIN_TRAINER = "llama3"
"""The trainer that comes with the harness."""
CONFIGURATION_KEY = "harness_trainer"
TABLES = {"pytest.toml": ("pytest",), ".pytest.toml": ("pytest",), "pyproject.toml": ("tool", "pytest")}
SECTIONS = {"pytest.ini": "pytest", ".pytest.ini": "pytest", "tox.ini": "pytest", "setup.cfg": "tool:pytest"}
FILES = ("pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg")
"""In pytest's order. The first of the nearest folder that has a section for pytest counts."""


@dataclass(frozen=True)
class DefaultTrainer:
    """The trainer that commands and the pytest plugin use if none is typed, and what chose it."""

    name: str
    """NAME, or FILE.py: absolute if a configuration names it, else relative to this folder."""
    reason: str = ""
    """What chose it, in words; empty if nothing did."""


def default_trainer() -> DefaultTrainer:
    """Return the trainer to use if none is typed: the configuration's, else the only adapter of this folder, else
    BUILTIN_TRAINER.

    Raises ValueError if this folder has several adapters and no configuration chooses, or if the configuration is
    wrong.
    """
    adapters = adapters_here()
    if trainer := find_configured_trainer(Path.cwd()):
        return trainer
    if len(adapters) > 1:
        raise ValueError(
            f"name one of the adapters of this folder: {', '.join(adapters)}; or write"
            f" {CONFIGURATION_KEY} into pyproject.toml, table [tool.pytest.ini_options]"
        )
    return (
        DefaultTrainer(adapters[0], "the only adapter of this folder") if adapters else DefaultTrainer(BUILTIN_TRAINER)
    )


def adapters_here() -> list[str]:
    """Return the paths of the adapters in this folder, sorted: adapter.py and *_adapter.py, as `harness init` calls
    them."""
    return sorted(str(file) for file in Path().glob("*.py") if file.stem == "adapter" or file.stem.endswith("_adapter"))


def trainer_arguments(name: str) -> list[str]:
    """Return the words that select a trainer on a command line here: --trainer NAME, or none if it is the usual one.

    An adapter in a checkout of `harness nightly` is named by its path in the repository.
    """
    name = name.rpartition(f"/{CHECKOUT_FOLDER}/")[2]
    try:
        usual_name = default_trainer().name
    except ValueError:
        usual_name = ""
    is_usual = name == usual_name or (usual_name.endswith(".py") and Path(usual_name).resolve() == Path(name).resolve())
    return [] if is_usual else ["--trainer", path_from_here(name) if name.endswith(".py") else name]


# ---- the configuration


def find_configured_trainer(folder: Path) -> DefaultTrainer | None:
    """Return the trainer that the nearest pytest configuration names, in this folder or above it.

    Only the first file with a section for pytest counts: None if it names no trainer, or there is none. Raises
    ValueError if it cannot be read, or names a file that does not exist.
    """
    for above in (folder, *folder.parents):
        for name in FILES:
            path = above / name
            if not path.is_file():
                continue
            section = pytest_section_of(path)
            if section is not None:
                return trainer_of_value(section[CONFIGURATION_KEY], path) if CONFIGURATION_KEY in section else None
    return None


def trainer_of_value(value: Any, path: Path) -> DefaultTrainer:
    """Return the trainer that a configuration's value names; a FILE.py in it is relative to the configuration's folder.

    Raises ValueError if the value is no text, empty, or a file that does not exist.
    """
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{path}: {CONFIGURATION_KEY} = {value!r}: a NAME or a FILE.py is needed")
    name = value.strip()
    if name.endswith(".py") and not (path.parent / name).is_file():
        raise ValueError(f"{path}: {CONFIGURATION_KEY} = {name!r}: there is no such file")
    return DefaultTrainer(
        str(path.parent / name) if name.endswith(".py") else name, f"{CONFIGURATION_KEY} of {path.name}"
    )


def pytest_section_of(path: Path) -> Mapping[str, Any] | None:
    """Return the section for pytest of a configuration file, options by name; None if the file has none.

    Raises ValueError if it cannot be read.
    """
    try:
        if path.name in TABLES:
            return _section_of_toml(tomllib.loads(path.read_text(encoding="utf-8")), path.name)
        return next(_sections_of_ini(path), None)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error


def _section_of_toml(document: Any, name: str) -> Mapping[str, Any] | None:
    """Return the section for pytest of a TOML document, with its ini_options; None if it is pyproject.toml and has none.

    A pytest.toml counts even if it is empty. Raises ValueError if it is no table.
    """
    for key in TABLES[name]:
        document = document.get(key, {})
        if not isinstance(document, dict):
            raise ValueError(f"{key} is no table")
    section = document | document.get("ini_options", {})
    return section if section or name != "pyproject.toml" else None


def _sections_of_ini(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the section for pytest, if there is one. A pytest.ini counts even if it is empty."""
    from iniconfig import IniConfig, ParseError  # what pytest reads it with

    try:
        sections = IniConfig(str(path)).sections
    except ParseError as error:
        raise ValueError(str(error)) from error
    if SECTIONS[path.name] in sections:
        yield sections[SECTIONS[path.name]]
    elif path.name.endswith("pytest.ini"):
        yield {}
