"""All results of a case, its verdict and its cause."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from harness.core.case import releases
from harness.core.case.case import Case, ExpectedFailure
from harness.core.judge.result import Diagnosis, Result, Verdict


@dataclass(frozen=True)
class Judgement:
    """What the checks say of one run of a case."""

    case: Case
    folder: Path  # where the evidence lies
    results: tuple[Result, ...]
    diagnosis: Diagnosis | None
    seconds: float  # of its launches, while they had their slots
    fault: str | None = None
    fired: bool | None = None  # whether the fault's code ran; None without a fault
    trainer: str = "llama3"
    made: dict[str, str] = field(default_factory=dict)  # how the run came about (`Run.made`)
    measures: dict[str, float] = field(default_factory=dict)  # what it took (`judge.measures`)
    gpu: str = ""  # its name
    observed: tuple[str, ...] = ()
    """What the plan takes from this run, for neither the case nor the adapter declares it; one phrase each."""

    @property
    def replaced(self) -> list[str]:
        """What of the trainer did not run as its users run it."""
        return self.made.get("replaced", "").splitlines()

    @property
    def verdict(self) -> Verdict:
        """FAIL if a check fails, else UNKNOWN if any could not be judged; a run in which nothing passed is UNKNOWN.

        A case that is expected to fail does so with exactly its checks and its cause, or is a FAIL. If no check fails and one
        could not be judged, it is UNKNOWN.
        """
        verdicts = {result.verdict for result in self.results}
        if (expected := self.expected_failure) is not None:
            if self._fails_as_expected(expected):
                return Verdict.XFAIL
            unknown = Verdict.UNKNOWN in verdicts and Verdict.FAIL not in verdicts
            return Verdict.UNKNOWN if unknown else Verdict.FAIL
        for verdict in (Verdict.FAIL, Verdict.UNKNOWN, Verdict.PASS):
            if verdict in verdicts:
                return verdict
        return Verdict.UNKNOWN

    @property
    def expected_failure(self) -> ExpectedFailure | None:
        """What is expected of this run: nothing of one with a fault, or on a torch that does not get it wrong."""
        expected = self.case.expected_failure
        if expected is None or self.fault is not None:
            return None
        on_this = not expected.torch or releases.holds(expected.torch, self.made.get("torch", ""))
        return expected if on_this else None

    def _fails_as_expected(self, expected: ExpectedFailure) -> bool:
        broken = {result.check for result in self.results if result.verdict is Verdict.FAIL}
        unknown = {result.check for result in self.results if result.verdict is Verdict.UNKNOWN}
        kinds = self.diagnosis.kinds if self.diagnosis else ()
        raised = any(expected.raised in str(finding.observed) for one in self.results for finding in one.findings)
        # Ranks that die leave nothing to judge the other checks by.
        return (
            broken == set(expected.checks.split())
            and expected.named in kinds
            and raised
            and (not unknown or "completed" in broken)
        )
