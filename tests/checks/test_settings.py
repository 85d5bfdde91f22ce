"""The check `settings` on literal evidence: switches of torch that somebody set, or that only some ranks have."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from checked import like
from literal import ADAMW, cause_of, judged, tiny_case, trial_of, with_rank, with_step

from harness.diagnosis import diagnose
from harness.judge.result import Verdict
from harness.judge.trial import Trial

EVERYWHERE = tuple(itertools.product((0, 1), (1, 2, 3)))
FLOAT32 = replace(ADAMW, dtype="float32")


def with_setting(trial: Trial, name: str, *values: str, at: tuple[tuple[int, int], ...] = EVERYWHERE) -> Trial:
    """at: ranks and steps."""
    for rank, step in at:
        known = trial.ranks[rank].steps[step - 1].settings
        trial = with_step(trial, rank, step, settings=known | {name: values})
    return trial


def cause(trial: Trial) -> str:
    told = diagnose(trial, [judged("settings", trial)])
    return cause_of(told) if told else ""


def test_anomaly_detection_left_on_is_named() -> None:
    trial = with_setting(trial_of(tiny_case("fsdp_2")), "autograd anomaly detection", "on")
    assert judged("settings", trial).findings == (
        like(0, ("off",), ("on",), step=1, name="autograd anomaly detection"),
        like(1, ("off",), ("on",), step=1, name="autograd anomaly detection"),
    )
    assert cause(trial) == "autograd anomaly detection is on, requested off (from step 1 on)"


def test_a_switch_that_is_on_for_a_part_of_one_step_is_a_finding() -> None:
    trial = with_setting(trial_of(tiny_case("fsdp_2")), "autograd anomaly detection", "off", "on", at=((1, 2),))
    assert cause(trial) == "autograd anomaly detection is off and on, requested off (on rank 1 in step 2)"
    (finding,) = judged("settings", trial).findings
    assert (finding.rank, finding.step, finding.name) == (1, 2, "autograd anomaly detection")


def test_a_switch_that_is_set_within_a_step_and_stays_is_not_told_as_of_that_step_only() -> None:
    trial = with_setting(trial_of(tiny_case("fsdp_2")), "deterministic algorithms", "off", "on", at=((1, 2),))
    trial = with_setting(trial, "deterministic algorithms", "on", at=((1, 3),))
    assert "first in step 2" in cause(trial)


def test_what_a_rank_was_started_with_or_an_adapter_declares_is_right() -> None:
    trial = with_setting(trial_of(tiny_case("fsdp_2")), "threads", "4")
    assert cause(trial) == "threads are 4, requested 1 (from step 1 on)"
    for rank in trial.ranks:
        trial = with_rank(trial, rank, settings=trial.ranks[rank].settings | {"threads": "4"})
    assert judged("settings", trial).verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("runs", "said"), [(1, "deterministic algorithms are on, requested off (from step 1 on)"), (2, "")]
)
def test_deterministic_algorithms_are_for_cases_that_run_twice(runs: int, said: str) -> None:
    assert cause(with_setting(trial_of(tiny_case("fsdp_2", runs=runs)), "deterministic algorithms", "on")) == said


def test_lower_matmul_precision_is_a_finding_where_float32_is_multiplied() -> None:
    float64, float32 = trial_of(tiny_case("fsdp_2")), trial_of(tiny_case("fsdp_2", FLOAT32))
    assert cause(with_setting(float64, "float32 matmul precision", "high")) == ""
    told = "float32 matmul precision is high, requested highest (from step 1 on)"
    assert cause(with_setting(float32, "float32 matmul precision", "high")) == told


@pytest.mark.parametrize("name", ["bfloat16 sums in CUDA matmuls", "CUBLAS_WORKSPACE_CONFIG"])
def test_how_cuda_adds_up_is_a_trainers_choice_for_all_ranks(name: str) -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    assert judged("settings", with_setting(trial, name, "its own")).verdict is Verdict.PASS
    (finding,) = judged("settings", with_setting(trial, name, "its own", at=((1, 3),))).findings
    assert (finding.rank, finding.step, finding.name) == (1, 3, name)


def test_what_a_trainer_may_choose_is_chosen_by_all_ranks_and_in_all_steps() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    assert cause(with_setting(trial, "cudnn.benchmark", "on")) == ""
    trial = with_setting(trial, "cudnn.benchmark", "on", at=((1, 3),))
    assert judged("settings", trial).findings == (
        like(1, ("off",), ("on",), step=3, name="cudnn.benchmark", note="as elsewhere"),
    )
    assert cause(trial) == "cudnn.benchmark is on, requested off (as elsewhere) (on rank 1 in step 3)"


def test_the_recipes_dtype_may_be_the_default_of_tensors_everywhere_and_no_other() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    assert cause(with_setting(trial, "default dtype", "float64")) == ""
    assert "requested float32" in cause(with_setting(trial, "default dtype", "bfloat16"))
    assert "default dtype is float64" in cause(with_setting(trial, "default dtype", "float64", at=((1, 1),)))


def test_evidence_without_settings_is_no_pass() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    for rank, step in EVERYWHERE:
        trial = with_step(trial, rank, step, settings={})
    assert judged("settings", trial).verdict is Verdict.UNKNOWN


def test_tf32_is_on_where_the_recipe_has_it_and_off_where_it_does_not() -> None:
    name = "TF32 in CUDA matmuls"
    requested, silent = (trial_of(tiny_case("fsdp_2", replace(FLOAT32, tf32=on))) for on in (True, False))
    switched = with_setting(with_setting(requested, name, "on"), "float32 matmul precision", "high")
    assert judged("settings", switched).verdict is Verdict.PASS
    assert cause(requested) == f"{name} are off, requested on (from step 1 on)"
    assert cause(with_setting(silent, name, "on")) == f"{name} are on, requested off (from step 1 on)"
