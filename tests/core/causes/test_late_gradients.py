"""Gradients of microbatches that come in the next step: trained in earnest, named where they do, and only there."""

from __future__ import annotations

import numpy as np
import pytest
from trained import Ran, _ran, case_of, diagnosed, reference  # noqa: F401

from harness.core.case.case import Case
from harness.reference.counterfactual import Batch, Changes, SeparateCopies, retrain_separately

Arrays = dict[str, np.ndarray]


def second_halves(case: Case, batch: Batch) -> np.ndarray:
    """1 for the tokens that each rank receives in its second microbatch. [b, s]"""
    number = np.arange(len(batch.labels)) % (case.training.global_batch // case.dims.dp) // case.local_batch
    return np.broadcast_to((number == 1)[:, None], batch.labels.shape).astype(float)


@pytest.mark.parametrize("carried", [1.0, 0.0])
def test_a_microbatch_that_is_reduced_with_the_next_step_is_told_from_one_that_is_lost(
    ran: Ran, carried: float
) -> None:
    case = case_of(accumulation=2)
    before: dict[int, Arrays] = {}

    def shares(step: int, batch: Batch) -> list[np.ndarray]:
        late = second_halves(case, batch)
        return [1 - late, late]

    def reduce(step: int, gradients: list[Arrays]) -> list[Arrays]:
        own, before[step] = gradients
        late = before.get(step - 1, {})
        return [{fqn: own[fqn] + carried * late.get(fqn, 0.0) for fqn in own}]

    apart = SeparateCopies((0, 0), shares, reduce, [Changes()])
    (trained,) = retrain_separately(case.model, case.training, reference(case), apart)
    found = diagnosed(ran(case, trained))
    details = dict(found.causes[0].details)
    assert found.kinds == ("unequal contributions",) and details["microbatches"] == (2,)
    assert ("steps late" in details) is bool(carried)
    assert not {"not explained", "still failing", "tried"} & dict(found.evidence).keys()
