"""What a trainer may keep, copy or move besides what the plan knows: declared by a case or an adapter, in bytes, with a reason.

An allowance is reviewed in git and shown in the report. What exceeds it is a finding; one that nothing uses is said to be.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

KINDS = ("kept", "copied", "moved")
PHASES = ("forward", "backward", "pipeline")  # those of which the plan knows every byte
MULTIPLE = re.compile(r"([1-9]) x parameters")


@dataclass(frozen=True)
class Allowance:
    """what: "kept" when training has ended, "copied" at once within a step, or "moved" in each step by collectives of this
    op, in this phase, over this axis. bytes: a number, or "N x parameters", of as many as the rank's slices have.
    """

    what: str = ""
    bytes: int | str = 0
    reason: str = ""
    op: str = ""
    phase: str = ""
    axis: str = ""

    def __post_init__(self) -> None:
        if self.what not in KINDS:
            raise ValueError(f"what {self.what!r}: choose one of {', '.join(KINDS)}")
        if not self.reason.strip():
            raise ValueError("reason is missing: one sentence that says why this trainer needs it")
        if not (MULTIPLE.fullmatch(self.bytes) if isinstance(self.bytes, str) else self.bytes > 0):
            raise ValueError(f"bytes {self.bytes!r}: a number above 0, or 'N x parameters' with N from 1 to 9")
        where = (self.op, self.phase, self.axis)
        if self.what == "moved" and not all(where):
            raise ValueError(
                "moved needs op, phase and axis: which collective, in forward or backward, over which ranks"
            )
        if self.what == "moved" and self.phase not in PHASES:
            raise ValueError(f"phase {self.phase!r}: choose one of {', '.join(PHASES)}")
        if self.what != "moved" and any(where):
            raise ValueError(f"{self.what} has no op, phase or axis: they are for what is moved")

    def amount(self, parameters: int) -> int:
        """parameters: the bytes of the rank's slices."""
        return int(self.bytes[0]) * parameters if isinstance(self.bytes, str) else self.bytes


def allowed(allowances: Iterable[Allowance], what: str, parameters: int) -> int:
    """Bytes that are allowed of one kind. parameters: bytes of the rank's own slices."""
    return sum(one.amount(parameters) for one in allowances if one.what == what)
