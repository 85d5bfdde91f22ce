"""Numbers as a person writes them."""

from __future__ import annotations

import pytest

from harness.core.evidence.text import number_text


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [(-0.0, 6, "0"), (0.0, 6, "0"), (-0.5, 6, "-0.5"), (1.23456, 4, "1.235"), (-1e-12, 2, "-1e-12"), (0.1, 10, "0.1")],
)
def test_a_zero_has_no_sign(value: float, digits: int, text: str) -> None:
    assert number_text(value, digits) == text
