"""The pytest plugin: the checks of cases as pytest items, FILE.yaml::CASE::CHECK.

It is loaded wherever the harness is installed, and takes no part unless a repository's configuration names its cases.

    [pytest]
    harness_cases = cases
    harness_trainer = adapter.py

Only then is more than this file imported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

__path__: list[str] = []  # old names have modules under this one, such as harness.plugin.items


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("harness_cases", "folders of cases whose checks are items; without it there are none", "paths", [])
    parser.addini("harness_trainer", "the trainer under test where --harness-trainer does not say: NAME or FILE.py")
    group = parser.getgroup("harness", "cases of distributed training; see harness_cases")
    group.addoption(
        "--harness-trainer", metavar="NAME|FILE.py", help="the trainer under test; default as of `harness run`"
    )
    group.addoption(
        "--harness-source", metavar="PATH|VERSION", help="a checkout of that trainer, or a release that pip brings"
    )
    group.addoption("--harness-launcher", default="local", choices=("local", "torchrun"))
    group.addoption("--harness-server", choices=("resident", "own"), help="as --server of `harness run`")
    group.addoption("--harness-device", default="cpu", choices=("cpu", "cuda"))
    group.addoption("--harness-ranks-per-gpu", type=int, default=1, metavar="N", help="may share one; default 1")
    group.addoption(
        "--harness-timeout", type=float, default=120.0, metavar="S", help="seconds for one launch; default 120"
    )
    group.addoption(
        "--harness-out",
        default="out",
        metavar="DIR",
        help="where evidence goes, typed --harness-out=DIR; default out. pytest reads its configuration before it knows this "
        "option, and takes a DIR that is a separate word for a place of tests",
    )
    group.addoption("--harness-accept-golden", action="store_true", help="golden items rewrite the golden, and fail")
    group.addoption(
        "--harness-not-applicable",
        action="store_true",
        help="show checks that do not apply to a case as skipped, each with its reason",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the items of checks, if the configuration names folders of cases; else import nothing.

    pytest.UsageError if an option of the harness is typed without such a configuration.
    """
    folders = config.getini("harness_cases")
    if folders:
        from harness.core.plugin.checks import Checks

        config.pluginmanager.register(Checks(config, folders), "harness-checks")
    elif typed := [word for word in map(str, config.invocation_params.args) if word.startswith("--harness-")]:
        raise pytest.UsageError(
            misplaced([str(word) for word in config.invocation_params.args])
            or f"{typed[0]}: there are no cases; harness_cases in the configuration names their folders"
        )


def misplaced(words: Sequence[str]) -> str:
    """Return why pytest did not find the configuration, and the remedy; empty if the reason is not the one below.

    pytest looks for it where any word of the command line lies. It does so before it knows that the word is the value
    of an option of the harness.
    """
    for option, value in pairwise(words):
        if option.startswith("--harness-") and "=" not in option and Path(value).exists():
            return f"{option} {value}: pytest looked for its configuration there, not here: write {option}={value}"
    return ""


@pytest.fixture
def same_training(tmp_path: Path) -> Callable[..., None]:
    """Return a function that records two commands of one training and fails the test if the second differs from the
    trusted first.

    Both are typed as by a person: "python train.py", "torchrun --nproc-per-node 4 train.py --fsdp". noise: whether the
    first is recorded once more with altered weights, for bounds. after: the second one goes on from the checkpoint that
    the first one saved after this step. A training that could not be judged fails as well, with the reason.
    """

    def judge(trusted: str, other: str, *, noise: bool = True, after: int = 0) -> None:
        from harness.core import rings

        if failed := rings.function_for("called", "same_training")(tmp_path, trusted, other, noise=noise, after=after):
            pytest.fail(failed, pytrace=False)

    return judge
