"""The losses that were observed, put together over ranks: sums over sums, never a mean of means. tp peers count once."""

from __future__ import annotations

import math

from harness.core.judge.places import last_stage_ranks
from harness.core.judge.trial import Trial


def global_loss(trial: Trial, step: int) -> float | None:
    """Return the sum of local losses over the sum of valid tokens. None without any valid token.

    tp peers compute the same loss, so they count once.
    """
    observed_losses: list[tuple[float, int]] = []
    for rank in last_stage_ranks(trial):
        if _is_first_of_tp(trial, rank):
            observed_losses += losses_of_rank(trial, rank, step)
    tokens = sum(count for _, count in observed_losses)
    return math.fsum(total for total, _ in observed_losses) / tokens if tokens else None


def losses_of_rank(trial: Trial, rank: int, step: int) -> list[tuple[float, int]]:
    """Return (sum of losses, valid tokens) of each of a rank's microbatches whose loss was observed."""
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
