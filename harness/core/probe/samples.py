"""Tokens that each forward pass received, and the loss computed from them.

Tokens are the first of the root module's inputs (inputs.py), if they are integers (a later pipeline stage is called with
activations). A trainer may lay the samples of a batch end to end in one row: it is cut where the recipe has them
end. Positions are known by the name that the model gives its argument. The loss is losses.py's.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from harness.core.evidence.step import Microbatch
from harness.core.probe.clock import Account, Clock
from harness.core.probe.hooks import Hook
from harness.core.probe.inputs import inputs_of
from harness.core.probe.losses import LossRecorder, make_microbatch
from harness.core.probe.structure import as_numpy, local_tensor_of

POSITION_NAMES = ("positions", "position_ids", "input_pos")


class _ReceivedTensor(NamedTuple):
    """Copies on the device, read when all is done."""

    account: Account
    tensor: torch.Tensor


def begin_forward_pass(clock: Clock, module: nn.Module) -> None:
    """Tell the clock that a forward pass of a model begins, in its mode and the present one of gradients."""
    clock.enter_forward(recording=torch.is_grad_enabled(), in_training_mode=module.training)


def end_forward_pass(clock: Clock, output: Any) -> None:
    """Note that a forward pass ends. If it is undecided, it trains once backward comes to its output."""
    account = clock.account
    if account.kind == "undecided":
        for tensor in tree_leaves(output):
            if torch.is_tensor(tensor) and tensor.requires_grad:
                tensor.register_hook(functools.partial(_mark_pass_as_training, clock, account))
    clock.leave_forward()


def _mark_pass_as_training(clock: Clock, account: Account, _: torch.Tensor) -> None:
    clock.mark_as_training(account)


class SampleRecorder:
    """Tokens, positions and losses of forward passes.

    row_length: how many tokens of each sample this rank receives in a step; None if each row is a sample.
    """

    def __init__(self, clock: Clock, row_length: Callable[[int], int] | None = None) -> None:
        self._clock = clock
        self._row_length = row_length
        self.losses = LossRecorder(clock)
        self._tokens: list[_ReceivedTensor] = []
        self._positions: list[_ReceivedTensor] = []
        self._hooks: list[Any] = []
        self._is_called_alone = False

    def install(self) -> None:
        self.losses.install()

    def attach(self, parts: Iterable[nn.Module]) -> None:
        """Hook the parts, and the model inside DDP. A call of that is a pass, too: it is usual for evaluation.

        In training nothing is reduced then. Trap: the pre-hook must run before FSDP's, which gathers parameters in its own, so
        it is put in front.
        """
        for part in parts:
            self._hooks.append(part.register_forward_pre_hook(Hook(self._enter_pass), with_kwargs=True, prepend=True))
            self._hooks.append(part.register_forward_hook(Hook(self._leave_pass), always_call=True))
            inside = part.module if isinstance(part, DistributedDataParallel) else None
            if inside is not None and inside._compiled_call_impl is None:  # compiled code would hold the hook
                self._hooks.append(
                    inside.register_forward_pre_hook(Hook(self._enter_alone), with_kwargs=True, prepend=True)
                )
                self._hooks.append(inside.register_forward_hook(Hook(self._leave_alone), always_call=True))

    def remove(self) -> None:
        """Take the hooks out again. What was noted stays."""
        for hook in self._hooks:
            hook.remove()
        self.losses.remove()
        self._hooks = []

    def _enter_pass(self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tell the clock that a forward begins, and record the tokens and the positions that the part is given.

        Positions are the first tensor among the arguments of POSITION_NAMES. Tokens are the first of `inputs_of`.
        They are not recorded if they are floating point, or have neither one nor two dims.
        """
        begin_forward_pass(self._clock, part)
        arguments = dict(zip(inspect.signature(part.forward).parameters, args, strict=False)) | kwargs
        positions = next((arguments[name] for name in POSITION_NAMES if torch.is_tensor(arguments.get(name))), None)
        if positions is not None:
            self._positions.append(_ReceivedTensor(self._clock.account, local_tensor_of(positions).clone()))
        for tokens in inputs_of(args, kwargs)[:1]:
            if not tokens.is_floating_point() and tokens.dim() in (1, 2):
                self._tokens.append(_ReceivedTensor(self._clock.account, local_tensor_of(tokens).clone()))

    def _leave_pass(self, part: nn.Module, args: Any, output: Any) -> None:
        end_forward_pass(self._clock, output)

    def _enter_alone(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a pass of the model inside DDP that is called without DDP; nothing inside another pass or in backward."""
        self._is_called_alone = not self._clock.forward_depth and self._clock.phase() != "backward"
        if self._is_called_alone:
            self._enter_pass(module, args, kwargs)

    def _leave_alone(self, module: nn.Module, args: Any, output: Any) -> None:
        """End the pass that `_enter_alone` began; nothing if it began none, as when DDP calls the model."""
        if self._is_called_alone:
            self._leave_pass(module, args, output)
            self._is_called_alone = False

    def kept_tensors(self) -> list[torch.Tensor]:
        """Return the probe's own tensors, which are kept until training has ended."""
        return self.losses.kept_tensors()

    def positions_of_step(self, step: int) -> tuple[np.ndarray, ...]:
        """Return the different positions that the step's passes received, each once. int64 [samples, positions]"""
        recorded_positions = self._rows_of_inputs(self._positions, step, lambda account: account.trains_step(step))
        return tuple({rows.tobytes(): rows for rows in recorded_positions}.values())

    def microbatches(self, step: int) -> tuple[Microbatch, ...]:
        """Return one record a forward pass; the n-th loss of a step belongs to the n-th time that tokens were received."""
        return self._microbatches(lambda account: account.trains_step(step), step)

    def evaluation_microbatches(self, step: int) -> tuple[Microbatch, ...]:
        """Return one record for each pass between this step and the next that trained nothing."""
        return self._microbatches(lambda account: account.step == step and account.kind != "training", step)

    def _microbatches(self, is_selected: Callable[[Account], bool], step: int) -> tuple[Microbatch, ...]:
        """Return one record for each input of the step, or for each loss if there are more of these."""
        received = list(self._rows_of_inputs(self._tokens, step, is_selected))
        losses = self.losses.losses_by_pass(is_selected, [tokens.size for tokens in received])
        return tuple(
            make_microbatch(tokens, losses_of_pass or ())
            for tokens, losses_of_pass in itertools.zip_longest(received, losses)
        )

    def _rows_of_inputs(
        self, recorded: list[_ReceivedTensor], step: int, is_selected: Callable[[Account], bool]
    ) -> Iterator[np.ndarray]:
        """Yield [samples, positions] for each input of a selected account. One row that the recipe's length does not
        divide is not cut.
        """
        for copy_of_input in recorded:
            if not is_selected(copy_of_input.account):
                continue
            tokens: np.ndarray = as_numpy(copy_of_input.tensor).astype(np.int64, copy=False)
            length = self._row_length(step) if self._row_length and tokens.ndim == 1 else tokens.shape[-1]
            if tokens.ndim > 1:
                yield tokens
            else:
                yield tokens.reshape(-1, length if len(tokens) % length == 0 else len(tokens))
