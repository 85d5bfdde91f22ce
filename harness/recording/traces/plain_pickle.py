"""Reader of pickles of plain values that runs nothing of them: numbers, texts, lists, tuples and dicts, and nothing else."""

from __future__ import annotations

import io
import pickle
from typing import Any

PLAIN_LISTS = {("torch.jit._pickle", f"build_{kind}list"): list for kind in ("int", "double", "bool", "tensor")}
"""What torch's own pickler names for a list of one kind."""


class NotPlain(ValueError):
    """Error of a pickle that has something else than plain values, or is none."""


class _Reader(pickle._Unpickler):
    """Unpickler that makes plain values alone.

    It is the one written in Python: the one in C makes room for as many values as a damaged number says.
    """

    dispatch = {code: load for code, load in pickle._Unpickler.dispatch.items() if code != pickle.BYTEARRAY8[0]}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in PLAIN_LISTS:
            return PLAIN_LISTS[module, name]
        raise NotPlain(f"it names {module}.{name}, and only plain values are read")

    def persistent_load(self, pid: Any) -> Any:
        raise NotPlain("it refers to values outside of it")


def load_plain(data: bytes) -> Any:
    """Return the value of a pickle of plain values. Raises NotPlain for others, and for what is no pickle."""
    try:
        return _Reader(io.BytesIO(data)).load()
    except NotPlain:
        raise
    except Exception as error:  # a flipped byte makes it raise almost anything
        raise NotPlain(f"{type(error).__name__}: {error}") from error
