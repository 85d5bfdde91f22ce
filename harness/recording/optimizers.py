"""Optimizers that a job steps, with their settings and the parameters that they step on.

One that has others step for it is none itself: a container of several, or ZeRO's, which after that sends to each rank what
others stepped.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch.optim import Optimizer

from harness.core.probe.optimizer_steps import stepped_tensors
from harness.core.probe.structure import dense_tensors_of
from harness.core.probe.values import storage_bytes_of

T = TypeVar("T")
MOST_VALUES = 3
"""Values of one setting that are told."""


@dataclass
class OptimizerSettings:
    """What is reported of an optimizer."""

    kind: str
    """Its class, and that of the optimizer that steps it."""
    values: dict[str, str]
    """By name, its settings in its first step on record."""
    changed: set[str] = field(default_factory=set)
    """Settings that another step had otherwise, as a schedule of betas does."""

    def __str__(self) -> str:
        setting_texts = []
        for key, value in self.values.items():
            suffix = " at first" if key in self.changed else ""
            setting_texts.append(f"{key} {value}{suffix}")
        return f"{self.kind}({', '.join(setting_texts)})"


class ByOptimizer(Generic[T]):
    """A value for each optimizer, while it lives. Trap: an optimizer that is also a list of others has no hash."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Optimizer], T]] = {}

    def __iter__(self) -> Iterator[Optimizer]:
        return (optimizer for ref, _ in self._entries.values() if (optimizer := ref()) is not None)

    def get(self, optimizer: Optimizer) -> T | None:
        """Return the optimizer's value, None if it has none. Another optimizer may have got the id of one that has gone."""
        ref, value = self._entries.get(id(optimizer), (None, None))
        return value if ref is not None and ref() is optimizer else None

    def put(self, optimizer: Optimizer, value: T) -> None:
        self._entries[id(optimizer)] = weakref.ref(optimizer), value


class Optimizers:
    """The optimizers that a job steps, and the parameters that a step of the outermost one steps on."""

    def __init__(self) -> None:
        self._known: ByOptimizer[OptimizerSettings] = ByOptimizer()
        self._containers: ByOptimizer[bool] = ByOptimizer()
        self._all: list[OptimizerSettings] = []
        self._stepping: list[weakref.ref[Optimizer]] = []
        self._stepped: set[int] = set()

    def __iter__(self) -> Iterator[Optimizer]:
        return iter(self._known)

    @property
    def settings_texts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(map(str, self._all)))

    def parameter_ids(self) -> set[int]:
        """Return the ids of all parameters that any of them has."""
        return set().union(*map(parameter_ids_of, (*self._known, *self._containers)))

    def pass_begins(self) -> None:
        """Forget unfinished optimizer steps: one that raised in the middle has not left its step."""
        self._stepping = []
        self._stepped = set()

    def begin_step(self, optimizer: Optimizer) -> None:
        """Note that an optimizer's step begins. One inside of which it begins is a container."""
        if self._stepping and (outer := self._stepping[-1]()) is not None:
            self._containers.put(outer, True)
        self._stepping.append(weakref.ref(optimizer))

    def end_step(self, optimizer: Optimizer) -> set[int]:
        """Return the ids of all parameters that were stepped. Empty if another optimizer steps this one, and has yet to end."""
        self._stepping = self._stepping[:-1]
        self._stepped |= parameter_ids_of(optimizer)
        if not self._containers.get(optimizer):
            self._note_settings(optimizer)
        if self._stepping:
            return set()
        stepped = self._stepped
        self._stepped = set()
        return stepped

    def _note_settings(self, optimizer: Optimizer) -> None:
        """Note an optimizer's settings in its first step, and which of them another step has otherwise."""
        values = settings_of(optimizer)
        if (first := self._known.get(optimizer)) is None:
            outer = self._stepping[-1]() if self._stepping else None
            container_text = f" in {type(outer).__name__}" if outer is not None else ""
            first = OptimizerSettings(f"{type(optimizer).__name__}{container_text}", values)
            self._known.put(optimizer, first)
            self._all.append(first)
        first.changed |= {key for key, value in first.values.items() if values.get(key) != value}


def gradient_bytes(parameters: Iterable[torch.Tensor], optimizer: Optimizer) -> dict[str, int]:
    """Return the bytes of gradients by kind: of the model's parameters, and of the tensors that the optimizer steps on.

    Under ZeRO the latter are the optimizer's own. Sparse gradients are counted separately, by the kind "sparse gradients",
    which
    is left out if there are none: they grow with the tokens of a step.
    """
    gradients = [
        parameter.grad for parameter in (*parameters, *stepped_tensors(optimizer)) if parameter.grad is not None
    ]
    sparse = [gradient for gradient in gradients if len(dense_tensors_of(gradient)) > 1]
    dense = {"gradients": storage_bytes_of(gradient for gradient in gradients if len(dense_tensors_of(gradient)) == 1)}
    return dense | ({"sparse gradients": storage_bytes_of(sparse)} if sparse else {})


def parameter_ids_of(optimizer: Optimizer) -> set[int]:
    """Return the ids of the tensors that the optimizer steps on."""
    return {id(parameter) for parameter in stepped_tensors(optimizer)}


def settings_of(optimizer: Optimizer) -> dict[str, str]:
    """Return settings by name, each with the values that the optimizer's groups of parameters have, joined by " and ".

    At most MOST_VALUES are given, then how many more there are. Settings that no group has are left out, and tensors.
    Trap: from a checkpoint, a tuple may come back as a list.
    """
    settings: dict[str, str] = {}
    for key in ("betas", "momentum", "eps", "weight_decay", "amsgrad"):
        group_values = [
            group[key] for group in optimizer.param_groups if key in group and not torch.is_tensor(group[key])
        ]
        values = list(dict.fromkeys(str(tuple(value) if isinstance(value, list) else value) for value in group_values))
        texts = values[:MOST_VALUES]
        if len(values) > MOST_VALUES:
            texts.append(f"{len(values) - MOST_VALUES} more")
        if texts:
            settings[key] = " and ".join(texts)
    return settings
