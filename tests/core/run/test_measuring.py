"""What is measured of a trainer, and which gradients its clipping was given, is written once all ranks have ended."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from literal import SGD, judged, tiny_case, trial_of

from harness.core.case.case import to_json
from harness.core.case.traits import TrainerTraits
from harness.core.evidence.store import EvidenceError, evidence_file, load_run, load_stored, save_run, save_stored
from harness.core.judge.order import reorder_reference
from harness.core.judge.result import Verdict
from harness.core.judge.stored_trial import load_trial
from harness.core.judge.trial import Trial
from harness.core.report.text import case_report
from harness.core.run import run_case
from harness.core.run.judging import judge_folder
from harness.core.run.measuring import write_measured_traits
from harness.core.run.options import Options
from harness.core.trainers import CannotStart, rows_of_trainer
from harness.reference.record import ReferenceRun

MINE = """
import numpy as np
from harness.core.trainers import Adapter
class Mine(Adapter):
    name = "mine"
    def unsupported(self, case):
        return None
    def start(self, case, weights, device):
        ...
    def rows(self, case):
        {}
adapter = Mine()
"""
NORM = "norm.weight"


def plain(reference: ReferenceRun) -> ReferenceRun:
    """As a file holds it."""
    return ReferenceRun(**{one.name: getattr(reference, one.name) for one in fields(ReferenceRun)})


def stored(folder: Path, trial: Trial, *, scale: float = 1.0) -> Path:
    """As ranks leave it whose gradients are `scale` times the reference's when backward ends, and divided by it then."""
    save_stored(folder / "reference.npz", plain(trial.reference))
    (folder / "case.json").write_text(json.dumps(to_json(replace(trial.case, file=""))))
    save_run(replace(trial.run, directory=str(folder / "run")))
    for rank, evidence in trial.ranks.items():
        steps = tuple(
            replace(s, gradients={f: scale * g for f, g in s.gradients.items()}, scaled=1 / scale)
            for s in evidence.steps
        )
        save_stored(evidence_file(folder / "run", rank), replace(evidence, steps=steps))
    return folder


def test_units_that_nobody_declares_are_written_beside_the_evidence_and_the_plan_needs_nothing_else(
    tmp_path: Path,
) -> None:
    ran = trial_of(tiny_case("fsdp_2", fsdp_units="observed"))
    folder = stored(tmp_path, ran)
    write_measured_traits(ran.case, folder, {"run": TrainerTraits()})
    (units,) = json.loads((folder / "traits.json").read_text())["run"]["measured"]["units"]
    assert units["ranks"] == [0, 1] and [len(one["parameters"]) for one in units["units"]] == [1, 9, 2]
    trial = load_trial(folder)
    assert trial.plan.measured_units == ran.plan.measured_units
    assert trial.plan.units[1] == ran.plan.units[1]


@pytest.mark.parametrize("declared", [True, False])
def test_units_that_are_declared_are_not_measured_and_the_report_shows_what_is_not(
    tmp_path: Path, declared: bool
) -> None:
    ran = trial_of(tiny_case("fsdp_2", fsdp_units="apart" if declared else "observed"))
    write_measured_traits(ran.case, stored(tmp_path, ran), {"run": TrainerTraits()})
    judgement = judge_folder(tmp_path)
    assert (load_trial(tmp_path).plan.measured_units is None) == declared
    assert len(judgement.observed) == (0 if declared else 1)
    labels = [line.split()[0] for line in case_report(judgement).splitlines() if line.strip()]
    assert labels.count("observed") == len(judgement.observed)


def test_a_run_of_which_nothing_was_measured_is_not_judged(tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match="of a run that ended"):
        load_trial(stored(tmp_path, trial_of(tiny_case("fsdp_2"))))


@pytest.mark.parametrize("scale", [64.0, 1.0])
def test_files_of_ranks_hold_the_gradients_that_clipping_was_given(tmp_path: Path, scale: float) -> None:
    ran = trial_of(tiny_case("fsdp_2", replace(SGD, max_norm=0.5)))
    folder = stored(tmp_path, ran, scale=scale)
    write_measured_traits(ran.case, folder, {"run": TrainerTraits()})
    for rank, evidence in load_run(folder / "run").ranks.items():
        for step, before in zip(evidence.steps, ran.ranks[rank].steps, strict=True):
            assert all(np.array_equal(step.gradients[fqn], value) for fqn, value in before.gradients.items())
    assert judged("gradients", load_trial(folder)).verdict is Verdict.PASS


def test_the_reference_lies_in_a_trainers_order_beside_its_evidence_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = plain(trial_of(tiny_case("single")).reference)
    save_stored(tmp_path / "cached.npz", reference)
    order = np.array([1, 0, 3, 2])
    for told in ({}, {NORM: order}):
        monkeypatch.setattr(run_case.trainers, "rows_of_trainer", lambda *_, told=told: told)
        run_case.place_reference(tiny_case("single"), tmp_path / "cached.npz", tmp_path / "placed.npz", Options())
        placed = load_stored(tmp_path / "placed.npz", ReferenceRun)
        wanted = reorder_reference(reference, told)
        assert np.array_equal(placed.weights[NORM], wanted.weights[NORM])
        assert {fqn: rows.tolist() for fqn, rows in placed.rows.items()} == {f: o.tolist() for f, o in told.items()}
        (tmp_path / "placed.npz").unlink()
    assert load_stored(tmp_path / "cached.npz", ReferenceRun).rows == {}


def test_an_adapter_whose_rows_raise_cannot_start(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MINE.format("return {'norm.weight': np.arange(2)}"))
    assert rows_of_trainer(tiny_case("single"), str(file))["norm.weight"].tolist() == [0, 1]
    other = tmp_path / "other.py"
    other.write_text(MINE.format("raise KeyError('wq')"))
    with pytest.raises(CannotStart, match="`rows`.*line 11.*wq"):
        rows_of_trainer(tiny_case("single"), str(other))
