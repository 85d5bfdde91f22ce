"""The computation of each step on a rank: forward calls of modules, matmuls, attention, random numbers.

No feature need report itself. A module called inside backward is recomputed. A module inside a compiled one is never
called from Python: its hooks are silent, though its matmuls are counted. Random numbers move the generator's state.
What is computed between two steps without recording gradients (validation of the bare model) belongs to no step.
"""

from __future__ import annotations

import functools
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import nn

from harness.core.evidence.step import Activity, Attention, Call, Matmul
from harness.core.probe.clock import Account, Clock
from harness.core.probe.hooks import Hook
from harness.core.probe.host_copies import HostCopy, copy_to_host, read_copy
from harness.core.probe.kernels import KEYS_BELOW, OperatorKernels
from harness.core.probe.structure import local_tensor_of, plain_fqn
from harness.core.probe.without_memory import has_real_computation, is_without_memory

K = TypeVar("K")

MATMUL_FACTORS = {"mm": 0, "mm.out": 0, "addmm": 1, "addmm.out": 1, "_scaled_mm": 0, "_scaled_mm.out": 0}
MATMUL_FACTORS |= {"_scaled_mm_v2": 0, "_scaled_mm_v2.out": 0}
"""aten's matmuls, those with `out` called by compiled code -> which argument is the first factor."""

FUSED_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
ATTENTION_OPERATORS = {name: "attention" for name in FUSED_ATTENTION} | {
    f"{name}_backward": "attention_backward" for name in FUSED_ATTENTION
}
"""aten's fused attention."""
BATCHED_MATMUL_FACTORS = {"bmm": 0, "bmm.out": 0, "baddbmm": 1, "baddbmm.out": 1}
"""aten's batched matmuls, of which attention is made where it is not fused -> which argument is the first factor."""

RANDOM_OPERATORS = ("uniform_", "normal_", "bernoulli_.float", "bernoulli_.Tensor", "native_dropout")
"""aten's operators that draw random numbers; rand, randn and dropout come down to them."""


class ActivityRecorder:
    """Counts of what was computed, by step and phase. `on_phase` is called at the first matmul of each pass."""

    on_phase: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._accounts: dict[Account, Activity] = defaultdict(Activity)
        self._discarded = Account(0)
        self._measured_inputs: list[tuple[Account, str, HostCopy, int]] = []
        self._random_states: dict[tuple[int, str], set[int]] = defaultdict(set)
        self._has_drawn = False
        self._last_phase: tuple[int, str] | None = None
        self._hooks: list[Any] = []
        self._kernels = OperatorKernels("aten")

    def install(self) -> None:
        """Put a kernel in front of each operator of matmuls, attention and random numbers."""
        kernels = {name: functools.partial(self._matmul_kernel, factor) for name, factor in MATMUL_FACTORS.items()}
        kernels |= {name: functools.partial(self._attention_kernel, kind) for name, kind in ATTENTION_OPERATORS.items()}
        kernels |= {
            name: functools.partial(self._batched_matmul_kernel, factor)
            for name, factor in BATCHED_MATMUL_FACTORS.items()
        }
        self._kernels.install(kernels | dict.fromkeys(RANDOM_OPERATORS, self._draw_kernel))

    def attach(self, parts: Iterable[nn.Module]) -> None:
        """Hook every module of the parts.

        A wrapper and what it wraps have one name. The inner module is hooked, because recomputation calls it alone."""
        for part in parts:
            for fqn, module in {plain_fqn(name): module for name, module in part.named_modules()}.items():
                self._hooks.append(
                    module.register_forward_pre_hook(Hook(functools.partial(self._note_module_call, fqn)))
                )

    def remove(self) -> None:
        """Take the hooks and the kernels out again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.close()

    def close(self) -> None:
        """Take the kernels out again. Nothing if they are out already."""
        self._kernels.close()

    def activity_of(self, step: int) -> Activity:
        """Return a step's activity, of passes that trained. Call it after waiting for the device."""
        activity = _add_up_accounts(
            account_activity for account, account_activity in self._accounts.items() if account.trains_step(step)
        )
        for account, fqn, measured, elements in self._measured_inputs:
            if account.trains_step(step):
                squares, count = activity.inputs.get(fqn, (0.0, 0.0))
                activity.inputs[fqn] = (squares + float(read_copy(measured)), count + elements)
        return activity

    def _current_account(self) -> Account:
        is_between_steps = self._clock.is_between_steps and not torch.is_grad_enabled()
        return self._discarded if is_between_steps else self._clock.account

    def _current_activity(self) -> Activity:
        return self._accounts[self._current_account()]

    def _matmul_kernel(self, factor: int, operator: Any, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        self.note_matmul(args[factor])
        return operator.redispatch(keyset & KEYS_BELOW, *args, **kwargs)

    def note_matmul(self, first_factor: torch.Tensor) -> None:
        """Count a matmul by phase and dtype; call `on_phase` if it is the first of a step's phase.

        A matmul that a compiler traces, or on the meta device, is not counted.
        """
        if has_real_computation(first_factor):
            if (where := self._clock.step_and_phase()) != self._last_phase:
                self._last_phase = where
                self.on_phase()
            _add_count(self._current_activity().matmuls, Matmul(self._clock.phase(), dtype_name(first_factor.dtype)))

    def _batched_matmul_kernel(self, factor: int, operator: Any, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        self.note_batched_matmul(args[factor])
        return operator.redispatch(keyset & KEYS_BELOW, *args, **kwargs)

    def note_batched_matmul(self, first_factor: torch.Tensor) -> None:
        """Note a batched matmul: as a matmul if its batch is one matrix, else as one that attention may be made of.

        einsum has no other matmul than a batch of one. An outer product, such as a table of angles, is not one."""
        if first_factor.shape[0] == 1 and first_factor.shape[-1] > 1:
            self.note_matmul(first_factor)
        else:
            self.note_attention("batched matmul", first_factor)

    def _attention_kernel(self, kind: str, operator: Any, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        self.note_attention(kind, args[0])
        return operator.redispatch(keyset & KEYS_BELOW, *args, **kwargs)

    def note_attention(self, kind: str, query: torch.Tensor) -> None:
        if has_real_computation(query):
            _add_count(self._current_activity().attention, Attention(self._clock.phase(), kind))

    def _draw_kernel(self, operator: Any, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        self.note_draw(args[0])
        return operator.redispatch(keyset & KEYS_BELOW, *args, **kwargs)

    def note_draw(self, target: torch.Tensor) -> None:
        """Count a draw of random numbers into this tensor by phase. From the first one on, modules' random states are
        compared.
        """
        if has_real_computation(target):
            self._has_drawn = not is_without_memory(
                target
            )  # from now on modules' states are compared, which costs time
            _add_count(self._current_activity().random, self._clock.phase())

    def _note_module_call(self, fqn: str, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Note a module's call, and measure its input in the first step.

        Trap: a compiler traces this hook with the module; it must see nothing of it."""
        if torch.compiler.is_compiling():
            return
        phase = self._clock.phase()
        _add_count(self._current_activity().calls, Call(phase, fqn))
        if self._clock.step == self._clock.start_step + 1 and phase == "forward":
            self._measure_input(fqn, inputs)
        if self._has_drawn:
            self._compare_random_state(fqn, phase)

    def _measure_input(self, fqn: str, inputs: tuple[Any, ...]) -> None:
        """Keep the sum of squares and the number of elements of a module's first input.

        However a layout divides the input, the mean square over all ranks is that of one device."""
        if not inputs or not isinstance(inputs[0], torch.Tensor):
            return
        value = local_tensor_of(inputs[0])
        if value.is_floating_point() and has_real_computation(value) and not is_without_memory(value):
            self._measured_inputs.append(
                (self._current_account(), fqn, copy_to_host(value.double().square().sum()), value.numel())
            )

    def _compare_random_state(self, fqn: str, phase: str) -> None:
        """Note the generators' state in forward, and count a recomputation that begins with none of these states."""
        known_states = self._random_states[self._clock.account.step, fqn]
        state = _random_state()
        if phase != "backward":
            known_states.add(state)
        elif known_states and state not in known_states:
            _add_count(self._current_activity().other_states, fqn)


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _add_count(counts: dict[K, int], key: K, increment: int = 1) -> None:
    counts[key] = counts.get(key, 0) + increment


def _add_up_accounts(accounts: Iterable[Activity]) -> Activity:
    """Add up a step's accounts: one for all that surely trained, and one for each pass that later turned out to train."""
    total = Activity()
    for account_activity in accounts:
        for name in ("calls", "matmuls", "attention", "random", "other_states"):
            for key, count in getattr(account_activity, name).items():
                _add_count(getattr(total, name), key, count)
    return total


def _random_state() -> int:
    """Return a checksum of the default generators' states."""
    checksum = zlib.crc32(torch.default_generator.get_state().numpy().data)
    if torch.cuda.is_initialized():
        checksum = zlib.crc32(torch.cuda.get_rng_state().numpy().data, checksum)
    return checksum
