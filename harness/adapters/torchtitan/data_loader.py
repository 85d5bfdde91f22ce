"""Data loaders for torchtitan with the case's samples, in the form that each version takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from harness.core.case.case import Case
from harness.core.trainers.support.samples import dataset_of, rank_samples
from harness.reference.data import document_indices


class Samples:
    """A data loader with the case's samples of one data-parallel rank, step after step, as (tokens, labels) of whole batches.

    dp_rank, dp_degree: as torchtitan passes them. at_start: called when iteration begins. Its state is the last step
    whose samples it gave, equal on all ranks.
    """

    def __init__(self, case: Case, dp_degree: int, dp_rank: int, at_start: Callable[[], None]) -> None:
        self.case = case
        self.dp_degree = dp_degree
        self.dp_rank = dp_rank
        self.at_start = at_start
        self.dataset = dataset_of(case)
        self.step = 0
        self.last = case.training.steps

    def __iter__(self) -> Iterator[Any]:
        self.at_start()
        size = self.case.local_batch * self.case.microbatches
        while self.step < self.last:
            self.step += 1
            tokens, labels = rank_samples(self.case, self.dataset, self.step, self.dp_rank, self.dp_degree)
            for batch in zip(tokens.split(size), labels.split(size), strict=True):
                yield self.batch(*batch)

    def batch(self, tokens: torch.Tensor, labels: torch.Tensor) -> Any:
        return tokens, labels

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


class Inputs(Samples):
    """Samples with tokens by name: ({"input": tokens}, labels).

    There are no positions: without them attention is causal over the whole row, and needs no mask.
    """

    def batch(self, tokens: torch.Tensor, labels: torch.Tensor) -> Any:
        return {"input": tokens}, labels


class Positioned(Inputs):
    """Inputs with the position of each token, which context parallel cuts along.

    Positions count in each row, and begin anew with each document if the case has a document mask. SDPA makes no mask
    of them: they only turn queries and keys. FlexAttention begins a document wherever positions begin anew.
    """

    def batch(self, tokens: torch.Tensor, labels: torch.Tensor) -> Any:
        """Return ({"input": tokens, "positions": int64 like labels}, labels)."""
        inputs, labels = super().batch(tokens, labels)
        positions = torch.arange(labels.shape[1]).expand(labels.shape)
        return inputs | {
            "positions": document_positions(tokens) if self.case.training.document_mask else positions
        }, labels


class Microbatches(Positioned):
    """Positioned samples, one microbatch of `local_batch` rows at a time."""

    def __iter__(self) -> Iterator[Any]:
        size = self.case.local_batch
        for inputs, labels in super().__iter__():
            for start in range(0, len(labels), size):
                part = {name: values[start : start + size] for name, values in inputs.items()}
                yield part, labels[start : start + size]


class Rows(Microbatches):
    """Microbatches as one row each, their samples end to end. torchtitan's mask begins a sample where positions begin anew."""

    def __iter__(self) -> Iterator[Any]:
        for inputs, labels in super().__iter__():
            yield {name: values.flatten() for name, values in inputs.items()}, labels.flatten()


class Ahead:
    """A data loader of validation: its n-th iterator begins with the samples of step n + 1.

    So the loss of a validation after each step is the one that the next step has. At the end it repeats the last step.
    If the case requests held-out samples, it continues behind it.
    make: returns samples from the first step on.
    """

    def __init__(self, make: Callable[[], Samples]) -> None:
        self.make = make
        self.finished = 0

    def __iter__(self) -> Iterator[Any]:
        self.finished += 1
        samples = self.make()
        samples.last += bool(samples.case.features.validate_every) and self.finished >= samples.last
        samples.step = min(self.finished, samples.last - 1)
        return iter(samples)


@dataclasses.dataclass
class LoaderBuilder:
    """The configuration of a validation's data loader, which builds an Ahead.

    There is one for each dp_rank, however often it is built.
    inputs: the form of the samples.
    """

    case: Case
    inputs: type[Samples]
    infinite: bool = True  # its name is `repeat` since 2026-08
    repeat: bool = True
    loaders: dict[int, Ahead] = dataclasses.field(default_factory=dict)

    def build(self, *, dp_world_size: int, dp_rank: int, **_: Any) -> Ahead:
        """Return the data loader of a data-parallel rank: the same object at each call, so that it counts validations."""
        ahead = Ahead(lambda: self.inputs(self.case, dp_world_size, dp_rank, lambda: None))
        return self.loaders.setdefault(dp_rank, ahead)


def document_positions(tokens: torch.Tensor) -> torch.Tensor:
    """Return each token's position in its own document, from 0: int64 [b, s]. tokens: int64 [b, s]."""
    document_numbers = document_indices(tokens)
    return (document_numbers.unsqueeze(-1) == document_numbers.unsqueeze(-2)).tril(-1).sum(-1)
