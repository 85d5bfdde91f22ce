"""Findings, causes and whatever holds them as plain values of JSON. Nothing is put in words here."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


def as_data(value: Any) -> Any:
    """Return dataclasses as objects without what is None or empty; NaN and infinity, which JSON lacks, as text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: as_data(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {name: found for name, found in fields.items() if found not in (None, "", [], {})}
    if isinstance(value, Mapping):
        return {_text(str(name)): as_data(found) for name, found in value.items() if found is not None}
    if isinstance(value, list | tuple | set | frozenset):
        return [as_data(one) for one in (sorted(value) if isinstance(value, set | frozenset) else value)]
    if isinstance(value, enum.Enum | Path | str | datetime.date):
        return _text(str(value))
    if isinstance(value, np.generic):
        return as_data(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value


def _text(text: str) -> str:
    """Return it with what no reader of UTF-8 takes, as of a file's name in another encoding, as a number."""
    return text.encode(errors="backslashreplace").decode()
