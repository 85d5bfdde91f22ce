"""The README and the pages of docs/ say what is: checks, commands, examples, tables; their links lead somewhere."""

from __future__ import annotations

import math
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from literal import tiny_case, trial_of, with_step

from harness import ROOT
from harness.core import checks
from harness.core.case.loading import find_case, load_all
from harness.core.cli import make_parser
from harness.core.judge import finding, result
from harness.core.judge.result import Verdict
from harness.core.judge.trial import Trial
from harness.core.report.text import case_report
from harness.core.run.options import Options
from harness.core.run.run_case import run_case
from harness.faults import load_fault
from tools.tables import PARTS

NEAR_THE_FIRST = pytest.mark.slow("real ranks; the first of these halves the gradients, too")
README = (ROOT / "README.md").read_text()
AT_THE_TOP = ("README.md", "CONTRIBUTING.md")
FILES = [*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in AT_THE_TOP)]
PAGES = {str(page.relative_to(ROOT).as_posix()).removeprefix("docs/"): page.read_text() for page in FILES}


def test_the_check_that_the_page_writes_as_an_example_can_pass_and_fail() -> None:
    _, _, after = PAGES["checks.md"].partition("## Add a check\n")
    (lines,) = re.findall(r'(?:^    """(?:.*\n|\n)+?)(?=^[^ \n])', after, re.MULTILINE)
    space = {"math": math, "Trial": Trial, **vars(result), **vars(finding)}
    exec(textwrap.dedent(lines), space)
    trial = trial_of(tiny_case("fsdp_2"))
    assert space["check"](trial).verdict is Verdict.PASS
    found = space["check"](with_step(trial, 1, 2, grad_norm=math.nan))
    assert [(one.ranks, one.step) for one in found.findings] == [((1,), 2)]


@pytest.mark.parametrize(("rate", "verdict"), [(1.0, Verdict.PASS), (2.0, Verdict.FAIL)])
def test_the_check_that_contributors_add_as_an_exercise_passes_its_own_test(
    rate: float, verdict: Verdict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = PAGES["CONTRIBUTING.md"]
    (file,) = re.findall(r'^    """No rank(?:.*\n|\n)+?(?=^[^ \n])', page, re.MULTILINE)
    (test,) = re.findall(r"^       import pytest\n(?:       .*\n|\n)+", page, re.MULTILINE)
    (tmp_path / "rate_below_one.py").write_text(textwrap.dedent(file))
    monkeypatch.setattr(checks, "__path__", [*checks.__path__, str(tmp_path)])
    space: dict[str, Any] = {}
    try:
        exec(textwrap.dedent(test), space)
    finally:
        sys.modules.pop("harness.core.checks.rate_below_one", None)
        vars(checks).pop("rate_below_one", None)
    (tested,) = [value for name, value in space.items() if name.startswith("test_")]
    tested(rate, verdict)


@pytest.mark.parametrize("page", PARTS, ids=lambda page: page.name)
def test_its_table_is_made_from_the_cases_and_from_what_was_measured(page: Path) -> None:
    text = page.read_text()
    assert PARTS[page](text) == text, "make it anew: python -m tools.tables"


@pytest.mark.parametrize(
    "command", sorted(set(re.findall(r"(?:^    (?:\$ )?|`)harness (\w+)", "\n".join(PAGES.values()), re.MULTILINE)))
)
def test_a_command_that_it_names_exists(command: str) -> None:
    with pytest.raises(SystemExit) as stop:
        make_parser().parse_args([command, "--help"])
    assert stop.value.code == 0


@pytest.mark.parametrize("page", sorted(PAGES))
def test_its_links_and_the_files_that_it_names_are_there(page: str) -> None:
    beside = ROOT if page in AT_THE_TOP else (ROOT / "docs" / page).parent
    links = re.findall(r"\]\(([^)#:]+)\)", PAGES[page])
    files = re.findall(
        r"`((?:harness|tools|tests|reference|cases|golden|docs|benchmarks|upstream_bugs)/[\w/.-]*)", PAGES[page]
    )
    assert [link for link in links if not (beside / link).exists()] == []
    assert [file for file in files if not (ROOT / file).exists()] == []


def test_the_failing_output_at_the_top_is_the_real_one(tmp_path: Path) -> None:
    judgement = run_case(find_case("hsdp_2x8", load_all()), Options(out=tmp_path, fault="hsdp_runs_as_fsdp"))
    shown = case_report(judgement).split("\n\n")[0]
    assert _without_noise(shown) in _without_noise(README)


def _without_noise(text: str) -> str:
    """Rounding differs between machines, the folder is another one; indentation is the README's."""
    lines = [line.strip() for line in text.splitlines() if not line.strip().startswith("evidence ")]
    return re.sub(r"within [\d.e-]+", "within", "\n".join(lines))


@pytest.mark.parametrize(
    "name",
    [
        "gradients_halved",
        *(pytest.param(name, marks=NEAR_THE_FIRST) for name in ("half_of_the_loss", "half_gradients")),
    ],
)
def test_the_examples_of_a_fault_work_and_are_named(name: str, tmp_path: Path) -> None:
    page = PAGES["faults.md"].partition("## A fault of your own")[2]
    code = re.findall(r"^    (.*)$|^()$", page, re.MULTILINE)
    (tmp_path / "own.py").write_text("\n".join(line for line, _ in code))
    spec = f"{tmp_path}/own.py:{name}"
    fault = load_fault(spec)
    judgement = run_case(find_case(fault.case, load_all()), Options(out=tmp_path / "out", fault=spec))
    broken = {result.check for result in judgement.results if result.verdict is Verdict.FAIL}
    assert set(fault.caught_by) <= broken
    assert judgement.diagnosis and fault.named in judgement.diagnosis.kinds
