"""What each forward pass was fed, and the loss computed from it.

Tokens are the first tensor the root module is called with, if it is one of integers (a later pipeline stage is called
with activations). A trainer may lay the samples of a batch end to end in one row: it is cut where the recipe has them
end. Labels and the local loss are what
torch.nn.functional.cross_entropy was called with and returned, so no trainer has to report them. Positions are known by
the name that the model gives its argument.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from harness.evidence import Microbatch
from harness.probe.clock import Clock
from harness.probe.structure import local

POSITION_NAMES = ("positions", "position_ids", "input_pos")


_installed: list[SampleRecorder] = []


def note_loss(labels: torch.Tensor, value: torch.Tensor, *, reduction: str, ignore_index: int = -100) -> None:
    """For the adapter of a trainer that computes its loss by a function of its own, and not by torch's cross_entropy."""
    for recorder in _installed:
        recorder._note_loss(labels, value, {"reduction": reduction, "ignore_index": ignore_index})


def noted(compute: Callable[..., torch.Tensor], *, reduction: str) -> Callable[..., torch.Tensor]:
    """A trainer's function of (logits, labels), whose value is noted unless it leaves that to torch's cross_entropy."""

    @functools.wraps(compute)
    def seen(logits: Any, labels: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        before = [recorder.losses for recorder in _installed]
        value = compute(logits, labels, *args, **kwargs)
        if before == [recorder.losses for recorder in _installed]:
            note_loss(labels, value, reduction=reduction)
        return value

    return seen


@dataclass
class _Loss:
    labels: torch.Tensor
    value: torch.Tensor
    reduction: str
    ignore_index: int


class SampleRecorder:
    def __init__(self, clock: Clock, row_length: Callable[[int], int] | None = None) -> None:
        self._clock, self._row_length = clock, row_length
        self._tokens: dict[int, list[np.ndarray]] = {}
        self._positions: dict[int, dict[bytes, np.ndarray]] = {}
        self._losses: dict[int, list[_Loss]] = {}
        self._hooks: list[Any] = []
        self.losses = 0
        self._cross_entropy: Callable[..., torch.Tensor] | None = None

    def install(self) -> None:
        self._cross_entropy = original = torch.nn.functional.cross_entropy

        @functools.wraps(original)
        def seen(input: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            value = original(input, target, *args, **kwargs)
            self._note_loss(target, value, kwargs)
            return value

        torch.nn.functional.cross_entropy = seen
        _installed.append(self)

    def attach(self, parts: Iterable[nn.Module]) -> None:
        """Trap: the pre-hook must run before FSDP's, which gathers parameters in its own, so it is put in front."""
        for part in parts:
            self._hooks.append(part.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True))
            self._hooks.append(part.register_forward_hook(self._leave, always_call=True))

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._cross_entropy is not None:
            torch.nn.functional.cross_entropy = self._cross_entropy
            _installed.remove(self)
        self._hooks, self._cross_entropy = [], None

    def _enter(self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._clock.enter_forward()
        self._note_positions(dict(zip(inspect.signature(part.forward).parameters, args, strict=False)) | kwargs)
        first = next((value for value in (*args, *kwargs.values()) if torch.is_tensor(value)), None)
        if first is not None and not first.is_floating_point() and first.dim() in (1, 2):
            self._tokens.setdefault(self._clock.step, []).append(self._rows(first))

    def _note_positions(self, given: dict[str, Any]) -> None:
        told = next((given[name] for name in POSITION_NAMES if torch.is_tensor(given.get(name))), None)
        if told is not None:
            seen = self._rows(told)
            self._positions.setdefault(self._clock.step, {})[seen.tobytes()] = seen

    def _rows(self, given: torch.Tensor) -> np.ndarray:
        """[samples, positions]. Of one row that the recipe's length does not divide, that row."""
        seen = local(given).to("cpu", torch.int64, copy=True).numpy()
        if seen.ndim > 1:
            return seen
        length = self._row_length(self._clock.step) if self._row_length else len(seen)
        return seen.reshape(-1, length if len(seen) % length == 0 else len(seen))

    def _leave(self, *_: Any) -> None:
        self._clock.leave_forward()

    def _note_loss(self, target: torch.Tensor, value: torch.Tensor, options: dict[str, Any]) -> None:
        """Copies, on the device and without waiting: a trainer may go on to reduce the loss or refill the labels in place."""
        labels, loss = local(target).clone(), local(value).clone()
        noted = _Loss(labels, loss, options.get("reduction", "mean"), options.get("ignore_index", -100))
        self._losses.setdefault(self._clock.step, []).append(noted)
        self.losses += 1

    def join(self, step: int, count: int, labels: torch.Tensor) -> None:
        """The losses of a step behind the first `count` were parts of one, over these labels."""
        losses = self._losses.get(step, [])
        if parts := losses[count:]:
            value = torch.stack([part.value.sum() for part in parts]).sum()
            losses[count:] = [_Loss(local(labels).clone(), value, "sum", parts[0].ignore_index)]

    def seen(self, step: int) -> int:
        return len(self._losses.get(step, []))

    def tensors(self) -> list[torch.Tensor]:
        """What is kept to be read when all is done, so as not to wait for it in a step."""
        return [tensor for losses in self._losses.values() for loss in losses for tensor in (loss.labels, loss.value)]

    def positions(self, step: int) -> tuple[np.ndarray, ...]:
        return tuple(self._positions.get(step, {}).values())

    def microbatches(self, step: int) -> tuple[Microbatch, ...]:
        """One record a forward pass; the n-th loss of a step belongs to the n-th time that tokens were fed."""
        found = []
        for fed, loss in itertools.zip_longest(self._tokens.get(step, []), self._losses.get(step, [])):
            shape = (-1,) if fed is None else fed.shape
            labels, total, valid = _read_loss(loss, shape) if loss else (None, None, None)
            found.append(Microbatch(fed, labels, total, valid))
        return tuple(found)


def _read_loss(loss: _Loss, shape: tuple[int, ...]) -> tuple[np.ndarray | None, float, int]:
    valid = int((loss.labels != loss.ignore_index).sum())
    value = loss.value.double()
    total = float(value.sum()) if loss.reduction != "mean" else (float(value) * valid if valid else 0.0)
    labels = loss.labels.to("cpu", torch.int64).numpy()
    fits = shape == (-1,) or labels.size == np.prod(shape)
    return (labels.reshape(shape) if fits else labels), total, valid
