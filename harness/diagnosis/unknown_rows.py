"""Rows of tokens that are no sample of the step: which part of one they are, or which samples of the data set, dealt how."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from harness.diagnosis.words import fed_with, rank_words
from harness.judge.received_samples import rows_received, shares_of_samples
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
    received, length = rows_received(trial, step), trial.case.seq_len(step)
    known = {tokens[:length].tobytes() for tokens in trial.reference.tokens}
    rows = [row for rank in ranks for row in received[rank] if row.tobytes() not in known]
    if not rows:
        return ""
    wanted = [trial.reference.sample_ids.index(id_) for id_ in trial.reference.samples[step - 1]]
    whole = [np.append(trial.reference.tokens[at], trial.reference.labels[at][-1:]) for at in wanted]
    said = [{text for sample in whole for text in of_sample(row, sample, length)} for row in rows]
    common = set.intersection(*said)
    return min(common) if common else _of_the_data(trial, step, ranks, rows)


# ---- parts of the step's samples


def of_sample(row: np.ndarray, sample: np.ndarray, wanted: int) -> Iterator[str]:
    """What a row is of a sample: its tokens, and the last label."""
    size = len(row)
    for by in range(1, len(sample)):
        both = min(size, len(sample) - by)
        if both >= LEAST and np.array_equal(row[:both], sample[by : by + both]):
            last = by > 1 and by + size in (len(sample) - 1, len(sample))
            part = f"the step's samples from token {by} on (counted from 0)"
            yield f"the last {size} tokens of the step's samples" if last else part
    alike = min(size, len(sample))
    other = np.flatnonzero(row[:alike] != sample[:alike])
    count = int(other[0]) if len(other) else alike
    rest = set(row[count:].tolist())
    if count >= LEAST and not rest and size != wanted:
        yield f"the first {count} tokens of the step's samples, of {wanted}"
    elif count >= LEAST and len(rest) == 1:
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
    same = len(data) <= MOST and all(np.array_equal(data[id_][0], tokens[at]) for at, id_ in enumerate(ids))
    return data if same else None


def _of_the_data(trial: Trial, step: int, ranks: list[int], rows: list[np.ndarray]) -> str:
    data, length = _data_of(trial), trial.case.seq_len(step)
    if data is None or any(len(row) != length for row in rows):
        return ""
    drawn = _drawn(trial, step, ranks, data)
    if any(id_ is None for ids in drawn.values() for id_ in ids):
        return "none of the data set's"
    return _dealt(trial, step, drawn, len(data)) or "samples of the data set outside these steps"


def _drawn(trial: Trial, step: int, ranks: list[int], data: Dataset) -> dict[int, list[int | None]]:
    """By rank, which of the data set's samples its rows are; None for a row that is none."""
    length, received = trial.case.seq_len(step), rows_received(trial, step)
    ids = {data[index][0][:length].numpy().tobytes(): index for index in range(len(data))}
    return {rank: [ids.get(row.tobytes()) for row in rows] for rank, rows in received.items() if rank in ranks}


def dealt_otherwise(trial: Trial, step: int) -> str:
    """By which other order, or in which other way, the step's samples were dealt to the dp ranks; empty where none is known."""
    drawn, data = shares_of_samples(trial, step), _data_of(trial)
    return _dealt(trial, step, drawn, len(data)) if data is not None else ""


def _dealt(trial: Trial, step: int, drawn: Mapping[int, Sequence[int | None]], size: int) -> str:
    """drawn: by rank, what it received of a data set of this size."""
    own = trial.case.training.global_batch // len(trial.one_rank_per_share())
    received = [(_share(trial, rank), list(ids)) for rank, ids in drawn.items()]
    for text, deal in _other_deals(trial, size):
        if all(ids == deal(share)[(step - 1) * own : step * own] for share, ids in received):
            return text
    return ""


def further_ahead(trial: Trial, step: int) -> str:
    """Where the steps after this one are ahead by as much more each: what is drawn besides is of the same samples."""
    from harness.reference.data import step_samples

    later, shares = [other for other in trial.case.steps if other >= step], trial.one_rank_per_share()
    if (data := _data_of(trial)) is None:
        return ""
    of_steps = {frozenset(step_samples(trial.case.training, len(data), s)): s for s in range(step, 4 * later[-1])}
    drawn = {other: itertools.chain(*_drawn(trial, other, shares, data).values()) for other in later}
    ahead = [of_steps.get(frozenset(ids), 0) - other for other, ids in drawn.items()]  # type: ignore[arg-type]
    more = ahead[0]
    if len(ahead) < 2 or more < 1 or any(there - here != more for here, there in itertools.pairwise(ahead)):
        return ""
    batches = "one more batch" if more == 1 else f"{more} more batches"
    return f", and {ahead[1]} in step {later[1]}, as if each step drew {batches}"


def begun_elsewhere(trial: Trial, step: int, ranks: list[int]) -> str:
    """Where each of these dp ranks reads on in its share of the shuffled samples, if it is at another place than requested."""
    from harness.reference.data import sample_order

    if (data := _data_of(trial)) is None:
        return ""
    usual, count = sample_order(trial.case.training, len(data), 0), len(trial.one_rank_per_share())
    wanted, places = (step - 1) * trial.case.training.global_batch // count, set()
    for rank, ids in _drawn(trial, step, ranks, data).items():
        share = _every(usual, count, _share(trial, rank))
        places.add(next((at for at in range(len(share)) if share[at : at + len(ids)] == ids), None))
    begun = places.pop()
    if places or begun is None:
        return ""
    every = len(ranks) == len(trial.first_stages())
    who = "each dp rank" if every else rank_words(ranks)
    does = "continues at its" if every or len(ranks) == 1 else "continue at their"
    return f"{who} {does} share's sample {begun} (counted from 0), requested {wanted}"


def _share(trial: Trial, rank: int) -> int:
    """The number of the dp rank whose samples a rank receives."""
    shares = trial.one_rank_per_share()
    return next(at for at, share in enumerate(shares) if rank in fed_with(trial.plan, [share]))


def _other_deals(trial: Trial, size: int) -> Iterator[tuple[str, Callable[[int], list[int]]]]:
    """What each share of an epoch is: of the data set's samples, in another order or dealt out otherwise."""
    from harness.reference.data import sample_order

    training, seed, count = trial.case.training, trial.case.training.seed, len(trial.one_rank_per_share())
    usual = sample_order(training, size, 0)
    yield "samples in the data set's own order, not shuffled", lambda share: [*range(size)][share::count]
    block = size // count
    text = "each dp rank reads a block of the shuffled samples, requested every n-th sample"
    yield text, lambda share: usual[share * block : (share + 1) * block]
    products = {1}
    for degree in trial.case.dims.degrees:
        products |= {degree * product for product in products}
    for stride in sorted(products - {1, count}):
        whole = " (one share per rank of the world)" * (stride == trial.case.dims.world_size)
        text = f"each dp rank reads every {_nth(stride)} of the shuffled samples{whole}, requested every {_nth(count)}"
        yield text, partial(_every, usual, stride)
    for other in (*range(seed + 1, seed + ORDERS), *range(seed - ORDERS, seed), 0):
        text = f"samples of the data set in the order of seed {other}"
        epochs = f", or of epoch {other - seed} (counted from 0)" * (other > seed)
        yield text + epochs, partial(_every, sample_order(training, size, other - seed), count)


def _every(order: list[int], stride: int, share: int) -> list[int]:
    """As a sampler deals them out."""
    return order[share::stride]


def _nth(number: int) -> str:
    return {2: "second", 3: "third"}.get(number, f"{number}th")
