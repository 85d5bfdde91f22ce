"""The quarantine: cases that a person has set aside for a while, in a file in git, which no command writes.

The file is a list. Each entry expires. What is broken is still shown, but counted separately.

    - case: hsdp_2x2
      cause: HSDP ran as FSDP     # a part of the cause; other causes still count
      reason: torch's nightly of 2026-03-02 ignores the mesh, pytorch/pytorch#123
      person: Ada
      until: 2026-04-01           # the last day
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from harness.core.case.case import CaseError
from harness.core.case.loading import as_mapping, refuse_unknown
from harness.core.case.yaml_documents import document_of
from harness.core.evidence.reading import read_text

ENTRY_KEYS = ("case", "cause", "reason", "person", "until")


@dataclass(frozen=True)
class QuarantineEntry:
    """A case that a person has set aside until a day."""

    case: str
    cause: str
    reason: str
    person: str
    until: datetime.date  # the last day on which it holds

    def is_active(self, day: datetime.date) -> bool:
        """Return whether the case is still set aside on that day."""
        return day <= self.until

    def __str__(self) -> str:
        return f"{self.case}: set aside by {self.person} until {self.until}: {self.reason}"


def load_quarantine(path: Path) -> tuple[QuarantineEntry, ...]:
    """Return the entries of a quarantine file; none for an empty file.

    Raises CaseError if it cannot be read, is no list, has a wrong entry, or two entries of one case.
    """
    try:
        written = document_of(read_text(path))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise CaseError(f"{path}: cannot be read: {error}") from error
    if not isinstance(written, list | None):
        raise CaseError(f"{path}: expected a list of entries with {', '.join(ENTRY_KEYS)}")
    entries = tuple(_parse_entry(entry, f"{path}: entry {number}") for number, entry in enumerate(written or [], 1))
    _refuse_repeated_cases([quarantine.case for quarantine in entries], path)
    return entries


def _parse_entry(written: Any, where: str) -> QuarantineEntry:
    """Return one entry. Raises CaseError if a key is unknown, lacking or of another type."""
    entry = as_mapping(written, where)
    refuse_unknown(entry, ENTRY_KEYS, where)
    for key in ENTRY_KEYS:
        value_type = datetime.date if key == "until" else str
        if type(entry.get(key)) is not value_type or not entry[key]:
            raise CaseError(f"{where}: {key!r} must be {'a day, 2026-04-01' if key == 'until' else 'some text'}")
    return QuarantineEntry(**entry)


def _refuse_repeated_cases(cases: Sequence[str], path: Path) -> None:
    """Raise CaseError if a case occurs more than once. cases: the case of each entry."""
    if repeated := sorted({case for case in cases if cases.count(case) > 1}):
        raise CaseError(f"{path}: more than one entry of {', '.join(repeated)}")
