"""What is said of norms and rates where ZeRO leaves each rank a part of what it steps on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from diagnosed import dims, first_line
from literal import ADAMW, UNEVEN, tiny_case, trial_of, with_every_rank, with_step

from harness.diagnosis.norms import other_norms
from harness.diagnosis.optimizer import _rates_and_decays
from harness.judge.trial import Trial
from harness.report.cause_text import cause_line


def zero(stage: str) -> Trial:
    case = tiny_case(dims(shard=3), replace(ADAMW, global_batch=9), wrapper=stage, model=UNEVEN)
    return trial_of(case)


def test_norm_gradients_not_summed_over_tp_are_named_where_a_rank_has_a_part_of_them_or_nothing() -> None:
    def share(trial: Trial, rank: int) -> Trial:
        for step in trial.ranks[rank].steps:
            parts = {fqn: part for fqn, part in step.gradients.items() if part.size}
            entries = {fqn: np.linspace(0.2, 0.7, part.size) for fqn, part in parts.items() if "norm" in fqn}
            own = {fqn: parts[fqn] * (1 - share if rank % 2 else share) for fqn, share in entries.items()}
            trial = with_step(trial, rank, step.step, gradients=parts | own)
        return trial

    told = first_line(with_every_rank(trial_of(tiny_case("fsdp_2_tp_2", wrapper="zero1")), share))
    assert told == "gradients of norm weights are not summed over tp: 3 parameters wrong, all others right"


def test_a_norm_counts_replicas_again_only_along_axes_that_have_any() -> None:
    def along(wrapper: str | None) -> set[str]:
        trial = trial_of(tiny_case("fsdp_2_tp_2", wrapper=wrapper))
        return {text.split()[-1] for text, _ in other_norms(trial) if "counts every replica" in text}

    assert along("zero1") == {"tp"}
    assert along(None) == {"tp"}


def test_a_rate_is_told_by_the_part_that_each_rank_steps_on() -> None:
    def doubled(trial: Trial, rank: int) -> Trial:
        start, moved = trial.start_of(rank), trial.ranks[rank].steps[0].parameters
        return with_step(trial, rank, 1, parameters={fqn: 2 * value - start[fqn] for fqn, value in moved.items()})

    assert [cause_line(one.cause) for one in _rates_and_decays(with_every_rank(zero("zero1"), doubled))] == [
        "the learning rate of every parameter is 0.01 in step 1, the peak, as without a schedule, requested 0.005",
        "every optimizer step is 2 times what it should be, as with 2 times the learning rate",
    ]


def test_a_part_without_gradients_tells_nothing_of_the_rate() -> None:
    trial = zero("zero1")
    assert list(_rates_and_decays(with_step(trial, 0, 1, gradients={}))) == []
