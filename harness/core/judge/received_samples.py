"""The samples that each rank received, recognised by their tokens; a cp rank's by those at the positions it should receive."""

from __future__ import annotations

import numpy as np

from harness.core.judge.places import first_stage_ranks, representative_of_shares
from harness.core.judge.trial import Trial
from harness.core.plan.grid import coordinate_of_rank
from harness.core.plan.stages import positions, token_positions_of_part


def expected_microbatch_sizes(trial: Trial, rank: int, step: int) -> tuple[int, ...]:
    """Return how many samples each microbatch of a rank should have."""
    mesh_coordinate = coordinate_of_rank(trial.case.dims, rank)
    share = mesh_coordinate["dp_replicate"] * trial.case.dims.dp_shard + mesh_coordinate["dp_shard"]
    return trial.case.sizes_at(step, share)


def received_sample_ids(trial: Trial, step: int) -> dict[int, list[int | None]]:
    """Return the sample ids that each first stage received in a step, in order, at whatever positions its rows were cut.

    The id is None for tokens that are no sample of the recipe, or where rows were cut at different positions.
    """
    ids_by_rank = {}
    for rank, rows in received_token_rows(trial, step).items():
        id_by_tokens = sample_id_by_tokens(trial, rank, step, received_positions_of(trial, rank, step))
        ids_by_rank[rank] = [id_by_tokens.get(row.tobytes()) for row in rows]
    return ids_by_rank


def received_token_rows(trial: Trial, step: int) -> dict[int, list[np.ndarray]]:
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


def sample_id_by_tokens(
    trial: Trial, rank: int, step: int, token_positions: np.ndarray | None = None
) -> dict[bytes, int]:
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


def received_positions_of(trial: Trial, rank: int, step: int) -> np.ndarray | None:
    """Return the positions in their samples of the rows that a rank received. None if no way to cut samples gives them."""
    rows = received_token_rows(trial, step).get(rank, [])
    if not rows:
        return None
    for cut_positions in possible_positions(trial, rank, step):
        possible_rows = {row[cut_positions].tobytes() for row in trial.reference.tokens}
        if all(row.tobytes() in possible_rows for row in rows):
            return cut_positions
    return None


def possible_positions(trial: Trial, rank: int, step: int) -> list[np.ndarray]:
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
        index = coordinate_of_rank(case.dims, peer)["cp"]
        for balanced in possible_balances:
            ways.append(token_positions_of_part(length, case.dims.cp, index, balanced=balanced))
    return [*ways, np.arange(length), *_positions_given_to_model(trial, rank, step)]


def _positions_given_to_model(trial: Trial, rank: int, step: int) -> list[np.ndarray]:
    """Return the positions that the model was given, where there is one a token, equal for all samples."""
    given = next((record.positions for record in trial.ranks[rank].steps if record.step == step), ())
    rows = [row.reshape(-1) for row in given if row.ndim == 1 or len(row) == 1]
    return [row for row in rows if row.size and row.min() >= 0 and row.max() < trial.reference.tokens.shape[1]]


def sample_ids_by_share(trial: Trial, step: int) -> dict[int, list[int | None]]:
    """Return the sample ids that each data-parallel share received, by the rank that represents it."""
    received = received_sample_ids(trial, step)
    return {rank: received[rank] for rank in representative_of_shares(trial) if rank in received}
