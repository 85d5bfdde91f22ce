"""The steps that are recorded: "1-3,100", and every so many."""

from __future__ import annotations

from dataclasses import dataclass

USUAL = "1-3"
WANTED = "{!r}: steps are numbers from 1, and spans of them, such as 1-3,100"


@dataclass(frozen=True)
class Chosen:
    """Steps that are recorded. Step 0, before the first one, is always one of them."""

    spans: tuple[tuple[int, int], ...] = ((1, 3),)
    """First and last step of each span."""
    every: int = 0
    """A number whose multiples are recorded as well; 0 for none."""

    @classmethod
    def parse(cls, text: str) -> Chosen:
        """Parse "1-3,100,/500": spans, single steps, and every 500th step. Raises ValueError."""
        parts = [part.strip() for part in (text or USUAL).split(",") if part.strip()]
        every = max((_number(text, part[1:]) for part in parts if part.startswith("/")), default=0)
        spans = []
        for part in (part for part in parts if not part.startswith("/")):
            first, _, last = part.partition("-")
            spans.append((_number(text, first), _number(text, last or first)))
        if any(not 1 <= first <= last for first, last in spans):
            raise ValueError(WANTED.format(text))
        return cls(tuple(spans), every)

    def __contains__(self, step: object) -> bool:
        if not isinstance(step, int) or step == 0:
            return step == 0
        return any(first <= step <= last for first, last in self.spans) or bool(self.every and step % self.every == 0)


def _number(text: str, part: str) -> int:
    """Return the number of a step. Raises ValueError."""
    if not part.strip().isdecimal():
        raise ValueError(WANTED.format(text))
    return int(part)
