"""Python kernels in front of torch's operators, below autograd and DTensor: every call passes through them, whoever makes it.

They sit at the dispatch key BackendSelect, and pass the call on to the keys below.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

KEYS_BELOW = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
"""The dispatch keys to which a kernel passes a call on."""


class OperatorKernels:
    """Kernels in front of operators of one namespace of torch's, while they are installed."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._library: torch.library.Library | None = None

    def install(self, kernels: Mapping[str, Callable[..., Any]]) -> None:
        """Put each kernel in front of the operator of that name, such as "mm" or "mm.out".

        An operator that this torch lacks is left out.
        A kernel gets the operator, the dispatch keys of the call, and the call's arguments. It must pass the call on:
        `operator.redispatch(keyset & KEYS_BELOW, ..)`."""
        self._library = torch.library.Library(self._namespace, "IMPL")
        packets = getattr(torch.ops, self._namespace)
        for name, kernel in kernels.items():
            packet, _, overload = name.partition(".")
            operator = getattr(getattr(packets, packet, None), overload or "default", None)
            if operator is not None:
                self._library.impl(name, functools.partial(kernel, operator), "BackendSelect", with_keyset=True)

    def close(self) -> None:
        """Take the kernels out again. Nothing if they are out already."""
        if self._library is not None:
            self._library._destroy()
        self._library = None
