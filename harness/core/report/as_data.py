"""Findings, causes and whatever holds them as plain values of JSON, and their document. Nothing is put in words here."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import __version__

SCHEMA_VERSION = 1
"""Version of the documents. It is raised if a field is removed or changes its meaning, but not for an additional field."""


def document_text(kind: str, data: Mapping[str, Any], indent: int | None = None) -> str:
    """Return the JSON text of a document: `data` behind the harness's version, the schema's version and the document's
    kind.

    It is ASCII, whatever letters names have. indent: as json.dumps takes it.
    """
    head = {"harness": __version__, "schema": SCHEMA_VERSION, "document": kind}
    return json.dumps(head | as_data(data), indent=indent, allow_nan=False)


def as_data(value: Any) -> Any:
    """Return a value as JSON can hold it: dataclasses as objects, sets as sorted lists, enums, paths and dates as text.

    Fields that are None or empty are left out, and entries of a mapping that are None. NaN and infinity, which JSON
    lacks, are text.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: as_data(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {name: data for name, data in fields.items() if data not in (None, "", [], {})}
    if isinstance(value, Mapping):
        return {_encodable_text(str(name)): as_data(entry) for name, entry in value.items() if entry is not None}
    if isinstance(value, set | frozenset):
        return [as_data(entry) for entry in sorted(value)]
    if isinstance(value, list | tuple):
        return [as_data(entry) for entry in value]
    if isinstance(value, enum.Enum | Path | str | datetime.date):
        return _encodable_text(str(value))
    if hasattr(value, "item"):  # a number of numpy, which what is printed of bad input does not import
        return as_data(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value


def _encodable_text(text: str) -> str:
    """Return the text with escapes in place of what UTF-8 cannot encode, as in a file's name in another encoding."""
    return text.encode(errors="backslashreplace").decode()
