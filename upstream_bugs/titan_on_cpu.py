"""Imported before torchtitan by the programs here: on a machine without accelerator torchtitan asks for one, and for triton."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections import defaultdict
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


def lent(*args: Any, **_: Any) -> Any:
    """Return the decorated function unchanged; also works with options."""
    return args[0] if len(args) == 1 and callable(args[0]) else lent


class Lent(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lent


class Triton(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stubs for Triton's kernels, which nothing calls here."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        wanted = name.partition(".")[0] == "triton"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if wanted else None

    def create_module(self, spec: Any) -> ModuleType:
        return Lent(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


if not torch.accelerator.is_available():
    torch._utils._get_available_device_type = lambda: "cpu"
    import torch._inductor.compile_fx  # looks for triton once, and must not find this one

    if importlib.util.find_spec("triton") is None:
        sys.meta_path.append(Triton())
    for name, answer in {
        "set_device": None,
        "get_device_name": "cpu",
        "get_device_properties": SimpleNamespace(total_memory=2**34, name="cpu"),
        "memory_stats": defaultdict(int),
        "reset_peak_memory_stats": None,
        "empty_cache": None,
    }.items():  # a memory monitor calls them
        setattr(torch.cpu, name, lambda *_, answer=answer: answer)
