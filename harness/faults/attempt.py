"""What became of a fault: which checks fail with it, what it was named, what weaker tests would have said."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

STEPS = 10
"""Steps of the runs that weaker tests compare."""

ACCEPTED = Path(__file__).with_name("results.json")
"""What was last measured of the catalogue."""


class Outcome(StrEnum):
    CAUGHT = "CAUGHT"
    OTHERWISE = "CAUGHT OTHERWISE"
    MISSED = "MISSED"
    UNFIRED = "UNFIRED"
    TIMEOUT = "TIMEOUT"
    NOT_TRIED = "NOT TRIED"


METHODS = {
    "exit_code": "exit code only",
    "within_1_percent": f"loss curve within 1% over {STEPS} steps",
    "within_1e_5": f"loss curve within 1e-5 over {STEPS} steps",
    "process_groups": "listing of process groups",
}


@dataclass(frozen=True)
class Attempt:
    """What became of one fault. cause: the diagnosis' first line, without verdict and names. kinds: of its causes. broken: the
    checks that fail.

    weaker: by method, whether it noticed; empty if not measured. off: by how much the reported loss is off at worst over
    ten steps, None if the faulty trainer did not get that far. note: why it was not tried, or what is lacking.
    """

    fault: str
    bug: str
    family: str
    real: bool
    case: str
    outcome: Outcome
    cause: str = ""
    kinds: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()
    weaker: dict[str, bool] | None = None
    off: float | None = None
    note: str = ""


def to_json(done: Sequence[Attempt]) -> str:
    return json.dumps([asdict(attempt) for attempt in done], indent=1) + "\n"


def is_attempts(text: str) -> bool:
    """Return whether a text is what to_json makes."""
    try:
        from_json(text)
    except (ValueError, TypeError, KeyError):
        return False
    return True


def from_json(text: str) -> list[Attempt]:
    records = json.loads(text)
    return [
        Attempt(
            **{
                **record,
                "outcome": Outcome(record["outcome"]),
                "kinds": tuple(record.get("kinds", ())),
                "broken": tuple(record["broken"]),
            }
        )
        for record in records
    ]


def accepted(stored: Path = ACCEPTED) -> list[Attempt]:
    """Empty where nothing is stored."""
    return from_json(stored.read_text(encoding="utf-8")) if stored.exists() else []
