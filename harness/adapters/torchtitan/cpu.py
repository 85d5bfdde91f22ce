"""Patches that are applied before torchtitan is imported on a machine without accelerator; never on GPUs.

Nothing here changes what is computed or communicated. They answer questions about a device, and stub names that only
GPU code uses.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import re
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.utils import checkpoint

from harness.adapters.torchtitan.eras import MAIN_FUNCTION
from harness.adapters.torchtitan.source import Source

READERS = (
    "tiktoken",
    "sentencepiece",
    "blobfile",
    "grain",
)  # of text, by the early ones and the newest; samples are the case's
CUDA = re.compile(r"\bcuda\b")


def patch_for_cpu(source: Source) -> None:
    """Apply all patches of this module that the source's version needs, to torch and to imports in this process."""
    before_import()
    stub_memory_calls()
    if source.era.run_by == MAIN_FUNCTION.run_by:
        sys.meta_path.insert(0, ReadAsCpu(source.folder))
    use_gloo()
    sum_and_divide()
    disable_pinned_memory()


def before_import() -> None:
    """Patch what a module of torchtitan asks of torch as it is imported.

    Stub triton and readers of text that are not installed.
    """
    torch._utils._get_available_device_type = lambda: "cpu"
    keep_attention()
    sys.meta_path.append(Lend(("triton", *READERS)))


def keep_attention() -> None:
    """Patch torch's selective checkpointing to treat the CPU's attention operator like the GPU's, which policies name."""
    original = checkpoint.create_selective_checkpoint_contexts
    aten = torch.ops.aten
    cpu_operator = aten._scaled_dot_product_flash_attention_for_cpu.default
    gpu_operator = aten._scaled_dot_product_flash_attention.default

    def contexts(policy: Any, *args: Any, **kwargs: Any) -> Any:
        def policy_without_kernels(context: Any, operator: Any, *given: Any, **named: Any) -> Any:
            return policy(context, gpu_operator if operator is cpu_operator else operator, *given, **named)

        return original(policy_without_kernels if callable(policy) else policy, *args, **kwargs)

    checkpoint.create_selective_checkpoint_contexts = contexts


def stub_memory_calls() -> None:
    """Add to torch.cpu the functions of torch.cuda that a memory monitor calls. Those that torch.cpu has are left alone."""
    answers: dict[str, Any] = {
        "set_device": lambda *_: None,
        "get_device_name": lambda *_: "cpu",
        "get_device_properties": lambda *_: SimpleNamespace(total_memory=2**34, name="cpu"),
        "get_device_capability": lambda *_: (0, 0),
        "memory_stats": lambda *_: defaultdict(int),
        "reset_peak_memory_stats": lambda *_: None,
        "empty_cache": lambda *_: None,
    }
    for name, answer in answers.items():
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, answer)


def use_gloo() -> None:
    """Patch torch.distributed: every process group is made with gloo, whatever is requested, and barriers ignore device_ids."""
    init = dist.init_process_group
    barrier = dist.barrier

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        init("gloo", *args, **kwargs)

    def barrier_without_devices(*args: Any, device_ids: Any = None, **kwargs: Any) -> Any:
        return barrier(*args, **kwargs)

    dist.init_process_group = init_process_group
    dist.barrier = barrier_without_devices


def sum_and_divide() -> None:
    """Patch FSDP2 to sum and then divide gradients, as on devices of type mtia: gloo can neither multiply nor average."""
    original = _fsdp_collectives._get_gradient_divide_factors

    def divide_apart(scatter: Any, reduce: Any, dtype: Any, device_type: str = "", *args: Any, **kwargs: Any) -> Any:
        return original(scatter, reduce, dtype, "mtia", *args, **kwargs)

    _fsdp_collectives._get_gradient_divide_factors = divide_apart


def disable_pinned_memory() -> None:
    """Patch CPUOffloadPolicy to pin no memory, which torch refuses without an accelerator."""
    CPUOffloadPolicy.__init__ = functools.partialmethod(CPUOffloadPolicy.__init__, pin_memory=False)


def attend_densely() -> None:
    """Patch torchtitan's FlexAttention to use dense_attention, and masks to be made uncompiled.

    FlexAttention has no backward on CPU.
    """
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring
    from torch.nn.attention.flex_attention import create_block_mask
    from torchtitan.models.common import attention

    attention._compiled_create_block_mask = ring._compiled_create_block_mask = create_block_mask
    attention.FlexAttention._compiled_flex_attn = staticmethod(dense_attention)


def dense_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, block_mask: Any, scale: Any, enable_gqa: bool, **_: Any
) -> tuple[torch.Tensor, None]:
    """Return (attention, None) by SDPA, with the block mask as one whole mask. The output is [b, n, t, h].

    q [b, n, t, h]; k, v [b, m, s, h]. Memory is O(t s).
    """
    from torch.nn.attention.flex_attention import create_mask

    sees = create_mask(block_mask.mask_mod, q.shape[0], 1, q.shape[2], k.shape[2], device="cpu")
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q, k, v, attn_mask=sees, scale=scale, enable_gqa=enable_gqa), None


class ReadAsCpu(importlib.abc.MetaPathFinder):
    """An import finder that has torchtitan's sources below a folder read with the word cuda replaced by cpu.

    Early versions have cuda hard-coded.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of a module of torchtitan, whose source is then read for CPU. None for others, or if not found."""
        if name.partition(".")[0] != "torchtitan":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path or [str(self.folder)], target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = CpuLoader(spec.name, spec.loader.path)
        return spec


class CpuLoader(importlib.machinery.SourceFileLoader):
    """A loader that compiles a source with the word cuda replaced by cpu. It writes no byte code.

    Byte code would be found by whoever imports the same file on a GPU.
    """

    def get_code(self, fullname: str) -> Any:
        """Return the compiled source of the module, with cuda replaced by cpu."""
        path = self.get_filename(fullname)
        return compile(CUDA.sub("cpu", Path(path).read_text(encoding="utf-8")), path, "exec", dont_inherit=True)


class Lend(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An import finder that stubs packages which are not installed: each name in them exists and does nothing.

    It must be the last finder. names: of the packages.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of a stub for a module of the packages in `names`.

        None for other packages, and inside installed ones.
        """
        package = name.partition(".")[0]
        installed = name != package and not isinstance(sys.modules.get(package), _Lent)  # has what it has, and no more
        wanted = package in self.names and not installed
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if wanted else None

    def create_module(self, spec: Any) -> ModuleType:
        return _Lent(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


class _Lent(ModuleType):
    """A stubbed module. A name with a capital is an empty class, any other an object that can be called and does nothing.

    Classes are needed because torch asks whether something is an instance of triton's.
    """

    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Nothing,), {}) if name[0].isupper() else _Nothing()


class _Nothing:
    """An object whose every attribute and call is another such object. Used as a decorator it leaves the function alone."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()
