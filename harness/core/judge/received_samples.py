"""Which samples each rank received, recognised by their tokens; a cp rank's by those at the positions it should receive."""

from __future__ import annotations

import numpy as np

from harness.core.judge.places import first_stage_ranks, one_rank_per_share
from harness.core.judge.trial import Trial
from harness.core.plan.grid import coordinate
from harness.core.plan.stages import positions, positions_of_part


def sizes_wanted(trial: Trial, rank: int, step: int) -> tuple[int, ...]:
    """Return how many samples each microbatch of a rank should have."""
    place = coordinate(trial.case.dims, rank)
    return trial.case.sizes_at(step, place["dp_replicate"] * trial.case.dims.dp_shard + place["dp_shard"])


def received_samples(trial: Trial, step: int) -> dict[int, list[int | None]]:
    """The sample ids each first stage received in a step, in order, at whatever positions its rows stand in their samples. The
    id is None for tokens that are no sample of the recipe, or where rows stand at different positions."""
    found = {}
    for rank, rows in rows_received(trial, step).items():
        known = rows_of(trial, rank, step, positions_received(trial, rank, step))
        found[rank] = [known.get(row.tobytes()) for row in rows]
    return found


def rows_received(trial: Trial, step: int) -> dict[int, list[np.ndarray]]:
    """Rows of tokens, by first stage."""
    return {
        rank: [row for part in record.microbatches if part.tokens is not None for row in part.tokens]
        for rank in first_stage_ranks(trial)
        for record in trial.ranks[rank].steps
        if record.step == step
    }


def rows_of(trial: Trial, rank: int, step: int, at: np.ndarray | None = None) -> dict[bytes, int]:
    """The sample id by the tokens at these positions, by default at those that this rank is to receive. Where samples have the
    same tokens there, it is one of this step's."""
    reference, own = trial.reference, {*trial.reference.samples[step - 1]}
    at = positions(trial.case, rank, trial.case.seq_len(step)) if at is None else at
    rows = sorted(zip(reference.sample_ids, reference.tokens, strict=True), key=lambda sample: sample[0] in own)
    return {row[at].tobytes(): id_ for id_, row in rows}


def positions_received(trial: Trial, rank: int, step: int) -> np.ndarray | None:
    """At which positions the rows that a rank received stand in their samples; None if at none that somebody would feed."""
    rows = rows_received(trial, step).get(rank, [])
    for at in ways_to_cut(trial, rank, step) if rows else ():
        known = {row[at].tobytes() for row in trial.reference.tokens}
        if all(row.tobytes() in known for row in rows):
            return at
    return None


def ways_to_cut(trial: Trial, rank: int, step: int) -> list[np.ndarray]:
    """Positions by the plan, balanced the other way, of the cp peers, the whole sequence, and those that the rank was given:
    most likely first."""
    case, length = trial.case, trial.case.seq_len(step)
    peers = (rank, *(peer for peer in trial.plan.peers(rank, "cp") if peer != rank))
    places = [coordinate(case.dims, peer)["cp"] for peer in peers]
    balances = (case.features.cp_load_balance, not case.features.cp_load_balance)
    possible = [balanced for balanced in balances if not balanced or length % (2 * case.dims.cp) == 0]
    cut = [
        positions_of_part(length, case.dims.cp, index, balanced=balanced) for index in places for balanced in possible
    ]
    return [*cut, np.arange(length), *_given_positions(trial, rank, step)]


def _given_positions(trial: Trial, rank: int, step: int) -> list[np.ndarray]:
    """One position a token, the same for all samples, within the whole sequence."""
    given = next((record.positions for record in trial.ranks[rank].steps if record.step == step), ())
    rows = [row.reshape(-1) for row in given if row.ndim == 1 or len(row) == 1]
    return [row for row in rows if row.size and row.min() >= 0 and row.max() < trial.reference.tokens.shape[1]]


def shares_of_samples(trial: Trial, step: int) -> dict[int, list[int | None]]:
    """What each data-parallel share received, by the rank that stands for it."""
    received = received_samples(trial, step)
    return {rank: received[rank] for rank in one_rank_per_share(trial) if rank in received}
