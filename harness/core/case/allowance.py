"""Allowances: what a trainer may do in addition to its plan, declared by a case or an adapter, with a reason.

An allowance is reviewed in git and shown in the report. What exceeds it is a finding; one that nothing uses is
reported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

AMOUNT_KEYS = {
    "kept": "bytes",
    "gathered": "bytes",
    "copied": "bytes",
    "moved": "bytes",
    "computed": "matmuls",
    "compiled": "graphs",
    "hooks": "name",
}
"""By kind, the key that says how much, or which."""
OUTSIDE_PHASE = "outside"
"""The phase of all that a step moves outside of forward, backward and a pipeline's schedule."""
PHASES = ("forward", "backward", "pipeline", OUTSIDE_PHASE)
YAML_WORDS = ("null", "true", "false", "yes", "no", "on", "off", "y", "n")
"""Words that YAML does not read as text."""
MULTIPLE_PATTERNS = {"bytes": re.compile(r"([1-9]) x parameters"), "matmuls": re.compile(r"([1-9]) x forward")}


@dataclass(frozen=True)
class Allowance:
    """One thing that is allowed, up to an amount, for a reason."""

    what: str = ""
    """kept: when training has ended. gathered: of parameters, from backward until the optimizer has stepped. copied: at once
    within a step. moved: in each step, by collectives. computed: in each step, outside of training passes. compiled: code
    that torch.compile runs. hooks: on tensors saved for backward."""
    bytes: int | str = 0
    """Of kept, gathered, copied and moved: a number, or "N x parameters", of the rank's own slices."""
    reason: str = ""
    """One sentence that says why the trainer needs it."""
    op: str = ""
    """Of moved: the collective, such as broadcast."""
    phase: str = ""
    """Of moved: forward, backward, pipeline or outside."""
    axis: str = ""
    """Of moved: the axis whose ranks take part, or world."""
    matmuls: int | str = 0
    """Of computed: a number, or "N x forward", of the step's own forward passes."""
    graphs: int = 0
    """Of compiled: the most graphs that a rank compiles in a launch."""
    name: str = ""
    """Of hooks: the function or class that sets them, with its module, such as torch.autograd.graph.save_on_cpu."""

    def __post_init__(self) -> None:
        if self.what not in AMOUNT_KEYS:
            raise ValueError(f"what {self.what!r}: choose one of {', '.join(AMOUNT_KEYS)}")
        if not self.reason.strip():
            raise ValueError("reason is missing: one sentence that says why this trainer needs it")
        self._check_amount()
        collective = (self.op, self.phase, self.axis)
        if self.what == "moved" and not all(collective):
            raise ValueError(
                f"moved needs op, phase and axis: which collective, in which of {', '.join(PHASES)}, over which ranks"
            )
        if self.what == "moved" and self.phase not in PHASES:
            raise ValueError(f"phase {self.phase!r}: choose one of {', '.join(PHASES)}")
        if self.what != "moved" and any(collective):
            raise ValueError(f"{self.what} has no op, phase or axis: they are for what is moved")

    def _check_amount(self) -> None:
        """Raise ValueError if the amount that this kind needs is missing or malformed, or the amount of another kind is
        given."""
        key = AMOUNT_KEYS[self.what]
        amount = getattr(self, key)
        multiple = MULTIPLE_PATTERNS.get(key)
        if other_key := next((name for name in AMOUNT_KEYS.values() if name != key and getattr(self, name)), None):
            raise ValueError(f"{self.what} has no {other_key}: say {key}")
        if key == "name":
            if not amount.strip():
                raise ValueError("name is required: the owner of the hooks, as printed in the finding")
        elif not (amount > 0 if isinstance(amount, int) else multiple and multiple.fullmatch(amount)):
            unit = f", or 'N x {multiple.pattern.rpartition(' ')[2]}' with N from 1 to 9" if multiple else ""
            raise ValueError(f"{key} {amount!r}: a number above 0{unit}")

    @property
    def yaml_entry(self) -> str:
        """Return the YAML mapping, on one line, that declares this allowance as an entry of `allow`.

        Empty fields are left out.
        """
        keys = ("what", "op", "phase", "axis", AMOUNT_KEYS[self.what], "reason")
        items = (f"{key}: {_as_yaml(getattr(self, key))}" for key in keys if getattr(self, key))
        return f"{{{', '.join(items)}}}"

    def byte_limit(self, parameters: int) -> int:
        """Return the bytes that are allowed. parameters: bytes of the rank's slices."""
        return int(self.bytes[0]) * parameters if isinstance(self.bytes, str) else self.bytes

    def matmul_limit(self, forward: int) -> int:
        """Return the matmuls that are allowed. forward: matmuls of a step's forward passes."""
        return int(self.matmuls[0]) * forward if isinstance(self.matmuls, str) else self.matmuls


def declaration(allowances: Iterable[Allowance]) -> str:
    """Return the line that declares all of these in a case."""
    return f"allow: [{', '.join(allowance.yaml_entry for allowance in allowances)}]"


def _as_yaml(value: int | str) -> str:
    """Return the value as it stands in a mapping on one line: quoted if YAML would read something else."""
    plain = re.fullmatch(r"([A-Za-z_]|\d x )[\w .<>/-]*", str(value)) and str(value).lower() not in YAML_WORDS
    return str(value) if isinstance(value, int) or plain else json.dumps(value, ensure_ascii=False)
