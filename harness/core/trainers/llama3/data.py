"""The samples that this rank reads.

One step's samples over all data-parallel ranks are one slice of the epoch's order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import DataLoader, DistributedSampler

from harness.core.case.case import Case
from harness.reference.data import SEPARATOR, build_dataset, sample_order


class ResumableSampler(DistributedSampler):
    """A DistributedSampler that begins an epoch at this rank's sample number `start`, without reading those before.

    Where ranks do not divide an epoch, torch's sampler drops its end or repeats samples. This one gives some ranks
    fewer.
    """

    start = 0

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(self.own_sample_ids(), self.start, None)

    def own_sample_ids(self) -> Iterator[int]:
        """Return an iterator over the ids of all of this rank's samples of the epoch, from the first."""
        size = len(self.dataset)
        if size % self.num_replicas == 0:
            return super().__iter__()
        order = torch.randperm(size, generator=torch.Generator().manual_seed(self.seed + self.epoch)).tolist()
        return iter(order[self.rank :: self.num_replicas])


def build_loader(dataset: Any, case: Case, dp_rank: int) -> DataLoader:
    """Return a loader of this rank's microbatches of one epoch: tokens, labels int64 [local_batch, seq_len].

    Under pp the microbatches of a step come together, [microbatches * local_batch, seq_len]: the schedule cuts them.
    With `last_batch` the last one may be smaller.
    """
    sampler = ResumableSampler(
        dataset, num_replicas=case.dims.dp, rank=dp_rank, shuffle=True, seed=case.training.seed, drop_last=True
    )
    has_even_batches = case.training.last_batch is None
    return DataLoader(
        dataset, batch_size=case.local_batch * case.microbatches, sampler=sampler, drop_last=has_even_batches
    )


class Microbatches:
    """This rank's microbatches of each step, epoch after epoch, each epoch in an order of its own.

    `samples` counts what all ranks together have drawn since the first epoch began, so a position holds in another
    layout. `size` is the number of samples in the dataset. It is a multiple of the global batch, so no step straddles
    two epochs; with `last_batch` it is not, and the last step is smaller.
    """

    def __init__(self, case: Case, dp_rank: int) -> None:
        self.case = case
        self.dataset = build_dataset(case.training, case.model)
        self.size = len(self.dataset)
        self.loader = build_loader(self.dataset, case, dp_rank)
        self.seek(0)

    def seek(self, samples: int) -> None:
        """Continue after this many samples over all ranks, from the first epoch on; a multiple of the global batch."""
        epoch, done = divmod(samples, len(self.dataset))
        self.samples = samples
        sampler = self.loader.sampler
        assert isinstance(sampler, ResumableSampler)
        sampler.set_epoch(epoch)
        sampler.start = done // self.case.dims.dp
        self.iterator = iter(self.loader)

    def step(self, length: int | None = None) -> list[tuple[Tensor, Tensor]]:
        """Return the microbatches of the next optimizer step: (tokens, labels), of each sample the first `length`
        tokens (None: all).

        There are `accumulation` many. Fewer at the end of data with `last_batch`; one without samples if this rank has
        none.
        """
        if self.samples % len(self.dataset) == 0:
            self.seek(self.samples)
        self.samples += min(self.case.training.global_batch, len(self.dataset) - self.samples % len(self.dataset))
        microbatches = list(itertools.islice(self.iterator, self.case.features.accumulation)) or [self.empty_batch()]
        return [(tokens[:, :length], labels[:, :length]) for tokens, labels in microbatches]

    def empty_batch(self) -> tuple[Tensor, Tensor]:
        """Return a batch of no samples, tokens and labels int64 [0, seq_len], for a rank that has none in a step.

        The rank then still takes part in all communication of the step.
        """
        return (torch.zeros(0, self.case.training.seq_len, dtype=torch.int64),) * 2

    def epochs(self) -> float:
        """Return how many epochs all ranks together have drawn, as a fraction."""
        return self.samples / len(self.dataset)

    def held_out(self) -> list[tuple[Tensor, Tensor]]:
        """Return this rank's microbatches (tokens, labels) of the first epoch's last batch, which that epoch trains on
        last."""
        ids = sample_order(self.case.training, len(self.dataset), 0)[-self.case.training.global_batch :]
        own_ids = ids[self.loader.sampler.rank :: self.case.dims.dp]
        tokens, labels = zip(*(self.dataset[id_] for id_ in own_ids), strict=True)
        size = self.case.local_batch
        return list(zip(torch.stack(tokens).split(size), torch.stack(labels).split(size), strict=True))


class Shapes:
    """Microbatches of zeros in the right shapes, in place of Microbatches, for a rank that runs alone and reads no samples.

    It has no dataset: `size` is 0 and `epochs` NaN.
    """

    def __init__(self, case: Case, dp_rank: int) -> None:
        self.case = case
        self.samples = 0
        self.size = 0

    def seek(self, samples: int) -> None:
        self.samples = samples

    def epochs(self) -> float:
        return math.nan

    def held_out(self) -> list[tuple[Tensor, Tensor]]:
        return self.step()

    def step(self, length: int | None = None) -> list[tuple[Tensor, Tensor]]:
        """Return `accumulation` microbatches of zeros: (tokens, labels), int64 [local_batch * microbatches, length or
        seq_len]."""
        case = self.case
        self.samples += case.training.global_batch
        shape = case.local_batch * case.microbatches, length or case.training.seq_len
        return [
            (torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64))
            for _ in range(case.features.accumulation)
        ]


def document_indices(tokens: Tensor) -> Tensor:
    """Return the number, from 0, of the document that each token is in within its row. int64 [b, s]

    A separator belongs to the document that it ends.
    """
    return pad((tokens[:, :-1] == SEPARATOR).cumsum(dim=1), (1, 0))
