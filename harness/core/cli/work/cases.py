"""The cases that are meant by what was typed."""

from __future__ import annotations

import argparse
from pathlib import Path

from harness.core.case import case_files, random_cases
from harness.core.case.case import Case
from harness.core.case.loading import load_all
from harness.core.case.named_case import load_case_named


def folder_of(args: argparse.Namespace, usual: str = case_files.CASES_FOLDER) -> Path:
    """Raises CaseError where there is none."""
    return case_files.folder_of(args.cases or usual)


def cases_of(args: argparse.Namespace, usual: str = case_files.CASES_FOLDER) -> list[Case]:
    """Raises CaseError."""
    return load_all(folder_of(args, usual))


def case_of(args: argparse.Namespace) -> Case:
    return random_cases.case_of_name(args.case) or load_case_named(args.case, folder_of(args))
