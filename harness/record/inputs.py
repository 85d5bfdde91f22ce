"""The samples that a model is called with: a tensor, or the first of a batch in whatever holds it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

BESIDE = ("mask", "pos", "type_ids", "seqlens")
"""What names of tensors have that are alike for all samples of one length."""

DEEPEST, MOST = 4, 64
"""Batches in batches, and members of one, that are looked at: what holds itself, or a list of a million, ends."""


def samples_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Of two ranks these differ if their batches do, which masks and positions need not. A tensor of its own comes before what
    a batch holds."""
    given = [*(("", value) for value in args), *kwargs.items()]
    alone = [(name, value) for name, value in given if torch.is_tensor(value)]
    held = itertools.chain(alone, *(_tensors(name, value, DEEPEST) for name, value in given))
    first = None
    for name, tensor in held:
        if not any(word in name for word in BESIDE):
            return tensor
        first = tensor if first is None else first
    return first


def _tensors(name: str, value: Any, deeper: int) -> Iterator[tuple[str, torch.Tensor]]:
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
        yield from _tensors(key, member, deeper - 1)
