"""What a diagnosis names, as data."""

from __future__ import annotations

from typing import Any

from harness.core.causes import diagnose
from harness.core.checks import judge
from harness.core.judge.result import Cause
from harness.core.judge.trial import Trial


def causes_of(trial: Trial) -> tuple[Cause, ...]:
    """Nothing raises on the way to them."""
    found = diagnose(trial, judge(trial))
    assert found is not None, "no check fails"
    assert not [text for label, text in found.evidence if label == "not tried"]
    return found.causes


def cause_of(trial: Trial) -> Cause:
    """The first."""
    return causes_of(trial)[0]


def data_of(cause: Cause, *names: str) -> tuple[Any, ...]:
    """Its kind, and of its details those of these names."""
    details = dict(cause.details)
    return (cause.kind, *(details[name] for name in names))
