"""The version of stored records: a record can be judged only by checks that read it as it was meant.

Every file carries a number and a digest of the names and types of its record's fields, all the way down. The digest changes
with the records by itself. The number is raised by hand where a field keeps name and type and means something else than
before.

Names in files are data. What is renamed in Python keeps its name there: a field by `field(metadata=stored_as("old"))`, a record
by `STORED = "Old"` in its class. So no recording, golden, history or trusted reference becomes another one.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import types
import typing
from typing import Any

FORMAT = 2
LATER = {"later": True}
"""Marks a field with a default that a record got after files of its version were written: these stay readable."""


def stored_as(name: str) -> dict[str, Any]:
    """Return a field's metadata: the name that it has in files."""
    return {"stored": name}


def field_name(field: dataclasses.Field[Any]) -> str:
    """Return the name that a field has in files."""
    return str(field.metadata.get("stored", field.name))


def record_name(kind: type) -> str:
    """Return the name that a record has in files."""
    return str(vars(kind).get("STORED", kind.__name__))


def as_stored(value: Any) -> Any:
    """Return a record, and all records in it, as dicts by the names in files."""
    if dataclasses.is_dataclass(value):
        return {field_name(field): as_stored(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: as_stored(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(as_stored, value))
    return value


def version_of(kind: type) -> str:
    """Return the version of files that hold a record of this kind: 2-1a2b3c4d."""
    return f"{FORMAT}-{fields_digest(kind)}"


@functools.cache
def fields_digest(kind: type) -> str:
    """Return eight digits of a hash over the names and types of a record's fields, all the way down."""
    return hashlib.sha256(repr(_fields(kind)).encode()).hexdigest()[:8]


def _fields(kind: Any) -> list[Any]:
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        fields = (field for field in dataclasses.fields(kind) if "later" not in field.metadata)
        return [record_name(kind), *((field_name(field), _fields(hints[field.name])) for field in fields)]  # type: ignore[arg-type]
    if hasattr(kind, "_fields"):  # a NamedTuple, whose fields have no names in files
        return [record_name(kind), *((name, _fields(hint)) for name, hint in typing.get_type_hints(kind).items())]
    origin = typing.get_origin(kind) or kind
    name = "|" if origin in (types.UnionType, typing.Union) else getattr(origin, "__qualname__", str(origin))
    return [name, *map(_fields, typing.get_args(kind))]


def other_version(written: str, kind: type) -> str:
    """Return the reason why a file with this version is not read; empty for the version of this harness."""
    if written == version_of(kind):
        return ""
    digits = written.partition("-")[0]
    number = int(digits) if digits.isdigit() else 1
    if number < FORMAT:
        age = "an older"
    elif number > FORMAT:
        age = "a newer"
    else:
        age = "another"
    return f"written by {age} version of the harness (records {written or '1'}, here {version_of(kind)})"
