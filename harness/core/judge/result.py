"""The result of a check: verdict, findings, number of comparisons. The diagnosis: the causes of failing checks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum, StrEnum

from harness.core.judge.finding import Finding


class Verdict(StrEnum):
    """The verdict of a check or of a case. XFAIL is only a case's: it failed in just the way that it is expected to."""

    PASS = "PASS"
    FAIL = "FAIL"
    UNKNOWN = "UNKNOWN"
    XFAIL = "XFAIL"
    NOT_APPLICABLE = "NOT APPLICABLE"


class Firing(Enum):
    """Whether the code of a fault ran on some rank, even one that died of it. The value is the one in documents."""

    NO_FAULT = None
    FIRED = True
    NOT_FIRED = False


@dataclass(frozen=True)
class Result:
    """A check's verdict on a trial."""

    check: str
    """The name of the check: that of its file."""
    verdict: Verdict
    """PASS, FAIL, UNKNOWN or NOT APPLICABLE."""
    examined: int = 0
    """How many things were compared; a check that examined nothing cannot pass."""
    findings: tuple[Finding, ...] = ()
    """Where it fails, the worst first."""
    note: str = ""
    """What a person should know: why UNKNOWN or NOT APPLICABLE."""
    largest: float | None = None
    """The largest relative difference that was seen; None where nothing of the kind is measured."""


def not_applicable(name: str, reason: str) -> Result:
    """Return the result of a check that has nothing to check here, with the reason that the report shows."""
    return Result(name, Verdict.NOT_APPLICABLE, note=reason)


def verdict_of(
    name: str, findings: list[Finding], examined: int, note: str = "", *, largest: float | None = None
) -> Result:
    """Return a check's result: FAIL with findings, PASS without. The check's name is put into the findings.

    examined: how many things were compared. Whoever runs the check turns a PASS with 0 into UNKNOWN.
    """
    verdict = Verdict.FAIL if findings else Verdict.PASS
    named_findings = tuple(replace(finding, check=name) for finding in findings)
    return Result(name, verdict, examined, named_findings, note, largest)


def verdict_of_all(results: Iterable[Result]) -> Verdict:
    """Return FAIL if a check fails, else UNKNOWN if one is UNKNOWN, else PASS if one passes; UNKNOWN without any of these."""
    verdicts = {result.verdict for result in results}
    ordered = (Verdict.FAIL, Verdict.UNKNOWN, Verdict.PASS)
    return next((verdict for verdict in ordered if verdict in verdicts), Verdict.UNKNOWN)


EXPLAINS = "explains"
"""Label of the line on which failing checks pass under the assumption of a cause. A cause without it is not proven."""


@dataclass(frozen=True)
class Cause:
    """One cause of failing checks, as data. harness/core/report makes the sentence of it."""

    kind: str
    """Its name in the list of docs/causes.md, which faults of the catalogue refer to."""
    observed: str
    """What is so; empty where `finding` says it all."""
    where: str = ""
    """In which parameters, on which ranks, in which steps; empty where it is so everywhere."""
    expected: str = ""
    """What was requested."""
    hint: str = ""
    """What of the case that number or place is, as far as it was tried."""
    finding: Finding | None = None
    """The first finding that shows it, where no more is known than that."""
    explains: tuple[str, ...] = ()
    """The failing checks that pass if this is assumed, or that saw it themselves."""
    ranks: tuple[int, ...] = ()
    """Global ranks of the findings of these checks."""
    steps: tuple[int, ...] = ()
    """Steps of these findings."""
    parameters: tuple[str, ...] = ()
    """Parameters of these findings, by fqn."""
    details: tuple[tuple[str, object], ...] = ()
    """What the sentence says, as data: ("factor", 0.5), ("axes", ("dp_replicate",)), ("step", 2)."""


Line = tuple[str, str | Finding | Cause]
"""A label, and what stands beside it. Findings and causes are put in words where they are shown."""
Lines = tuple[Line, ...]


@dataclass(frozen=True)
class Diagnosis:
    """The causes of failing checks, with the evidence for them."""

    causes: tuple[Cause, ...]
    """The ones that explain most checks first."""
    evidence: Lines = ()
    """What was expected and observed, and what is proven."""
    launch: str = ""
    """The launch of a case that resumes in which it is so, as in Finding.launch."""

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(cause.kind for cause in self.causes)


def diagnosis_of_one_cause(text: str, evidence: Lines = (), kind: str = "") -> Diagnosis:
    """Return a diagnosis with a single cause whose sentence is `text`. kind: empty if it is none of docs/causes.md."""
    return Diagnosis((Cause(kind, text),), evidence)
