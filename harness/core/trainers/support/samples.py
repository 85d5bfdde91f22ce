"""A step's samples, as a data-parallel rank reads them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from harness.core.case.case import Case
from harness.core.probe.without_memory import is_without_memory
from harness.reference.data import Dataset, build_dataset, sample_order, step_samples


class OnlyShapes:
    """A data set of zeros in the right shapes, one step's samples, for a rank that runs alone and reads no samples."""

    def __init__(self, case: Case) -> None:
        self.training = case.training

    def __len__(self) -> int:
        return self.training.global_batch

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        length = self.training.seq_len
        return torch.zeros(length, dtype=torch.int64), torch.zeros(length, dtype=torch.int64)


def dataset_of(case: Case) -> Dataset:
    """Return the recipe's data set; one of zeros for a rank whose tensors have no memory."""
    return OnlyShapes(case) if is_without_memory(torch.empty(0)) else build_dataset(case.training, case.model)


def rank_samples(
    case: Case, dataset: Dataset, step: int, dp_rank: int = 0, dp_degree: int = 1
) -> tuple[Tensor, Tensor]:
    """Return a rank's tokens and labels of a step (from 1), int64 [global_batch / dp_degree, s], s the step's length.

    dataset: `build_dataset` of the case. Rank r reads every dp_degree-th sample from the r-th on, as torch's
    DistributedSampler cuts them. By default all.
    """
    if isinstance(dataset, OnlyShapes):
        sample_ids: Sequence[int] = range(len(dataset))[dp_rank::dp_degree]
    else:
        sample_ids = step_samples(case.training, len(dataset), step)[dp_rank::dp_degree]
    columns = zip(*(dataset[index] for index in sample_ids), strict=True)
    tokens, labels = (torch.stack(rows) for rows in columns)
    return tokens[:, : case.seq_len(step)], labels[:, : case.seq_len(step)]


def recipe_batches(case: Case, dp_rank: int = 0, dp_degree: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield this rank's microbatches (tokens, labels), step after step, without end, for a trainer with a function for
    batches."""
    dataset = build_dataset(case.training, case.model)
    for step in itertools.count(1):
        tokens, labels = rank_samples(case, dataset, step, dp_rank, dp_degree)
        cut = case.features.accumulation
        yield from zip(tokens.chunk(cut), labels.chunk(cut), strict=True)


def _pair(tokens: Tensor, labels: Tensor) -> Any:
    return tokens, labels


class RecipeSamples(torch.utils.data.Dataset[Any]):
    """The recipe's samples in the place of a trainer's data set: its own sampler, loader and workers bring them to the ranks.

    shuffled: whether its sampler, torch's, shuffles them by the recipe's seed; if not, they lie in the recipe's order.
    form: what the trainer's data set answers for tokens and labels, int64 [s] each; by default both in a tuple.
    """

    def __init__(self, case: Case, *, shuffled: bool = False, form: Callable[[Tensor, Tensor], Any] = _pair) -> None:
        self.dataset = build_dataset(case.training, case.model)
        self.form = form
        order = sample_order(case.training, len(self.dataset), epoch=0)
        self.ids = range(len(self.dataset)) if shuffled else order

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Any:
        return self.form(*self.dataset[self.ids[int(index)]])


class RecipeStream(torch.utils.data.IterableDataset[Any]):
    """The samples of a data-parallel rank, one after the other, for a trainer whose data set is a stream. form: as above.

    A DataLoader asks its n workers for a batch in turn. Worker w has every n-th batch from the w-th on, so that all of them
    together bring what one alone would. batch: samples that the loader takes at once; by default a microbatch.
    """

    def __init__(
        self,
        case: Case,
        dp_rank: int,
        dp_degree: int,
        *,
        form: Callable[[Tensor, Tensor], Any] = _pair,
        batch: int | None = None,
    ) -> None:
        self.case = case
        self.place = (dp_rank, dp_degree)
        self.form = form
        self.batch = batch or case.local_batch

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        batches = recipe_batches(self.case, *self.place)
        samples = itertools.chain.from_iterable(zip(*batch, strict=True) for batch in batches)
        for number, sample in enumerate(samples):
            if number // self.batch % workers == worker:
                yield self.form(*sample)
