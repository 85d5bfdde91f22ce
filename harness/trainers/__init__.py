"""Trainers under test: what the harness asks of one, and finding it by name.

A trainer is a module or package in this folder with an `adapter`. Importing it must be cheap: torch and the trainer's
own code are imported by `start`.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import nn

    from harness.case import Case


@dataclass(frozen=True)
class Metrics:
    """What a trainer displays after a step (counted from 1), None where it does not. grad_norm: global, before clipping."""

    step: int
    loss: float | None
    grad_norm: float | None
    lr: float


class StartedTrainer(Protocol):
    """A trainer on one rank, built and holding its weights. `metrics` grows by one entry a step, equal on all ranks."""

    model_parts: list[nn.Module]
    metrics: list[Metrics]

    def train(self, last_step: int) -> None:
        """Up to and with that step, from the one after the last that was finished; the schedule is the recipe's."""
        ...

    def save(self, folder: Path) -> object:
        """Leave a checkpoint in this folder, in which older ones may lie. Only for cases with `resume`."""
        ...

    def resume(self, folder: Path) -> None:
        """Before the first step: continue from the latest complete checkpoint in this folder, whatever layout wrote it.
        Only for cases with `resume`. Raises ValueError if there is none."""
        ...


class Adapter(Protocol):
    """How the harness starts one trainer on one rank.

    displays: which of "loss" and "grad_norm" the trainer shows its user. preload: modules that the rank server may import
    once for all its ranks, where they are installed. A trainer that comes from outside has a method `of(source)` besides,
    which gives the adapter of another version or checkout: `--trainer NAME --source SOURCE`; and
    may say in `files` which paths of its repository running it needs.
    """

    name: str
    preload: tuple[str, ...]
    displays: tuple[str, ...]

    def own(self, case: Case) -> Case:
        """The case with this trainer's choice where the case leaves one; the plan is made of that. Mostly `return case`."""
        ...

    def unsupported(self, case: Case) -> str | None:
        """Why this trainer cannot run the case, in one sentence; None if it can. Starts nothing, imports no torch."""
        ...

    def start(self, case: Case, weights: Path | None, device: str) -> StartedTrainer:
        """Join the process group that the environment describes and build. weights: .npz of full tensors by fqn;
        None means the seed's. device: "cpu" or "cuda". Raises ValueError for a case or world size that does not fit.
        """
        ...

    def stop(self) -> None:
        """Leave the process group."""
        ...

    def fqn(self, name: str) -> str:
        """The reference's spelling of a name from `named_parameters()` of one of model_parts."""
        ...


def spec(name: str, source: str | None) -> str:
    """As load takes it. A source that is a path is made absolute: ranks may run elsewhere."""
    if not source:
        return name
    return f"{name}@{Path(source).resolve() if Path(source).exists() else source}"


def load(spec: str) -> Adapter:
    """The adapter of NAME, or of NAME@SOURCE. Raises ValueError with the known ones."""
    name, at, where = spec.partition("@")
    known = sorted(module.name for module in pkgutil.iter_modules(__path__))
    if name not in known:
        raise ValueError(f"no trainer is named {name!r}; known: {', '.join(known)}")
    adapter = importlib.import_module(f"{__name__}.{name}").adapter
    if not at:
        return adapter
    if not hasattr(adapter, "of"):
        raise ValueError(f"trainer {name} has no other sources; leave out @{where}")
    return adapter.of(where)
