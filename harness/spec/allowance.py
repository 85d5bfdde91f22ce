"""What a trainer may keep, copy, move or compute besides what the plan knows: declared by a case or an adapter, with a reason.

An allowance is reviewed in git and shown in the report. What exceeds it is a finding; one that nothing uses is said to be.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

KINDS = ("kept", "copied", "moved", "computed")
PHASES = ("forward", "backward", "pipeline")  # those of which the plan knows every byte
MULTIPLE = re.compile(r"([1-9]) x parameters")
PASSES = re.compile(r"([1-9]) x forward")


@dataclass(frozen=True)
class Allowance:
    """what: "kept" when training has ended, "copied" at once within a step, "moved" in each step by collectives of this op, in
    this phase, over this axis, or "computed" in each step outside of training passes, as by a moving average of the model.

    bytes: a number, or "N x parameters", of as many as the rank's slices have. matmuls, of what is computed: a number, or
    "N x forward", of as many as the step's own forward passes have.
    """

    what: str = ""
    bytes: int | str = 0
    reason: str = ""
    op: str = ""
    phase: str = ""
    axis: str = ""
    matmuls: int | str = 0

    def __post_init__(self) -> None:
        if self.what not in KINDS:
            raise ValueError(f"what {self.what!r}: choose one of {', '.join(KINDS)}")
        if not self.reason.strip():
            raise ValueError("reason is missing: one sentence that says why this trainer needs it")
        self._check_amount()
        where = (self.op, self.phase, self.axis)
        if self.what == "moved" and not all(where):
            raise ValueError(
                "moved needs op, phase and axis: which collective, in forward or backward, over which ranks"
            )
        if self.what == "moved" and self.phase not in PHASES:
            raise ValueError(f"phase {self.phase!r}: choose one of {', '.join(PHASES)}")
        if self.what != "moved" and any(where):
            raise ValueError(f"{self.what} has no op, phase or axis: they are for what is moved")

    def _check_amount(self) -> None:
        key, multiple, other = (
            ("matmuls", PASSES, "bytes") if self.what == "computed" else ("bytes", MULTIPLE, "matmuls")
        )
        given, unit = getattr(self, key), multiple.pattern.rpartition(" ")[2]
        if getattr(self, other):
            raise ValueError(f"{self.what} has no {other}: say {key}")
        if not (multiple.fullmatch(given) if isinstance(given, str) else given > 0):
            raise ValueError(f"{key} {given!r}: a number above 0, or 'N x {unit}' with N from 1 to 9")

    def amount(self, parameters: int) -> int:
        """Bytes. parameters: those of the rank's slices."""
        return int(self.bytes[0]) * parameters if isinstance(self.bytes, str) else self.bytes

    def computed(self, forward: int) -> int:
        """Matmuls. forward: those of a step's forward passes."""
        return int(self.matmuls[0]) * forward if isinstance(self.matmuls, str) else self.matmuls


def allowed(allowances: Iterable[Allowance], what: str, parameters: int) -> int:
    """Bytes that are allowed of one kind. parameters: bytes of the rank's own slices."""
    return sum(one.amount(parameters) for one in allowances if one.what == what)


def allowed_matmuls(allowances: Iterable[Allowance], forward: int) -> int:
    """Matmuls that are allowed in a step besides training passes. forward: those of its forward passes."""
    return sum(one.computed(forward) for one in allowances)
