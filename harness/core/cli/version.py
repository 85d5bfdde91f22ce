"""`harness --version`: what a report of a mistake begins with."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from typing import Any

from harness import __version__
from harness.core.evidence.format import FORMAT
from harness.core.report.output import say
from harness.core.run.commit import commit_of_harness


class Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        say(version_text())
        parser.exit()


def version_text() -> str:
    commit = commit_of_harness() or "unknown"
    return (
        f"harness {__version__}, commit {commit}, records {FORMAT}, torch {_torch()}, Python {sys.version.split()[0]}"
    )


def _torch() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
