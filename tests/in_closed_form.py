"""Literal references are made in closed form: what is assumed of one is worked out likewise, and nothing is trained."""

from __future__ import annotations

from typing import Any

import pytest
from literal_reference import retrained, retrained_apart

from harness.core.causes import all_facts, all_suspects, assume, costly_suspects

for load in (all_suspects, all_facts, costly_suspects):  # now, for what is imported under a patch keeps it
    load()


@pytest.fixture(autouse=True)
def in_closed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    def retrain(model: Any, training: Any, reference: Any, **otherwise: Any) -> Any:
        return retrained(training, reference, **otherwise)

    def apart(model: Any, training: Any, reference: Any, otherwise: Any, **told: Any) -> Any:
        return retrained_apart(training, reference, otherwise, **told)

    monkeypatch.setattr(assume, "retrain", retrain)
    monkeypatch.setattr(assume, "retrain_separately", apart)
