"""What a check states: verdict, findings, how much was examined; and what a diagnosis says."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self


class Verdict(StrEnum):
    """XFAIL is a case's only, never a check's: it failed in just the way that it is expected to."""

    PASS = "PASS"
    FAIL = "FAIL"
    UNKNOWN = "UNKNOWN"
    XFAIL = "XFAIL"
    NOT_APPLICABLE = "NOT APPLICABLE"


@dataclass(frozen=True)
class Finding:
    """One place where a check fails: where, what was expected, what was observed, and the bound if it is a number.

    rank, step, name: the same place as data, for whoever needs more than its text; None and empty where a check has no one
    rank, step or thing to name. `at` makes the text of them.
    """

    where: str
    expected: str
    observed: str
    bound: str = ""
    rank: int | None = field(default=None, compare=False)
    step: int | None = field(default=None, compare=False)
    name: str = field(default="", compare=False)

    @classmethod
    def at(
        cls, rank: int, expected: str, observed: str, bound: str = "", *, step: int | None = None, name: str = ""
    ) -> Self:
        """Of one rank: "rank 1, step 2, norm.weight"."""
        words = (f"rank {rank}", "" if step is None else f"step {step}", name)
        return cls(", ".join(filter(None, words)), expected, observed, bound, rank, step, name)


SHOWN = 8  # findings of a check


@dataclass(frozen=True)
class Result:
    """A check's verdict on a trial. `examined` counts the things compared; a check that examined nothing cannot pass.

    note: what a person should know of a verdict: why UNKNOWN or NOT APPLICABLE, the largest difference of PASS.
    """

    check: str
    verdict: Verdict
    examined: int = 0
    findings: tuple[Finding, ...] = ()
    note: str = ""

    @property
    def shown(self) -> tuple[Finding, ...]:
        """The first findings, and how many more there are: a check puts the worst in front."""
        if len(self.findings) <= SHOWN:
            return self.findings
        return (*self.findings[:SHOWN], Finding(f"and {len(self.findings) - SHOWN} more", "", ""))


def not_applicable(name: str, reason: str) -> Result:
    """The result of a check that has no object here, with the reason that the report shows."""
    return Result(name, Verdict.NOT_APPLICABLE, note=reason)


def verdict_of(name: str, findings: list[Finding], examined: int, note: str = "") -> Result:
    """FAIL with findings, PASS without."""
    verdict = Verdict.FAIL if findings else Verdict.PASS
    return Result(name, verdict, examined, tuple(findings), note)


Lines = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Cause:
    """What is wrong. kind: its name in the list of docs/causes.md, which faults of the catalogue refer to.

    observed: what is so. where: in which parameters, on which ranks, in which steps, if not everywhere. expected: what was
    requested. hint: what of the case that number or place is, as far as it was tried.
    """

    kind: str
    observed: str
    where: str = ""
    expected: str = ""
    hint: str = ""

    @property
    def text(self) -> str:
        """In one line."""
        where, expected = f" {self.where}" * bool(self.where), f", requested {self.expected}" * bool(self.expected)
        return f"{self.observed}{where}{expected}{f': {self.hint}' * bool(self.hint)}"


@dataclass(frozen=True)
class Diagnosis:
    """causes: most checks explained first. evidence: (label, text), what was expected and observed, and what is proven."""

    causes: tuple[Cause, ...]
    evidence: Lines = ()
    launch: str = ""

    @property
    def cause(self) -> str:
        """In one line."""
        return self.launch + "; ".join(cause.text for cause in self.causes)

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(cause.kind for cause in self.causes)


def one_cause(text: str, evidence: Lines = (), kind: str = "") -> Diagnosis:
    """A diagnosis of one cause that is a sentence already."""
    return Diagnosis((Cause(kind, text),), evidence)
