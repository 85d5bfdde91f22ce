"""The observed losses put together over ranks: sums over sums, never a mean of means."""

from __future__ import annotations

import math

from harness.core.judge.places import last_stage_ranks
from harness.core.judge.trial import Trial


def global_loss(trial: Trial, step: int) -> float | None:
    """Return the mean loss of a step in nats: the sum of all observed losses over the sum of their valid tokens.

    tp peers compute the same loss, so they count once. None if no valid token was observed.
    """
    observed_losses: list[tuple[float, int]] = []
    for rank in last_stage_ranks(trial):
        if _is_first_of_tp(trial, rank):
            observed_losses += losses_of_rank(trial, rank, step)
    tokens = sum(count for _, count in observed_losses)
    return math.fsum(total for total, _ in observed_losses) / tokens if tokens else None


def losses_of_rank(trial: Trial, rank: int, step: int) -> list[tuple[float, int]]:
    """Return (sum of losses in nats, valid tokens) of each microbatch of a rank in a step.

    Those without a loss are left out.
    """
    observed_losses = []
    for record in trial.ranks[rank].steps:
        if record.step != step:
            continue
        for microbatch in record.microbatches:
            if microbatch.loss_sum is not None and microbatch.valid_tokens is not None:
                observed_losses.append((microbatch.loss_sum, microbatch.valid_tokens))
    return observed_losses


def _is_first_of_tp(trial: Trial, rank: int) -> bool:
    return trial.plan.peers(rank, "tp")[0] == rank
