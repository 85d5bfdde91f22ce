"""The samples that each rank received, recognised by their tokens; a cp rank's by those at the positions it should receive."""

from __future__ import annotations

import numpy as np

from harness.core.judge.places import first_stage_ranks, one_rank_per_share
from harness.core.judge.trial import Trial
from harness.core.plan.grid import coordinate
from harness.core.plan.stages import positions, positions_of_part


def sizes_wanted(trial: Trial, rank: int, step: int) -> tuple[int, ...]:
    """Return how many samples each microbatch of a rank should have."""
    mesh_coordinate = coordinate(trial.case.dims, rank)
    share = mesh_coordinate["dp_replicate"] * trial.case.dims.dp_shard + mesh_coordinate["dp_shard"]
    return trial.case.sizes_at(step, share)


def received_samples(trial: Trial, step: int) -> dict[int, list[int | None]]:
    """Return the sample ids that each first stage received in a step, in order, at whatever positions its rows were cut.

    The id is None for tokens that are no sample of the recipe, or where rows were cut at different positions.
    """
    ids_by_rank = {}
    for rank, rows in rows_received(trial, step).items():
        id_by_tokens = rows_of(trial, rank, step, positions_received(trial, rank, step))
        ids_by_rank[rank] = [id_by_tokens.get(row.tobytes()) for row in rows]
    return ids_by_rank


def rows_received(trial: Trial, step: int) -> dict[int, list[np.ndarray]]:
    """Return the rows of tokens that each first stage received in a step, by rank. A rank without the step is left out."""
    rows_by_rank: dict[int, list[np.ndarray]] = {}
    for rank in first_stage_ranks(trial):
        for record in trial.ranks[rank].steps:
            if record.step == step:
                rows: list[np.ndarray] = []
                for microbatch in record.microbatches:
                    if microbatch.tokens is not None:
                        rows += [*microbatch.tokens]
                rows_by_rank[rank] = rows
    return rows_by_rank


def rows_of(trial: Trial, rank: int, step: int, token_positions: np.ndarray | None = None) -> dict[bytes, int]:
    """Return the sample id by the tokens at these positions, by default at those that this rank is to receive.

    Where samples have the same tokens there, the id is one of this step's.
    """
    reference = trial.reference
    ids_of_step = {*reference.samples[step - 1]}
    if token_positions is None:
        token_positions = positions(trial.case, rank, trial.case.seq_len(step))
    samples = zip(reference.sample_ids, reference.tokens, strict=True)
    # Samples of this step come last, so that they replace other samples with the same tokens.
    ordered_samples = sorted(samples, key=lambda sample: sample[0] in ids_of_step)
    return {tokens[token_positions].tobytes(): sample_id for sample_id, tokens in ordered_samples}


def positions_received(trial: Trial, rank: int, step: int) -> np.ndarray | None:
    """Return the positions in their samples of the rows that a rank received. None if no way to cut samples gives them."""
    rows = rows_received(trial, step).get(rank, [])
    if not rows:
        return None
    for cut_positions in ways_to_cut(trial, rank, step):
        possible_rows = {row[cut_positions].tobytes() for row in trial.reference.tokens}
        if all(row.tobytes() in possible_rows for row in rows):
            return cut_positions
    return None


def ways_to_cut(trial: Trial, rank: int, step: int) -> list[np.ndarray]:
    """Return the positions that a rank may have received, the most likely first.

    They are those of the plan, then balanced the other way, those of the cp peers, the whole sequence, and those that the
    rank was given.
    """
    case = trial.case
    length = case.seq_len(step)
    peers = (rank, *(peer for peer in trial.plan.peers(rank, "cp") if peer != rank))
    balances = (case.features.cp_load_balance, not case.features.cp_load_balance)
    possible_balances = [balanced for balanced in balances if not balanced or length % (2 * case.dims.cp) == 0]
    ways = []
    for peer in peers:
        index = coordinate(case.dims, peer)["cp"]
        for balanced in possible_balances:
            ways.append(positions_of_part(length, case.dims.cp, index, balanced=balanced))
    return [*ways, np.arange(length), *_given_positions(trial, rank, step)]


def _given_positions(trial: Trial, rank: int, step: int) -> list[np.ndarray]:
    """Return the positions that the model was given, where there is one a token, equal for all samples."""
    given = next((record.positions for record in trial.ranks[rank].steps if record.step == step), ())
    rows = [row.reshape(-1) for row in given if row.ndim == 1 or len(row) == 1]
    return [row for row in rows if row.size and row.min() >= 0 and row.max() < trial.reference.tokens.shape[1]]


def shares_of_samples(trial: Trial, step: int) -> dict[int, list[int | None]]:
    """Return the sample ids that each data-parallel share received, by the rank that represents it."""
    received = received_samples(trial, step)
    return {rank: received[rank] for rank in one_rank_per_share(trial) if rank in received}
