"""Reader of a profiler trace in pieces, however large the file is: its events in batches, and what stands around them."""

from __future__ import annotations

import codecs
import contextlib
import gzip
import itertools
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from harness.core.evidence.reading import open_regular_file
from harness.core.evidence.store import EvidenceError

PIECE = 4_000_000  # characters that are read at once
LONGEST_VALUE = 256_000_000  # characters of one value
EVENTS_KEY = "traceEvents"
_SPACE = re.compile(r"[\s,]*")
_BETWEEN = re.compile(r"\}\s*,\s*(?=\{)")
_DECODER = json.JSONDecoder(strict=False)


class NotJson(ValueError):
    """Error of a text that is no JSON, or ends too early."""


@contextlib.contextmanager
def open_trace(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading bytes, through gzip where it is compressed; it is closed afterwards.

    Raises EvidenceError with the remedy, also for an error in what is read later.
    """
    try:
        with open_regular_file(path) as file:
            is_compressed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            yield cast(BinaryIO, gzip.GzipFile(fileobj=file)) if is_compressed else file
    except (OSError, EOFError, zlib.error) as error:
        why = "it is cut short" if isinstance(error, EOFError) else str(error)
        raise EvidenceError(f"{path}: cannot be read ({why}); copy it again from where it was written") from error


class PartialText:
    """A piece of the file, and the place in it that is reached."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.text = ""
        self.position = 0
        self.offset = 0
        self.is_read = False
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def remaining(self) -> int:
        """Return how many characters of the piece are not read yet."""
        return len(self.text) - self.position

    def read_more(self) -> None:
        """Read a further piece, at least as long as what is left, and drop what is behind the position.

        Raises NotJson where nothing is left, or one value is longer than LONGEST_VALUE.
        """
        if self.is_read or self.remaining > LONGEST_VALUE:
            raise NotJson(
                "the file ends too early" if self.is_read else f"one value has more than {LONGEST_VALUE} characters"
            )
        piece = self.file.read(max(PIECE, self.remaining))
        self.is_read = not piece
        self.offset += self.position
        self.text = self.text[self.position :] + self.decoder.decode(piece, final=self.is_read)
        self.position = 0

    def next_letter(self) -> str:
        """Go to the next character that is neither space nor comma, and return it without going past it.

        Raises NotJson at the end.
        """
        while True:
            self.position = cast(Any, _SPACE.match(self.text, self.position)).end()
            if self.remaining:
                return self.text[self.position]
            self.read_more()

    def read_value(self) -> Any:
        """Return the JSON value that begins here, and go past it.

        Raises NotJson. A number at the end of a piece may go on.
        """
        self.next_letter()
        while True:
            try:
                decoded, end = _DECODER.raw_decode(self.text, self.position)
                if end < len(self.text) or self.is_read:
                    self.position = end
                    return decoded
            except json.JSONDecodeError as error:
                if self.is_read:
                    raise NotJson(f"character {self.offset + error.pos}: {error.msg}") from error
            self.read_more()

    def expect(self, *letters: str) -> str:
        """Go past the next letter and return it. Raises NotJson if it is none of these."""
        letter = self.next_letter()
        if letter not in letters:
            raise NotJson(f"character {self.offset + self.position}: expected {' or '.join(letters)}, found {letter!r}")
        self.position += 1
        return letter


def event_batches(file: BinaryIO, around: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """Yield the events of a trace in batches. Other keys of the file are written into `around` as they come.

    The file is an array of events, or an object that has one. Raises NotJson.
    """
    text = PartialText(file)
    if text.expect("{", "[") == "[":
        yield from _array_batches(text)
        return
    while text.next_letter() != "}":
        key = text.read_value()
        text.expect(":")
        if key == EVENTS_KEY:
            text.expect("[")
            yield from _array_batches(text)
        else:
            around[key] = text.read_value()


def _array_batches(text: PartialText) -> Iterator[list[dict[str, Any]]]:
    """Yield the elements of an array in batches: as many as a piece of the file holds.

    Where it cannot be cut between two elements, they are read one by one, up to 1000 a batch.
    """
    while text.next_letter() != "]":
        while text.remaining < PIECE // 2 and not text.is_read:
            text.read_more()
        yield _many_elements(text) or list(itertools.islice(_single_elements(text), 1000))
    text.position += 1


def _single_elements(text: PartialText) -> Iterator[dict[str, Any]]:
    """Yield the elements of an array one by one."""
    while text.next_letter() != "]":
        yield text.read_value()


def _many_elements(text: PartialText) -> list[dict[str, Any]]:
    """Return the elements up to one of the last places that may lie between two, and go past them; empty where there
    is none."""
    end = len(text.text)
    boundaries = [match.start() + 1 for match in _BETWEEN.finditer(text.text, max(text.position, end - 100_000), end)]
    for boundary in boundaries[:-4:-1]:
        with contextlib.suppress(json.JSONDecodeError):
            elements = json.loads(f"[{text.text[text.position : boundary]}]", strict=False)
            text.position = boundary
            return cast(list[dict[str, Any]], elements)
    return []
