"""The recorders' source where tensors have no memory: a dispatch mode that reports operators to them.

Operators on tensors without memory are answered before they come to a backend, and so above the recorders' kernels. This
dispatch mode stands above those who answer, and reports to the same recorders what a kernel would report.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from harness.core.probe.activity import ATTENTION_OPERATORS, BATCHED_MATMUL_FACTORS, MATMUL_FACTORS, RANDOM_OPERATORS
from harness.core.probe.collectives import C10D_OPERATORS
from harness.core.probe.storages import StorageRecorder

if TYPE_CHECKING:
    from harness.core.probe import Probe

FUNCTIONAL_COLLECTIVES = {
    "all_reduce": ("all_reduce", False),
    "all_gather_into_tensor": ("all_gather", True),
    "reduce_scatter_tensor": ("reduce_scatter", False),
    "all_to_all_single": ("all_to_all", False),
    "broadcast": ("broadcast", False),
}
"""Functional collectives, without the ends "_", "_out" and "_coalesced" -> as the recorder calls it, and whether the unsharded
tensor is the result."""
COMPOSITE_RANDOM_OPERATORS = ("rand", "randn", "rand_like", "randn_like", "bernoulli", "normal")
"""Operators that a backend brings down to those of RANDOM_OPERATORS, which draw into a tensor that is there."""
COPY_OPERATORS = ("copy_", "clone", "_to_copy")


SKIPPED_MODULES = ("torch._compile", "torch._dynamo.eval_frame")
"""torch has its compiler look away from what a dispatch mode does."""


class Witness(TorchDispatchMode):
    """Trap: it must leave DTensors to themselves, or what they do inside does not come by here.

    What is computed of real integers alone, such as a mesh's ranks, remains real.
    """

    def __init__(self, probe: Probe) -> None:
        super().__init__()
        self._probe = probe
        self._silence_depth = 0
        self.storages = StorageRecorder(probe.clock.step_and_phase)

    @contextlib.contextmanager
    def silenced(self) -> Iterator[None]:
        """Surround what is not recorded: torch's own operators, by which it finds shapes."""
        self._silence_depth += 1
        try:
            yield
        finally:
            self._silence_depth -= 1

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in kinds):
            return NotImplemented
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "aten" and not kinds and name != "lift_fresh" and _has_only_integers((args, kwargs)):
            with _disable_current_modes():
                return func(*args, **(kwargs or {}))
        if self._silence_depth:
            return func(*args, **(kwargs or {}))
        if namespace == "c10d" and name in C10D_OPERATORS:
            op, payload = C10D_OPERATORS[name]
            self._probe.collectives._note_operator(op, args[payload], args)
        results = func(*args, **(kwargs or {}))
        self.storages.note_results(results)
        if namespace == "_c10d_functional":
            self._note_functional_collective(func, name, args, results)
        elif namespace == "aten":
            full = f"{name}.{func._overloadname}".removesuffix(".default")
            self._note_operator(name, full, args, results, _frame_outside_torch_compiler(sys._getframe().f_back))
        return results

    def _note_functional_collective(self, func: Any, name: str, args: Any, results: Any) -> None:
        """Report a functional collective to the recorder of collectives. One of another name is left out."""
        base_name = name.removesuffix("_out").removesuffix("_").removesuffix("_coalesced")
        if base_name in FUNCTIONAL_COLLECTIVES:
            op, is_result = FUNCTIONAL_COLLECTIVES[base_name]
            group = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))["group_name"]
            self._probe.collectives.note(
                op, results if is_result else args[0], dist.distributed_c10d._resolve_process_group(group)
            )

    def _note_operator(self, name: str, operator: str, args: Any, results: Any, caller: types.FrameType | None) -> None:
        """Report a matmul, an attention, a draw or a copy to its recorder; nothing for other operators.

        name: the operator's, such as "mm". operator: with its overload, such as "mm.out". caller: the frame that called it.
        """
        probe = self._probe
        if operator in MATMUL_FACTORS:
            probe.activity.note_matmul(args[MATMUL_FACTORS[operator]])
        elif operator in BATCHED_MATMUL_FACTORS:
            probe.activity.note_batched_matmul(args[BATCHED_MATMUL_FACTORS[operator]])
        elif operator in ATTENTION_OPERATORS:
            probe.activity.note_attention(ATTENTION_OPERATORS[operator], args[0])
        elif operator in RANDOM_OPERATORS:
            probe.activity.note_draw(args[0])
        elif name in COMPOSITE_RANDOM_OPERATORS:
            probe.activity.note_draw(results)
        elif name in COPY_OPERATORS and isinstance(args[1 if name == "copy_" else 0], torch.Tensor):
            target, source = (args[0], args[1]) if name == "copy_" else (results, args[0])
            probe.copies.note_copy(target, source, caller)
        elif operator == "cat":
            probe.copies.note_concatenation(results, args[0], caller)


def _has_only_integers(arguments: Any) -> bool:
    tensors = [value for value in tree_leaves(arguments) if isinstance(value, torch.Tensor)]
    return bool(tensors) and not any(tensor.is_floating_point() for tensor in tensors)


def _frame_outside_torch_compiler(frame: types.FrameType | None) -> types.FrameType | None:
    """Return the frame that called the operator."""
    while frame is not None and frame.f_globals.get("__name__") in SKIPPED_MODULES:
        frame = frame.f_back
    return frame
