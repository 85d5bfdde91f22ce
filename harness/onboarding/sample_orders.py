"""In which order a trainer's sampler drew the recipe's samples in step 1: which seed, and shuffled or not, gives just these.

An adapter hands the samples over as a data set, `RecipeSamples`, and the trainer's sampler draws from it. Both may shuffle.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from harness.judge.received_samples import rows_received
from harness.judge.trial import Trial
from harness.onboarding.names import to_known
from harness.onboarding.skeleton import NO_DATA_SET
from harness.reference.data import build_dataset, epoch_order, sample_order
from harness.spec.case import Case
from harness.trainers.support.requests import NOT_PASSED_ON

SEEDS = (*range(200), 777, 999, 1000, 1111, 1234, 1337, 2023, 2024, 2025, 3407, 4242, 12345, 31337, 123456)
FIRST_EPOCHS = range(1, 4)  # by which scripts count that do not begin at 0
MOST_SAMPLES = 100_000  # of a file of tokens, which is read whole


@dataclass(frozen=True)
class Order:
    """seed: of the sampler's shuffling, its epoch added; None where it does not shuffle. declared: whether the data set was
    told that it is shuffled."""

    seed: int | None
    declared: bool


def drawn(trial: Trial) -> list[int | None] | None:
    """Samples of the recipe that the ranks received in step 1, by their place in the whole data set; None among them for a row
    that is none of its. None where that is not known."""
    case = trial.case
    data = build_dataset(case.training, case.model)
    if case.dims.cp > 1 or len(data) > MOST_SAMPLES:
        return None
    received = rows_received(trial, 1)
    rows = [row for rank in trial.one_rank_per_share() for row in received.get(rank, ())]
    at = {data[index][0][: case.seq_len(1)].numpy().tobytes(): index for index in range(len(data))}
    return [at.get(np.asarray(row, np.int64).tobytes()) for row in rows] or None


def order_of(ids: Sequence[int], case: Case, n_samples: int) -> Order | None:
    """The one that gives these; None where none does."""
    recipe, wanted = sample_order(case.training, n_samples, epoch=0), sorted(ids)
    if wanted == list(range(len(ids))):
        return Order(None, declared=True)
    own = case.training.seed
    for seed in dict.fromkeys((own, *(own + epoch for epoch in FIRST_EPOCHS), *SEEDS)):
        places = epoch_order(n_samples, seed)[: len(ids)]
        if sorted(recipe[place] for place in places) == wanted:
            return Order(seed, declared=False)
        if sorted(int(place) for place in places) == wanted:
            return Order(seed, declared=True)
    return None


def advice(trial: Trial, refused: str | None, adapter: str, file: str) -> list[str]:
    """Lines to write, for step 1. refused: why the adapter runs no case of another seed. adapter: its text, in `file`."""
    ids, case = drawn(trial), trial.case
    if ids is None or all(id_ is None for id_ in ids):
        return list(_not_handed_over(adapter, file))
    if None in ids:
        return [
            f"{ids.count(None)} of {len(ids)} rows are no sample of the recipe's: what changes tokens on their way?"
        ]
    known = [id_ for id_ in ids if id_ is not None]
    if sorted(known) == sorted(trial.reference.samples[0]) or len(set(known)) < len(known):
        return []  # in step 1 they are the right ones, or some are there twice, which no order explains
    found = order_of(known, case, len(build_dataset(case.training, case.model)))
    if found is None:
        return [
            "they are the recipe's, in an order that no seed tried of torch's DistributedSampler gives, shuffled or not"
        ]
    passed_on = refused is None and "training.seed" in adapter
    return list(_reordered(found, case, refused, file, passed_on=passed_on))


def _reordered(found: Order, case: Case, refused: str | None, file: str, *, passed_on: bool) -> Iterator[str]:
    if found.seed is None:
        yield "they are the recipe's, and its sampler does not shuffle: adapter: leave shuffled=True out of RecipeSamples"
        return
    yield f"they are the recipe's, shuffled by torch's DistributedSampler with seed {found.seed} (its epoch added)"
    if not found.declared:
        yield "adapter: RecipeSamples(case, shuffled=True)"
    if passed_on and (first := found.seed - case.training.seed) in FIRST_EPOCHS:
        yield f"its first epoch is {first}, not 0: adapter: in `arguments`, case.training.seed - {first} as its seed"
    elif found.seed != case.training.seed:
        yield f"case: training: {{seed: {found.seed}}}, requested {case.training.seed}; or pass the seed on in `arguments`"
        if refused and NOT_PASSED_ON in refused:
            yield to_known({"seed": found.seed}, file)


def _not_handed_over(adapter: str, file: str) -> Iterator[str]:
    called = {ast.unparse(node.func) for node in ast.walk(ast.parse(adapter)) if isinstance(node, ast.Call)}
    handed = [name for name in ("RecipeSamples", "RecipeStream", "recipe_batches") if name in called]
    if handed:
        yield f"the adapter has {' and '.join(handed)}, and none of its rows reached the model: another thing makes batches"
        yield "(another NAME in self.script.replace(NAME, ..)), or changes the tokens on their way"
        return
    if (line := next((n for n, text in enumerate(adapter.splitlines(), 1) if NO_DATA_SET in text), None)) is not None:
        yield f"the TODO in line {line} of {file} is not done: nothing hands the recipe's samples over"
    yield "adapter: put RecipeSamples in the place of its data set, RecipeStream of its stream, or recipe_batches of"
    yield "what makes its batches: self.script.replace(NAME, ..). If its sampler shuffles: shuffled=True, and"
    yield "case: training: {seed: ..} is the sampler's, which of torch's DistributedSampler is 0 where none is written"
