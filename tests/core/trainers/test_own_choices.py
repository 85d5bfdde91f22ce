"""What trainers do by choice fails with the line that declares it, and passes with that line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from harness import ROOT
from harness.core.case.allowance import Allowance
from harness.core.case.loading import find_case, load_all
from harness.core.causes.declarable import IF_INTENDED
from harness.core.judge.result import Firing, Verdict
from harness.core.report.cause_text import evidence_rows
from harness.core.run.options import Options
from harness.core.run.run_case import run_case

NEAR_THE_FIRST = pytest.mark.slow("real ranks; the first of these declares a choice in the same way")
CHOICES = ROOT / "tests" / "own_choices.py"


@pytest.mark.parametrize(
    ("case", "choice"),
    [
        ("fsdp_2", "compiled_product"),
        pytest.param("fsdp_2", "saved_on_the_host", marks=NEAR_THE_FIRST),
        pytest.param("tp_2", "batch_sent_to_peers", marks=NEAR_THE_FIRST),
        pytest.param("fsdp_4_reshard_never", "gathered_until_freed_by_hand", marks=NEAR_THE_FIRST),
    ],
)
def test_a_choice_passes_once_the_line_that_the_report_prints_declares_it(
    tmp_path: Path, case: str, choice: str
) -> None:
    requested, options = find_case(case, load_all()), Options(out=tmp_path, fault=f"{CHOICES}:{choice}")
    failed = run_case(requested, options)
    assert failed.verdict is Verdict.FAIL and failed.diagnosis is not None
    lines = [
        yaml.safe_load(text)["allow"]
        for label, text in evidence_rows(failed.diagnosis.evidence)
        if label == IF_INTENDED
    ]
    allow = tuple(Allowance(**one) for entries in lines for one in entries)
    assert allow
    assert run_case(replace(requested, allow=allow), options).verdict is Verdict.PASS


def test_a_checkpoint_that_is_saved_in_each_step_breaks_no_check(tmp_path: Path) -> None:
    options = Options(out=tmp_path, fault=f"{CHOICES}:saves_in_each_step")
    judgement = run_case(find_case("fsdp_2", load_all()), options)
    assert (judgement.verdict, judgement.firing) == (Verdict.PASS, Firing.FIRED), judgement.diagnosis
