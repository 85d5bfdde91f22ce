"""Which version of the harness wrote a record: what is stored can be judged only by checks that read it as it was meant.

Every file carries a number and a digest of the names and types of its record's fields, all the way down. The digest changes
with the records by itself. The number is raised by hand where a field keeps name and type and means something else than
before.
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


def version_of(kind: type) -> str:
    """Return the version of files that hold a record of this kind: 2-1a2b3c4d."""
    return f"{FORMAT}-{fields_digest(kind)}"


@functools.cache
def fields_digest(kind: type) -> str:
    """Eight digits of the names and types of a record's fields, all the way down."""
    return hashlib.sha256(repr(_fields(kind)).encode()).hexdigest()[:8]


def _fields(kind: Any) -> list[Any]:
    if dataclasses.is_dataclass(kind):
        hints, known = typing.get_type_hints(kind), (one for one in dataclasses.fields(kind) if one.metadata != LATER)
        return [kind.__name__, *((one.name, _fields(hints[one.name])) for one in known)]  # type: ignore[union-attr]
    if hasattr(kind, "_fields"):  # a NamedTuple
        return [kind.__name__, *((name, _fields(hint)) for name, hint in typing.get_type_hints(kind).items())]
    origin = typing.get_origin(kind) or kind
    name = "|" if origin in (types.UnionType, typing.Union) else getattr(origin, "__qualname__", str(origin))
    return [name, *map(_fields, typing.get_args(kind))]


def other_version(written: str, kind: type) -> str:
    """Why a file with this version is not read; empty for one of ours."""
    if written == version_of(kind):
        return ""
    number = int(written.partition("-")[0]) if written.partition("-")[0].isdigit() else 1
    age = "an older" if number < FORMAT else "a newer" if number > FORMAT else "another"
    return f"written by {age} version of the harness (records {written or '1'}, here {version_of(kind)})"
