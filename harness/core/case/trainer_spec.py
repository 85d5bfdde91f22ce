"""The trainer under test, and where it comes from, as it is written: NAME or FILE.py, or either with @SOURCE."""

from __future__ import annotations

import re
from dataclasses import dataclass

CHECKOUT_FOLDER = ".trainer"
"""The folder of OUT into which `harness nightly --commit` clones the trainer's repository, with its adapter."""
SPEC_PATTERN = re.compile(r"(?P<name>[\w-]+|.+?\.py|[^@]*)(@(?P<source>.*))?", re.DOTALL)


@dataclass(frozen=True)
class TrainerSpec:
    """name: of a trainer of ours, or the path of a FILE.py, which may contain an @. source: a checkout, or the folder in which
    pip installed a release; empty for the usual one."""

    name: str
    source: str = ""

    @classmethod
    def parse(cls, text: str) -> TrainerSpec:
        """Return the spec that a text writes. Any text is accepted; without an @ the source is empty.

        The name is a plain word before an @, else a path up to its .py, else all before the first @.
        """
        match = SPEC_PATTERN.fullmatch(text)
        assert match is not None  # the last alternative and what follows take any text
        return cls(match["name"], match["source"] or "")

    @property
    def is_file(self) -> bool:
        return self.name.endswith(".py")

    def __str__(self) -> str:
        return f"{self.name}@{self.source}" if self.source else self.name
