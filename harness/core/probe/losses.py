"""The local losses and their labels, seen where torch computes them, so that no trainer has to report them.

cross_entropy and nll_loss end in two functions that torch.nn.functional looks up at each call, however a trainer imported
it; linear_cross_entropy is patched separately. A loss belongs to the forward pass before it. It may be computed in many
calls, each from a part of the labels: together they are one microbatch's. What backward computes again is not counted, nor
what is computed without gradients beside a loss that has them, to be shown. Of losses of single tokens, those count to which
backward comes with another gradient than zero: a trainer may multiply them by a mask.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from harness.core.evidence.step import Microbatch
from harness.core.probe.clock import Account, Clock
from harness.core.probe.structure import local

IGNORED = -100
REDUCTIONS = ("none", "mean", "sum")
"""Torch's numbers are their indices."""

_installed: list[LossRecorder] = []


def note_loss(labels: torch.Tensor, value: torch.Tensor, *, reduction: str, ignore_index: int = IGNORED) -> None:
    """For the adapter of a trainer that computes its loss by another function than torch's.

    Functions of torch that are called for the same pass then count for nothing: a trainer may multiply by a mask what they
    return.
    """
    for recorder in _installed:
        recorder.note(labels, value, reduction, ignore_index, by_adapter=True)


def noted(compute: Callable[..., torch.Tensor], *, reduction: str) -> Callable[..., torch.Tensor]:
    """A trainer's function of (logits, labels), whose value is noted unless it leaves that to a function of torch's."""

    @functools.wraps(compute)
    def seen(logits: Any, labels: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        before = [recorder.heard for recorder in _installed]
        value = compute(logits, labels, *args, **kwargs)
        if before == [recorder.heard for recorder in _installed]:
            note_loss(labels, value, reduction=reduction)
        return value

    return seen


@dataclass
class Loss:
    """One call of a loss function."""

    account: Account  # the step's
    after: int  # how many forward passes had begun
    labels: torch.Tensor
    value: torch.Tensor
    differentiable: bool  # gradients flow from it
    reduction: str
    ignore_index: int
    by_adapter: bool  # it was noted, and not seen in a function of torch's
    trained: torch.Tensor | None = None  # of losses of single tokens: which have a gradient; None until backward comes

    def see_gradient(self, gradient: torch.Tensor) -> None:
        has_gradient = local(gradient) != 0
        self.trained = has_gradient if self.trained is None else self.trained | has_gradient


class LossRecorder:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._noted: list[Loss] = []
        self.heard = 0
        self._patched: list[tuple[Any, str, Any]] = []
        self._inside = False

    def install(self) -> None:
        self._patch(torch._C._nn, "cross_entropy_loss", _given_to_kernels)
        self._patch(torch._C._nn, "nll_loss_nd", _given_to_kernels)
        if hasattr(torch.nn.functional, "linear_cross_entropy"):  # torch 2.13
            self._patch(torch.nn.functional, "linear_cross_entropy", _given_to_linear)
        _installed.append(self)

    def remove(self) -> None:
        for owner, name, original in reversed(self._patched):
            setattr(owner, name, original)
        if self in _installed:
            _installed.remove(self)
        self._patched = []

    def _patch(self, owner: Any, name: str, read: Callable[..., tuple[torch.Tensor, str, int]]) -> None:
        """read: how to get labels, reduction and the label that is ignored from the arguments."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def seen(*args: Any, **kwargs: Any) -> torch.Tensor:
            outermost, self._inside = not self._inside, True
            try:
                value = original(*args, **kwargs)
            finally:
                self._inside = not outermost
            if outermost:
                labels, reduction, ignored = read(*args, **kwargs)
                self.note(labels, value, reduction, ignored)
            return value

        self._patched.append((owner, name, original))
        setattr(owner, name, seen)

    def note(
        self,
        labels: torch.Tensor,
        value: torch.Tensor,
        reduction: str,
        ignore_index: int,
        *,
        by_adapter: bool = False,
    ) -> None:
        """Copies, on the device and without waiting: a trainer may go on to reduce the loss or refill the labels in place."""
        clock, self.heard = self._clock, self.heard + 1
        if clock.phase() == "backward" or labels.is_floating_point() or not _is_real(value):
            return
        of_step = value.requires_grad and clock.of_last_pass.kind == "evaluation"
        account = clock.of_step if of_step else clock.of_last_pass
        copies = local(labels).clone(), local(value).clone()
        passes = clock.passes
        flows = value.requires_grad
        loss = Loss(account, passes, *copies, flows, reduction, ignore_index, by_adapter)
        if flows and reduction == "none" and loss.value.numel() == loss.labels.numel():
            value.register_hook(loss.see_gradient)
        self._noted.append(loss)

    def tensors(self) -> list[torch.Tensor]:
        """What is kept to be read when all is done, so as not to wait for it in a step."""
        return [
            tensor for loss in self._noted for tensor in (loss.labels, loss.value, loss.trained) if tensor is not None
        ]

    def of_passes(self, of: Callable[[Account], bool], received: Sequence[int]) -> list[list[Loss]]:
        """Return losses by microbatch. received: how many tokens each pass received, where that was seen."""
        noted = (loss for loss in self._noted if of(loss.account))
        groups = [_that_count(list(group)) for _, group in itertools.groupby(noted, key=lambda loss: loss.after)]
        if [_labels(group) for group in groups] == list(received):
            return groups
        return _cut([loss for group in groups for loss in group], received) or groups


def _given_to_kernels(
    input: Any, target: torch.Tensor, weight: Any = None, reduction: int = 1, ignore_index: int = IGNORED, *_: Any
) -> tuple[torch.Tensor, str, int]:
    return target, REDUCTIONS[reduction], ignore_index


def _given_to_linear(
    input: Any, linear_weight: Any, target: torch.Tensor, *, reduction: str = "mean", ignore_index: Any = None, **_: Any
) -> tuple[torch.Tensor, str, int]:
    return target, reduction, IGNORED if ignore_index is None else ignore_index


def _is_real(tensor: torch.Tensor) -> bool:
    """Others are a compiler's, tracing."""
    traced = type(local(tensor)).__name__ in ("FakeTensor", "FunctionalTensor")
    return not traced and tensor.device.type != "meta" and not torch.compiler.is_compiling()


def _that_count(losses: list[Loss]) -> list[Loss]:
    """Return the calls of one pass that make its loss: those that an adapter noted, else those from which gradients flow.

    A trainer's own loss computed in autograd functions records nothing: then all are taken.
    """
    noted = [loss for loss in losses if loss.by_adapter]
    return noted or [loss for loss in losses if loss.differentiable] or losses


def _labels(losses: Iterable[Loss]) -> int:
    return sum(loss.labels.numel() for loss in losses)


def _cut(losses: list[Loss], received: Sequence[int]) -> list[list[Loss]] | None:
    """In order, as many for each pass as have a label for each of its tokens; None where they do not come out even."""
    ends = list(itertools.accumulate(loss.labels.numel() for loss in losses))
    wanted = list(itertools.accumulate(received))
    if not set(wanted) <= set(ends) or wanted[-1:] != ends[-1:]:
        return None
    cuts = [0, *(ends.index(end) + 1 for end in wanted)]
    return [losses[start:stop] for start, stop in itertools.pairwise(cuts)]


def microbatch(tokens: np.ndarray | None, losses: Sequence[Loss]) -> Microbatch:
    """Labels lie as the tokens do if one call was given them all."""
    if not losses:
        return Microbatch(tokens, None, None, None)
    parts = [_read(loss) for loss in losses]
    labels = parts[0][0] if len(parts) == 1 else np.concatenate([labels.reshape(-1) for labels, _, _ in parts])
    if tokens is not None and labels.size == tokens.size:
        labels = labels.reshape(tokens.shape)
    chunks = tuple(labels.size for labels, _, _ in parts) if len(parts) > 1 else ()
    total, valid = math.fsum(total for _, total, _ in parts), sum(valid for _, _, valid in parts)
    return Microbatch(tokens, labels if tokens is not None else labels.reshape(-1), total, valid, chunks)


def _read(loss: Loss) -> tuple[np.ndarray, float, int]:
    """Labels, -100 where they are ignored; the sum of the losses; how many labels count."""
    ignored = loss.labels == loss.ignore_index
    value = loss.value.double()
    if loss.trained is not None:
        ignored = ignored | ~loss.trained.reshape(ignored.shape)
        value = value.masked_fill(ignored.reshape(value.shape), 0.0)
    valid = int((~ignored).sum())
    total = float(value.sum()) if loss.reduction != "mean" else (float(value) * valid if valid else 0.0)
    return loss.labels.masked_fill(ignored, IGNORED).to("cpu", torch.int64).numpy(), total, valid
