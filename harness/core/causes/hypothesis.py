"""Hypotheses, facts and proofs: what may be wrong, and the evidence as it would have to be judged if that were so.

The checks alone confirm a hypothesis. Under the assumption those that fail pass, and no passing check fails. What a
hypothesis names (a degree, a factor, samples, a module) is fitted on part of the evidence; the checks judge all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from harness.core import rings
from harness.core.causes.words import Broken, elsewhere_text, finding_line, first_finding
from harness.core.checks import all_checks, run_check
from harness.core.judge.result import Cause, Line, Lines, Result, Verdict
from harness.core.judge.trial import Trial


class Comparable(Protocol):
    """Evidence that is no trial: what a ring compares, such as two recordings."""

    def result_of(self, check: str) -> Result:
        """Return the result of a check on this evidence, as it is or as it is assumed."""


Evidence = TypeVar("Evidence", bound=Trial | Comparable)
"""What an assumption changes, and what is judged again."""


@dataclass(frozen=True)
class Hypothesis(Generic[Evidence]):
    """An assumption about what is wrong, with the cause that is named if it is proven."""

    cause: Cause
    """The cause that is named if it is proven."""
    assume: Callable[[Evidence], Evidence] | None
    """The same evidence with another request, plan, reference or optimizer; None if no reference shows what follows."""
    fitted_count: int = 1
    """How many numbers or choices were fitted; simpler hypotheses are tried first."""
    lines: Lines = ()
    """Lines of evidence for it."""
    seen_by: tuple[str, ...] = ()
    """Checks that saw it directly: for these it is stated even if it is not proven."""
    renumbers_ranks: bool = False
    """Whether ranks have other numbers in the assumed trial: its findings do not fit this one's."""
    given_checks: tuple[str, ...] = ()
    """Checks of what the trainer received: assumed, so they are no part of the proof."""

    def __post_init__(self) -> None:
        assert known_checks() >= {*self.seen_by}, self.seen_by

    def and_then(self, change: Callable[[Evidence], Evidence]) -> Hypothesis[Evidence]:
        """Return this hypothesis with a further change to the evidence that it assumes. Itself if it assumes none."""
        first = self.assume
        return self if first is None else replace(self, assume=lambda evidence: change(first(evidence)))


@dataclass(frozen=True)
class Fact:
    """A cause that a check saw itself; nothing is assumed."""

    cause: Cause
    """The cause that it is named as."""
    checks: tuple[str, ...]
    """The failing checks that it explains: all of their findings follow from it."""
    lines: Lines = ()
    """Lines of evidence for it."""
    is_symptom: bool = False
    """Whether it names no mistake, and so is a cause only where there is no other."""

    def __post_init__(self) -> None:
        assert known_checks() >= {*self.checks}, self.checks


def known_checks() -> frozenset[str]:
    """Return the names of all checks: those of trials, and those with which rings compare."""
    names = {*all_checks()}
    for ring in rings.rings().values():
        names.update(ring.comparing)
    return frozenset(names)


NOT_TESTED: Lines = (("not tested", "whether all wrong numbers follow from this"),)


def not_tested_line(why: str) -> Line:
    return "not tested", f"whether all wrong numbers follow from this: {why}"


def fact_with_text(
    broken: Broken, check: str, kind: str, text: str, *checks: str, further_lines: Iterable[Line] = ()
) -> Fact:
    """Return a fact whose cause is a text, with the first finding of the check as its first line.

    checks: others that it explains as well. Precondition: the check fails with findings.
    """
    return Fact(Cause(kind, text), (check, *checks), (finding_line(broken[check]), *further_lines))


def fact_of_first_finding(broken: Broken, check: str, kind: str, text: str, *, further_lines: Lines = ()) -> Fact:
    """Return a fact that explains one check, and whose cause has the first finding of that check beside the text.

    Precondition: the check fails with findings.
    """
    findings = broken[check].findings
    return Fact(
        Cause(kind, text, hint=elsewhere_text(findings), finding=first_finding(findings)), (check,), further_lines
    )


SuspectsOf = Callable[[Evidence, Broken], Iterator[Hypothesis[Evidence]]]
FactsOf = Callable[[Evidence, Broken], Iterator[Fact]]
Suspects = SuspectsOf[Trial]
Facts = FactsOf[Trial]


def facts_of_unproven(suspects: SuspectsOf[Evidence]) -> FactsOf[Evidence]:
    """Return a function that yields, as a fact, the first hypothesis of these suspects that a check saw directly.

    It has the name of `suspects`, by which it is ordered.
    """

    def facts(evidence: Evidence, broken: Broken) -> Iterator[Fact]:
        """Yield a fact of the first hypothesis that a check saw; nothing if none did."""
        for hypothesis in suspects(evidence, broken):
            if hypothesis.seen_by:
                yield Fact(hypothesis.cause, hypothesis.seen_by, hypothesis.lines)
                return

    facts.__name__ = suspects.__name__
    return facts


@dataclass(frozen=True)
class Proof(Generic[Evidence]):
    """Hypotheses that hold together: under them no passing check fails, but for tolerated ones."""

    hypotheses: tuple[Hypothesis[Evidence], ...]
    """One, or two independent mistakes."""
    explained: tuple[str, ...]
    """Failing checks that pass under them."""
    unexplained: tuple[str, ...]
    """Failing checks that do not."""
    assumed: Evidence
    """The evidence under all of them."""
    tolerated_failures: tuple[str, ...] = ()
    """Passing checks that fail under them, and need not pass."""

    @property
    def renumbers_ranks(self) -> bool:
        """Return whether ranks have other numbers in the assumed evidence."""
        return any(hypothesis.renumbers_ranks for hypothesis in self.hypotheses)

    @property
    def is_complete(self) -> bool:
        """Return whether no failing check is left unexplained."""
        return not self.unexplained

    @property
    def fitted_count(self) -> int:
        return sum(hypothesis.fitted_count for hypothesis in self.hypotheses)

    @property
    def seen_count(self) -> int:
        """Return how many unexplained checks have seen one of the hypotheses themselves."""
        direct: set[str] = set()
        for hypothesis in self.hypotheses:
            direct.update(hypothesis.seen_by)
        return len(direct & {*self.unexplained})


def prove(evidence: Evidence, results: Sequence[Result], hypothesis: Hypothesis[Evidence]) -> Proof[Evidence] | None:
    """Return the proof of a hypothesis, judged under its assumption.

    None if a check that passed fails or is unknown then. A proof may explain nothing, and still be half of one that
    does. Precondition: the hypothesis has an assumption. Raises what the assumption raises.
    """
    assert hypothesis.assume is not None
    assumed = hypothesis.assume(evidence)
    failing = [result.check for result in results if result.verdict is Verdict.FAIL]
    explained = tuple(name for name in failing if _passes(assumed, name))
    if explained == ("golden",):  # which passes under every assumption
        explained = ()
    # of other samples than requested, what is reported may count those that were requested
    need_not_pass = {"reported_numbers"} if hypothesis.given_checks else set()
    aside: list[str] = []
    for result in results:
        if result.verdict is not Verdict.PASS:
            continue
        if verdict_of(assumed, result.check) in (Verdict.PASS, Verdict.NOT_APPLICABLE):
            continue
        if result.check not in need_not_pass:
            return None
        aside.append(result.check)
    left = tuple(name for name in failing if name not in explained)
    return Proof((hypothesis,), explained, left, assumed, tuple(aside))


def _passes(assumed: Trial | Comparable, name: str) -> bool:
    """Return whether a check passes under an assumption, or has nothing to compare because of it.

    `replica_agreement` has nothing if ranks train separate copies, `reshard` if nothing is sharded, `exchange` without its
    axes.
    """
    copies = isinstance(assumed, Trial) and assumed.assumption.references
    dissolved = name in ("reshard", "exchange") or (name == "replica_agreement" and copies)
    holding = (Verdict.PASS, Verdict.NOT_APPLICABLE) if dissolved else (Verdict.PASS,)
    return verdict_of(assumed, name) in holding


def verdict_of(evidence: Trial | Comparable, name: str) -> Verdict:
    """Return the verdict of a check on this evidence, for this launch alone.

    PASS for `golden` of a trial: it is about the reference, which is itself assumed.
    """
    if name == "golden" and isinstance(evidence, Trial):
        return Verdict.PASS
    return judge_check(evidence, name).verdict


def judge_check(evidence: Trial | Comparable, name: str) -> Result:
    """Return the result of a check on this evidence, for this launch alone."""
    if not isinstance(evidence, Trial):
        return evidence.result_of(name)
    return run_check(name, all_checks()[name].check, evidence)
