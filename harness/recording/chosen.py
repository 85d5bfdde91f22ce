"""Selection of the steps that are recorded, such as "1-3,100", or every so many."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_STEPS = "1-3"
STEPS_ERROR = "{!r}: steps are numbers from 1, and spans of them, such as 1-3,100"


@dataclass(frozen=True)
class StepSelection:
    """Steps that are recorded. Step 0, before the first one, is always one of them."""

    spans: tuple[tuple[int, int], ...] = ((1, 3),)
    """First and last step of each span."""
    every: int = 0
    """A number whose multiples are recorded as well; 0 for none."""

    @classmethod
    def parse(cls, text: str) -> StepSelection:
        """Return the steps that a text such as "1-3,100,/500" means: spans, single steps, and every 500th step.

        Empty text means DEFAULT_STEPS. Of several /N the largest counts. Raises ValueError for other words, and for spans
        that begin before 1 or end before they begin.
        """
        parts = [part.strip() for part in (text or DEFAULT_STEPS).split(",") if part.strip()]
        every = max((_parse_step(text, part[1:]) for part in parts if part.startswith("/")), default=0)
        spans = []
        for part in (part for part in parts if not part.startswith("/")):
            first, _, last = part.partition("-")
            spans.append((_parse_step(text, first), _parse_step(text, last or first)))
        if any(not 1 <= first <= last for first, last in spans):
            raise ValueError(STEPS_ERROR.format(text))
        return cls(tuple(spans), every)

    def __contains__(self, step: object) -> bool:
        if not isinstance(step, int) or step == 0:
            return step == 0
        for first, last in self.spans:  # no generator: this is asked a dozen times in each step that is not recorded
            if first <= step <= last:
                return True
        return bool(self.every and step % self.every == 0)


def _parse_step(text: str, part: str) -> int:
    """Return the number of a step. Raises ValueError if `part` is no number; the message names the whole text."""
    if not part.strip().isdecimal():
        raise ValueError(STEPS_ERROR.format(text))
    return int(part)
