"""A failing case is made again: how often, and what is said of one that fails once."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.core.case.case import Case
from harness.core.case.loading import from_json
from harness.core.cli import main
from harness.core.judge.twice import PASSED_IN_BACKWARD
from harness.core.report.outcome import Outcome
from harness.core.report.progress import Progress
from harness.core.report.repeats_text import repeats_text
from harness.core.run.again import RERUNS_PER_CAUSE, Reruns
from harness.core.run.matrix import run_all
from harness.core.run.options import Options

BAD = Outcome("a", "FAIL", cause="gradients scaled", diagnosis={"kinds": ["gradients scaled"]})
BAD = replace(BAD, report="FAIL a  gradients scaled\n  proof\n\n  checks")
GOOD, OPEN, OTHER = replace(BAD, verdict="PASS"), replace(BAD, verdict="UNKNOWN"), replace(BAD, cause="other")


def case_of(**parts: Any) -> Case:
    return from_json({"name": "a", "why": "a test", "dims": {"dp_shard": 2}, **parts})


def again(first: Outcome, further: list[Outcome], *, fault: str | None = None, of: Reruns | None = None) -> Outcome:
    left: Iterator[Outcome] = iter([first, *further])
    options = Options(out=Path("nowhere"), fault=fault)
    return (of or Reruns(len(further))).outcome_with_reruns(case_of(), options, lambda case, options: next(left))


@pytest.mark.parametrize(
    ("further", "alike", "once"),
    [
        ([BAD], 1, False),
        ([BAD, OTHER], 1, False),
        ([GOOD], 0, True),
        ([GOOD, GOOD], 0, True),
        ([GOOD, BAD], 1, False),
        ([OPEN], 0, False),
        ([GOOD, OPEN], 0, True),
    ],
)
def test_a_cause_is_told_of_what_fails_again_alone(further: list[Outcome], alike: int, once: bool) -> None:
    found = again(BAD, further)
    assert found.verdict == "FAIL"
    assert found.repeats["verdicts"] == [one.verdict for one in further]
    assert found.repeats["alike"] == alike
    assert found.repeats["folders"][:2] == ["nowhere/a", "nowhere/a+again_1"]
    assert (found.cause != BAD.cause, found.diagnosis == {}) == (once, once)
    assert repeats_text(found.repeats)[:20] in found.report and found.report.endswith("\n\n  checks")
    assert ("gradients scaled" in found.report, "proof" in found.report) == (not once, not once)


def test_what_is_green_or_undecided_or_has_a_fault_is_not_made_again() -> None:
    for first, fault in ((GOOD, None), (OPEN, None), (BAD, "some")):
        assert again(first, [BAD], fault=fault) == first


def test_of_one_cause_only_some_are_made_again() -> None:
    of = Reruns(1)
    assert [bool(again(BAD, [BAD], of=of).repeats) for _ in range(RERUNS_PER_CAUSE + 2)] == [
        True
    ] * RERUNS_PER_CAUSE + [False] * 2
    assert again(replace(OTHER, diagnosis={"kinds": ["another"]}), [BAD], of=of).repeats


ONCE = """
import os
from pathlib import Path

from harness.core.trainers.llama3 import Llama3


class Once(Llama3):
    name = "once"

    def start(self, case, weights, device):
        trainer, marker, calls = super().start(case, weights, device), Path(__file__).with_name("done"), []

        def changed(module, args, output):
            calls.append(module)
            if len(calls) == 2:
                output.register_hook(lambda gradient: gradient * 1.5)

        if os.environ["RANK"] == "1" and not marker.exists():
            marker.touch()
            trainer.model_parts[0].layers["0"].register_forward_hook(changed)
        return trainer


adapter = Once()
"""


@pytest.mark.slow("real ranks; the first is made again in the same way", after=1)
@pytest.mark.parametrize("times", [0, 2])
def test_one_case_is_made_again_in_fresh_ranks_and_its_report_names_no_cause(
    times: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, out = tmp_path / "once.py", tmp_path / "out"
    trainer.write_text(ONCE)
    words = ["run", "fsdp_2", "--trainer", str(trainer), "--out", str(out), "--json"]
    assert main([*words, "--again", str(times)] if times else words) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "FAIL"
    assert (found.get("repeats", {}).get("verdicts", []), "diagnosis" not in found) == (["PASS"] * times, bool(times))
    assert {"gradients", "grad_norm"} <= {each["check"] for each in found["results"] if each["verdict"] == "FAIL"}


@pytest.mark.slow(
    "real ranks, twice; test_one_case_is_made_again_in_fresh_ranks_and_its_report_names_no_cause makes a case again"
)
def test_a_gradient_that_goes_wrong_once_on_one_rank_is_located_there(tmp_path: Path) -> None:
    trainer = tmp_path / "once.py"
    trainer.write_text(ONCE)
    options = Options(out=tmp_path / "out", trainer=str(trainer))
    (found,) = run_all(
        [case_of()], options, jobs=1, progress=Progress({"a": 1.0}, io.StringIO()), ended=lambda _: None, again=1
    )
    assert (found.verdict, found.repeats["verdicts"], found.diagnosis) == ("FAIL", ["PASS"], {})
    differs = found.repeats["differs"]
    assert (differs["step"], differs["quantity"], tuple(differs["ranks"])) == (2, PASSED_IN_BACKWARD, (1,))
    assert all((Path(folder) / "case.json").exists() for folder in found.repeats["folders"])
