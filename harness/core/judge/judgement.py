"""The judgement of a case: the results of all checks, its verdict and its cause."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from harness.core.case import releases
from harness.core.case.case import Case, ExpectedFailure
from harness.core.judge.finding import Finding
from harness.core.judge.result import Diagnosis, Firing, Result, Verdict


@dataclass(frozen=True)
class Judgement:
    """The results of all checks on one run of a case."""

    case: Case
    folder: Path  # where the evidence lies
    results: tuple[Result, ...]
    diagnosis: Diagnosis | None
    seconds: float  # of its launches, while they had their slots
    fault: str | None = None
    firing: Firing = Firing.NO_FAULT  # whether the fault's code ran
    trainer: str = "llama3"
    made: dict[str, str] = field(default_factory=dict)  # how the run came about (`Run.made`)
    measures: dict[str, float] = field(default_factory=dict)  # what it took (`judge.measures`)
    gpu: str = ""  # its name
    observed: tuple[str, ...] = ()
    """What the plan takes from this run, for neither the case nor the adapter declares it; one phrase each."""

    @property
    def replaced(self) -> list[str]:
        """Return the parts of the trainer that did not run as its users run them, one sentence each."""
        return self.made.get("replaced", "").splitlines()

    @property
    def verdict(self) -> Verdict:
        """Return FAIL if a check fails, else UNKNOWN if one could not be judged, else PASS. UNKNOWN if nothing passed.

        A case with an expected failure is XFAIL if exactly its checks fail, with its cause and error. Otherwise it is
        FAIL, or UNKNOWN if no check fails and one could not be judged.
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
        """Return the failure that this run should show.

        None if the case expects none, for a run with a fault, or on a release of torch to which it does not apply.
        """
        expected = self.case.expected_failure
        if expected is None or self.fault is not None:
            return None
        applies_to_torch = not expected.torch or releases.condition_holds(expected.torch, self.made.get("torch", ""))
        return expected if applies_to_torch else None

    def _fails_as_expected(self, expected: ExpectedFailure) -> bool:
        """Return whether exactly the expected checks fail, with the expected kind of cause and the expected error.

        A check that could not be judged refutes that, unless `completed` fails: ranks that die leave nothing to judge
        by.
        """
        failing_checks = {result.check for result in self.results if result.verdict is Verdict.FAIL}
        unknown_checks = {result.check for result in self.results if result.verdict is Verdict.UNKNOWN}
        kinds = self.diagnosis.kinds if self.diagnosis else ()
        raised = any(expected.raised in str(finding.observed) for finding in self._findings())
        # Ranks that die leave nothing to judge the other checks by.
        return (
            failing_checks == set(expected.checks.split())
            and expected.named in kinds
            and raised
            and (not unknown_checks or "completed" in failing_checks)
        )

    def _findings(self) -> Iterator[Finding]:
        for result in self.results:
            yield from result.findings
