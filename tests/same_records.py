"""Records compared as they lie on disk."""

from __future__ import annotations

import dataclasses

import numpy as np


def assert_same(one, other) -> None:
    """Equal records, arrays byte for byte with their dtype and shape."""
    assert type(one) is type(other), (one, other)
    if dataclasses.is_dataclass(one):
        for field in dataclasses.fields(one):
            assert_same(getattr(one, field.name), getattr(other, field.name))
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (tuple, list)):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    else:
        assert one == other or (one != one and other != other)
