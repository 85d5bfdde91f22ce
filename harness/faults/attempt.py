"""The result of trying a fault: which checks fail with it, what it was named, what weaker tests would have said."""

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
    """The outcome of trying a fault. When each holds: `run_catalogue.outcome_of`."""

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
    """The result of trying one fault."""

    fault: str
    """Name of the fault."""
    bug: str
    family: str
    real: bool
    case: str
    outcome: Outcome
    cause: str = ""
    """The diagnosis' first line, without verdict and names."""
    kinds: tuple[str, ...] = ()
    """The kinds of its causes."""
    broken: tuple[str, ...] = ()
    """The checks that fail."""
    weaker: dict[str, bool] | None = None
    """By method, whether it noticed; None if not measured."""
    off: float | None = None
    """Largest relative error of the reported loss over ten steps; None if the faulty trainer did not get that far."""
    note: str = ""
    """Why it was not tried, or what is lacking."""


def attempts_to_json(done: Sequence[Attempt]) -> str:
    """Return attempts as they are stored in faults.json."""
    return json.dumps([asdict(attempt) for attempt in done], indent=1) + "\n"


def is_attempts(text: str) -> bool:
    """Return whether a text is one that attempts_to_json made."""
    try:
        attempts_from_json(text)
    except (ValueError, TypeError, KeyError):
        return False
    return True


def attempts_from_json(text: str) -> list[Attempt]:
    """Return the attempts stored in a text of attempts_to_json. Raises ValueError, TypeError or KeyError for any other text."""
    attempts = []
    for record in json.loads(text):
        outcome = Outcome(record["outcome"])
        kinds = tuple(record.get("kinds", ()))
        broken = tuple(record["broken"])
        attempts.append(Attempt(**{**record, "outcome": outcome, "kinds": kinds, "broken": broken}))
    return attempts


def accepted_attempts(stored: Path = ACCEPTED) -> list[Attempt]:
    """Return the attempts that were last accepted, from the file `stored`. Empty if there is none."""
    return attempts_from_json(stored.read_text(encoding="utf-8")) if stored.exists() else []
