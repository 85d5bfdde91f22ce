"""The check `settings` on literal evidence: switches of torch that somebody set, or that only some ranks have."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from checked import like
from literal import ADAMW, cause_of, judged, tiny_case, trial_of, with_rank, with_step

from harness.core.causes import diagnose
from harness.core.causes.words import first_finding
from harness.core.judge.result import Verdict
from harness.core.judge.trial import Trial

EVERYWHERE = tuple(itertools.product((0, 1), (1, 2, 3)))
FLOAT32 = replace(ADAMW, dtype="float32")


def with_setting(trial: Trial, name: str, *values: str, at: tuple[tuple[int, int], ...] = EVERYWHERE) -> Trial:
    """at: ranks and steps."""
    for rank, step in at:
        known = trial.ranks[rank].steps[step - 1].settings
        trial = with_step(trial, rank, step, settings=known | {name: values})
    return trial


def cause(trial: Trial) -> str:
    """The kind, where the check fails."""
    result = judged("settings", trial)
    told = diagnose(trial, [result])
    assert bool(told) == (result.verdict is Verdict.FAIL)
    assert not told or told.causes[0].finding == first_finding(result.findings)
    return cause_of(told) and told.kinds[0] if told else ""


def finding(trial: Trial) -> tuple[object, ...]:
    """Of the first: its name, what was expected, what was observed, and where."""
    assert cause(trial) == "another setting"
    first = judged("settings", trial).findings[0]
    return first.name, first.expected, first.observed, first.rank, first.step


def test_anomaly_detection_left_on_is_named() -> None:
    trial = with_setting(trial_of(tiny_case("fsdp_2")), "autograd anomaly detection", "on")
    assert judged("settings", trial).findings == (
        like(0, ("off",), ("on",), step=1, name="autograd anomaly detection"),
        like(1, ("off",), ("on",), step=1, name="autograd anomaly detection"),
    )
    assert cause(trial) == "another setting"
    told = diagnose(trial, [judged("settings", trial)])
    assert told is not None
    assert ("if intended", 'settings = {"autograd anomaly detection": "on"}') in told.evidence


def test_a_switch_that_is_on_for_a_part_of_one_step_is_a_finding() -> None:
    trial = with_setting(trial_of(tiny_case("fsdp_2")), "autograd anomaly detection", "off", "on", at=((1, 2),))
    assert finding(trial) == ("autograd anomaly detection", ("off",), ("off", "on"), 1, 2)
    assert len(judged("settings", trial).findings) == 1


def test_a_switch_that_is_set_within_a_step_and_stays_is_not_told_as_of_that_step_only() -> None:
    trial = with_setting(trial_of(tiny_case("fsdp_2")), "deterministic algorithms", "off", "on", at=((1, 2),))
    trial = with_setting(trial, "deterministic algorithms", "on", at=((1, 3),))
    assert finding(trial)[-2:] == (1, 2)


def test_what_a_rank_was_started_with_or_an_adapter_declares_is_right() -> None:
    trial = with_setting(trial_of(tiny_case("fsdp_2")), "threads", "4")
    assert finding(trial) == ("threads", ("1",), ("4",), 0, 1)
    for rank in trial.ranks:
        trial = with_rank(trial, rank, settings=trial.ranks[rank].settings | {"threads": "4"})
    assert judged("settings", trial).verdict is Verdict.PASS


@pytest.mark.parametrize(("runs", "kind"), [(1, "another setting"), (2, "")])
def test_deterministic_algorithms_are_for_cases_that_run_twice(runs: int, kind: str) -> None:
    assert cause(with_setting(trial_of(tiny_case("fsdp_2", runs=runs)), "deterministic algorithms", "on")) == kind


def test_lower_matmul_precision_is_a_finding_where_float32_is_multiplied() -> None:
    float64, float32 = trial_of(tiny_case("fsdp_2")), trial_of(tiny_case("fsdp_2", FLOAT32))
    assert cause(with_setting(float64, "float32 matmul precision", "high")) == ""
    name = "float32 matmul precision"
    assert finding(with_setting(float32, name, "high"))[:3] == (name, ("highest",), ("high",))


@pytest.mark.parametrize("name", ["bfloat16 sums in CUDA matmuls", "CUBLAS_WORKSPACE_CONFIG"])
def test_how_cuda_adds_up_is_a_trainers_choice_for_all_ranks(name: str) -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    assert judged("settings", with_setting(trial, name, "its own")).verdict is Verdict.PASS
    (found,) = judged("settings", with_setting(trial, name, "its own", at=((1, 3),))).findings
    assert (found.rank, found.step, found.name) == (1, 3, name)


def test_what_a_trainer_may_choose_is_chosen_by_all_ranks_and_in_all_steps() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    assert cause(with_setting(trial, "cudnn.benchmark", "on")) == ""
    trial = with_setting(trial, "cudnn.benchmark", "on", at=((1, 3),))
    assert judged("settings", trial).findings == (
        like(1, ("off",), ("on",), step=3, name="cudnn.benchmark", note="as elsewhere"),
    )
    assert cause(trial) == "another setting"


def test_the_recipes_dtype_may_be_the_default_of_tensors_everywhere_and_no_other() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    assert cause(with_setting(trial, "default dtype", "float64")) == ""
    assert finding(with_setting(trial, "default dtype", "bfloat16"))[1:3] == (("float32",), ("bfloat16",))
    at = ((1, 1),)
    assert finding(with_setting(trial, "default dtype", "float64", at=at))[2:] == (("float64",), 1, 1)


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
    assert finding(requested)[:3] == (name, ("on",), ("off",))
    assert finding(with_setting(silent, name, "on"))[:3] == (name, ("off",), ("on",))
