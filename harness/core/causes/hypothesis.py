"""A hypothesis: what may be wrong, and the trial as it would have to be judged if that were so.

It is confirmed by the checks alone. Under the assumption those that fail pass, and no passing check fails. What a hypothesis
names (a degree, a factor, samples, a module) is fitted on part of the evidence; the checks judge all of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from harness.core.causes.words import Broken, elsewhere, finding_line, first_finding
from harness.core.checks import all_checks, run_check
from harness.core.judge.result import Cause, Line, Lines, Result, Verdict
from harness.core.judge.trial import Trial


@dataclass(frozen=True)
class Hypothesis:
    """What may be wrong, how to assume it, and what was seen of it."""

    cause: Cause
    assume: Callable[[Trial], Trial] | None
    """The same evidence with another request, plan, reference or optimizer; None if no reference shows what follows."""
    fitted: int = 1  # how many numbers or choices were fitted; simpler hypotheses are tried first
    lines: Lines = ()  # what was seen of it
    seen: tuple[str, ...] = ()  # checks that saw it directly: for these it is stated even if it is not proven
    renumbers: bool = False  # ranks have other numbers in the assumed trial: its findings do not fit this one's
    given: tuple[str, ...] = ()  # checks of what the trainer received: assumed, so they are no part of the proof

    def __post_init__(self) -> None:
        assert all_checks().keys() >= set(self.seen), self.seen

    def and_then(self, change: Callable[[Trial], Trial]) -> Hypothesis:
        """The same, and a change to the trial that is assumed."""
        first = self.assume
        return self if first is None else replace(self, assume=lambda trial: change(first(trial)))


@dataclass(frozen=True)
class Fact:
    """What a check saw itself, nothing is assumed. checks: those that it is the whole content of. symptom: no mistake
    is named by it, so it is a cause only where there is no other."""

    cause: Cause
    checks: tuple[str, ...]
    lines: Lines = ()
    symptom: bool = False

    def __post_init__(self) -> None:
        assert all_checks().keys() >= set(self.checks), self.checks


NOT_TESTED: Lines = (("not tested", "whether all wrong numbers follow from this"),)


def no_reference(why: str) -> Line:
    return "not tested", f"whether all wrong numbers follow from this: {why}"


def stated(broken: Broken, check: str, kind: str, text: str, *checks: str, more: Iterable[Line] = ()) -> Fact:
    """What a check saw, with its first finding. checks: others that this is the whole content of."""
    return Fact(Cause(kind, text), (check, *checks), (finding_line(broken[check]), *more))


def seen(broken: Broken, check: str, kind: str, text: str, *, more: Lines = ()) -> Fact:
    """Return the first finding of a check as the cause itself."""
    findings = broken[check].findings
    return Fact(Cause(kind, text, hint=elsewhere(findings), finding=first_finding(findings)), (check,), more)


Suspects = Callable[[Trial, Broken], Iterator[Hypothesis]]
Facts = Callable[[Trial, Broken], Iterator[Fact]]


def as_seen(suspects: Suspects) -> Facts:
    """What checks have seen of hypotheses that are not proven."""

    def facts(trial: Trial, broken: Broken) -> Iterator[Fact]:
        for one in itertools.islice((one for one in suspects(trial, broken) if one.seen), 1):
            yield Fact(one.cause, one.seen, one.lines)

    facts.__name__ = suspects.__name__
    return facts


@dataclass(frozen=True)
class Proof:
    """Hypotheses that hold together."""

    hypotheses: tuple[Hypothesis, ...]
    explained: tuple[str, ...]  # failing checks that hold under them
    left: tuple[str, ...]  # failing checks that do not
    assumed: Trial
    aside: tuple[str, ...] = ()  # passing checks that do not hold under them, and need not

    @property
    def renumbers(self) -> bool:
        return any(one.renumbers for one in self.hypotheses)

    @property
    def complete(self) -> bool:
        return not self.left

    @property
    def fitted(self) -> int:
        return sum(hypothesis.fitted for hypothesis in self.hypotheses)

    @property
    def seen(self) -> int:
        """How many of the checks that are left have seen it themselves."""
        return len({check for hypothesis in self.hypotheses for check in hypothesis.seen} & {*self.left})


def tested(trial: Trial, results: Sequence[Result], hypothesis: Hypothesis) -> Proof | None:
    """None if a check that passed fails under the assumption. One that explains nothing may still be half of what does."""
    assert hypothesis.assume is not None
    assumed = hypothesis.assume(trial)
    broken = [result.check for result in results if result.verdict is Verdict.FAIL]
    explained = [name for name in broken if _holds(assumed, name)]
    explained = [] if explained == ["golden"] else explained  # which holds under every assumption
    # of other samples than requested, what is reported may count those that were requested
    need_not, aside = {"reported_numbers"} if hypothesis.given else set(), list[str]()
    for name in (result.check for result in results if result.verdict is Verdict.PASS):
        if verdict_of(assumed, name) not in (Verdict.PASS, Verdict.NOT_APPLICABLE):
            if name not in need_not:
                return None
            aside.append(name)
    left = tuple(name for name in broken if name not in explained)
    return Proof((hypothesis,), tuple(explained), left, assumed, tuple(aside))


def _holds(assumed: Trial, name: str) -> bool:
    """Some checks have nothing to compare under an assumption: `replica_agreement` if ranks train separate copies, `reshard` if
    nothing is sharded, `exchange` without its axes."""
    dissolved = name in ("reshard", "exchange") or (name == "replica_agreement" and assumed.assumption.references)
    return verdict_of(assumed, name) in ((Verdict.PASS, Verdict.NOT_APPLICABLE) if dissolved else (Verdict.PASS,))


def verdict_of(trial: Trial, name: str) -> Verdict:
    """Return the verdict of this launch alone. `golden` is about the reference, which is itself assumed."""
    if name == "golden":
        return Verdict.PASS
    return run_check(name, all_checks()[name].check, trial).verdict
