"""The codec of records: a record as plain values of JSON and a list of arrays, and back.

Whatever ranks leave goes through it, in whatever file: evidence, references and checkpoints (npz), records and summaries of
recorded jobs, heads of sketches, and single records in JSON files. The types of a record's fields say how it is read. Its names
in files and its version are in format.py.

bfloat16 has no numpy dtype: such values are stored as float32, which holds every bfloat16 exactly; the field `dtype`
keeps the true one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import numpy as np

from harness.core.evidence.format import field_name, is_inlined, stored_items

T = TypeVar("T")


class ArraySource(Protocol):
    """The arrays of a record that is decoded, in the order in which they were encoded."""

    def take(self, dtype: str, shape: list[int]) -> np.ndarray:
        """Return the next array, of this dtype and shape."""


def encode(value: Any, arrays: list[np.ndarray] | None) -> Any:
    """Return a value as plain values of JSON: a record as a dict by names in files, a dict as [key, value] pairs.

    An array becomes [dtype, shape], and is appended to `arrays`, flat. None: values of arrays are not kept.
    """
    if dataclasses.is_dataclass(value):
        return {name: encode(item, arrays) for name, item in stored_items(value)}
    if isinstance(value, np.ndarray):
        if arrays is not None:
            arrays.append(np.ascontiguousarray(value).reshape(-1))
        return [str(value.dtype), list(value.shape)]
    if isinstance(value, dict):
        return [[key, encode(item, arrays)] for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [encode(item, arrays) for item in value]
    return value


def decode(kind: type[T], plain: Any, arrays: ArraySource) -> T:
    """Return the value of this type that `encode` encoded. A field that is missing in `plain` has its default.

    Raises KeyError for a field that the record does not have, and almost anything for values that do not fit the types.
    """
    read: Callable[[Any, ArraySource], T] = _reader(kind)  # type: ignore[arg-type]
    return read(plain, arrays)


def encoded_without_values(record: Any) -> Any:
    """Return a record as plain values of JSON. Arrays keep only their types and shapes."""
    return encode(record, None)


def decoded_without_values(kind: type[T], plain: Any) -> T:
    """Return the record that encoded_without_values encoded. Raises as `decode` does.

    Its arrays have the right shape, take no memory and hold zeros, which are not their values.
    """
    return decode(kind, plain, ArraysWithoutValues())


class ArraysWithoutValues:
    """A source of arrays whose values are not kept."""

    def take(self, dtype: str, shape: list[int]) -> np.ndarray:
        """Return an array of zeros that takes no memory."""
        return array_without_values(tuple(shape), dtype)


def array_without_values(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Return an array of this shape and dtype that takes no memory. Its zeros are not the values, which are not kept."""
    return np.broadcast_to(np.zeros((), dtype), shape)


def join_arrays(arrays: list[np.ndarray]) -> np.ndarray:
    """Return the bytes of flat arrays, one after the other: uint8 [bytes]. JoinedArrays takes them apart."""
    return np.concatenate([a.view(np.uint8).reshape(-1) for a in arrays]) if arrays else np.zeros(0, np.uint8)


class JoinedArrays:
    """A source of the arrays that join_arrays joined."""

    def __init__(self, joined: bytes) -> None:
        self.joined = joined
        self.position = 0

    def take(self, dtype: str, shape: list[int]) -> np.ndarray:
        """Return the next array, a view that cannot be written. Raises ValueError if fewer bytes are left."""
        count = math.prod(shape)
        array = np.frombuffer(self.joined, dtype, count, self.position) if count else np.zeros(0, dtype)
        self.position += array.nbytes
        return array.reshape(shape)


@functools.cache
def _reader(kind: Any) -> Callable[[Any, ArraySource], Any]:
    """Return the function that builds a value of this annotated type from plain values of JSON and a source of arrays.

    It is made once a type, for a run has tens of thousands of values.
    """
    origin = typing.get_origin(kind)
    args = typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        inner = _reader(next(arg for arg in args if arg is not type(None)))
        return lambda plain, arrays: None if plain is None else inner(plain, arrays)
    if dataclasses.is_dataclass(kind):
        return _record_reader(kind)
    if kind is np.ndarray:
        return lambda plain, arrays: arrays.take(*plain)
    if origin is dict:
        return _dict_reader(*args)
    if origin is tuple:
        each = _reader(args[0])
        return lambda plain, arrays: tuple([each(item, arrays) for item in plain])
    return lambda plain, arrays: plain


def _record_reader(kind: Any) -> Callable[[Any, ArraySource], Any]:
    """Return the function that rebuilds a record, with the parts whose fields lie among its own.

    Values are read in the order of the file, in which arrays are taken from their source.
    """
    fields = dataclasses.fields(kind)
    hints = typing.get_type_hints(kind)
    readers = {}
    for field in fields:
        if not is_inlined(field):
            readers[field_name(field)] = ("", field.name, _reader(hints[field.name]))
    parts = {field.name: hints[field.name] for field in fields if is_inlined(field)}
    for part, kind_of_part in parts.items():
        fields_of_part = dataclasses.fields(kind_of_part)
        assert not any(map(is_inlined, fields_of_part)), f"{kind_of_part}: records are inlined once"
        hints_of_part = typing.get_type_hints(kind_of_part)
        for field in fields_of_part:
            readers[field_name(field)] = (part, field.name, _reader(hints_of_part[field.name]))

    def rebuilt(plain: Any, arrays: ArraySource) -> Any:
        own_values: dict[str, Any] = {}
        values_by_part: dict[str, dict[str, Any]] = {part: {} for part in parts}
        for stored, item in plain.items():
            part, name, read = readers[stored]
            values = values_by_part[part] if part else own_values
            values[name] = read(item, arrays)
        for part, values in values_by_part.items():
            own_values[part] = parts[part](**values)
        return kind(**own_values)

    return rebuilt


def _dict_reader(key_kind: Any, value_kind: Any) -> Callable[[Any, ArraySource], Any]:
    """Return the function that rebuilds a dict from [key, value] pairs, or from an object of JSON, whose keys are texts.

    Keys are texts, numbers, or NamedTuples of texts, which JSON makes lists of. Heads of sketches once had objects.
    """
    read = _reader(value_kind)
    key_of: Callable[[Any], Any] = key_kind._make if hasattr(key_kind, "_make") else key_kind

    def rebuilt(plain: Any, arrays: ArraySource) -> Any:
        pairs = plain.items() if isinstance(plain, dict) else plain
        return {key_of(key): read(item, arrays) for key, item in pairs}

    return rebuilt
