"""Where variations of the model are looked for: in which modules, beside which other mistakes, by which numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from literal import TINY, tiny_case, with_rank
from trained import RECIPE, Ran, _ran, case_of  # noqa: F401

from harness.checks import judge
from harness.diagnosis.engine import failing_checks
from harness.diagnosis.forward import Tries, _false_position, other_forward
from harness.judge.trial import Trial
from harness.plan.stages import positions
from harness.reference.altered import altering
from harness.reference.variations import over_cp, variations
from harness.spec.dims import ParallelDims


def tries(step: int = 1) -> Tries:
    """Of a trial of which no more is known than that its model has three layers."""
    trial: Any = SimpleNamespace(case=tiny_case("single", model=replace(TINY, n_layers=3)))
    return Tries(trial, step)


@pytest.mark.parametrize(
    ("wrong", "begins"),
    [
        ("layers.0.attention.wq", ["tok_embeddings", "layers.0", ""]),
        ("layers.1", ["layers.0", "layers.1", ""]),
        ("layers.2.feed_forward.w2", ["layers.1", "layers.2", ""]),
        ("norm", ["layers.2", "norm", ""]),
        ("output", ["layers.2", "norm", ""]),
        ("", ["tok_embeddings", "layers.0", "layers.1", "layers.2", "norm", ""]),
    ],
)
def test_what_begins_in_another_block_than_the_first_wrong_input_or_the_one_before_is_not_tried(
    wrong: str, begins: list[str]
) -> None:
    first = {"layers.0": "layers.0.attention", "layers.1": "layers.1.attention_norm", "layers.2": "layers.2"}
    ends = {"layers.0": ["layers.1.attention", "norm"]}  # the first of several counts
    names = ["tok_embeddings", "layers.0", "layers.1", "layers.2", "norm", ""]
    chosen = {name: [first.get(name, name), *ends.get(name, [])] for name in names}
    assert [name for name in names if tries()._may_begin(chosen[name], wrong)] == begins
    assert all(tries(step=2)._may_begin(modules, wrong) for modules in chosen.values()), "its inputs were not seen"


@pytest.mark.parametrize("exponent", [1.0, 3.0, -2.0])
def test_a_number_is_found_between_two_that_give_more_and_less(exponent: float) -> None:
    """Also where one end would stay for long."""

    def off(logarithm: float) -> float:
        asked.append(logarithm)
        return math.exp(exponent * logarithm) - 0.07**exponent

    low, high, asked = math.log(1e-3), math.log(1.0), list[float]()
    found = _false_position(low, off(low), high, off(high), off)
    assert math.isclose(found, 0.07, rel_tol=1e-12) and len(asked) < 30


def over_two(told: str) -> tuple[Any, Any]:
    """A case of two cp ranks, and what a model computes of which this is said."""
    case = case_of(ParallelDims(cp=2), training=replace(RECIPE, seq_len=16), cp_load_balance=False)
    owner = np.repeat([0, 1], 8)
    held = np.concatenate([positions(case, rank, 16) for rank in (0, 1)])
    (variation,) = [one for one in over_cp((held, owner)) if one.observed == told]
    return case, altering(variation, ["layers.0.attention"], 1)


def receiving(trial: Trial, row: np.ndarray | None) -> Trial:
    """What rank 1 is told of its positions; None: nothing."""
    given = () if row is None else (row,)
    return with_rank(trial, 1, steps=tuple(replace(step, positions=given) for step in trial.ranks[1].steps))


def test_a_model_that_counts_positions_itself_is_looked_at_and_one_that_is_told_wrong_ones_is_not(ran: Ran) -> None:
    told = "rotary positions restart at 0 on each cp rank"
    case, altered = over_two(told)
    trial = ran(case, altered=altered)

    def proposed(trial: Trial) -> list[str]:
        broken = failing_checks(judge(trial))
        assert "positions" in broken
        return [one.cause.observed for one in other_forward(trial, broken)]

    assert proposed(receiving(trial, None)) == [told]
    assert proposed(receiving(trial, np.arange(8))) == []


@pytest.mark.parametrize("rows", [None, np.arange(8) >= 4])
def test_which_ranks_compute_otherwise_is_a_choice_more(ran: Ran, rows: np.ndarray | None) -> None:
    case = case_of(training=replace(RECIPE, document_mask=True))
    (lost,) = [one for one in variations(case.model, case.training) if one.observed == "attention crosses documents"]
    found = Tries(ran(case, altered=altering(lost, [""], 1, rows)), 1).tried(lost, [""])
    assert found is not None
    assert (found.numbers, found.cause.where) == ((1, "") if rows is None else (2, "on rank 1"))
    assert found.distance < 1e-12
