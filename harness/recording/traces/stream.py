"""A profiler trace read in pieces, however large the file is: its events in batches, and what stands around them."""

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

from harness.core.evidence.reading import regular
from harness.core.evidence.store import EvidenceError

PIECE = 4_000_000  # characters that are read at once
LARGEST = 256_000_000  # characters of one value
EVENTS = "traceEvents"
_SPACE = re.compile(r"[\s,]*")
_BETWEEN = re.compile(r"\}\s*,\s*(?=\{)")
_DECODER = json.JSONDecoder(strict=False)


class NotJson(ValueError):
    """The text is no JSON, or ends too early."""


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file, through gzip where it is compressed. Raises EvidenceError with the remedy, also for what is read later."""
    try:
        with regular(path) as file:
            is_compressed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            yield cast(BinaryIO, gzip.GzipFile(fileobj=file)) if is_compressed else file
    except (OSError, EOFError, zlib.error) as error:
        why = "it is cut short" if isinstance(error, EOFError) else str(error)
        raise EvidenceError(f"{path}: cannot be read ({why}); copy it again from where it was written") from error


class Text:
    """A piece of the file, and the place in it that is reached."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.text = ""
        self.at = 0
        self.before = 0
        self.over = False
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def left(self) -> int:
        """Return how many characters of the piece are not read yet."""
        return len(self.text) - self.at

    def more(self) -> None:
        """Read a piece more, as long as what is here, and forget what is behind. Raises NotJson where nothing is left."""
        if self.over or self.left > LARGEST:
            raise NotJson("the file ends too early" if self.over else f"one value has more than {LARGEST} characters")
        piece = self.file.read(max(PIECE, self.left))
        self.over = not piece
        self.before += self.at
        self.text = self.text[self.at :] + self.decoder.decode(piece, final=self.over)
        self.at = 0

    def next(self) -> str:
        """Go to the next character that is neither space nor comma, and return it."""
        while True:
            self.at = cast(Any, _SPACE.match(self.text, self.at)).end()
            if self.left:
                return self.text[self.at]
            self.more()

    def value(self) -> Any:
        """Return the value that begins here. A number at the end of a piece may go on."""
        self.next()
        while True:
            try:
                decoded, end = _DECODER.raw_decode(self.text, self.at)
                if end < len(self.text) or self.over:
                    self.at = end
                    return decoded
            except json.JSONDecodeError as error:
                if self.over:
                    raise NotJson(f"character {self.before + error.pos}: {error.msg}") from error
            self.more()

    def expect(self, *letters: str) -> str:
        """Go past the next letter, which must be one of these, and return it. Raises NotJson."""
        letter = self.next()
        if letter not in letters:
            raise NotJson(f"character {self.before + self.at}: expected {' or '.join(letters)}, found {letter!r}")
        self.at += 1
        return letter


def events(file: BinaryIO, around: dict[str, Any]) -> Iterator[list[dict[str, Any]]]:
    """Yield the events of a trace in batches; `around` gets the other values of the file as they come. Raises NotJson."""
    text = Text(file)
    if text.expect("{", "[") == "[":
        yield from _array(text)
        return
    while text.next() != "}":
        key = text.value()
        text.expect(":")
        if key == EVENTS:
            text.expect("[")
            yield from _array(text)
        else:
            around[key] = text.value()


def _array(text: Text) -> Iterator[list[dict[str, Any]]]:
    """Yield its elements: many at once as long as a piece of the file has nothing else, then one by one."""
    while text.next() != "]":
        while text.left < PIECE // 2 and not text.over:
            text.more()
        yield _many(text) or list(itertools.islice(_single(text), 1000))
    text.at += 1


def _single(text: Text) -> Iterator[dict[str, Any]]:
    """Yield the elements of an array one by one."""
    while text.next() != "]":
        yield text.value()


def _many(text: Text) -> list[dict[str, Any]]:
    """Return the elements up to one of the last places that may lie between two; nothing where none does."""
    end = len(text.text)
    boundaries = [match.start() + 1 for match in _BETWEEN.finditer(text.text, max(text.at, end - 100_000), end)]
    for boundary in boundaries[:-4:-1]:
        with contextlib.suppress(json.JSONDecodeError):
            elements = json.loads(f"[{text.text[text.at : boundary]}]", strict=False)
            text.at = boundary
            return cast(list[dict[str, Any]], elements)
    return []
