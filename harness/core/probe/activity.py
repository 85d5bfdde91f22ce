"""What a rank computed in a step: forward calls of modules, matmuls, random numbers.

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
from harness.core.probe.host_copies import Copy, copied, read
from harness.core.probe.structure import local, plain_fqn
from harness.core.probe.without_memory import is_computed, is_without_memory

K = TypeVar("K")

PRODUCTS = {"mm": 0, "mm.out": 0, "addmm": 1, "addmm.out": 1, "_scaled_mm": 0, "_scaled_mm.out": 0}
PRODUCTS |= {"_scaled_mm_v2": 0, "_scaled_mm_v2.out": 0}
"""aten's matmuls, those with `out` called by compiled code -> which argument is the first factor."""

FUSED = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
ATTENTION = {name: "attention" for name in FUSED} | {f"{name}_backward": "attention_backward" for name in FUSED}
"""aten's fused attention."""
BATCHED = {"bmm": 0, "bmm.out": 0, "baddbmm": 1, "baddbmm.out": 1}
"""aten's batched matmuls, of which attention is made where it is not fused -> which argument is the first factor."""

DRAWS = ("uniform_", "normal_", "bernoulli_.float", "bernoulli_.Tensor", "native_dropout")
"""aten's operators that draw random numbers; rand, randn and dropout come down to them."""


class ActivityRecorder:
    """on_phase is called at the first matmul of each pass."""

    on_phase: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._accounts: dict[Account, Activity] = defaultdict(Activity)
        self._nobodys = Account(0)
        self._measured: list[tuple[Account, str, Copy, int]] = []
        self._states: dict[tuple[int, str], set[int]] = defaultdict(set)
        self._draws = False
        self._last: tuple[int, str] | None = None
        self._hooks: list[Any] = []
        self._library: torch.library.Library | None = None

    def install(self) -> None:
        """Put a kernel in front of each operator, below autograd and DTensor, as the recorder of collectives does."""
        self._library = torch.library.Library("aten", "IMPL")
        kernels = {name: functools.partial(self._product, factor) for name, factor in PRODUCTS.items()}
        kernels |= {name: functools.partial(self._attend, kind) for name, kind in ATTENTION.items()}
        kernels |= {name: functools.partial(self._product_of_batches, factor) for name, factor in BATCHED.items()}
        for name, kernel in (kernels | dict.fromkeys(DRAWS, self._draw)).items():
            packet, _, overload = name.partition(".")
            operator = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
            if operator is not None:
                kernel = functools.partial(kernel, operator)
                self._library.impl(name, kernel, "BackendSelect", with_keyset=True)

    def attach(self, parts: Iterable[nn.Module]) -> None:
        """Hook every module of the parts.

        A wrapper and what it wraps have one name. The inner module is hooked, because recomputation calls it alone."""
        for part in parts:
            for fqn, module in {plain_fqn(name): module for name, module in part.named_modules()}.items():
                self._hooks.append(module.register_forward_pre_hook(Hook(functools.partial(self._called, fqn))))

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.close()

    def close(self) -> None:
        """Take the kernels out again. Nothing if they are out already."""
        if self._library is not None:
            self._library._destroy()
        self._library = None

    def of_step(self, step: int) -> Activity:
        """Return a step's activity. Call it after waiting for the device."""
        activity = _together(
            account_activity for account, account_activity in self._accounts.items() if account.of(step)
        )
        for account, fqn, measured, elements in self._measured:
            if account.of(step):
                squares, count = activity.inputs.get(fqn, (0.0, 0.0))
                activity.inputs[fqn] = (squares + float(read(measured)), count + elements)
        return activity

    def _account(self) -> Account:
        is_between_steps = self._clock.is_between_steps and not torch.is_grad_enabled()
        return self._nobodys if is_between_steps else self._clock.account

    def _now(self) -> Activity:
        return self._accounts[self._account()]

    def _product(self, factor: int, operator: Any, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        self.multiplied(args[factor])
        return operator.redispatch(keyset & _BELOW, *args, **kwargs)

    def multiplied(self, first_factor: torch.Tensor) -> None:
        if is_computed(first_factor):
            if (where := self._clock.where()) != self._last:
                self._last = where
                self.on_phase()
            _count(self._now().matmuls, Matmul(self._clock.phase(), dtype_name(first_factor.dtype)))

    def _product_of_batches(self, factor: int, operator: Any, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        self.multiplied_batches(args[factor])
        return operator.redispatch(keyset & _BELOW, *args, **kwargs)

    def multiplied_batches(self, first_factor: torch.Tensor) -> None:
        """Note a batched matmul: as a matmul if its batch is one matrix, else as one that attention may be made of.

        einsum has no other matmul than a batch of one. An outer product, such as a table of angles, is not one."""
        if first_factor.shape[0] == 1 and first_factor.shape[-1] > 1:
            self.multiplied(first_factor)
        else:
            self.attended("batched matmul", first_factor)

    def _attend(self, kind: str, operator: Any, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        self.attended(kind, args[0])
        return operator.redispatch(keyset & _BELOW, *args, **kwargs)

    def attended(self, kind: str, query: torch.Tensor) -> None:
        if is_computed(query):
            _count(self._now().attention, Attention(self._clock.phase(), kind))

    def _draw(self, operator: Any, keyset: Any, *args: Any, **kwargs: Any) -> Any:
        self.drew(args[0])
        return operator.redispatch(keyset & _BELOW, *args, **kwargs)

    def drew(self, target: torch.Tensor) -> None:
        if is_computed(target):
            self._draws = not is_without_memory(target)  # from now on modules' states are compared, which costs time
            _count(self._now().random, self._clock.phase())

    def _called(self, fqn: str, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Note a module's call, and measure its input in the first step.

        Trap: a compiler traces this hook with the module; it must see nothing of it."""
        if torch.compiler.is_compiling():
            return
        phase = self._clock.phase()
        _count(self._now().calls, Call(phase, fqn))
        if self._clock.step == self._clock.start + 1 and phase == "forward":
            self._measure(fqn, inputs)
        if self._draws:
            self._compare_random_state(fqn, phase)

    def _measure(self, fqn: str, inputs: tuple[Any, ...]) -> None:
        """Keep the sum of squares and the number of elements of a module's first input.

        However a layout divides the input, the mean square over all ranks is that of one device."""
        if not inputs or not isinstance(inputs[0], torch.Tensor):
            return
        value = local(inputs[0])
        if value.is_floating_point() and is_computed(value) and not is_without_memory(value):
            self._measured.append((self._account(), fqn, copied(value.double().square().sum()), value.numel()))

    def _compare_random_state(self, fqn: str, phase: str) -> None:
        """Note the generators' state in forward, and count a recomputation that begins with none of these states."""
        known_states = self._states[self._clock.account.step, fqn]
        state = _random_state()
        if phase != "backward":
            known_states.add(state)
        elif known_states and state not in known_states:
            _count(self._now().other_states, fqn)


_BELOW = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _count(counts: dict[K, int], key: K, increment: int = 1) -> None:
    counts[key] = counts.get(key, 0) + increment


def _together(accounts: Iterable[Activity]) -> Activity:
    """Add up a step's accounts: one for all that surely trained, and one for each pass that later turned out to train."""
    total = Activity()
    for account_activity in accounts:
        for name in ("calls", "matmuls", "attention", "random", "other_states"):
            for key, count in getattr(account_activity, name).items():
                _count(getattr(total, name), key, count)
    return total


def _random_state() -> int:
    """Return a checksum of the default generators' states."""
    checksum = zlib.crc32(torch.default_generator.get_state().numpy().data)
    if torch.cuda.is_initialized():
        checksum = zlib.crc32(torch.cuda.get_rng_state().numpy().data, checksum)
    return checksum
