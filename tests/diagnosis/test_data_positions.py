"""Samples of other steps than the one that trains on them: how far the data are ahead or behind. Literal evidence, no ranks."""

from __future__ import annotations

import pytest
from diagnosed import fsdp_4, received

from harness.diagnosis.data import wrong_samples
from harness.report.cause_text import cause_line


@pytest.mark.parametrize(
    ("step", "of", "far"),
    [(1, 2, "1 step ahead"), (1, 3, "2 steps ahead"), (2, 1, "1 step behind"), (3, 1, "2 steps behind")],
)
def test_all_samples_of_another_step_are_told_with_how_far_the_data_are_ahead_or_behind(
    step: int, of: int, far: str
) -> None:
    trial = fsdp_4()
    ids = trial.reference.samples[of - 1]
    for rank in trial.ranks:
        trial = received(trial, rank, step, list(ids[2 * rank : 2 * rank + 2]))
    found = wrong_samples(trial)
    assert found is not None and found.kind == "data position"
    assert cause_line(found).startswith(f"step {step} trains on samples of step {of}: the data are {far}")


def test_samples_of_several_steps_are_counted_with_the_ranks_that_receive_them() -> None:
    trial = received(received(fsdp_4(), 3, 2, [14, 1]), 1, 2, [10, 17])
    found = wrong_samples(trial)
    assert found is not None
    assert cause_line(found) == "2 of 8 samples received in step 2 are those of step 1, 3 on ranks [1,3]"
