"""The dtype of a forward pass is seen where the model's own forward enters autocast."""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn

from harness.recording.numbers import compute_dtype_of


def test_a_forward_that_is_wrapped_in_autocast_computes_in_its_dtype() -> None:
    """As accelerate does it, with another wrapper around it."""
    model = nn.Linear(2, 2)
    cast = torch.autocast("cpu", dtype=torch.bfloat16)(type(model).forward)

    @functools.wraps(cast)
    def outer(*args: Any) -> Any:
        return cast(*args).float()

    assert compute_dtype_of([model]) == ""
    model.forward = MethodType(outer, model)  # type: ignore[method-assign]
    assert compute_dtype_of([model]) == "bfloat16"
    assert compute_dtype_of([nn.Sequential(model)]) == "bfloat16"


@pytest.mark.parametrize(("enabled", "dtype"), [(True, "bfloat16"), (False, "")])
def test_an_autocast_that_is_turned_off_casts_nothing(enabled: bool, dtype: str) -> None:
    model = nn.Linear(2, 2)
    model.forward = torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled)(model.forward)  # type: ignore[method-assign]
    assert compute_dtype_of([model]) == dtype
