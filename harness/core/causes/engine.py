"""The search that turns suspects into proofs: the simplest one that explains all, or two that do together."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from harness.core.causes.hypothesis import Broken, Evidence, Fact, FactsOf, Hypothesis, Proof, SuspectsOf, prove
from harness.core.causes.undercut import is_undercut
from harness.core.judge.result import Cause, Result, Verdict
from harness.core.judge.tolerance import NoBound
from harness.core.judge.trial import Trial
from harness.reference import budget

T = TypeVar("T")
MOST_CHARACTERS = 120  # characters of what an error says
MOST_FIRST_MISTAKES = 6  # hypotheses that are tried as one of two independent mistakes
MOST_PASSES = 4000  # global batches that the reference computes in one search
MOST_JUDGED = 500  # hypotheses that are judged in one search
KINDS_ONCE = frozenset({"gradients scaled"})
"""Kinds of which there are not two at once: a factor fits what another one has left."""
PASSES_ENDED_TEXT = f"the reference was computed for {MOST_PASSES} forward passes"


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The result of a search: proofs, facts, and the checks that neither explains."""

    proofs: tuple[Proof, ...] = ()
    """Those that explain most, equally simple ones side by side; empty if no hypothesis holds."""
    facts: tuple[Fact, ...] = ()
    """Of checks that no proof explains."""
    unexplained: tuple[str, ...] = ()
    """Failing checks that neither explains."""
    tried_count: int = 0
    """How many hypotheses were put to the test, a second mistake that is tried alone not counted."""
    errors: tuple[str, ...] = ()
    """Errors that suspects and hypotheses raised during the search."""
    end_reason: str = ""
    """Text of the bound that ended the search; empty if none did."""


def explain(
    evidence: Evidence,
    results: Sequence[Result],
    suspects: Sequence[SuspectsOf[Evidence]],
    facts: Sequence[FactsOf[Evidence]],
    costly: Sequence[SuspectsOf[Evidence]] = (),
) -> Explanation:
    """Return the proofs of hypotheses, and the facts on checks that no proof explains. Never raises.

    An error that a suspect raises is put into `errors`. The forward passes that are computed and the hypotheses that
    are judged are bounded. costly: suspects that are asked only if the others leave a check unexplained.
    """
    with _bounded_passes(evidence):
        return _explain(Search(tuple(suspects), tuple(costly)), evidence, results, facts)


def _bounded_passes(evidence: object) -> contextlib.AbstractContextManager[None]:
    """Return a context in which the reference is computed for at most MOST_PASSES forward passes of a step.

    It bounds nothing for evidence that is no trial, because that has no reference.
    """
    if not isinstance(evidence, Trial):
        return contextlib.nullcontext()
    training = evidence.case.training
    return budget.logits_budget(MOST_PASSES * training.global_batch * training.seq_len * evidence.case.model.vocab_size)


def _explain(search: Search, trial: Any, results: Sequence[Result], facts: Sequence[FactsOf[Any]]) -> Explanation:
    """Return the explanation that a search finds. Proofs that a rule undercuts are left out."""
    proofs = [proof for proof in search.find_proofs(trial, results) if search.is_not_undercut(proof, results)]
    unexplained = proofs[0].unexplained if proofs else _failing_names(results)
    broken = {result.check: result for result in results if result.check in unexplained and result.findings}
    stated = list(search.proposals_of(facts, trial, broken))
    chosen, left = choose_facts(stated, unexplained)
    raised = tuple(search.errors)
    return Explanation(tuple(proofs), chosen, left, search.tried_count, raised, search.end_reason)


def choose_facts(facts: Sequence[Fact], unexplained: Sequence[str]) -> tuple[tuple[Fact, ...], tuple[str, ...]]:
    """Return (facts that cover unexplained checks, the checks that none of them covers).

    The fact that covers most of the remaining checks goes first; of those that cover as many, a mistake before a
    symptom. A fact that covers nothing more is left out.
    """

    def coverage(fact: Fact) -> tuple[int, bool]:
        return len({*fact.checks} & {*left}), not fact.is_symptom

    chosen: list[Fact] = []
    left = tuple(unexplained)
    remaining = list(facts)
    while remaining:
        widest = max(remaining, key=coverage)
        remaining.remove(widest)
        if {*widest.checks} & {*left}:
            chosen.append(widest)
            left = tuple(check for check in left if check not in widest.checks)
    return tuple(chosen), left


@dataclasses.dataclass
class Search:
    """A search for the proofs of one trial, with the counts and errors that it leaves."""

    suspects: tuple[SuspectsOf[Any], ...]
    """Functions that propose hypotheses."""
    costly: tuple[SuspectsOf[Any], ...] = ()
    """Those that compute models to do so. They are asked where the others leave a check unexplained."""
    tried_count: int = 0
    """How many hypotheses were judged."""
    errors: list[str] = dataclasses.field(default_factory=list)
    """What suspects, facts and assumptions raised, each once."""
    end_reason: str = ""
    """Which bound the search met; empty if none."""
    asked_trial: object = None
    """The trial as it is recorded, while others are assumed."""

    def find_proofs(self, trial: Any, results: Sequence[Result]) -> list[Proof]:
        """Return the simplest proofs that explain everything, equally simple ones side by side.

        Empty if nothing is explained. If no single hypothesis does, two together are returned that do; else the proofs
        that explain most.
        """
        self.asked_trial = trial
        complete, partial = self._single_proofs(trial, results)
        if complete:
            return complete
        candidates = [proof for proof in partial if proof.explained]
        firsts = [proof for proof in partial[:MOST_FIRST_MISTAKES] if not proof.renumbers_ranks]
        for first in firsts:
            pairs = self._pairs(trial, results, first)
            if pairs and pairs[0].is_complete:
                return pairs
            candidates += pairs
        return _best_proofs(candidates)

    def is_not_undercut(self, proof: Proof, results: Sequence[Result]) -> bool:
        """Return whether no rule undercuts the proof. False if judging that raises: what is not known is not named."""
        try:
            return not is_undercut(proof, results)
        except Exception as error:
            self._record_error("is_undercut", error)
            return False

    def _single_proofs(self, trial: Any, results: Sequence[Result]) -> tuple[list[Proof], list[Proof]]:
        """Return (the simplest proofs that explain everything, []), or ([], all proofs of one hypothesis, best first).

        Costly suspects are asked only if the others do not explain everything. The best explain most checks, then fit
        fewest numbers.
        """
        partial: list[Proof] = []
        for suspects in (self.suspects, self.costly):
            proposals = self.proposals_of(suspects, trial, failing_checks(results))
            testable = (hypothesis for hypothesis in proposals if hypothesis.assume)
            bounded = list(itertools.islice(testable, MOST_JUDGED + 1))  # one more shows that some are left out
            bounded.sort(key=_complexity)
            for _, equally_simple in itertools.groupby(bounded, key=_complexity):
                proofs = self._test_all(trial, results, list(equally_simple))
                complete = [proof for proof in proofs if proof.is_complete]
                if complete:
                    return complete, []
                partial += proofs
        partial.sort(key=lambda proof: (-len(proof.explained), proof.fitted_count))
        return [], partial

    def _pairs(self, trial: Any, results: Sequence[Result], first: Proof) -> list[Proof]:
        """Return this proof with each second one that explains all the rest, or with the best that explains a part.

        Empty if nothing explains more. A second hypothesis may not be of the same kind if that is one of KINDS_ONCE.
        """
        complete, partial = self._single_proofs(first.assumed, results_under(first, results))
        taken = KINDS_ONCE & {hypothesis.cause.kind for hypothesis in first.hypotheses}
        seconds = [proof for proof in complete if proof.hypotheses[0].cause.kind not in taken]
        if not seconds:
            seconds = [proof for proof in partial if proof.hypotheses[0].cause.kind not in taken][:1]
        return [self._combine(trial, results, first, second) for second in seconds if second.explained]

    def _combine(self, trial: Any, results: Sequence[Result], first: Proof, second: Proof) -> Proof:
        """Return both as one proof, or the second alone if it explains as much: what adds nothing is no mistake."""
        both = _join(first, second, results)
        alone = self._prove_hypothesis(trial, results, second.hypotheses[0])
        if alone and {*both.explained} <= {*alone.explained}:
            return alone
        return both

    def _test_all(self, trial: Any, results: Sequence[Result], hypotheses: Sequence[Hypothesis]) -> list[Proof]:
        """Return the proofs of the hypotheses that hold.

        Once MOST_JUDGED were judged, the others are left out and `end_reason` says so.
        """
        allowed = hypotheses[: MOST_JUDGED - self.tried_count]
        if len(allowed) < len(hypotheses):
            self.end_reason = f"{MOST_JUDGED} hypotheses were judged"
        self.tried_count += len(allowed)
        proofs = [self._prove_hypothesis(trial, results, hypothesis) for hypothesis in allowed]
        return [proof for proof in proofs if proof]

    def _prove_hypothesis(self, trial: Any, results: Sequence[Result], hypothesis: Hypothesis) -> Proof | None:
        """Return the proof of a hypothesis.

        None if a passing check fails or becomes UNKNOWN under it without being tolerated, if it raises, or if it would
        cost too much. An error is put on record,
        but for NoBound: no noise was measured for such an assumption.
        """
        try:
            return prove(trial, results, hypothesis)
        except budget.BudgetExceeded:
            self.end_reason = PASSES_ENDED_TEXT
        except NoBound:  # no noise was measured for this assumption
            pass
        except Exception as error:
            self._record_error(hypothesis.cause.kind, error)
        return None

    def proposals_of(
        self, makers: Iterable[Callable[[Any, Broken], Iterator[T]]], trial: Any, broken: Broken
    ) -> Iterator[T]:
        """Yield what these functions propose, one function after the other.

        A function that raises is abandoned there. Its error is put on record, but for NoBound while something is
        assumed. broken: results of the failing checks, by name.
        """
        for make in makers:
            try:
                yield from make(trial, broken)
            except budget.BudgetExceeded:
                self.end_reason = PASSES_ENDED_TEXT
            except Exception as error:
                if trial is self.asked_trial or not isinstance(error, NoBound):
                    self._record_error(make.__name__, error)

    def _record_error(self, who: str, error: Exception) -> None:
        """Add the text of an error to `errors`, once, though most functions are asked again under each assumption.

        who: the function or kind of cause that raised. An error about a bound that was never measured is a sentence
        already.
        """
        text = str(error)
        if not isinstance(error, NoBound):
            where = traceback.extract_tb(error.__traceback__)[-1]
            first_line = text.partition("\n")[0]
            text = f"{who} raised {type(error).__name__}: {first_line[:MOST_CHARACTERS]} at {where.name}:{where.lineno}"
        if text not in self.errors:
            self.errors.append(text)


def failing_checks(results: Sequence[Result]) -> dict[str, Result]:
    """Return the failing results that have findings, by check."""
    return {result.check: result for result in results if result.verdict is Verdict.FAIL and result.findings}


def results_under(proof: Proof, results: Sequence[Result]) -> list[Result]:
    """Return the results with a PASS for each check that the proof explains. All others stay as they are."""
    after: list[Result] = []
    for result in results:
        passes = result.check in proof.explained
        after.append(dataclasses.replace(result, verdict=Verdict.PASS) if passes else result)
    return after


def _failing_names(results: Sequence[Result]) -> tuple[str, ...]:
    """Return the names of the failing checks, with findings or without."""
    return tuple(result.check for result in results if result.verdict is Verdict.FAIL)


def _complexity(hypothesis: Hypothesis) -> int:
    """Return how many numbers a hypothesis fits: simpler ones are tried first."""
    return hypothesis.fitted_count


def _best_proofs(candidates: Sequence[Proof]) -> list[Proof]:
    """Return the proofs that explain most, of these the simplest, of these those that most checks have seen.

    Equal ones are returned side by side, of the same causes the first. Empty without candidates.
    """
    ordered = sorted(candidates, key=lambda proof: (-len(proof.explained), proof.fitted_count, -proof.seen_count))
    best: dict[frozenset[Cause], Proof] = {}
    for proof in ordered:
        if _merit(proof) == _merit(ordered[0]):
            causes = frozenset(hypothesis.cause for hypothesis in proof.hypotheses)
            best.setdefault(causes, proof)
    return list(best.values())


def _merit(proof: Proof) -> tuple[tuple[str, ...], int, int]:
    """Return what equally good proofs have in common: explained checks, fitted numbers, and its seen_count."""
    return proof.explained, proof.fitted_count, proof.seen_count


def _join(first: Proof, second: Proof, results: Sequence[Result]) -> Proof:
    """Return both proofs as one. Precondition: the second was found in the evidence that the first assumes."""
    hypotheses = (*first.hypotheses, *second.hypotheses)
    either = {*first.explained, *second.explained}
    explained = tuple(check for check in _failing_names(results) if check in either)
    aside = tuple(dict.fromkeys((*first.tolerated_failures, *second.tolerated_failures)))
    return Proof(hypotheses, explained, second.unexplained, second.assumed, aside)
