"""Which ranks of a trial are fed, which compute losses, and which stand for a share of the samples."""

from __future__ import annotations

from harness.core.judge.trial import Trial
from harness.core.plan.grid import coordinate


def first_stage_ranks(trial: Trial) -> list[int]:
    """Return the ranks that receive tokens."""
    return [rank for rank in trial.ranks if 0 in trial.plan.stages[rank]]


def last_stage_ranks(trial: Trial) -> list[int]:
    """Return the ranks that compute a loss."""
    return [rank for rank in trial.ranks if trial.case.n_stages - 1 in trial.plan.stages[rank]]


def one_rank_per_share(trial: Trial) -> list[int]:
    """Return the ranks that between them received each sample once: first stages at cp 0 and tp 0."""
    places = {rank: coordinate(trial.case.dims, rank) for rank in first_stage_ranks(trial)}
    return [rank for rank, place in places.items() if (place["cp"], place["tp"]) == (0, 0)]


def feeder_of(trial: Trial, rank: int) -> int:
    """Return the rank of the same pipeline that runs the first stage, and so receives the tokens whose loss `rank` computes."""
    return next(peer for peer in trial.plan.peers(rank, "pp") if 0 in trial.plan.stages[peer])
