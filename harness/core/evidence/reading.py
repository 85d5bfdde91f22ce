"""Files that somebody else may have written: read only if they are regular files of a bounded size and depth."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

MAX_FILE_BYTES = 32_000_000  # bytes; plain JSON takes up to twenty times as much memory


def read_bytes(path: Path, largest: int = MAX_FILE_BYTES) -> bytes:
    """Return the bytes of a file. Raises OSError for a pipe, a device, a folder, and a file of more bytes than `largest`."""
    with open_regular_file(path) as file:
        data = file.read(largest + 1)
    if len(data) > largest:
        raise OSError(errno.EFBIG, f"it has more than {largest} bytes", str(path))
    return data


@contextlib.contextmanager
def open_regular_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file to read it. Raises OSError for a pipe, a device or a folder; a pipe without a writer would block."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        kind = os.fstat(file.fileno()).st_mode
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
        if not stat.S_ISREG(kind):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        yield file


def read_text(path: Path) -> str:
    """Return the text of a file. Raises OSError as read_bytes does, and ValueError if it is not UTF-8."""
    return read_bytes(path).decode("utf-8")


def read_json(path: Path) -> Any:
    """Return the JSON value of a file. Raises OSError as read_bytes does, and ValueError if it is not JSON."""
    return parse_json(read_bytes(path))


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError if it is not JSON, nested too deeply, or larger than a file may be."""
    if len(text) > MAX_FILE_BYTES:
        raise ValueError(f"more than {MAX_FILE_BYTES} bytes of JSON")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def decompress(data: bytes, largest: int = MAX_FILE_BYTES) -> bytes:
    """Return the bytes that zlib compressed. Raises ValueError if they are not zlib's, or more than `largest` bytes."""
    reader = zlib.decompressobj()
    try:
        text = reader.decompress(data, largest)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not reader.eof:
        raise ValueError(f"cut short, or more than {largest} bytes")
    return text
