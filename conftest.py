"""The harness's pytest plugin, which `harness_cases` in pyproject.toml gives the cases of this repository.

`pytest -k hsdp` means cases, as the names of cases are what one types there; `pytest tests -k hsdp` the harness's own tests.
Tests of adapters, which need the packages that these adapt, run when they are named: `make test-adapters`.
`pytest --short`, which `make test` uses, leaves out the tests marked `slow`, and of the cases all but tests/short_cases.txt.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.core.case.case import CaseError
from harness.core.case.loading import load_all
from harness.core.plugin.items import Check
from harness.core.run.selection import matches_expression

pytest_plugins = ["harness.plugin"]
TESTS = Path(__file__).with_name("tests")
ADAPTERS = TESTS / "adapters"
SHORT_CASES = TESTS / "short_cases.txt"
LEFT_OUT = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--short", action="store_true", help="no test marked slow, and only the cases of tests/short_cases.txt"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "slow(reason, after=0): left out by --short; another test is near it, which the reason names."
        " after: so many values of each parameter stay",
    )
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS and names_cases(config.option.keyword):
        config.args.remove("tests")


@pytest.hookimpl(trylast=True)  # what -k, -m and a case's tier leave out is left out already
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--short"):
        return
    names = SHORT_CASES.read_text().split()
    left_out = [item for item in items if not is_short(item, names)]
    items[:] = [item for item in items if is_short(item, names)]
    config.hook.pytest_deselected(items=left_out)
    config.stash[LEFT_OUT] = len(left_out)
    if hasattr(config, "workeroutput"):
        config.workeroutput["left_out_by_short"] = len(left_out)


def is_short(item: pytest.Item, names: Collection[str]) -> bool:
    """Return whether --short keeps it. names: of the cases that it keeps."""
    if isinstance(item, Check):
        return item.parent.case.name in names
    return all(is_among_first(item, marker.kwargs.get("after", 0)) for marker in item.iter_markers("slow"))


def is_among_first(item: pytest.Item, count: int) -> bool:
    """Return whether each parameter of a test has one of its first `count` values; False of a test without parameters."""
    callspec = getattr(item, "callspec", None)
    return callspec is not None and all(place < count for place in callspec.indices.values())


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Under `pytest -n` workers leave tests out, all of them the same; pytest counts what is passed on here, once."""
    count = getattr(node, "workeroutput", {}).get("left_out_by_short", 0)
    if count and LEFT_OUT not in node.config.stash:
        node.config.stash[LEFT_OUT] = count
        node.config.hook.pytest_deselected(items=[SimpleNamespace()] * count)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if count := config.stash.get(LEFT_OUT, 0):
        terminalreporter.write_line(f"--short left out {count} tests: `make test ALL=1` runs them as well")


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
        return (
            bool(words)
            and not matches_expression(expression, "")
            and any(w in c.name.lower() for c in load_all() for w in words)
        )
    except (CaseError, TypeError):  # of words that pytest understands, or that it will refuse
        return False
