"""A weight that embedding and output share, and whose gradient lacks the output's part. Literal evidence, no ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from diagnosed import broken
from literal import ADAMW, TINY, tiny_case, trial_of, with_value

from harness.checks.features import LACKING, RECOMPUTED
from harness.diagnosis.backward import TIED, _untied
from harness.diagnosis.differences import wrong_pairs
from harness.diagnosis.hypothesis import Broken, Fact
from harness.judge.contents import take
from harness.judge.finding import Finding
from harness.judge.result import Cause
from harness.judge.trial import Trial

BY_STEP = ([0, 1], [2, 5], [6, 6])  # the tokens of each step's first half
UNTIED = Cause(
    "tied weight without the output's part",
    "the gradient of the tied weight lacks the output's part: tok_embeddings.weight has only the embedding's",
)


def tied(**changes: object) -> Trial:
    """Every other step reads half of its tokens."""
    training = replace(ADAMW, variable_length=True)
    trial = trial_of(tiny_case("fsdp_2", training, model=replace(TINY, tied_embeddings=True), **changes))
    tokens = np.array([[*first, 3, 3] for first in BY_STEP for _ in range(8)])
    return replace(trial, reference=replace(trial.reference, tokens=tokens))


def with_rows(trial: Trial, step: int, rows: list[int]) -> Trial:
    """Of the gradient of a step there is nothing but these rows, which are others than the reference's."""
    whole = trial.reference.steps[step - 1].gradients[TIED].reshape(-1, TINY.dim)
    left = np.where(np.isin(np.arange(len(whole)), rows)[:, None], whole**2, 0.0).reshape(trial.plan.shapes[TIED])
    for rank in trial.ranks:
        part = trial.gradient_slice_of(rank, TIED)
        assert part is not None
        trial = with_value(trial, rank, step, "gradients", TIED, lambda _, part=part: take(left, part))
    return trial


def found(trial: Trial, step: int, checks: Broken | None = None) -> Fact | None:
    return _untied(checks or broken("gradients"), trial, wrong_pairs(trial, step), step)


@pytest.mark.parametrize(("step", "read"), [(1, [0, 1, 3]), (2, [2, 5]), (3, [3, 6])])
@pytest.mark.parametrize("wrapper", ["fsdp2", "fsdp1", "zero2"])
def test_a_tied_weight_has_the_gradient_of_the_rows_that_a_step_reads(wrapper: str, step: int, read: list[int]) -> None:
    trial = tied(wrapper=wrapper)
    checks = ("gradients", "loss", "reported_loss")
    checks = checks if wrapper != "zero2" else ("gradients", "grad_norm", "loss", "reported_loss", "update")
    tested = f"in step {step} all rows of tokens that were not read are zero, all other parameters are right"
    assert found(with_rows(trial, step, read), step) == Fact(UNTIED, checks, (("tested", tested),))
    assert found(with_rows(trial, step, read[:1]), step) is not None
    for other in set(range(8)) - {*read}:
        assert found(with_rows(trial, step, [*read, other]), step) is None


def test_of_a_step_that_reads_every_token_no_row_tells_what_is_missing() -> None:
    trial = tied()
    tokens = np.arange(8) + np.zeros((24, 1), int)
    every = replace(trial, reference=replace(trial.reference, tokens=tokens))
    every = replace(every, case=replace(every.case, training=replace(every.case.training, seq_len=8)))
    assert found(with_rows(every, 1, [0, 1, 3]), 1) is None


def test_products_that_are_not_done_in_backward_are_the_missing_part_s() -> None:
    trial = with_rows(tied(), 1, [0, 1, 3])

    def checks(*places: str) -> tuple[str, ...]:
        findings = tuple(Finding.at(rank, 1, 2, step=1, quantity=place) for rank, place in enumerate(places))
        results = broken("gradients", "features")
        fact = found(trial, 1, results | {"features": replace(results["features"], findings=findings)})
        assert fact is not None
        return fact.checks

    assert checks(LACKING, LACKING) == ("gradients", "loss", "reported_loss", "features")
    assert checks(LACKING, RECOMPUTED) == ("gradients", "loss", "reported_loss")


def test_a_weight_of_its_own_or_another_one_beside_it_lacks_no_part() -> None:
    trial = with_rows(tied(), 1, [0, 1, 3])
    assert found(with_value(trial, 0, 1, "gradients", "norm.weight", lambda gradient: 2 * gradient), 1) is None
    alone = trial_of(tiny_case("fsdp_2", replace(ADAMW, variable_length=True)))
    alone = replace(alone, reference=replace(alone.reference, tokens=trial.reference.tokens))
    alone = with_rows(alone, 1, [0, 1, 3])
    assert wrong_pairs(alone, 1) == [(0, TIED), (1, TIED)]
    assert found(alone, 1) is None
