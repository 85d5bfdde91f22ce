"""Rows of tokens that are no sample of the recipe's steps: which part of one they are, or which samples of the data set."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from harness.diagnosis.words import fed_with
from harness.judge.received_samples import rows_received
from harness.judge.trial import Trial

if TYPE_CHECKING:
    from harness.reference.data import Dataset

ORDERS = 8  # seeds and epochs beside the recipe's whose orders are tried
MOST = 4096  # samples of a data set that are looked through
LEAST = 4  # tokens that make it sure that a row is a part of a sample


def described(trial: Trial, step: int, ranks: list[int]) -> str:
    """One thing that all unknown rows of a step are; empty where none is known."""
    if trial.case.dims.cp > 1:  # a rank's rows are pieces
        return ""
    rows = [row for rank in ranks for row in rows_received(trial, step).get(rank, []) if _unknown(trial, row, step)]
    if not rows:
        return ""
    wanted = [trial.reference.sample_ids.index(id_) for id_ in trial.reference.samples[step - 1]]
    whole = [np.append(trial.reference.tokens[at], trial.reference.labels[at][-1:]) for at in wanted]
    said = [{text for sample in whole for text in of_sample(row, sample, trial.case.seq_len(step))} for row in rows]
    common = set.intersection(*said)
    return min(common) if common else _of_the_data(trial, step, ranks, rows)


def _unknown(trial: Trial, row: np.ndarray, step: int) -> bool:
    known = any(np.array_equal(row, tokens[: len(row)]) for tokens in trial.reference.tokens)
    return not known or len(row) != trial.case.seq_len(step)


# ---- parts of the step's samples


def of_sample(row: np.ndarray, sample: np.ndarray, wanted: int) -> Iterator[str]:
    """What a row is of a sample: its tokens, and the last label."""
    size = len(row)
    for by in range(1, max(size, len(sample) - LEAST)):
        both = min(size, len(sample) - by)
        if both >= LEAST and np.array_equal(row[:both], sample[by : by + both]):
            last = by > 1 and by + size in (len(sample) - 1, len(sample))
            part = f"the step's samples from token {by} on (counted from 0)"
            yield f"the last {size} tokens of the step's samples" if last else part
    alike = min(size, len(sample) - 1)
    other = np.flatnonzero(row[:alike] != sample[:alike])
    count = int(other[0]) if len(other) else alike
    if LEAST <= count == size < wanted:
        yield f"the first {count} tokens of the step's samples, of {wanted}"
    elif LEAST <= count < size and len(rest := set(row[count:].tolist())) == 1:
        yield f"the first {count} tokens of the step's samples, then {rest.pop()} only"


# ---- other samples of the data set


def _data_of(trial: Trial) -> Dataset | None:
    """None where it is not there any more, or is no longer the one that the recipe's samples are of."""
    from harness.reference.data import build_dataset

    try:
        data = build_dataset(trial.case.training, trial.case.model)
    except ValueError:
        return None
    ids, tokens = trial.reference.sample_ids, trial.reference.tokens
    same = len(data) <= MOST and all(
        np.array_equal(data[i][0].numpy(), row) for i, row in zip(ids, tokens, strict=True)
    )
    return data if same else None


def _of_the_data(trial: Trial, step: int, ranks: list[int], rows: list[np.ndarray]) -> str:
    data, length = _data_of(trial), trial.case.seq_len(step)
    if data is None or any(len(row) != length for row in rows):
        return ""
    ids = {data[index][0][:length].numpy().tobytes(): index for index in range(len(data))}
    if not all(row.astype(np.int64).tobytes() in ids for row in rows):
        return "none of the data set's"
    for text, order in _other_orders(trial, len(data)):
        if all(_is_share(trial, step, rank, order, ids) for rank in ranks):
            return text
    return "samples of the data set that these steps do not read"


def _other_orders(trial: Trial, size: int) -> Iterator[tuple[str, list[int]]]:
    """Of the data set's samples, of which a step takes the next ones and deals them out to the dp ranks."""
    from harness.reference.data import sample_order

    training, seed, count = trial.case.training, trial.case.training.seed, len(trial.one_rank_per_share())
    yield "samples in the data set's own order, not shuffled", [*range(size)]
    usual = np.array(sample_order(training, size, 0)[: size // count * count])
    blocks = [int(index) for index in usual.reshape(count, -1).T.ravel()]
    yield "each dp rank reads a block of the shuffled samples, requested every n-th of them", blocks
    for other in (*range(seed + 1, seed + ORDERS), *range(seed - ORDERS, seed), 0):
        text = f"samples of the data set in the order of seed {other}"
        epochs = f", or of as many epochs on from {seed}" * bool(other)
        yield text + epochs, sample_order(training, size, other - seed)


def _is_share(trial: Trial, step: int, rank: int, order: list[int], ids: dict[bytes, int]) -> bool:
    """Whether what a rank received are all of the step's share of that order: strided as a sampler deals it out."""
    shares = trial.one_rank_per_share()
    feeder = trial.feeder(rank)
    group = next(share for share in shares if feeder == share or rank in fed_with(trial.plan, [share]))
    batch = trial.case.training.global_batch
    found = [ids.get(row.astype(np.int64).tobytes()) for row in rows_received(trial, step).get(rank, [])]
    return found == order[(step - 1) * batch : step * batch][shares.index(group) :: len(shares)]
