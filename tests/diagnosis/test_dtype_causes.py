"""Matmuls that are not computed in the dtype requested: of which steps, ranks and units. Literal evidence, no ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from literal import judged, tiny_case, trial_of, with_rank, with_step

from harness.diagnosis.differences import OF_GRADIENTS
from harness.diagnosis.features import computed_in_another_dtype
from harness.diagnosis.hypothesis import NOT_TESTED, Fact
from harness.evidence.step import Matmul
from harness.judge.trial import Trial
from harness.report.cause_text import cause_line


def computing(by_dtype: dict[str, int], ranks: Sequence[int] = (0, 1)) -> Trial:
    """So many matmuls of forward in each dtype, twice as many of backward; float64 is requested."""
    trial = trial_of(tiny_case("fsdp_2"))
    seen = {
        Matmul(phase, dtype): by * n for phase, by in (("forward", 1), ("backward", 2)) for dtype, n in by_dtype.items()
    }
    for rank in ranks:
        activity = replace(trial.ranks[rank].steps[0].activity, matmuls=seen)
        trial = with_step(trial, rank, 1, activity=activity)
    return trial


def told(trial: Trial) -> Fact:
    (fact,) = computed_in_another_dtype(trial, {"features": judged("features", trial)})
    return fact


@pytest.mark.parametrize(
    ("by_dtype", "ranks", "text"),
    [
        ({"float32": 8}, (0, 1), "matmuls are computed in float32, requested float64"),
        ({"float32": 8}, (1,), "matmuls are computed in float32 on rank 1, requested float64"),
        (
            {"float32": 1, "float64": 7},
            (0, 1),
            "matmuls are computed in float32 and float64 (1 of 8 in forward in float32), requested float64",
        ),
        (
            {"bfloat16": 1, "float32": 2, "float64": 5},
            (0, 1),
            "matmuls are computed in bfloat16 and float32 and float64 (3 of 8 in forward in bfloat16 and float32),"
            " requested float64",
        ),
    ],
)
def test_another_dtype_of_matmuls_is_told_with_how_many_where_not_all_have_it(
    by_dtype: dict[str, int], ranks: Sequence[int], text: str
) -> None:
    fact = told(computing(by_dtype, ranks))
    assert (fact.cause.kind, cause_line(fact.cause)) == ("another feature", text)
    assert fact.checks == ("features", "reshard", "traffic", "memory", *OF_GRADIENTS)
    assert fact.lines[1:] == NOT_TESTED and fact.lines[0][0] == "features"
    assert not list(computed_in_another_dtype(computing(by_dtype, ranks), {}))


def test_units_that_cast_to_another_dtype_than_the_others_are_named() -> None:
    trial = computing({"float32": 1, "float64": 7})
    units = {name: replace(unit, casts_to="float64") for name, unit in trial.ranks[0].structure.items()}
    odd = next(iter(units))
    trial = with_rank(trial, 0, structure=units | {odd: replace(units[odd], casts_to="float32")})
    computed = "matmuls are computed in float32 and float64 (1 of 8 in forward in float32), requested float64"
    assert cause_line(told(trial).cause) == f"{computed}: FSDP unit {odd} has float32 param_dtype, others float64"


def test_another_dtype_in_backward_alone_is_not_counted_in_forward() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    seen = {Matmul("forward", "float64"): 8, Matmul("backward", "float32"): 16}
    trial = with_step(trial, 0, 1, activity=replace(trial.ranks[0].steps[0].activity, matmuls=seen))
    assert cause_line(told(trial).cause) == "matmuls are computed in float32 and float64 on rank 0, requested float64"
