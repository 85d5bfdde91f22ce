"""The version of stored records: a record can be judged only by checks that read it as it was meant.

Every file carries a number and a digest of the names and types of its record's fields, all the way down. The digest changes
with the records by itself. The number is raised by hand where a field keeps name and type and means something else than
before.

Names in files are data. What is renamed in Python keeps its name there: a field by `field(metadata=stored_as("old"))`, a record
by `STORED = "Old"` in its class. Fields that move into a record of their own keep their place in files by `INLINED`, and the
version by STORED_ORDER. So no recording, golden, history or trusted reference becomes another one. A record whose files had
numbers of their own has the one that is still read in `EARLIER_VERSION` of its class.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import types
import typing
from collections.abc import Iterator
from typing import Any

FORMAT_VERSION = 2
LATER = {"later": True}
"""Marks a field with a default that a record got after files of its version were written: these stay readable."""
INLINED = {"inlined": True}
"""Marks a field that holds a record: in files the fields of that record lie among those of the record that has the field.
STORED_ORDER in the class of the latter lists the names in files in the order of which the version is a digest."""


def stored_as(name: str) -> dict[str, Any]:
    """Return a field's metadata: the name that it has in files."""
    return {"stored": name}


def field_name(field: dataclasses.Field[Any]) -> str:
    """Return the name that a field has in files."""
    return str(field.metadata.get("stored", field.name))


def record_name(kind: type) -> str:
    """Return the name that a record has in files."""
    return str(vars(kind).get("STORED", kind.__name__))


def is_inlined(field: dataclasses.Field[Any]) -> bool:
    """Return whether a field holds a record of which files have the fields."""
    return "inlined" in field.metadata


def stored_items(record: Any) -> Iterator[tuple[str, Any]]:
    """Yield the names and values that files have of a record."""
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if is_inlined(field):
            yield from stored_items(value)
        else:
            yield field_name(field), value


def version_of(*kinds: type) -> str:
    """Return the version of files that hold records of these kinds: 2-1a2b3c4d, with a space between two."""
    return " ".join(f"{FORMAT_VERSION}-{fields_digest(kind)}" for kind in kinds)


@functools.cache
def fields_digest(kind: type) -> str:
    """Return eight digits of a hash over the names and types of a record's fields, all the way down."""
    return hashlib.sha256(repr(_field_types(kind)).encode()).hexdigest()[:8]


def _field_types(kind: Any) -> list[Any]:
    if dataclasses.is_dataclass(kind):
        return [record_name(kind), *_of_first_files(kind)]  # type: ignore[arg-type]
    if hasattr(kind, "_fields"):  # a NamedTuple, whose fields have no names in files
        return [record_name(kind), *((name, _field_types(hint)) for name, hint in typing.get_type_hints(kind).items())]
    origin = typing.get_origin(kind) or kind
    name = "|" if origin in (types.UnionType, typing.Union) else getattr(origin, "__qualname__", str(origin))
    return [name, *map(_field_types, typing.get_args(kind))]


def _of_first_files(kind: type) -> list[tuple[str, Any]]:
    """Return names and types of the fields that files of a version have had from the first."""
    hints = typing.get_type_hints(kind)
    fields: list[tuple[str, Any]] = []
    for field in dataclasses.fields(kind):
        if is_inlined(field):
            fields += _of_first_files(hints[field.name])
        elif "later" not in field.metadata:
            fields.append((field_name(field), _field_types(hints[field.name])))
    order = {name: position for position, name in enumerate(vars(kind).get("STORED_ORDER", ()))}
    return sorted(fields, key=lambda field: order.get(field[0], len(order)))


class OtherVersion(Exception):
    """A file is of another version. The message says of which one, and which one is read here."""


def refuse_other_version(written: object, *kinds: type) -> None:
    """Raise OtherVersion unless a file with this version, as it says, is read as one that holds these kinds of records."""
    text = str(written)
    if text == version_of(*kinds) or text in {vars(kind).get("EARLIER_VERSION") for kind in kinds}:
        return
    digits = text.partition("-")[0]
    # Numbers without a digest are those of before.
    number = int(digits) if "-" in text and digits.isdigit() else 1
    if number < FORMAT_VERSION:
        age = "an older"
    elif number > FORMAT_VERSION:
        age = "a newer"
    else:
        age = "another"
    raise OtherVersion(f"written by {age} version of the harness (records {text or '1'}, here {version_of(*kinds)})")
