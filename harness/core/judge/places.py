"""The ranks of a trial that receive samples, that compute losses, and that represent a data-parallel rank's samples."""

from __future__ import annotations

from harness.core.judge.trial import Trial
from harness.core.plan.grid import coordinate_of_rank


def first_stage_ranks(trial: Trial) -> list[int]:
    """Return the ranks with evidence that run the first pipeline stage and so receive tokens."""
    return [rank for rank in trial.ranks if 0 in trial.plan.stages[rank]]


def last_stage_ranks(trial: Trial) -> list[int]:
    """Return the ranks with evidence that run the last pipeline stage and so compute a loss."""
    return [rank for rank in trial.ranks if trial.case.n_stages - 1 in trial.plan.stages[rank]]


def representative_of_shares(trial: Trial) -> list[int]:
    """Return one rank with evidence for each data-parallel share: the one of its first stage at cp 0 and tp 0.

    Together these ranks should have received each sample once.
    """
    coordinates = {rank: coordinate_of_rank(trial.case.dims, rank) for rank in first_stage_ranks(trial)}
    return [
        rank for rank, mesh_coordinate in coordinates.items() if mesh_coordinate["cp"] == mesh_coordinate["tp"] == 0
    ]


def first_stage_peer(trial: Trial, rank: int) -> int:
    """Return the rank of the same pipeline that runs the first stage: it receives the tokens whose loss `rank` computes."""
    return next(peer for peer in trial.plan.peers(rank, "pp") if 0 in trial.plan.stages[peer])
