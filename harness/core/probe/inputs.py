"""What a model is called with: tensors, or those of a batch in whatever holds it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

POSITION_WORD = "pos"
MASK_WORDS = ("mask", POSITION_WORD, "type_ids", "seqlens")
"""What names of tensors have that are alike for all samples of one length."""

LABEL_WORDS = ("label", "target")
"""What names of tensors have that are no samples, and may come before them."""

MOST_INPUTS = 8
"""Tensors of one call that are looked at."""
DEEPEST = 4
"""Batches in batches that are looked at, so that looking at a batch that holds itself ends."""
MOST_MEMBERS = 64
"""Members of a batch that are looked at, so that looking at a list of a million ends."""


def inputs_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the samples first, then what else differs between two ranks if their batches do: labels, noise. Masks and
    positions need not: one of these is returned where there is nothing else. An argument that is a tensor comes before
    tensors inside of an argument."""
    arguments = [*(("", value) for value in args), *kwargs.items()]
    tensor_arguments = [(name, value) for name, value in arguments if torch.is_tensor(value)]
    named_tensors = itertools.chain(tensor_arguments, *(tensors_in(name, value) for name, value in arguments))
    samples = dict[int, torch.Tensor]()
    labels = dict[int, torch.Tensor]()
    masks_and_positions = list[torch.Tensor]()
    for name, tensor in named_tensors:
        if any(word in name for word in MASK_WORDS):
            masks_and_positions.append(tensor)
        elif any(word in name for word in LABEL_WORDS):
            if _is_of_samples(tensor):
                labels[id(tensor)] = tensor
        elif not samples or _is_of_samples(tensor):
            samples[id(tensor)] = tensor
        if len(samples) == MOST_INPUTS:
            break
    return [*samples.values(), *labels.values()][:MOST_INPUTS] or masks_and_positions[:1]


def sample_begins(args: tuple[Any, ...], kwargs: Mapping[str, Any], samples: torch.Tensor) -> torch.Tensor | None:
    """Return where samples begin that lie end to end in one row: where positions begin anew. bool [tokens]; None if a row is
    a sample, or no positions are given."""
    if samples.dim() > 2 or samples.numel() != samples.shape[-1:].numel() or not samples.numel():
        return None
    arguments = [*(("", argument) for argument in args), *kwargs.items()]
    named_tensors = itertools.chain(*(tensors_in(name, value) for name, value in arguments))
    positions = (
        tensor.reshape(-1)
        for name, tensor in named_tensors
        if POSITION_WORD in name and _is_of_samples(tensor) and tensor.shape == samples.shape
    )
    for token_positions in positions:
        begins = token_positions == 0
        begins[1:] &= token_positions[:-1] != 0  # positions of padding may all be 0
        return begins
    return None


def _is_of_samples(tensor: torch.Tensor) -> bool:
    """Return whether a tensor may have one number a sample.

    Counts and scales of a whole batch have none, and are equal on all ranks.
    """
    return tensor.dim() > 0 and tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta


def tensors_in(name: str, value: Any, deeper: int = DEEPEST) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors in maps, sequences and dataclasses, with the name nearest to each."""
    if torch.is_tensor(value):
        yield name, value
        return
    members: Any = ()
    if isinstance(value, Mapping):
        members = ((str(key), value[key]) for key in value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        members = ((field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value))
    elif isinstance(value, (list, tuple)):
        members = ((name, element) for element in value)
    for key, member in itertools.islice(members, MOST_MEMBERS if deeper else 0):
        yield from tensors_in(key, member, deeper - 1)
