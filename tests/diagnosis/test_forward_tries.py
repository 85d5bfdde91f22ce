"""What is tried of a forward pass that is wrong: by which rows, losses, masks and tables, and how its causes are told."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from literal import EIGHT, TINY, tiny_case, trial_of, with_step
from literal_reference import sample_loss

from harness.diagnosis.forward import Tries, _false_position
from harness.judge.trial import Trial
from harness.plan.make_plan import make_plan
from harness.reference import masks, variations
from harness.reference.altered import Variation
from harness.report.cause_text import cause_line
from harness.spec.dims import ParallelDims


def laid_out(accumulation: int = 1, cp_load_balance: bool = True, **dims: int) -> Trial:
    case = tiny_case(ParallelDims(**dims), EIGHT, accumulation=accumulation, cp_load_balance=cp_load_balance)
    return trial_of(case)


def turned(trial: Trial) -> Trial:
    """Rank 0 receives its rows in the opposite order."""
    parts = trial.ranks[0].steps[0].microbatches[::-1]
    back = tuple(replace(one, tokens=one.tokens[::-1]) for one in parts if one.tokens is not None)
    return with_step(trial, 0, 1, microbatches=back)


# ---- rows and losses


def test_rows_are_those_of_the_samples_that_each_share_received() -> None:
    trial = laid_out(dp_shard=2, tp=2)
    found = {step: {rank: rows.tolist() for rank, rows in Tries(trial, step).rows.items()} for step in (1, 2)}
    assert found[1] == found[2] == {0: [0, 1, 2, 3], 2: [4, 5, 6, 7]}
    assert Tries(turned(trial), 1).rows[0].tolist() == [3, 2, 1, 0]
    own, other = (trial.ranks[0].steps[step].microbatches[0] for step in (0, 1))
    assert own.tokens is not None
    for tokens in (other.tokens, own.tokens + 1):
        assert Tries(with_step(trial, 0, 1, microbatches=(replace(own, tokens=tokens),)), 1).rows == {}


BY_ROWS = [[*range(at, at + 16)] for at in range(0, 64, 16)]


@pytest.mark.parametrize(
    ("accumulation", "balanced", "dims", "passes"),
    [
        (1, True, {"dp_shard": 4}, BY_ROWS),
        (4, True, {}, BY_ROWS),
        (
            4,
            False,
            {"cp": 2},
            [[*range(i, i + 4), *range(i + 8, i + 12)] for at in range(0, 64, 16) for i in (at, at + 4)],
        ),
        (
            1,
            True,
            {"dp_shard": 4, "cp": 2},
            [
                [at + row + i for row in (0, 8) for i in held]
                for at in range(0, 64, 16)
                for held in ((0, 1, 6, 7), (2, 3, 4, 5))
            ],
        ),
    ],
)
def test_each_forward_pass_has_the_tokens_of_its_rows_at_the_positions_of_its_rank(
    accumulation: int, balanced: bool, dims: dict[str, int], passes: list[list[int]]
) -> None:
    trial = laid_out(accumulation, balanced, **dims)
    assert [at.tolist() for at in Tries(trial, 2).passes] == passes


@pytest.mark.parametrize("dims", [{"dp_shard": 2}, {"dp_shard": 2, "tp": 2}, {"dp_shard": 2, "cp": 2}])
def test_the_loss_of_a_share_is_the_sum_over_its_rows_on_however_many_ranks(dims: dict[str, int]) -> None:
    trial = laid_out(**dims)
    for step in (1, 2):
        ids = trial.reference.samples[step - 1]
        expected = [sum(map(sample_loss, share)) for share in (ids[:4], ids[4:])]
        assert [*Tries(trial, step).observed.values()] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("dims", "accumulation", "first"),
    [
        ({}, 1, [0] * 8),
        ({"dp_shard": 2}, 1, [0] * 4 + [4] * 4),
        ({"dp_shard": 2}, 2, [0, 0, 2, 2, 4, 4, 6, 6]),
        ({}, 8, [*range(8)]),
    ],
)
def test_each_row_has_the_first_of_its_microbatch(dims: dict[str, int], accumulation: int, first: list[int]) -> None:
    assert Tries(laid_out(accumulation, **dims), 2)._first_rows().tolist() == first


def test_of_rows_that_were_received_in_another_order_the_first_is_the_one_received_first() -> None:
    tries = Tries(turned(laid_out(accumulation=2)), 1)
    assert tries.rows[0].tolist() == [7, 6, 5, 4, 3, 2, 1, 0]
    assert tries._first_rows().tolist() == [3] * 4 + [7] * 4
    chosen = Tries(laid_out(dp_shard=4), 1)._chosen([0, 2])
    assert chosen is not None and chosen.tolist() == [True, True, False, False] * 2
    assert Tries(laid_out(dp_shard=4), 1)._chosen([0, 1, 2, 3]) is None


# ---- whose losses are those of a variation


@pytest.mark.parametrize(
    ("seen", "tried", "ranks"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], None),  # as usual
        ([5.0, 6.0, 7.0], [5.0, 6.0, 7.0], [0, 1, 2]),
        ([1.0, 6.0, 7.0], [5.0, 6.0, 7.0], [1, 2]),
        ([1.0, 2.0, 7.0], [5.0, 6.0, 7.0], [2]),
        ([1.0, 6.0, 7.0], [1.0, 6.0, 7.0], [0, 1, 2]),  # the first has no part in it
        ([1.0, 6.0, 3.0], [1.0, 6.0, 7.0], [1]),
        ([1.0, 6.0, 8.0], [5.0, 6.0, 7.0], None),  # the last is neither
        ([1.0, 2.0, 8.0], [1.0, 2.0, 7.0], None),
        ([5.0, 6.0, 7.0 + 2.7e-2], [5.0, 6.0, 7.0], [0, 1, 2]),
        ([5.0, 6.0, 7.0 + 3e-2], [5.0, 6.0, 7.0], None),
        ([5.0, 6.0, 7.0 - 3e-2], [5.0, 6.0, 7.0], None),
    ],
)
def test_ranks_that_compute_otherwise_have_its_losses_and_all_others_the_usual_ones(
    seen: list[float], tried: list[float], ranks: list[int] | None
) -> None:
    """Each within four times the bound."""
    trial: Any = SimpleNamespace(bounds=SimpleNamespace(loss={1: 1e-3}))
    tries = Tries(trial, 1)
    rows = {rank: np.array([2 * rank, 2 * rank + 1]) for rank in range(3)}
    vars(tries).update(rows=rows, observed=dict(enumerate(seen)), usual={0: 1.0, 1: 2.0, 2: 3.0})
    assert tries.ranks(np.repeat(tried, 2) / 2) == ranks


EVERY = [f"layers.{layer}" for layer in range(4)]


@pytest.mark.parametrize(
    ("step", "modules", "ranks", "where"),
    [
        (1, EVERY, [0, 1], ""),
        (1, EVERY[:3], [0, 1], " in layers.0, layers.1, layers.2"),
        (1, EVERY[::-1], [0, 1], " in layers.3, layers.2, layers.1 and 1 more"),
        (2, EVERY[:1], [1], " in layers.0 on ranks [1,3] from step 2 on"),
        (1, EVERY, [0], " on ranks [0,2]"),
    ],
)
def test_ranks_of_a_pipeline_that_compute_otherwise_are_all_that_one_share_goes_through(
    step: int, modules: list[str], ranks: list[int], where: str
) -> None:
    case = tiny_case(ParallelDims(pp=2, dp_replicate=2), model=replace(TINY, n_layers=4))
    trial = replace(trial_of(tiny_case(ParallelDims(dp_replicate=4))), case=case, plan=make_plan(case))
    tries = Tries(trial, step)
    vars(tries)["rows"] = {0: np.arange(4), 1: np.arange(4, 8)}
    cause = tries.cause(Variation("gate", "gates are open", "closed", "block"), modules, ranks)
    assert (cause.kind, cause_line(cause)) == ("gate", f"gates are open{where}, requested closed")
    assert tries.observed.keys() == {0, 1}


# ---- what is tried of a case


LOW = [f"the loss is computed and summed in {dtype}" for dtype in ("float32", "bfloat16")]
NOT_MASKED = [
    f"the embedding sharded over tp does not mask tokens of other ranks' rows: each rank adds its {row} row for them"
    for row in ("nearest", "first")
]
MASKS = [
    f"dropout masks are those of {which}" for which in ("step 1 in every step", "the step before", "the step after")
]
FIRST_ROW = "all rows of a microbatch have the documents of its first"
OVER_CP = [
    "each token attends only to tokens of its own cp rank",
    "each token attends to itself and those before it as cp ranks hold them",
    "rotary positions restart at 0 on each cp rank",
    "rotary positions count tokens in the order in which cp ranks hold them",
]
OF_STEPS = [f"the document mask of step {step} is used" for step in (1, 2)]


@pytest.mark.parametrize(
    ("dims", "dropout", "documents", "step", "degrees", "more"),
    [
        ({}, 0.0, False, 1, set(), []),
        ({"dp_shard": 4}, 0.0, False, 1, {4}, []),
        ({"dp_replicate": 2, "tp": 4}, 0.0, False, 1, {2, 4}, NOT_MASKED),
        ({}, 0.5, False, 1, set(), MASKS),
        ({}, 0.0, True, 1, set(), [FIRST_ROW]),
        ({}, 0.0, True, 3, set(), [FIRST_ROW, *OF_STEPS]),
        ({"cp": 2}, 0.0, False, 1, {2}, OVER_CP),
    ],
)
def test_what_is_tried_beside_what_every_case_may_have(
    monkeypatch: pytest.MonkeyPatch,
    dims: dict[str, int],
    dropout: float,
    documents: bool,
    step: int,
    degrees: set[int],
    more: list[str],
) -> None:
    asked: list[Any] = []
    usual = Variation("gate", "gates are open", "closed", "block")
    monkeypatch.setattr(variations, "variations", lambda *of: asked.append(of) or [usual])
    model = replace(TINY, dropout=dropout)
    case = tiny_case(ParallelDims(**dims), replace(EIGHT, document_mask=documents), model=model)
    tries = Tries(trial_of(case), step)
    every = {"block", "model", "inner", "attention", "embedding"}
    assert [one.observed for one in tries.variations(every)] == [usual.observed, *LOW, *more]
    assert asked == [(case.model, case.training, degrees)]
    assert [one.observed for one in tries.variations({"block"})] == [usual.observed]
    assert tries.variations({"wo"}) == []


def test_masks_of_earlier_steps_and_tables_over_cp_are_made_of_what_these_steps_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps of another length are as long as they are, and each length has one table."""
    steps: list[tuple[list[list[int]], int]] = []
    tables: list[list[list[int]]] = []
    other = masks.mask_of_step
    monkeypatch.setattr(masks, "mask_of_step", lambda at, step: steps.append((at.tolist(), step)) or other(at, step))
    monkeypatch.setattr(
        variations, "over_cp", lambda *of: tables.append([one.tolist() for pair in of for one in pair]) or []
    )
    monkeypatch.setattr(variations, "variations", lambda *of: [])
    training = replace(EIGHT, document_mask=True, variable_length=True)
    trial = trial_of(tiny_case(ParallelDims(cp=2), training))
    tokens = trial.reference.tokens
    assert len(Tries(trial, 3).variations({"model"})) == 5
    assert steps == [(tokens[:8].tolist(), 1), (tokens[8:16, :4].tolist(), 2)]
    assert tables == [[[0, 1, 6, 7, 2, 3, 4, 5], [0, 0, 1, 1, 1, 1, 0, 0], [0, 3, 1, 2], [0, 1, 1, 0]]]
    assert {each.dtype.kind for each in Tries(trial, 1)._over_cp(8)} == {"i"}


# ---- the search for a number


def asked_for(value: Callable[[float], float], low: float, high: float) -> tuple[float, list[float]]:
    """The logarithm of what is found between these, and of what is asked."""
    asked = list[float]()

    def noted(x: float) -> float:
        asked.append(x)
        return value(x)

    return math.log(_false_position(low, value(low), high, value(high), noted)), asked


def test_an_end_that_stays_counts_half() -> None:
    found, asked = asked_for(lambda x: x * x * x - 1, 0.0, 4.0)
    assert asked[:7] == pytest.approx([0.0625, 0.124009, 0.243049, 0.464314, 0.826912, 1.142308, 0.975066], rel=1e-5)
    assert found == pytest.approx(1.0, rel=1e-14) and len(asked) == 14


def test_the_search_for_a_number_ends() -> None:
    """Where it is met, where the loss jumps, or after 40 passes."""
    assert asked_for(lambda x: x, -1.0, 1.0) == (0.0, [0.0])
    found, asked = asked_for(lambda x: math.copysign(1.0, x - 0.3), -2.0, 1.0)
    assert math.isclose(found, 0.3, rel_tol=1e-12) and len(asked) == 19
    found, asked = asked_for(lambda x: math.copysign(1.0, x), -1.0, 2.0)
    assert abs(found) < 1e-5 and len(asked) == 40
