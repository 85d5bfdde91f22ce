"""Modules whose matmuls run in 8 bits and should not, or the other way round, or in another format. Literal evidence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from diagnosed import broken
from literal import ADAMW, judged, tiny_case, trial_of, with_step

from harness.diagnosis import assume
from harness.diagnosis.features import odd_traces, other_features, quantized_otherwise
from harness.diagnosis.hypothesis import verdict_of
from harness.evidence.step import QuantizedMatmul
from harness.judge.result import Verdict
from harness.judge.trial import Trial
from harness.reference import precision
from harness.report.cause_text import cause_line

ROWWISE = replace(ADAMW, quantize="float8_rowwise")
QUANTIZED = trial_of(tiny_case("ddp_2", ROWWISE))
MODULES = QUANTIZED.plan.quantized
FIRST, SECOND = sorted(MODULES)[:2]


def in_8_bits(
    modules: Iterable[str], trial: Trial = QUANTIZED, format: str = "float8_rowwise", ranks: tuple[int, ...] = (0, 1)
) -> Trial:
    """On these ranks the matmuls of these modules alone: one of forward, two of backward."""
    counts = {"forward": 1, "backward": 2}
    seen = {QuantizedMatmul(phase, fqn, format): n for fqn in modules for phase, n in counts.items()}
    for rank, step in list(trial.own_steps()):
        trial = with_step(
            trial, rank, step.step, activity=replace(step.activity, quantized=seen if rank in ranks else {})
        )
    return trial


def check(trial: Trial) -> dict[str, Any]:
    result = judged("features", trial)
    return {"features": result} if result.verdict is Verdict.FAIL else {}


def told(trial: Trial) -> list[str]:
    return [cause_line(fact.cause) for fact in odd_traces(trial, check(trial))]


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a reference that is trained again has in 8 bits besides the recipe's modules, and what of these it has not."""
    seen: list[Any] = []
    monkeypatch.setattr(precision, "also_quantized", lambda *of: of)
    monkeypatch.setattr(assume, "retrain", lambda model, recipe, old, **words: (seen.append(words), old)[1])
    return seen


@pytest.mark.parametrize(
    ("modules", "more", "fewer", "text"),
    [
        ([*MODULES, "output"], ["output"], [], "matmuls of output run in float8_rowwise, not requested"),
        (
            [*MODULES, "output", "norm", "a"],
            ["a", "norm", "output"],
            [],
            "matmuls of a, norm and 1 more run in float8_rowwise, not requested",
        ),
        (
            sorted(MODULES)[2:],
            [],
            [FIRST, SECOND],
            f"float8_rowwise is requested, no matmul of {FIRST}, {SECOND} ran in that format",
        ),
        (
            [*sorted(MODULES)[1:], "output"],
            ["output"],
            [FIRST],
            "matmuls of output run in float8_rowwise, not requested",
        ),
    ],
)
def test_a_reference_is_trained_with_the_modules_in_8_bits_that_ran_so(
    modules: list[str], more: list[str], fewer: list[str], text: str, trained: list[Any]
) -> None:
    trial = in_8_bits(modules)
    (one,) = quantized_otherwise(trial, check(trial))
    assert (one.cause.kind, cause_line(one.cause), one.fitted) == ("odd traces", text, 1)
    assert told(trial) == [text] and not list(other_features(trial, check(trial)))
    assert not list(quantized_otherwise(trial, broken("traffic")))
    other = replace(trial, case=replace(trial.case, name="another"))
    assumed = one.assume(other)
    assert trained == [{"altered": ("float8_rowwise", more, fewer)}]
    assert assumed.assumption.reference == {"altered": ("float8_rowwise", more, fewer)}
    assert sorted(assumed.plan.quantized) == sorted(modules) and assumed.case.name == "another"


def test_what_ran_in_8_bits_is_what_the_check_then_expects(trained: list[Any]) -> None:
    trial = in_8_bits(sorted(MODULES)[2:])
    (one,) = quantized_otherwise(trial, check(trial))
    assert verdict_of(one.assume(trial), "features") is Verdict.PASS


def test_modules_that_ran_in_8_bits_on_any_rank_ran_so() -> None:
    assert told(in_8_bits(MODULES, ranks=(1,))) == []
    trial = in_8_bits(sorted(MODULES)[1:], ranks=(1,))
    assert told(trial) == [f"float8_rowwise is requested, no matmul of {FIRST} ran in that format"]


def test_a_recipe_without_any_has_no_reference_with_some() -> None:
    for modules, which in ((["output"], "output"), (MODULES, f"{FIRST}, {SECOND} and {len(MODULES) - 2} more")):
        trial = in_8_bits(modules, trial_of(tiny_case("ddp_2")), "mxfp8")
        assert told(trial) == [f"matmuls of {which} run in mxfp8, not requested"]
        assert not list(quantized_otherwise(trial, check(trial))) and not list(other_features(trial, check(trial)))


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("", "float8_rowwise is requested, no matmul ran in that format"),
        ("float8_tensorwise", "float8_rowwise is requested, float8_tensorwise is observed"),
        ("mxfp8", "float8_rowwise is requested, mxfp8 is observed"),
    ],
)
def test_another_format_of_all_modules_is_another_recipe(format: str, text: str) -> None:
    trial = in_8_bits(MODULES if format else (), format=format)
    (one,) = other_features(trial, check(trial))
    assert (one.cause.kind, cause_line(one.cause)) == ("another feature", text)
    assert one.assume(trial).case.training == replace(ROWWISE, quantize=format or None)
    assert told(trial) == ([] if format else [text])
    assert not list(quantized_otherwise(trial, check(trial)))


def test_what_was_compiled_does_not_tell_its_formats() -> None:
    trial = trial_of(tiny_case("ddp_2", ROWWISE, compile=True))
    assert not check(trial) and not list(odd_traces(trial, broken("features")))
    assert not list(quantized_otherwise(in_8_bits(["output"], trial), broken("features")))
