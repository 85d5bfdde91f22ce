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
from harness.core.probe.structure import local_tensor_of

IGNORED_LABEL = -100
REDUCTIONS = ("none", "mean", "sum")
"""Torch's numbers are their indices."""

_installed: list[LossRecorder] = []


def note_loss(labels: torch.Tensor, value: torch.Tensor, *, reduction: str, ignore_index: int = IGNORED_LABEL) -> None:
    """For the adapter of a trainer that computes its loss by another function than torch's.

    Functions of torch that are called for the same pass then count for nothing: a trainer may multiply by a mask what they
    return.
    """
    for recorder in _installed:
        recorder.note_call(labels, value, reduction, ignore_index, by_adapter=True)


def noting_loss(compute: Callable[..., torch.Tensor], *, reduction: str) -> Callable[..., torch.Tensor]:
    """Return a trainer's function of (logits, labels) that also notes its value.

    If the function calls one of torch's loss functions, nothing is noted here: the recorder sees that call."""

    @functools.wraps(compute)
    def compute_and_note(logits: Any, labels: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        heard_before = [recorder.noted_calls for recorder in _installed]
        value = compute(logits, labels, *args, **kwargs)
        if heard_before == [recorder.noted_calls for recorder in _installed]:
            note_loss(labels, value, reduction=reduction)
        return value

    return compute_and_note


@dataclass
class Loss:
    """One call of a loss function."""

    account: Account  # the step's
    passes_before: int  # how many forward passes had begun
    labels: torch.Tensor
    value: torch.Tensor
    is_differentiable: bool  # gradients flow from it
    reduction: str
    ignore_index: int
    is_noted_by_adapter: bool  # it was noted, and not seen in a function of torch's
    has_gradient: torch.Tensor | None = (
        None  # of losses of single tokens: which have a gradient; None until backward comes
    )

    def see_gradient(self, gradient: torch.Tensor) -> None:
        """Note which single tokens' losses have a gradient other than zero, in addition to those noted before."""
        has_gradient = local_tensor_of(gradient) != 0
        self.has_gradient = has_gradient if self.has_gradient is None else self.has_gradient | has_gradient


class LossRecorder:
    """The calls of loss functions while it is installed, with copies of their labels and values.

    `noted_calls` counts all of them, also those that are not kept.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._noted: list[Loss] = []
        self.noted_calls = 0
        self._patched: list[tuple[Any, str, Any]] = []
        self._is_inside_loss = False

    def install(self) -> None:
        """Patch torch's loss functions, and take what adapters note from now on."""
        self._patch(torch._C._nn, "cross_entropy_loss", _read_kernel_arguments)
        self._patch(torch._C._nn, "nll_loss_nd", _read_kernel_arguments)
        if hasattr(torch.nn.functional, "linear_cross_entropy"):  # torch 2.13
            self._patch(torch.nn.functional, "linear_cross_entropy", _read_linear_arguments)
        _installed.append(self)

    def remove(self) -> None:
        """Put torch's loss functions back. What was noted stays."""
        for owner, name, original in reversed(self._patched):
            setattr(owner, name, original)
        if self in _installed:
            _installed.remove(self)
        self._patched = []

    def _patch(self, owner: Any, name: str, read_arguments: Callable[..., tuple[torch.Tensor, str, int]]) -> None:
        """Replace a loss function by one that notes each outermost call.

        read_arguments: returns labels, reduction and the label that is ignored, from the call's arguments."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def call_and_note(*args: Any, **kwargs: Any) -> torch.Tensor:
            is_outermost = not self._is_inside_loss
            self._is_inside_loss = True
            try:
                value = original(*args, **kwargs)
            finally:
                self._is_inside_loss = not is_outermost
            if is_outermost:
                labels, reduction, ignore_index = read_arguments(*args, **kwargs)
                self.note_call(labels, value, reduction, ignore_index)
            return value

        self._patched.append((owner, name, original))
        setattr(owner, name, call_and_note)

    def note_call(
        self,
        labels: torch.Tensor,
        value: torch.Tensor,
        reduction: str,
        ignore_index: int,
        *,
        by_adapter: bool = False,
    ) -> None:
        """Note one call of a loss function.

        Labels and value are copied, on the device and without waiting: a trainer may go on to reduce the loss or refill the
        labels in place. Not kept are calls inside backward, labels of floating-point numbers, and tensors without values.
        reduction: none, mean or sum. ignore_index: the label that is ignored. by_adapter: the adapter noted it.
        """
        clock = self._clock
        self.noted_calls = self.noted_calls + 1
        if clock.phase() == "backward" or labels.is_floating_point() or not _has_values(value):
            return
        belongs_to_step = value.requires_grad and clock.account_of_last_pass.kind == "evaluation"
        account = clock.account_of_step if belongs_to_step else clock.account_of_last_pass
        copied_tensors = local_tensor_of(labels).clone(), local_tensor_of(value).clone()
        passes = clock.passes
        has_gradient = value.requires_grad
        loss = Loss(account, passes, *copied_tensors, has_gradient, reduction, ignore_index, by_adapter)
        if has_gradient and reduction == "none" and loss.value.numel() == loss.labels.numel():
            value.register_hook(loss.see_gradient)
        self._noted.append(loss)

    def kept_tensors(self) -> list[torch.Tensor]:
        """Return the tensors that are kept until training has ended, so that no step waits for them."""
        kept = []
        for loss in self._noted:
            kept += [loss.labels, loss.value]
            if loss.has_gradient is not None:
                kept.append(loss.has_gradient)
        return kept

    def losses_by_pass(self, is_selected: Callable[[Account], bool], token_counts: Sequence[int]) -> list[list[Loss]]:
        """Return the losses that count, by microbatch, of passes whose account is selected.

        token_counts: how many tokens each pass received, where that was seen. If labels cannot be divided by them, losses are
        grouped
        by the forward pass before them.
        """
        selected_losses = (loss for loss in self._noted if is_selected(loss.account))
        losses_by_pass = itertools.groupby(selected_losses, key=lambda loss: loss.passes_before)
        groups = [_losses_that_count(list(losses_of_pass)) for _, losses_of_pass in losses_by_pass]
        if [_count_labels(group) for group in groups] == list(token_counts):
            return groups
        return _split_by_pass(list(itertools.chain.from_iterable(groups)), token_counts) or groups


def _read_kernel_arguments(
    input: Any, target: torch.Tensor, weight: Any = None, reduction: int = 1, ignore_index: int = IGNORED_LABEL, *_: Any
) -> tuple[torch.Tensor, str, int]:
    return target, REDUCTIONS[reduction], ignore_index


def _read_linear_arguments(
    input: Any, linear_weight: Any, target: torch.Tensor, *, reduction: str = "mean", ignore_index: Any = None, **_: Any
) -> tuple[torch.Tensor, str, int]:
    return target, reduction, IGNORED_LABEL if ignore_index is None else ignore_index


def _has_values(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has values. A tensor that a compiler traces with has none."""
    traced = type(local_tensor_of(tensor)).__name__ in ("FakeTensor", "FunctionalTensor")
    return not traced and tensor.device.type != "meta" and not torch.compiler.is_compiling()


def _losses_that_count(losses: list[Loss]) -> list[Loss]:
    """Return the calls of one pass that make its loss: those that an adapter noted, else those from which gradients flow.

    A trainer's own loss computed in autograd functions records nothing: then all are taken.
    """
    adapter_losses = [loss for loss in losses if loss.is_noted_by_adapter]
    return adapter_losses or [loss for loss in losses if loss.is_differentiable] or losses


def _count_labels(losses: Iterable[Loss]) -> int:
    return sum(loss.labels.numel() for loss in losses)


def _split_by_pass(losses: list[Loss], token_counts: Sequence[int]) -> list[list[Loss]] | None:
    """Return the losses of each pass, in order: as many as have a label for each of its tokens.

    None if the labels of some losses belong to tokens of two passes."""
    label_ends = list(itertools.accumulate(loss.labels.numel() for loss in losses))
    token_ends = list(itertools.accumulate(token_counts))
    if not set(token_ends) <= set(label_ends) or token_ends[-1:] != label_ends[-1:]:
        return None
    cuts = [0, *(label_ends.index(end) + 1 for end in token_ends)]
    return [losses[start:stop] for start, stop in itertools.pairwise(cuts)]


def make_microbatch(tokens: np.ndarray | None, losses: Sequence[Loss]) -> Microbatch:
    """Return the record of one pass. Its labels have the tokens' shape if there are as many of them."""
    if not losses:
        return Microbatch(tokens, None, None, None)
    loss_parts = [_read_loss(loss) for loss in losses]
    labels = (
        loss_parts[0][0]
        if len(loss_parts) == 1
        else np.concatenate([labels.reshape(-1) for labels, _, _ in loss_parts])
    )
    if tokens is not None and labels.size == tokens.size:
        labels = labels.reshape(tokens.shape)
    chunks = tuple(labels.size for labels, _, _ in loss_parts) if len(loss_parts) > 1 else ()
    total = math.fsum(total for _, total, _ in loss_parts)
    valid = sum(valid for _, _, valid in loss_parts)
    return Microbatch(tokens, labels if tokens is not None else labels.reshape(-1), total, valid, chunks)


def _read_loss(loss: Loss) -> tuple[np.ndarray, float, int]:
    """Return the labels, -100 where they are ignored; the sum of the losses; how many labels count."""
    is_ignored = loss.labels == loss.ignore_index
    value = loss.value.double()
    if loss.has_gradient is not None:
        is_ignored = is_ignored | ~loss.has_gradient.reshape(is_ignored.shape)
        value = value.masked_fill(is_ignored.reshape(value.shape), 0.0)
    valid_labels = int((~is_ignored).sum())
    total = float(value.sum()) if loss.reduction != "mean" else (float(value) * valid_labels if valid_labels else 0.0)
    return loss.labels.masked_fill(is_ignored, IGNORED_LABEL).to("cpu", torch.int64).numpy(), total, valid_labels
