"""The order in which a trainer's sampler drew the recipe's samples in step 1: which seed gives it, shuffled or not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from harness.adapters.onboarding.names import known_line
from harness.adapters.onboarding.skeleton import NO_DATA_SET
from harness.adapters.support.requests import NOT_PASSED_ON
from harness.core.case.case import Case
from harness.core.judge.places import representative_of_shares
from harness.core.judge.received_samples import received_token_rows, sample_id_by_row
from harness.core.judge.trial import Trial
from harness.core.trainers import Adapter
from harness.reference.data import build_dataset, epoch_order, sample_order

SEEDS = (*range(200), 777, 999, 1000, 1111, 1234, 1337, 2023, 2024, 2025, 3407, 4242, 12345, 31337, 123456)
FIRST_EPOCHS = range(1, 4)  # by which scripts count that do not begin at 0
MOST_SAMPLES = 100_000  # of a file of tokens, which is read whole
MAKERS = ("RecipeSamples(", "RecipeStream(", "recipe_batches(")


def received_ids(trial: Trial) -> list[int | None]:
    """Return the index in the whole data set of each row received in step 1; None for a row that is no sample of it.

    Empty with context parallel, and for a data set of more than MOST_SAMPLES.
    """
    case = trial.case
    data = build_dataset(trial.case.training, trial.case.model)
    if case.dims.cp > 1 or len(data) > MOST_SAMPLES:
        return []
    received = received_token_rows(trial, 1)
    rows: list[Any] = []
    for rank in representative_of_shares(trial):
        rows += received.get(rank, ())
    id_by_row = sample_id_by_row(data, case.seq_len(1))
    return [id_by_row.get(np.asarray(row, np.int64).tobytes()) for row in rows]


def find_seed(ids: Sequence[int], case: Case, n_samples: int) -> tuple[int | None, bool] | None:
    """Return (seed of torch's DistributedSampler with its epoch added, whether the adapter says `shuffled`) that gives
    these samples.

    The seed is None if samples are not shuffled. The result is None if no seed that is tried gives them. The order of
    `ids` does not count.
    """
    recipe = sample_order(case.training, n_samples, epoch=0)
    wanted = sorted(ids)
    own_seed = case.training.seed
    if wanted == list(range(len(ids))):
        return None, True
    for seed in dict.fromkeys((own_seed, *(own_seed + epoch for epoch in FIRST_EPOCHS), *SEEDS)):
        positions = [int(position) for position in epoch_order(n_samples, seed)[: len(ids)]]
        if sorted(recipe[position] for position in positions) == wanted:
            return seed, False
        if sorted(positions) == wanted:
            return seed, True
    return None


def advice_lines(trial: Trial, adapter: Adapter, text: str, file: str) -> Iterator[str]:
    """Yield lines of advice on how the adapter hands over samples. Nothing if the samples of step 1 are the right ones.

    Nothing, too, if all are the recipe's and some came twice. Where rows are not compared (received_ids is empty), the
    advice is the same as if none were the recipe's.
    text: the adapter's code, in `file`.
    """
    ids = received_ids(trial)
    case = trial.case
    known = [id_ for id_ in ids if id_ is not None]
    code = "\n".join(line.partition("#")[0] for line in text.split("\n"))
    if not known:
        if any(maker in code for maker in MAKERS):
            yield "none of the rows that the adapter hands over reached the model: another thing makes batches"
            yield "(another NAME in script.replace(NAME, ..)), or changes the tokens on their way"
            return
        if NO_DATA_SET in text:
            line = text[: text.index(NO_DATA_SET)].count("\n") + 1
            yield f"the TODO in line {line} of {file} is not done: nothing hands the recipe's samples over"
        yield "adapter: script.replace(NAME, ..) puts RecipeSamples, RecipeStream or recipe_batches in the place of what"
        yield "makes its samples"
    elif len(known) < len(ids):
        yield f"{len(ids) - len(known)} of {len(ids)} rows are no sample of the recipe's: what changes tokens on their way?"
    elif sorted(known) != sorted(trial.reference.samples[0]) and len(set(known)) == len(known):
        refusal = adapter.unsupported(replace(case, training=replace(case.training, seed=case.training.seed + 1)))
        order = find_seed(known, case, len(build_dataset(case.training, case.model)))
        yield from _order_lines(order, case, refusal or "", file, passed_on=refusal is None and "training.seed" in code)


def _order_lines(
    order: tuple[int | None, bool] | None, case: Case, refused: str, file: str, *, passed_on: bool
) -> Iterator[str]:
    """Yield lines on which seed gives the order of the samples, and what to write. order: as find_seed returns it.

    refused: why the adapter cannot run another seed, or empty. passed_on: the adapter passes the case's seed to the
    script.
    """
    if order is None:
        yield "they are the recipe's, in an order that no seed tried of torch's DistributedSampler gives"
        return
    seed, says_so = order
    if seed is None:
        yield "they are the recipe's, and its sampler does not shuffle: adapter: leave shuffled=True out of RecipeSamples"
        return
    yield f"they are the recipe's, shuffled by torch's DistributedSampler with seed {seed} (its epoch added)"
    if not says_so:
        yield "adapter: RecipeSamples(case, shuffled=True)"
    if passed_on and (first := seed - case.training.seed) in FIRST_EPOCHS:
        yield f"its first epoch is {first}, not 0: adapter: in `arguments`, case.training.seed - {first} as its seed"
    elif seed != case.training.seed:
        yield f"case: training: {{seed: {seed}}}, requested {case.training.seed}; or pass the seed on in `arguments`"
        if NOT_PASSED_ON in refused:
            yield known_line({"seed": seed}, file)
