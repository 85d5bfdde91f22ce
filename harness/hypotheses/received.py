"""Rows that ranks received, put together to the batches of one device, and the reference trained on them; their positions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from harness.core.causes.assume import assume_reference
from harness.core.causes.hypothesis import Broken, Hypothesis
from harness.core.causes.words import on_ranks_text
from harness.core.checks.positions import expected_position_rows, nearest_row, wrong_position_rows
from harness.core.evidence.step import Microbatch
from harness.core.evidence.text import positions_text
from harness.core.judge.labels import IGNORED, arrange_labels
from harness.core.judge.numbers import NotOnRecord, validation_batches
from harness.core.judge.places import first_stage_peer, last_stage_ranks, representative_of_shares
from harness.core.judge.received_samples import (
    microbatches_of,
    received_positions_of,
    received_token_rows,
    requested_rows,
    samples_of_step,
    shared_samples,
)
from harness.core.judge.result import Cause, Lines
from harness.core.judge.trial import Trial
from harness.core.plan.stages import layers_of_stage, token_positions_of_rank

LARGEST_SHIFT = 4
"""Places by which labels may be shifted."""


@dataclass(frozen=True)
class Rows:
    """Tokens and labels that ranks received in one step."""

    tokens: np.ndarray
    """int64 [rows, positions]"""
    labels: np.ndarray
    """int64 [rows, positions]"""
    is_one_label_a_token: bool = True
    """False if the loss had labels that are not one a token."""


def rows_of_step(trial: Trial, step: int) -> Rows | None:
    """Return the rows of all data-parallel shares, one share after the other, each put together from its cp ranks.

    None if those of a share do not make up rows.
    """
    rows_of_shares = [rows_of_dp_share(trial, rank, step) for rank in representative_of_shares(trial)]
    known = [rows for rows in rows_of_shares if rows is not None]
    if not known or len(known) < len(rows_of_shares):
        return None
    tokens = np.vstack([rows.tokens for rows in known])
    labels = np.vstack([rows.labels for rows in known])
    return Rows(tokens, labels, all(rows.is_one_label_a_token for rows in known))


def rows_of_dp_share(trial: Trial, rank: int, step: int) -> Rows | None:
    """Return the rows of one data-parallel share, put together from its cp ranks. None if they do not make up rows.

    They do if each rank's rows have the width of its positions, all ranks have as many rows, and positions cover the
    sequence once.
    """
    length = trial.case.seq_len(step)
    rows_by_peer = {}
    for peer in trial.plan.peers(rank, "cp"):
        rows = received_token_rows(trial, step).get(peer)
        received_positions = received_positions_of(trial, peer, step)
        columns = (
            token_positions_of_rank(trial.case, peer, length) if received_positions is None else received_positions
        )
        if not rows or any(len(row) != len(columns) for row in rows):
            return None
        rows_by_peer[peer] = columns, np.stack(rows)
    covered_positions = sorted(np.concatenate([columns for columns, _ in rows_by_peer.values()]))
    if len({len(rows) for _, rows in rows_by_peer.values()}) > 1 or covered_positions != [*range(length)]:
        return None
    tokens = np.empty((len(rows_by_peer[rank][1]), length), np.int64)
    for columns, rows_of_peer in rows_by_peer.values():
        tokens[:, columns] = rows_of_peer
    labels = right_labels(trial, tokens)
    whole = True
    for peer, (columns, _) in rows_by_peer.items():
        labels_of_peer, fits = _observed_labels(trial, peer, step, labels[:, columns])
        labels[:, columns] = labels_of_peer
        whole = whole and fits
    return Rows(tokens, labels, whole)


def right_labels(trial: Trial, tokens: np.ndarray) -> np.ndarray:
    """Return the right labels of these tokens, int64 [rows, positions]. Rows that are no sample's have their next tokens."""
    samples = enumerate(trial.reference.tokens)
    labels_by_tokens = {row[: tokens.shape[1]].tobytes(): trial.reference.labels[index] for index, row in samples}
    labels = []
    for row in tokens:
        next_tokens = np.append(row[1:], IGNORED)
        labels.append(labels_by_tokens.get(row.tobytes(), next_tokens)[: len(row)])
    return np.stack(labels)


def _observed_labels(trial: Trial, feeder: int, step: int, own: np.ndarray) -> tuple[np.ndarray, bool]:
    """Return (labels that the loss of this rank's samples was computed from, laid as its tokens lie; are they one a token).

    Right labels stand for those that were not seen. own: the right labels, int64 [rows, positions].
    """
    ranks = (rank for rank in last_stage_ranks(trial) if first_stage_peer(trial, rank) == feeder)
    all_parts = itertools.chain.from_iterable(microbatches_of(trial, rank, step) for rank in ranks)
    parts = [part for part in all_parts if part.labels is not None]
    if not parts or len(own) % len(parts):
        return own, True
    labels_of_parts = []
    for part, own_of_part in zip(parts, np.split(own, len(parts)), strict=True):
        labels = labels_of_part(part, own_of_part)
        labels_of_parts.append(own_of_part if labels is None else labels)
    fits = all(part.labels is not None and part.labels.size * len(parts) == own.size for part in parts)
    return np.vstack(labels_of_parts), fits


def labels_of_part(part: Microbatch, own: np.ndarray) -> np.ndarray | None:
    """Return the labels of a microbatch, [samples, positions], IGNORED where there is none. None if their layout is unknown.

    Wrong labels may be right ones of other positions, of fewer if need be. So may labels that lack positions that do not count.
    """
    laid = arrange_labels(part, own)
    size = 0 if part.labels is None else part.labels.size
    if laid is not None and np.array_equal(laid, own) and size in (own.size, (own != IGNORED).sum()):
        return laid
    for columns in _label_layouts(part, len(own)):
        if columns.shape[1] <= own.shape[1] and shift_of_labels(columns, own) is not None:
            padded = np.full_like(own, IGNORED)
            padded[:, : columns.shape[1]] = columns
            return padded
    return laid


def _label_layouts(part: Microbatch, samples: int) -> Iterator[np.ndarray]:
    """Yield a microbatch's labels as [samples, labels of a row]: as they lie, then with their chunks side by side.

    The second only if the samples divide each chunk. Nothing if they do not divide the labels. Precondition: the microbatch
    has labels.
    """
    assert part.labels is not None
    flat = part.labels.ravel()
    if flat.size % samples == 0:
        yield flat.reshape(samples, flat.size // samples)
        if all(size % samples == 0 for size in part.chunks):
            pieces = np.split(flat, np.cumsum(part.chunks)[:-1])
            yield np.hstack([piece.reshape(samples, piece.size // samples) for piece in pieces])


def shift_of_labels(labels: np.ndarray, own: np.ndarray) -> int | None:
    """Return by how many positions labels are shifted to later tokens, 0 for right ones. None if by no shift that is tried."""
    width = own.shape[1]
    for shift in sorted(range(-LARGEST_SHIFT, LARGEST_SHIFT + 1), key=abs):
        first = max(0, -shift)
        last = min(labels.shape[1], width - shift)
        if last - first >= width // 2 and np.array_equal(labels[:, first:last], own[:, first + shift : last + shift]):
            return shift
    return None


def are_labels_at_ends(trial: Trial, step: int, wrong: Mapping[int, list[tuple[int, int, int]]]) -> bool:
    """Return whether all wrong labels are at ends of a cp rank's parts of the sequence.

    A label is the next token, which at such an end is another rank's. wrong: rank -> (position, label, right label).
    """
    for rank, labels in wrong.items():
        rank_positions = token_positions_of_rank(trial.case, rank, trial.case.seq_len(step)).tolist()
        neighbours = zip(rank_positions, [*rank_positions[1:], None], strict=True)
        ends = {position for position, following in neighbours if following != position + 1}
        if trial.case.dims.cp == 1 or not {position for position, _, _ in labels} <= ends:
            return False
    return True


def first_token_of_rows(trial: Trial, step: int, ranks: tuple[int, ...]) -> int:
    """Return how many tokens into the step's samples all rows of these ranks begin; 0 if they do not.

    At least half of a row must be in the sample.
    """
    length = trial.case.seq_len(step)
    samples = trial.reference.tokens[requested_rows(trial, step)]
    rows = [*itertools.chain.from_iterable(received_token_rows(trial, step)[rank] for rank in ranks)]
    for first_token in range(1, len(samples[0]) - length // 2):
        known = {sample[first_token : first_token + length].tobytes() for sample in samples}
        if all(row[: len(samples[0]) - first_token].tobytes() in known for row in rows):
            return first_token
    return 0


def have_shared_rows(trial: Trial) -> bool:
    """Return whether two dp ranks receive the same row of tokens, in whatever steps. False if the recipe has a sample
    twice.
    """
    planned = [*itertools.chain.from_iterable(trial.reference.samples)]
    rows_by_rank: dict[int, set[bytes]] = {rank: set() for rank in representative_of_shares(trial)}
    for rank, step in itertools.product(rows_by_rank, trial.case.steps):
        rows_by_rank[rank] |= {row.tobytes() for row in received_token_rows(trial, step).get(rank, [])}
    return len(set(planned)) == len(planned) and bool(shared_samples(rows_by_rank.values()))


def are_validated_rows(trial: Trial, step: int, ranks: tuple[int, ...]) -> bool:
    """Return whether all rows that these ranks received in a step are among those that ranks validated on."""
    shares = [rows_of_dp_share(trial, rank, step) for rank in ranks]
    validated = set[bytes]()
    for number in trial.case.steps:
        with suppress(NotOnRecord):
            batches = itertools.chain(*validation_batches(trial, number).values())
            rows = itertools.chain(*(tokens for tokens, _ in batches))
            validated |= {np.asarray(row, np.int64)[: trial.case.seq_len(step)].tobytes() for row in rows}
    return all(own is not None and {row.tobytes() for row in own.tokens} <= validated for own in shares)


def label_owner_text(trial: Trial, rows: Rows) -> str:
    """Return in words of which samples the wrong labels are: of other rows, or of one other step. Empty if of neither."""
    own = right_labels(trial, rows.tokens)
    if sorted(row.tobytes() for row in own) == sorted(row.tobytes() for row in rows.labels):
        return "they are those of other rows"
    labels = dict(zip(trial.reference.sample_ids, trial.reference.labels[:, : own.shape[1]], strict=True))
    step_of_labels = {}
    for step, ids in enumerate(trial.reference.samples, start=1):
        for id_ in ids:
            step_of_labels[labels[id_].tobytes()] = step
    wrong_rows_of_labels = [seen for seen, right in zip(rows.labels, own, strict=True) if (seen != right).any()]
    steps = {step_of_labels.get(row.tobytes()) for row in wrong_rows_of_labels}
    return f"they are those of step {steps.pop()}" if len(steps) == 1 and None not in steps else ""


def label_positions_text(trial: Trial, step: int, rows: Rows) -> str:
    """Return in words at which positions of the same samples the labels of a cp rank stand. Empty if nowhere in them."""
    length = trial.case.seq_len(step)
    own = right_labels(trial, rows.tokens)
    cp_ranks = trial.plan.peers(representative_of_shares(trial)[0], "cp")
    expected_columns = {rank: token_positions_of_rank(trial.case, rank, length) for rank in cp_ranks}
    columns_by_rank = {
        rank: _matching_columns(rows.labels[:, columns], own) for rank, columns in expected_columns.items()
    }
    located = {rank: columns for rank, columns in columns_by_rank.items() if columns is not None}
    wrong_ranks = [rank for rank, columns in located.items() if not np.array_equal(columns, expected_columns[rank])]
    if not wrong_ranks or len(located) < len(columns_by_rank):
        return ""
    observed_text = positions_text(located[wrong_ranks[0]])
    tokens_text = positions_text(expected_columns[wrong_ranks[0]])
    balance = trial.case.features.cp_load_balance
    text = f"rank {wrong_ranks[0]} has the labels of positions {observed_text} for its tokens at {tokens_text}"
    changed_case = replace(trial.case, features=replace(trial.case.features, cp_load_balance=not balance))
    if all(
        np.array_equal(columns, token_positions_of_rank(changed_case, rank, length))
        for rank, columns in located.items()
    ):
        text += f": labels are cut over cp as by cp_load_balance {not balance}, tokens by {balance}"
    return text


def _matching_columns(labels: np.ndarray, own: np.ndarray) -> np.ndarray | None:
    """Return the column of `own` that each column of labels is equal to, each another one. None if some is equal to none.

    Of several equal columns it is the one after the last column, else the first.
    """
    chosen: list[int] = []
    for matches in (labels[:, :, None] == own[:, None, :]).all(axis=0):
        candidates = [column for column in np.flatnonzero(matches).tolist() if column not in chosen]
        if not candidates:
            return None
        chosen.append(chosen[-1] + 1 if chosen and chosen[-1] + 1 in candidates else candidates[0])
    return np.array(chosen)


def label_shift(trial: Trial, step: int, rows: Rows) -> int:
    """Return by how many positions labels that count are shifted to later tokens, at most LARGEST_SHIFT; 0 if they are
    not.

    They may be shifted in whole rows, or in each cp rank's part.
    """
    length = trial.case.seq_len(step)
    own = right_labels(trial, rows.tokens)
    nexts = np.where(own >= 0, own, np.append(rows.tokens[:, 1:], own[:, -1:], axis=1))
    ranks_of_parts = [cp_rank * trial.case.dims.tp for cp_rank in range(trial.case.dims.cp)]
    positions_of_parts = [token_positions_of_rank(trial.case, rank, length) for rank in ranks_of_parts]
    for columns_of_parts in ([np.arange(length)], positions_of_parts):
        pieces = [(rows.labels[:, columns], nexts[:, columns]) for columns in columns_of_parts]
        for shift in sorted(range(-LARGEST_SHIFT, LARGEST_SHIFT + 1), key=abs):
            if _are_shifted(pieces, shift):
                return shift
    return 0


def _are_shifted(pieces: Sequence[tuple[np.ndarray, np.ndarray]], shift: int) -> bool:
    """Return whether all labels that count are the tokens `shift` positions after the next one.

    At least half of the labels that count must have such a token. pieces: (labels, next tokens).
    """
    matches_of_pieces = list[np.ndarray]()
    counted = 0
    for labels, nexts in pieces:
        first = max(0, -shift)
        last = labels.shape[1] - max(0, shift)
        observed = labels[:, first:last]
        wanted = nexts[:, first + shift : last + shift]
        matches_of_pieces.append((observed == wanted)[(observed >= 0) & (wanted >= 0)])
        counted += int((labels >= 0).sum())
    matches = np.concatenate(matches_of_pieces)
    return bool(matches.all()) and 0 < counted <= 2 * len(matches)


def assume_trained_on(trial: Trial, by_step: dict[int, Rows], counted: dict[int, float] | None = None) -> Trial:
    """Return the trial with the reference trained again, as if these rows were the samples of these steps. Other steps
    stay.

    counted: by step, how often the loss of each token counts in gradients; None: once.
    """
    reference = trial.reference
    samples = list(trial.reference.samples)
    tokens = list(reference.tokens)
    labels = list(reference.labels)
    ids = list(reference.sample_ids)
    labels_of_samples: dict[int, bytes] = {}
    length = reference.tokens.shape[1]
    for step, rows in by_step.items():
        width = rows.tokens.shape[1]
        step_ids = []
        known = {row[:width].tobytes(): index for index, row in enumerate(tokens)}
        for number, row in enumerate(rows.tokens):
            index = known.get(row.tobytes(), len(ids))
            seen = rows.labels[number].tobytes()
            if labels_of_samples.get(index, seen) != seen:
                index = len(ids)  # the same tokens with other labels are another sample
            if index == len(ids):
                known[row.tobytes()] = index
                ids.append(max(ids) + 1)
                tokens.append(np.append(row, np.full(length - width, IGNORED)))
                labels.append(np.full(length, IGNORED))
            labels_of_samples[index] = seen
            labels[index] = np.append(rows.labels[number], labels[index][width:])
            step_ids.append(ids[index])
        samples[step - 1] = tuple(step_ids)
    changed = replace(reference, samples=tuple(samples), sample_ids=tuple(ids))
    trial = replace(trial, reference=replace(changed, tokens=np.stack(tokens), labels=np.stack(labels)))
    if counted is None:
        return assume_reference(trial)

    def batch(step: int, own: Any) -> Any:
        return replace(own, counts=np.full(own.labels.shape, counted.get(step, 1.0)))

    return assume_reference(trial, batch=batch)


# ---- positions


def other_positions(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Suppose that tokens are right, and the model turns their queries and keys by the angles of other positions."""
    if "positions" not in broken or (cause := wrong_positions(trial)) is None:
        return
    by_step = {step: _positions_by_layer(trial, step) for step in trial.case.steps}
    lines: Lines = (("positions", broken["positions"].findings[0]),)
    yield Hypothesis(cause, partial(_assume_positions, by_step), 1, lines, ("positions",))


def wrong_positions(trial: Trial) -> Cause | None:
    """Return the cause if rotary positions are not those of the tokens received. None if all are right, or none were
    recorded.
    """
    wrong: dict[int, tuple[np.ndarray, list[np.ndarray]]] = {}
    for rank, step, _ in trial.steps_with_reference():
        received_positions = received_positions_of(trial, rank, step.step)
        wanted = received_positions
        if wanted is None:
            wanted = token_positions_of_rank(trial.case, rank, trial.case.seq_len(step.step))
        right = expected_position_rows(trial, wanted, step.step)
        for row in wrong_position_rows(step.positions, right):
            wrong.setdefault(rank, (row, right))
    if not wrong:
        return None
    rank, (row, right) = next(iter(wrong.items()))
    text = f"rotary positions are not those of the tokens{on_ranks_text(trial, wrong)}"
    nearest = nearest_row(row, right)
    nearest_text = positions_text(nearest)
    requested_text = f"for its tokens at {nearest_text}"
    if nearest is not right[0]:
        whole_text = positions_text(right[0])
        requested_text = f"where it should count {nearest_text} in documents, or {whole_text} in the whole sequence"
    hint = f"rank {rank} receives positions {positions_text(row)} {requested_text}"
    return Cause("positions", text, hint=hint, details=(("ranks", tuple(wrong)), ("first", int(row[0]))))


def _positions_by_layer(trial: Trial, step: int) -> dict[int, np.ndarray]:
    """Return, by layer, the positions of one device's batch, int64 [samples, positions].

    Each sample's positions are put together from the cp ranks that received it.
    """
    positions_by_layer: dict[int, np.ndarray] = {}
    length = trial.case.seq_len(step)
    ids = trial.reference.samples[step - 1]
    samples_by_rank = samples_of_step(trial, step).by_rank
    for rank in sorted(trial.ranks, reverse=True):
        rank_positions = token_positions_of_rank(trial.case, rank, length)
        rows = _recorded_positions(trial, rank, step, len(rank_positions))
        sample_ids = samples_by_rank.get(first_stage_peer(trial, rank), [])
        layers = itertools.chain.from_iterable(layers_of_stage(trial.case, stage) for stage in trial.plan.stages[rank])
        for layer in layers:
            layer_positions = positions_by_layer.setdefault(layer, np.tile(np.arange(length), (len(ids), 1)))
            for index, id_ in enumerate(sample_ids):
                if id_ in ids and len(rows) in (1, len(sample_ids)):
                    layer_positions[ids.index(id_), rank_positions] = rows[index % len(rows)]
    return positions_by_layer


def _recorded_positions(trial: Trial, rank: int, step: int, width: int) -> list[np.ndarray]:
    """Return the rows of positions that a rank's model parts received: one for all its samples, or one for each.

    Positions of several passes that are alike are recorded once.
    """
    recorded = next((record.positions for record in trial.ranks[rank].steps if record.step == step), ())
    positions_of_width = (rows for rows in recorded if rows.shape[-1] == width)
    return [*itertools.chain.from_iterable(rows.reshape(-1, width) for rows in positions_of_width)]


def _assume_positions(by_step: dict[int, dict[int, np.ndarray]], trial: Trial) -> Trial:
    """Assume that queries and keys were turned by these positions. by_step: step -> layer -> positions."""
    from harness.reference.spellings import turn_by_positions

    return assume_reference(trial, altered=turn_by_positions(by_step))
