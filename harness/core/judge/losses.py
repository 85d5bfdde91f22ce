"""The losses that were seen, put together over ranks: sums over sums, never a mean of means. tp peers count once."""

from __future__ import annotations

import math

from harness.core.judge.places import last_stage_ranks
from harness.core.judge.trial import Trial


def global_loss(trial: Trial, step: int) -> float | None:
    """Sum of local losses over sum of valid tokens. tp peers, who compute the same loss, count once between them."""
    seen = [loss for rank in last_stage_ranks(trial) if _first_of_tp(trial, rank) for loss in losses(trial, rank, step)]
    tokens = sum(count for _, count in seen)
    return math.fsum(total for total, _ in seen) / tokens if tokens else None


def losses(trial: Trial, rank: int, step: int) -> list[tuple[float, int]]:
    """(sum of losses, valid tokens) of a rank's forward passes whose loss was seen."""
    return [
        (part.loss_sum, part.valid_tokens)
        for record in trial.ranks[rank].steps
        if record.step == step
        for part in record.microbatches
        if part.loss_sum is not None and part.valid_tokens is not None
    ]


def _first_of_tp(trial: Trial, rank: int) -> bool:
    return trial.plan.peers(rank, "tp")[0] == rank
