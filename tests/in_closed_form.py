"""Literal references are made in closed form: what is assumed of one is worked out likewise, and nothing is trained."""

from __future__ import annotations

from typing import Any

import pytest
from literal_reference import retrained, retrained_apart

from harness.core.causes import assume


@pytest.fixture(autouse=True)
def in_closed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    def retrain(model: Any, training: Any, reference: Any, **otherwise: Any) -> Any:
        return retrained(training, reference, **otherwise)

    def apart(model: Any, training: Any, reference: Any, otherwise: Any, **told: Any) -> Any:
        return retrained_apart(training, reference, otherwise, **told)

    monkeypatch.setattr(assume, "retrain", retrain)
    monkeypatch.setattr(assume, "retrain_apart", apart)
