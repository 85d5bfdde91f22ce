"""Folders of case files, in somebody's repository or built in here, and the paths by which cases name their files.

A repository has cases/ and golden/ side by side. The path of a case's file is absolute, and relative for one that is
built in.
"""

from __future__ import annotations

import os
from pathlib import Path

from harness import BUILTIN
from harness.core.case.case import CaseError
from harness.core.case.repository import path_from_here

CASES_FOLDER = "cases"
LAYOUTS = BUILTIN / "layouts"  # for a cluster, of which no case is run
BUILTIN_WORD = "builtin"  # what is typed for the cases that come with the harness


def folder_of(typed: str) -> Path:
    """Return the folder that `--cases` means, absolute. BUILTIN_WORD means the cases that come with the harness.

    Raises CaseError if it is a file, or there is no such folder.
    """
    if typed == BUILTIN_WORD:
        return BUILTIN / CASES_FOLDER
    folder = Path(typed).absolute()
    if folder.is_file():
        raise CaseError(
            f"{typed!r} is a file: name its folder, --cases {path_from_here(folder.parent)}, and choose cases by name"
        )
    if not folder.is_dir():
        raise CaseError(
            f"no folder {typed!r} in {Path.cwd()}: name one that has YAML files of cases, --cases DIR; "
            f"those that come with the harness are --cases {BUILTIN_WORD}"
        )
    return folder


def path_of(file: str) -> Path:
    """Return the absolute path of a case's file."""
    return BUILTIN / file


def repository_folder(file: str) -> Path:
    """Return the folder that has cases/ in it. For a file in a folder of another name, that folder itself."""
    folder = path_of(file).parent
    return folder.parent if folder.name == CASES_FOLDER else folder


def recorded_path(path: Path) -> str:
    """Return the path as a case and its evidence keep it: relative for a file that is built in, else absolute, links
    resolved."""
    path = Path(os.path.realpath(path))  # Path.resolve raises RuntimeError for a loop of links, which reading reports
    return str(path.relative_to(BUILTIN)) if path.is_relative_to(BUILTIN) else str(path)


def shown_path(file: str) -> str:
    """Return the path as a person reads it here."""
    return path_from_here(path_of(file))


def cases_arguments(file: str) -> list[str]:
    """Return the words, such as --cases DIR, that select the file's folder on a command line here.

    Empty if it is the usual folder, cases/ here, or if the case is of no file.
    """
    return folder_arguments(path_of(file).parent) if file else []


def folder_arguments(folder: Path) -> list[str]:
    """Return the words, such as --cases DIR, that select a folder of cases on a command line here.

    Empty if it is cases/ here.
    """
    if folder == Path.cwd() / CASES_FOLDER:
        return []
    return ["--cases", BUILTIN_WORD if folder == BUILTIN / CASES_FOLDER else path_from_here(folder)]
