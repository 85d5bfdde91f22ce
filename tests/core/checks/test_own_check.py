"""A check is one file: what is put beside the others is judged, reported and in the JSON, and nothing else is touched."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from literal import tiny_case, trial_of, with_step

from harness.core import checks
from harness.core.evidence.errors import CheckError
from harness.core.judge.judgement import Judgement
from harness.core.judge.result import Result, Verdict
from harness.core.judge.trial import Trial
from harness.core.report.stored import store_report
from harness.core.report.text import case_report

FILE = '''"""No rank takes a step of a rate above 1."""

from harness.core.judge.finding import Finding, Limit
from harness.core.judge.result import Result, verdict_of
from harness.core.judge.trial import Trial

STAGE = "numbers"
NEEDS = frozenset({"values"})


def check(trial: Trial) -> Result:
    rates = [(rank, step.step, step.lr) for rank, step in trial.own_steps() if step.lr is not None]
    wrong = [Finding.at(r, Limit(most=1), lr, step=n, quantity="learning rate") for r, n, lr in rates if lr > 1]
    return verdict_of("small_rates", wrong, len(rates))
'''


@pytest.fixture
def small_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "small_rates.py").write_text(FILE)
    monkeypatch.setattr(checks, "__path__", [*checks.__path__, str(tmp_path)])
    checks.all_checks.cache_clear()
    yield
    checks.all_checks.cache_clear()


def judged(trial: Trial, folder: Path) -> Judgement:
    folder.mkdir()
    return Judgement(trial.case, folder, checks.judge(trial), None, 1.0)


@pytest.mark.usefixtures("small_rates")
def test_it_is_judged_reported_and_in_the_json(tmp_path: Path) -> None:
    right = judged(trial_of(tiny_case("fsdp_2")), tmp_path / "right")
    wrong = judged(with_step(trial_of(tiny_case("fsdp_2")), 1, 2, lr=2.0), tmp_path / "wrong")
    verdicts = [next(one for one in made.results if one.check == "small_rates").verdict for made in (right, wrong)]
    assert verdicts == [Verdict.PASS, Verdict.FAIL]
    assert "small_rates: No rank takes a step of a rate above 1." in case_report(wrong)
    store_report(wrong)
    stored = json.loads((wrong.folder / "verdict.json").read_text())
    (found,) = [one for one in stored["results"] if one["check"] == "small_rates"]
    assert (found["verdict"], found["examined"]) == ("FAIL", 6)
    (finding,) = found["findings"]
    assert (finding["ranks"], finding["step"], finding["observed"]) == ([1], 2, 2.0)
    assert finding["expected"] == {"most": 1}


def test_it_is_gone_again() -> None:
    assert "small_rates" not in checks.all_checks()


@pytest.mark.parametrize(
    ("written", "lacking"),
    [
        (FILE.replace('STAGE = "numbers"', 'STAGE = "number"'), "STAGE, one of process"),
        (FILE.replace('frozenset({"values"})', 'frozenset({"valeus"})'), "NEEDS, a frozenset of words"),
        (FILE.replace('frozenset({"values"})', '"values"'), "NEEDS, a frozenset of words"),
        (FILE.replace("def check(", "def judge("), r"a function check\(trial\)"),
        (FILE.partition("\n")[2], "a docstring"),
    ],
)
def test_a_file_that_is_no_check_is_refused_with_what_it_lacks(
    written: str, lacking: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no_check.py").write_text(written)
    monkeypatch.setattr(checks, "__path__", [*checks.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "harness.core.checks.no_check", raising=False)
    with pytest.raises(CheckError, match=rf"no_check\.py: not a check; it lacks {lacking}"):
        checks.all_checks.__wrapped__()


def test_a_check_that_returns_the_result_of_another_name_is_unknown() -> None:
    result = checks.run_check("loss", lambda _: Result("los", Verdict.PASS, 1), trial_of(tiny_case("fsdp_2")))
    assert result.verdict is Verdict.UNKNOWN and "no Result named 'loss'" in result.note
