"""Stored evidence takes the place of a run only where a new run would be the same one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness.core.case.case import Case
from harness.core.judge.result import Verdict
from harness.core.run.options import Options
from harness.core.run.run_case import run_case
from harness.faults import load_fault
from harness.faults import run_catalogue as catalogue
from harness.faults.attempt import Outcome
from harness.faults.run_catalogue import judge_stored
from harness.reference.config import ModelConfig, TrainingConfig

CASE = Case("alone", "a test", model=ModelConfig(n_layers=1), training=TrainingConfig(steps=1))


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out")
    assert run_case(CASE, Options(out=folder)).verdict is Verdict.PASS
    return folder


def test_a_baseline_of_the_same_case_and_sources_is_not_run_again(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "run_case", None)
    baseline = catalogue.make_baseline(CASE, Options(out=out), curves=False)
    assert (baseline.outcome, baseline.is_stored) == ("PASS, as stored,", True)


@pytest.mark.parametrize(
    ("outcome", "taken"), [(Outcome.CAUGHT, True), (Outcome.MISSED, False), (Outcome.TIMEOUT, False)]
)
def test_stored_evidence_of_a_fault_is_taken_where_it_is_caught_in_it(
    outcome: Outcome, taken: bool, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "outcome_of", lambda *_: outcome)
    fault = load_fault("hsdp_runs_as_fsdp")
    stored = catalogue.stored_if_caught(fault, CASE, Options(out=out))
    assert (stored is not None) == taken
    assert catalogue.stored_if_caught(fault, replace(CASE, name="never_run"), Options(out=out)) is None


def test_evidence_of_other_sources_is_none(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "digest_of_run", lambda options: "0123")
    assert judge_stored(CASE, Options(out=out)) is None


@pytest.mark.parametrize(
    "case",
    [
        replace(CASE, training=replace(CASE.training, lr=0.1)),
        replace(CASE, training=replace(CASE.training, data="tokens.npy")),
        replace(CASE, name="never_run"),
    ],
    ids=["another recipe", "a file of tokens", "no evidence"],
)
def test_evidence_of_another_case_is_none(case: Case, out: Path) -> None:
    assert judge_stored(case, Options(out=out)) is None


@pytest.mark.parametrize("trainer", ["llama3@elsewhere", "own.py"])
def test_a_trainer_whose_sources_nobody_follows_runs_again(trainer: str, out: Path) -> None:
    assert catalogue.digest_of_run(Options(out=out, trainer=trainer)) == ""


def test_a_run_that_was_cut_short_is_none(out: Path) -> None:
    (out / "alone" / "run" / "run.json").unlink()
    assert judge_stored(CASE, Options(out=out)) is None
