"""The cases that a command line selects by --cases and by name."""

from __future__ import annotations

import argparse
from pathlib import Path

from harness.core.case import case_files, random_cases
from harness.core.case.case import Case
from harness.core.case.loading import load_all
from harness.core.case.named_case import load_case_named


def folder_of(args: argparse.Namespace, usual: str = case_files.CASES_FOLDER) -> Path:
    """Return the folder of cases that was typed, or the usual one. Raises CaseError if there is no such folder."""
    return case_files.folder_of(args.cases or usual)


def cases_of(args: argparse.Namespace, usual: str = case_files.CASES_FOLDER) -> list[Case]:
    """Return all cases of the folder that was typed, or of the usual one.

    Raises CaseError if one is wrong, or there is none.
    """
    return load_all(folder_of(args, usual))


def case_of(args: argparse.Namespace) -> Case:
    """Return the case that was typed: drawn for a name like random_7_1, else from the folder of cases. Raises CaseError."""
    return random_cases.case_of_name(args.case) or load_case_named(args.case, folder_of(args))
