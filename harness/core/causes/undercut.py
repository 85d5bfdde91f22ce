"""Proofs that do not count: all that they explain may follow from a failing check that they leave unexplained.

Checks have a depth: first which ranks sum with which, then gradients, then norms, updates, replicas and reports. A
mistake at one depth makes deeper checks fail as well, in its own step or later ones. Some hypothesis nearly always fits
numbers that are wrong for such a reason, so a fit shows nothing. Each row of the table is a pair of depths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from harness.core.causes.differences import GRADIENT_CHECKS
from harness.core.causes.hypothesis import Proof, judge_check
from harness.core.judge.finding import Finding
from harness.core.judge.result import Result, Verdict

GRADIENTS_AND_DEEPER = GRADIENT_CHECKS | {"reported_numbers", "reported_rate", "golden"}
"""Checks of gradients, of what is made of them, and of what is reported. `golden` passes under every assumption."""
ANY_KIND: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Undercut:
    """A row of the table: a pair of depths, and the kinds of causes that it refutes."""

    left: frozenset[str]
    """The shallower checks: the proof leaves one of them failing."""
    follows: frozenset[str]
    """The checks that may fail because of that: the proof explains no others."""
    reason: str
    """Why such a proof shows nothing."""
    kinds: frozenset[str] = ANY_KIND
    """Kinds of causes: the row applies to a proof that names one of them. ANY_KIND: to all."""

    def applies(self, proof: Proof, results: Sequence[Result]) -> bool:
        """Return whether this row refutes a proof of these results."""
        left = self.left & {*proof.unexplained}
        kinds = {hypothesis.cause.kind for hypothesis in proof.hypotheses}
        if not left or not self.follows.issuperset(proof.explained):
            return False
        if self.kinds != ANY_KIND and not self.kinds & kinds:
            return False
        return first_left_step(proof, results, left) <= first_explained_step(proof, results)


TABLE = (
    Undercut(
        left=frozenset({"gradients"}),
        follows=GRADIENTS_AND_DEEPER,
        reason="wrong gradients make all of these wrong, and some factor, norm or report always fits them",
    ),
    Undercut(
        left=frozenset({"traffic", "placements", "process_groups", "shard_contents"}),
        follows=GRADIENTS_AND_DEEPER,
        reason="weights of samples fit whatever other groups have summed",
        kinds=frozenset({"unequal contributions"}),
    ),
)


def is_undercut(proof: Proof, results: Sequence[Result], table: Sequence[Undercut] = TABLE) -> bool:
    """Return whether all that a proof explains may follow from a shallower failing check that it leaves unexplained.

    Time decides as well: where gradients, under the proof's own assumption, fail only after what it explains, nothing
    of that follows from them, and the proof stands. It may judge checks again, and raises what they raise.
    """
    return any(row.applies(proof, results) for row in table)


def first_left_step(proof: Proof, results: Sequence[Result], checks: frozenset[str]) -> float:
    """Return the first step in which one of the checks still fails under the proof's assumption. 0 if there is none.

    A check that cannot be judged under it, for lack of a bound, counts as before. So does one that no longer fails. A
    check whose findings are of no step counts as 0.
    """
    first_steps: list[int] = []
    for result in results:
        if result.check in checks:
            assumed = judge_check(proof.assumed, result.check)
            findings = assumed.findings if assumed.verdict is Verdict.FAIL else result.findings
            first_steps.append(min(steps_of(findings), default=0))
    return min(first_steps, default=0)


def first_explained_step(proof: Proof, results: Sequence[Result]) -> float:
    """Return the first step in which a check failed that the proof explains; infinity if their findings are of no step."""
    steps: list[int] = []
    for result in results:
        if result.check in proof.explained:
            steps += steps_of(result.findings)
    return min(steps, default=math.inf)


def steps_of(findings: Sequence[Finding]) -> list[int]:
    """Return the steps that findings name, one for each finding. Findings of no step are left out."""
    return [finding.step for finding in findings if finding.step is not None]
