"""A weight as a trainer exported it, under the name that others know it by."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ExportedTensor:
    """One tensor of an export, read back from its file."""

    dtype: str
    """Name of the dtype in the file, such as "bfloat16"."""
    value: np.ndarray
    """All its elements, in that dtype; in float32 if `dtype` is "bfloat16", which numpy lacks."""


def as_exported(value: np.ndarray, dtype: str) -> np.ndarray:
    """Return a weight in the dtype of a file; bfloat16, which numpy lacks, as float32 that is rounded to it, ties to even."""
    if dtype != "bfloat16":
        return value.astype(dtype)
    bits = np.ascontiguousarray(value, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.asarray(rounded.astype(np.uint32).view(np.float32))
