"""What a model is called with: tensors, or those of a batch in whatever holds it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

POSITIONS = "pos"
BESIDE = ("mask", POSITIONS, "type_ids", "seqlens")
"""What names of tensors have that are alike for all samples of one length."""

LABELS = ("label", "target")
"""What names of tensors have that are no samples, and may come before them."""

INPUTS = 8
"""Tensors of one call that are looked at."""
DEEPEST, MOST = 4, 64
"""Batches in batches, and members of one, that are looked at: what holds itself, or a list of a million, ends."""


def inputs_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the samples first, then what else differs between two ranks if their batches do: labels, noise. Masks and
    positions need not: one of these is returned where there is nothing else. An argument that is a tensor comes before
    tensors inside of an argument."""
    given = [*(("", value) for value in args), *kwargs.items()]
    alone = [(name, value) for name, value in given if torch.is_tensor(value)]
    held = itertools.chain(alone, *(tensors_in(name, value) for name, value in given))
    found, labels, beside = dict[int, torch.Tensor](), dict[int, torch.Tensor](), list[torch.Tensor]()
    for name, tensor in held:
        if any(word in name for word in BESIDE):
            beside.append(tensor)
        elif any(word in name for word in LABELS):
            labels |= {id(tensor): tensor} if _is_of_samples(tensor) else {}
        elif not found or _is_of_samples(tensor):
            found[id(tensor)] = tensor
        if len(found) == INPUTS:
            break
    return [*found.values(), *labels.values()][:INPUTS] or beside[:1]


def begins_of(args: tuple[Any, ...], kwargs: Mapping[str, Any], samples: torch.Tensor) -> torch.Tensor | None:
    """Return where samples begin that lie end to end in one row: where positions begin anew. bool [tokens]; None if a row is
    a sample, or no positions are given."""
    if samples.dim() > 2 or samples.numel() != samples.shape[-1:].numel() or not samples.numel():
        return None
    given = itertools.chain(
        *(tensors_in(name, value) for name, value in (*(("", one) for one in args), *kwargs.items()))
    )
    positions = (
        one.reshape(-1)
        for name, one in given
        if POSITIONS in name and _is_of_samples(one) and one.shape == samples.shape
    )
    for found in positions:
        begins = found == 0
        begins[1:] &= found[:-1] != 0  # positions of padding may all be 0
        return begins
    return None


def _is_of_samples(tensor: torch.Tensor) -> bool:
    """Whether it may have one number a sample: counts and scales of a whole batch have none, and are alike on all ranks."""
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
        members = ((each.name, getattr(value, each.name, None)) for each in dataclasses.fields(value))
    elif isinstance(value, (list, tuple)):
        members = ((name, each) for each in value)
    for key, member in itertools.islice(members, MOST if deeper else 0):
        yield from tensors_in(key, member, deeper - 1)
