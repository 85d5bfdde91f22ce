"""What is said where frozen parameters move."""

from __future__ import annotations

from dataclasses import replace

from diagnosed import proven
from literal import ADAMW, tiny_case, trial_of, with_every_rank, with_value

from harness.core.judge.trial import Trial

TRAINED = ("norm.weight", "output.weight")


def test_decay_of_all_frozen_parameters_is_named() -> None:
    def change(trial: Trial, rank: int) -> Trial:
        for fqn in (one.fqn for one in trial.ranks[rank].parameters if one.fqn not in TRAINED):
            factor = 1.0
            for step in trial.reference.steps:
                factor *= 1 - 0.1 * step.lr
                trial = with_value(trial, rank, step.step, "parameters", fqn, lambda value, by=factor: value * by)
        return trial

    trial = trial_of(tiny_case("fsdp_2", replace(ADAMW, trainable=TRAINED)))
    assert proven(with_every_rank(trial, change)) == ("weight decay", {"frozen": True})
