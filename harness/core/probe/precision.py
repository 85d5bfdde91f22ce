"""Matmuls that really ran in 8 bits, by module and format: seen where torchao multiplies.

A matmul is noted when its two factors are quantized tensors, by the module whose forward call it serves, in forward and
backward. Compiled code calls nothing of torchao, and so leaves no note.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from harness.core.evidence.step import QuantizedMatmul
from harness.core.probe.clock import Account, Clock
from harness.core.probe.hooks import Hook
from harness.core.probe.structure import plain_fqn

TORCHAO_FUNCTIONS = (
    ("torchao.float8.float8_linear", "matmul_with_hp_or_float8_args"),
    ("torchao.prototype.moe_training.mxfp8_linear", "mx_mm"),
)
"""The autograd functions of torchao 0.18 that do one module's three matmuls."""

MATMUL = torch.ops.aten.mm.default


class QuantizedRecorder:
    """Counts of matmuls of quantized tensors, by phase, module and format."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._accounts: dict[Account, Counter[QuantizedMatmul]] = defaultdict(Counter)
        self._current_fqn = ""
        self._undo: list[Callable[[], None]] = []

    def attach(self, parts: Iterable[nn.Module]) -> None:
        """Patch torchao's matmuls and hook every module of the parts.

        torchao is looked for now, when the trainer is built. A trainer without it does not load it."""
        tables = [table for table in (_float8_operators(), _mx_operators()) if table is not None]
        for table in tables:
            self._patch_matmul(table)
        for name, function in TORCHAO_FUNCTIONS:
            if hasattr(sys.modules.get(name), function):
                self._patch_autograd_function(getattr(sys.modules[name], function))
        if tables:
            for part in parts:
                for name, module in part.named_modules():
                    hook = functools.partial(self._enter_module, plain_fqn(name))
                    self._undo.append(module.register_forward_pre_hook(Hook(hook)).remove)

    def remove(self) -> None:
        """Undo all patches and hooks, the last first."""
        for undo in reversed(self._undo):
            undo()
        self._undo = []

    def matmuls_of(self, step: int) -> dict[QuantizedMatmul, int]:
        """Return how many matmuls of each phase, module and format ran in passes that trained in a step."""
        return dict(
            sum(
                (matmuls for account, matmuls in self._accounts.items() if account.trains_step(step)),
                Counter[QuantizedMatmul](),
            )
        )

    def _enter_module(self, fqn: str, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._current_fqn = fqn

    def _patch_matmul(self, table: dict[Any, Any]) -> None:
        """Replace the matmul in one of torchao's tables by one that is counted."""
        original = table[MATMUL]

        @functools.wraps(original)
        def multiply_and_note(*args: Any, **kwargs: Any) -> Any:
            self._accounts[self._clock.account][
                QuantizedMatmul(self._clock.phase(), self._current_fqn, _format_of(args))
            ] += 1
            return original(*args, **kwargs)

        table[MATMUL] = multiply_and_note
        self._undo.append(lambda: table.__setitem__(MATMUL, original))

    def _patch_autograd_function(self, function: Any) -> None:
        """Have a function's backward pass belong to the module of its forward pass."""
        forward = function.forward
        backward = function.backward

        def forward_of(ctx: Any, *args: Any) -> Any:
            ctx.module_of_probe = self._current_fqn
            return forward(ctx, *args)

        def backward_of(ctx: Any, *gradients: Any) -> Any:
            self._current_fqn = getattr(ctx, "module_of_probe", "")
            return backward(ctx, *gradients)

        function.forward = staticmethod(forward_of)
        function.backward = staticmethod(backward_of)
        self._undo.append(lambda: setattr(function, "forward", staticmethod(forward)))
        self._undo.append(lambda: setattr(function, "backward", staticmethod(backward)))


def _float8_operators() -> dict[Any, Any] | None:
    """Return torchao's table of float8 operators; None if the trainer does not use them.

    Trap: torchao loads this module at the first matmul."""
    if "torchao.float8.float8_linear" not in sys.modules:
        return None
    return importlib.import_module("torchao.float8.float8_ops").FLOAT8_OPS_TABLE


def _mx_operators() -> dict[Any, Any] | None:
    """Return torchao's table of MX operators; None if the trainer has not imported MX tensors."""
    kind = getattr(sys.modules.get("torchao.prototype.mx_formats.mx_tensor"), "MXTensor", None)
    return None if kind is None else kind._ATEN_OP_TABLE[kind]


def _format_of(args: Any) -> str:
    """Return the format of the tensors in a matmul's arguments, or in lists among these."""
    leaves: list[Any] = []
    for arg in args:
        if isinstance(arg, (tuple, list)):
            leaves += arg
        else:
            leaves.append(arg)
    factors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if any(hasattr(factor, "block_size") for factor in factors):
        return "mxfp8"
    rowwise = any(getattr(factor, "_axiswise_dim", None) is not None for factor in factors)
    return "float8_rowwise" if rowwise else "float8_tensorwise"
