"""`harness --version`: what a report of a mistake begins with."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from typing import Any

from harness import __version__
from harness.core.evidence.format import FORMAT_VERSION
from harness.core.report.output import print_lines
from harness.core.run.commit import commit_of_harness


class Version(argparse.Action):
    """The action of --version: print the versions and end the process."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print_lines(version_text())
        parser.exit()


def version_text() -> str:
    """Return the versions of harness, commit, records, torch and Python on one line."""
    commit = commit_of_harness() or "unknown"
    python = sys.version.split()[0]
    return (
        f"harness {__version__}, commit {commit}, records {FORMAT_VERSION}, torch {_torch_version()}, Python {python}"
    )


def _torch_version() -> str:
    """Return the version of torch, without importing it; "not installed" if there is none."""
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
