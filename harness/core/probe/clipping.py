"""Torch's functions that clip gradients, or make the norm by which they are clipped, replaced by ones that are observed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel

CLIP_BY_TOTAL_NORM = "clip_grad_norm_"
"""torch's function that makes the norm of all gradients and clips by it; FSDP1 has a method of this name."""
CLIP_BY_GIVEN_NORM = "clip_grads_with_norm_"
"""torch's function that is given a norm to clip by."""
MAKE_NORM = "get_total_norm"
"""torch's function that makes a norm, of a rank's own gradients if these are plain."""
CLIP_FUNCTIONS = (CLIP_BY_TOTAL_NORM, "clip_grad_value_", MAKE_NORM, CLIP_BY_GIVEN_NORM)
INNER_CLIP_FUNCTIONS = ("_get_total_norm", "_clip_grads_with_norm_")
"""What those call, which who imported them by name before comes to as well."""

ClipFunction = Callable[..., Any]


def observe_clipping(wrap: Callable[[str, ClipFunction], ClipFunction], names: Iterable[str]) -> Callable[[], None]:
    """Replace torch's clipping functions of these names by what `wrap` returns; return a function that puts them back.

    FSDP1's method is replaced with `clip_grad_norm_`. A name that this torch lacks is left out.
    wrap: gets the name and the function, and returns the one that is called instead.
    """
    names = tuple(names)
    owners_and_names: list[tuple[Any, str]] = list(itertools.product((torch.nn.utils, torch.nn.utils.clip_grad), names))
    if CLIP_BY_TOTAL_NORM in names:
        owners_and_names.append((FullyShardedDataParallel, CLIP_BY_TOTAL_NORM))
    patched: list[tuple[Any, str, ClipFunction]] = []
    for owner, name in owners_and_names:
        original = getattr(owner, name, None)
        if original is not None:
            patched.append((owner, name, original))
            setattr(owner, name, wrap(name, original))

    def put_back() -> None:
        for owner, name, original in reversed(patched):
            setattr(owner, name, original)

    return put_back
