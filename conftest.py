"""The harness's pytest plugin, which `harness_cases` in pyproject.toml gives the cases of this repository.

`pytest -k hsdp` means cases, as the names of cases are what one types there; `pytest tests -k hsdp` the harness's own tests.
Tests of adapters, which need the packages that these adapt, run when they are named: `make test-adapters`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.run.selection import holds
from harness.spec.case import CaseError
from harness.spec.loading import load_all

pytest_plugins = ["harness.plugin"]
ADAPTERS = Path(__file__).with_name("tests") / "adapters"


def pytest_configure(config: pytest.Config) -> None:
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS and names_cases(config.option.keyword):
        config.args.remove("tests")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    named = any(ADAPTERS in (path := Path(arg.partition("::")[0]).resolve(), *path.parents) for arg in config.args)
    return True if collection_path == ADAPTERS and not named else None


def pytest_report_header(config: pytest.Config) -> str | None:
    left_out = config.args_source is pytest.Config.ArgsSource.TESTPATHS and "tests" not in config.args
    return f"cases only; the harness's own tests: pytest tests -k '{config.option.keyword}'" if left_out else None


def names_cases(expression: str) -> bool:
    """Whether a word of it is part of a case's name, and it selects not everything that lacks its words: "not slow" does."""
    words = {word.lower() for word in re.findall(r"\w+", expression)} - {"and", "or", "not"}
    try:
        return bool(words) and not holds(expression, "") and any(w in c.name.lower() for c in load_all() for w in words)
    except (CaseError, TypeError):  # of words that pytest understands, or that it will refuse
        return False
