"""Patches of torch and Megatron-core for a machine without accelerator; never applied on GPUs.

Nothing here changes what is computed or communicated. It answers questions about a device. It puts tensors that are
made on "cuda" on the CPU. It marks the weight of a norm as the norms of GPUs do.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import sys
from collections.abc import Callable, Iterable
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch

TRITON = ("triton", "triton.language")
MAKERS = "arange as_tensor empty empty_like full linspace ones ones_like rand randn tensor zeros zeros_like"
KINDS = {
    "torch.DoubleTensor": "torch.cuda.FloatTensor",
    "torch.FloatTensor": "torch.cuda.FloatTensor",
    "torch.BFloat16Tensor": "torch.cuda.BFloat16Tensor",
}
"""What clipping and the optimizer assert of gradients and parameters, whose types here have other names."""


def patch_for_cpu() -> None:
    """Apply all patches of this module to torch and Megatron in this process.

    It may be called before or after megatron.core is imported.
    """
    patch_cuda_functions()
    for name in MAKERS.split():
        setattr(torch, name, with_cpu_tensors(getattr(torch, name)))
    patch_tensor_types()
    keep_random_state()
    mark_norms()


def import_without_triton(names: Iterable[str]) -> None:
    """Import Megatron's modules with a mock in the place of triton, which is removed afterwards.

    Releases from 0.17 on, and commits before 0.13, import triton for kernels of GPUs. The modules of torch that look
    for triton are imported before, so that they find none.
    """
    for name in ("hints", "triton_compat"):
        importlib.import_module(f"torch._inductor.runtime.{name}")
    importlib.import_module("torch._inductor.compile_fx")
    for name in TRITON:
        sys.modules[name] = MagicMock(__spec__=ModuleSpec(name, None), __version__="0")
    try:
        for name in names:
            importlib.import_module(name)
    finally:
        for name in TRITON:
            del sys.modules[name]


def patch_cuda_functions() -> None:
    """Replace functions of torch.cuda (device, streams, random state) by ones for a CPU.

    `Tensor.cuda` returns the tensor itself.
    """
    cpu = torch.device("cpu")
    stream = SimpleNamespace(wait_stream=lambda *_: None, wait_event=lambda *_: None, record_event=lambda *_: None)
    answers: dict[str, Any] = {
        "current_device": lambda: cpu,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "manual_seed": torch.manual_seed,
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "Stream": lambda *_, **__: stream,
        "stream": lambda *_: contextlib.nullcontext(),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor


def with_cpu_tensors(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return `make`, changed to make a tensor on the CPU if it is asked for one on cuda."""

    @functools.wraps(make)
    def make_on_cpu(*args: Any, **kwargs: Any) -> Any:
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return make(*args, **kwargs)

    return make_on_cpu


def patch_tensor_types() -> None:
    """Patch `Tensor.type` to name a CPU tensor's type like that of a CUDA tensor (KINDS), which Megatron asserts."""
    original = torch.Tensor.type

    @functools.wraps(original)
    def kind(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        name = original(tensor, *args, **kwargs)
        return KINDS.get(name, name) if isinstance(name, str) else name

    torch.Tensor.type = kind


def keep_random_state() -> None:
    """Have Megatron's tensor parallel read and set the CPU's random state in the place of CUDA's."""
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def mark_norms() -> None:
    """Patch torch's norm in Megatron to mark its weight as `sequence_parallel`, as Apex's norm does itself.

    Without the mark it is refused under sequence parallel.
    """
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    original = WrappedTorchNorm.__new__

    def make_marked_norm(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = original(cls, plain, *args, **kwargs)
        norm.weight.sequence_parallel = config.sequence_parallel
        return norm

    WrappedTorchNorm.__new__ = make_marked_norm
