"""Which optimizers a job steps. One that has others step for it is none itself: a container of several, or ZeRO's, which after
that sends to each rank what others stepped."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch.optim import Optimizer

from harness.core.probe.structure import stored
from harness.core.probe.values import held_bytes

T = TypeVar("T")
MOST = 3
"""Values of one setting that are told."""


@dataclass
class Settings:
    """What is reported of an optimizer."""

    kind: str
    """Its class, and that of the optimizer that steps it."""
    values: dict[str, str]
    """By name, its settings in its first step on record."""
    changed: set[str] = field(default_factory=set)
    """Settings that another step had otherwise, as a schedule of betas does."""

    def __str__(self) -> str:
        words = (f"{key} {value}{' at first' * (key in self.changed)}" for key, value in self.values.items())
        return f"{self.kind}({', '.join(words)})"


class Weakly(Generic[T]):
    """A value for each optimizer, while it lives. Trap: an optimizer that is also a list of others has no hash."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[weakref.ref[Optimizer], T]] = {}

    def __iter__(self) -> Iterator[Optimizer]:
        return (optimizer for ref, _ in self._held.values() if (optimizer := ref()) is not None)

    def get(self, optimizer: Optimizer) -> T | None:
        """Another may have got the id of one that has gone."""
        ref, told = self._held.get(id(optimizer), (None, None))
        return told if ref is not None and ref() is optimizer else None

    def put(self, optimizer: Optimizer, told: T) -> None:
        self._held[id(optimizer)] = weakref.ref(optimizer), told


class Optimizers:
    def __init__(self) -> None:
        self._known: Weakly[Settings] = Weakly()
        self._containers: Weakly[bool] = Weakly()
        self._all: list[Settings] = []
        self._stepping: list[weakref.ref[Optimizer]] = []
        self._stepped: set[int] = set()

    def __iter__(self) -> Iterator[Optimizer]:
        return iter(self._known)

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(map(str, self._all)))

    def owned(self) -> set[int]:
        """Return the ids of all parameters that any of them has."""
        return set().union(*map(parameters_of, (*self._known, *self._containers)))

    def pass_begins(self) -> None:
        """Inside of none; what raised in the middle of its step has not left it."""
        self._stepping, self._stepped = [], set()

    def begins(self, optimizer: Optimizer) -> None:
        if self._stepping and (outer := self._stepping[-1]()) is not None:
            self._containers.put(outer, True)
        self._stepping.append(weakref.ref(optimizer))

    def ended(self, optimizer: Optimizer) -> set[int]:
        """The ids of all parameters that were stepped; of none where another stepped it, which has yet to end."""
        self._stepping = self._stepping[:-1]
        self._stepped |= parameters_of(optimizer)
        if not self._containers.get(optimizer):
            self._note_settings(optimizer)
        if self._stepping:
            return set()
        stepped, self._stepped = self._stepped, set()
        return stepped

    def _note_settings(self, optimizer: Optimizer) -> None:
        values = settings_of(optimizer)
        if (first := self._known.get(optimizer)) is None:
            outer = self._stepping[-1]() if self._stepping else None
            within = f" in {type(outer).__name__}" if outer is not None else ""
            first = Settings(f"{type(optimizer).__name__}{within}", values)
            self._known.put(optimizer, first)
            self._all.append(first)
        first.changed |= {key for key, value in first.values.items() if values.get(key) != value}


def gradient_bytes(parameters: Iterable[torch.Tensor], optimizer: Optimizer) -> dict[str, int]:
    """What hangs on parameters of the model, and on what is stepped on, which under ZeRO are tensors of the optimizer's own.
    Sparse ones are counted separately: they grow with the tokens of a step."""
    stepped_on = (p for group in optimizer.param_groups for p in group["params"])
    gradients = [p.grad for p in (*parameters, *stepped_on) if p.grad is not None]
    sparse = [gradient for gradient in gradients if len(stored(gradient)) > 1]
    dense = {"gradients": held_bytes(gradient for gradient in gradients if len(stored(gradient)) == 1)}
    return dense | ({"sparse gradients": held_bytes(sparse)} if sparse else {})


def parameters_of(optimizer: Optimizer) -> set[int]:
    """What it steps on, the ids."""
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def settings_of(optimizer: Optimizer) -> dict[str, str]:
    """Each with the values that its groups of parameters have. Trap: from a checkpoint, a tuple may come back as a list."""
    found: dict[str, str] = {}
    for key in ("betas", "momentum", "eps", "weight_decay", "amsgrad"):
        told = [group[key] for group in optimizer.param_groups if key in group and not torch.is_tensor(group[key])]
        values = list(dict.fromkeys(str(tuple(one) if isinstance(one, list) else one) for one in told))
        more = [f"{len(values) - MOST} more"] * (len(values) > MOST)
        if values:
            found[key] = " and ".join([*values[:MOST], *more])
    return found
