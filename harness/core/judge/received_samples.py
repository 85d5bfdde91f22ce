"""Samples that each rank received, microbatch by microbatch, beside those requested: of a run's step or a recording's alike.

In a run, samples are recognised by their tokens, at whatever positions the rows were cut; nothing that a data loader says is
believed. In a recording a sample is the digest of its row (harness/recording/judged/same_rows.py makes its StepSamples).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from harness.core.evidence.step import Microbatch
from harness.core.judge.places import first_stage_ranks, representative_of_shares
from harness.core.judge.trial import Trial
from harness.core.plan.grid import coordinate_of_rank
from harness.core.plan.stages import token_positions_of_part, token_positions_of_rank

S = TypeVar("S", bound=Hashable)


@dataclass(frozen=True)
class StepSamples:
    """The samples of one step: those requested, and those that ranks received.

    A sample is a number: the recipe's id in a run, the digest of a row in a recording.
    """

    requested: Counter[int]
    """Sample -> how often all ranks together should receive it."""
    microbatches: Mapping[int, tuple[tuple[int | None, ...], ...]]
    """Rank -> samples of each microbatch, in order; None for a row that is no sample of the recipe."""

    @functools.cached_property
    def by_rank(self) -> dict[int, list[int | None]]:
        """Return, by rank, the samples of all its microbatches, in order. A rank without the step is left out."""
        samples_by_rank = {}
        for rank, microbatches in self.microbatches.items():
            samples: list[int | None] = []
            for microbatch in microbatches:
                samples += microbatch
            samples_by_rank[rank] = samples
        return samples_by_rank

    def on_ranks(self, ranks: Iterable[int]) -> StepSamples:
        """Return the samples that these ranks alone received. Ranks without the step are left out."""
        return replace(
            self, microbatches={rank: self.microbatches[rank] for rank in ranks if rank in self.microbatches}
        )

    @functools.cached_property
    def counts(self) -> Counter[int]:
        """Return how often all ranks together received each sample. Rows that are no sample are left out."""
        counts = Counter[int]()
        for samples in self.by_rank.values():
            counts.update(sample for sample in samples if sample is not None)
        return counts

    @property
    def missing(self) -> set[int]:
        """Return the requested samples that no rank received."""
        return {*self.requested} - {*self.counts}

    @property
    def ranks_with_others(self) -> list[int]:
        """Return the ranks that received a row that is none of the samples requested in this step."""
        return [rank for rank, samples in self.by_rank.items() if not {*samples} <= self.requested.keys()]

    @property
    def ranks_alike(self) -> list[tuple[int, ...]]:
        """Return each group of several ranks that received the same samples in the same order.

        Nothing is known about ranks with rows that are no sample, and about ranks that received nothing.
        """
        ranks_by_samples: dict[tuple[int | None, ...], list[int]] = {}
        for rank, samples in self.by_rank.items():
            if samples and None not in samples:
                ranks_by_samples.setdefault(tuple(samples), []).append(rank)
        return [tuple(ranks) for ranks in ranks_by_samples.values() if len(ranks) > 1]

    def repeated_microbatches(self, rank: int) -> list[tuple[int, int]]:
        """Return pairs, counted from 1: (the first microbatch of a rank that has some samples, a later one with the same).

        The order of samples within a microbatch does not count. Empty if all differ. Precondition: the rank received samples
        alone, for rows that are none are not distinguished.
        """
        contents = [Counter(microbatch) for microbatch in self.microbatches[rank]]
        pairs = [(contents.index(samples) + 1, number) for number, samples in enumerate(contents, 1)]
        return [(first, number) for first, number in pairs if first < number]


def steps_of_samples(requested: Mapping[int, Collection[int]], samples: Collection[int | None]) -> list[int]:
    """Return the steps that have requested all of these samples. Empty if there is none, or no sample.

    requested: by step, its samples.
    """
    return [step for step, of_step in requested.items() if samples and {*samples} <= {*of_step}]


def shared_samples(sets: Iterable[Set[S]]) -> set[S]:
    """Return the samples that are in several of these sets, each of which is what one rank received."""
    counts = Counter[S]()
    for samples in sets:
        counts.update(samples)
    return {sample for sample, count in counts.items() if count > 1}


# ---- of a run


def samples_of_step(trial: Trial, step: int) -> StepSamples:
    """Return the recipe's samples of a step, and those that each first stage received.

    A row is no sample if its tokens are none of the recipe's, or if the rank's rows were cut at different positions.
    """
    microbatches = {}
    for rank, arrays in received_tokens(trial, step).items():
        id_by_tokens = sample_id_by_tokens(trial, rank, step, received_positions_of(trial, rank, step))
        ids_of_microbatches = []
        for tokens in arrays:
            ids_of_microbatches.append(tuple(id_by_tokens.get(row.tobytes()) for row in tokens))
        microbatches[rank] = tuple(ids_of_microbatches)
    return StepSamples(Counter(trial.reference.samples[step - 1]), microbatches)


def requested_rows(trial: Trial, step: int) -> list[int]:
    """Return the samples that the recipe requests in a step, in order, as indices of the reference's `tokens` and `labels`."""
    row_by_id = {sample_id: row for row, sample_id in enumerate(trial.reference.sample_ids)}
    return [row_by_id[sample_id] for sample_id in trial.reference.samples[step - 1]]


def samples_of_shares(trial: Trial, step: int) -> StepSamples:
    """Return the samples of a step that each data-parallel share received, by the rank that represents it."""
    return samples_of_step(trial, step).on_ranks(representative_of_shares(trial))


def step_of_samples(trial: Trial, ids: Collection[int | None]) -> int | None:
    """Return the first step of the recipe that all these samples belong to. None if there is none, or no sample."""
    return next(iter(steps_of_samples(dict(enumerate(trial.reference.samples, 1)), ids)), None)


def expected_microbatch_sizes(trial: Trial, rank: int, step: int) -> tuple[int, ...]:
    """Return how many samples each microbatch of a rank should have."""
    mesh_coordinate = coordinate_of_rank(trial.case.dims, rank)
    share = mesh_coordinate["dp_replicate"] * trial.case.dims.dp_shard + mesh_coordinate["dp_shard"]
    return trial.case.microbatch_sizes(step, share)


def wrong_microbatch_sizes(trial: Trial, step: int) -> dict[int, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return, by first stage that ran other microbatches than requested, (samples of each, samples that each should have)."""
    wrong = {}
    for rank, arrays in received_tokens(trial, step).items():
        sizes = tuple(map(len, arrays))
        expected_sizes = expected_microbatch_sizes(trial, rank, step)
        if sizes != expected_sizes:
            wrong[rank] = sizes, expected_sizes
    return wrong


def microbatches_of(trial: Trial, rank: int, step: int) -> list[Microbatch]:
    """Return the microbatches that a rank ran in a step; none for a step that it did not take."""
    microbatches: list[Microbatch] = []
    for record in trial.ranks[rank].steps:
        if record.step == step:
            microbatches += record.microbatches
    return microbatches


def received_tokens(trial: Trial, step: int) -> dict[int, list[np.ndarray]]:
    """Return, by first stage, the tokens [samples, positions] of each of its microbatches in a step.

    Microbatches without tokens, and ranks without the step, are left out.
    """
    tokens_by_rank = {}
    for rank in first_stage_ranks(trial):
        if any(record.step == step for record in trial.ranks[rank].steps):
            microbatches = microbatches_of(trial, rank, step)
            tokens_by_rank[rank] = [part.tokens for part in microbatches if part.tokens is not None]
    return tokens_by_rank


def received_token_rows(trial: Trial, step: int) -> dict[int, list[np.ndarray]]:
    """Return the rows of tokens that each first stage received in a step, by rank. A rank without the step is left out."""
    rows_by_rank = {}
    for rank, arrays in received_tokens(trial, step).items():
        rows: list[np.ndarray] = []
        for tokens in arrays:
            rows += [*tokens]
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
        token_positions = token_positions_of_rank(trial.case, rank, trial.case.seq_len(step))
    samples = zip(reference.sample_ids, reference.tokens, strict=True)
    # Samples of this step come last, so that they replace other samples with the same tokens.
    ordered_samples = sorted(samples, key=lambda sample: sample[0] in ids_of_step)
    return {tokens[token_positions].tobytes(): sample_id for sample_id, tokens in ordered_samples}


def sample_id_by_row(data: Any, length: int) -> dict[bytes, int]:
    """Return, by the bytes of its first `length` tokens, the id of each sample of a whole data set. data: a torch Dataset."""
    return {data[sample_id][0][:length].numpy().tobytes(): sample_id for sample_id in range(len(data))}


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
