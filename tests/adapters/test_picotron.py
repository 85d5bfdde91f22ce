"""The adapter of picotron, as far as it goes without a checkout of it. Judged cases: docs/results/picotron.md."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from literal import tiny_case

from harness import ROOT
from harness.core import trainers
from harness.core.case.case import Case
from harness.core.case.dims import ParallelDims
from harness.core.case.features import Features
from harness.core.case.loading import load_cases
from harness.core.probe.clock import Clock
from harness.core.probe.pipeline import PipelineRecorder, pass_of_schedule

CASES = ROOT / "harness" / "adapters" / "picotron" / "cases" / "picotron.yaml"
ITS_OWN = load_cases(CASES)


@pytest.fixture
def adapter(tmp_path: Path) -> Any:
    """Of a folder that looks like a checkout."""
    (tmp_path / "picotron").mkdir()
    (tmp_path / "picotron" / "process_group_manager.py").touch()
    return trainers.load_adapter(f"picotron@{tmp_path}")


def other(dims: ParallelDims = ParallelDims(), features: Features = Features(), **recipe: object) -> Case:  # noqa: B008
    single = next(case for case in ITS_OWN if case.name == "single")
    return replace(single, dims=dims, features=features, training=replace(single.training, **recipe))


def test_its_cases_are_requested_of_it(adapter: Any) -> None:
    assert {case.name: adapter.unsupported(case) for case in ITS_OWN} == {case.name: None for case in ITS_OWN}


@pytest.mark.parametrize(
    ("requested", "reason"),
    [
        (other(max_norm=1.0), "max_norm 1.0: picotron has None written into its train.py"),
        (other(all_valid=False), "all_valid False: picotron has True written"),
        (other(ParallelDims(tp=2)), "sequence_parallel, loss_parallel: picotron has neither"),
        (other(ParallelDims(pp=2, dp_replicate=2)), "data ranks with pp: in picotron's grid"),
        (other(rates=(1e-3, 1e-3, 1e-4)), "rates: picotron has one for all steps"),
        (other(ParallelDims(dp_shard=2)), "dp_shard 2: picotron has no such option"),
    ],
)
def test_what_it_does_not_run_is_refused_with_the_reason(adapter: Any, requested: Case, reason: str) -> None:
    assert str(adapter.unsupported(requested)).startswith(reason)


def test_without_a_checkout_it_says_that_it_wants_one(tmp_path: Path) -> None:
    assert "--source" in str(trainers.load_adapter("picotron").unsupported(tiny_case("single")))
    assert (
        trainers.load_adapter(f"picotron@{tmp_path}").unsupported(tiny_case("single"))
        == f"picotron is not at {tmp_path}"
    )


def test_a_pipeline_s_microbatches_are_its_accumulation() -> None:
    from harness.adapters.picotron import lent

    found = json.loads(lent.configuration(other(ParallelDims(pp=2), Features(microbatches=4)), "cpu"))
    assert found["distributed"] == {
        "tp_size": 1,
        "cp_size": 1,
        "pp_size": 2,
        "dp_size": 1,
        "pp_engine": "1f1b",
        "use_cpu": True,
    }
    assert (found["training"]["gradient_accumulation_steps"], found["training"]["micro_batch_size"]) == (4, 4)


class Stage:
    """A model as its schedules use it: they call `forward`."""

    called = 0

    def forward(self, tokens: int) -> int:
        return tokens + 1

    def backward(self, tokens: int) -> int:
        return tokens - 1

    def __call__(self, **inputs: int) -> int:
        self.called += 1
        return self.forward(**inputs)


def test_what_a_schedule_calls_is_the_module_itself_and_each_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.adapters.picotron import lent

    monkeypatch.setattr(lent, "process_grid", lambda: type("Grid", (), {"pp_rank": 1}))
    recorder, stage = PipelineRecorder(Clock()), Stage()
    monkeypatch.setattr("harness.core.probe.pipeline._installed", [recorder])
    lent.show_actions(stage, microbatches=2)
    with pass_of_schedule():
        seen = [stage.forward(tokens=1), stage.forward(tokens=2), stage.backward(5), stage.backward(6)]
    assert (seen, stage.called, recorder.actions) == ([2, 3, 4, 5], 2, {1: ["1F0", "1F1", "1B0", "1B1"]})
