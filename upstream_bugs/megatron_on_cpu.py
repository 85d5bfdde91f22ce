"""Imported before megatron.core by the programs here: on a machine without accelerator it asks for one. Computes nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch


def on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        return make(*args, **{**kwargs, "device": "cpu"} if "device" in kwargs else kwargs)

    return made


def arrange() -> None:
    nothing = SimpleNamespace(wait_stream=lambda *_: None)
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.default_stream = torch.cuda.current_stream = lambda *_: nothing
    torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()
    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.synchronize = lambda *_: None
    for name in ("empty", "full", "ones", "tensor", "zeros"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    plain = torch.Tensor.type
    torch.Tensor.type = lambda tensor, *to, **how: (
        plain(tensor, *to, **how) if to or how else f"torch.cuda.{plain(tensor).rpartition('.')[2]}"
    )


if not torch.cuda.is_available():
    arrange()
