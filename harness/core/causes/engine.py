"""Suspects -> what the evidence confirms: the simplest that explains all, else the part that each of two explains."""

from __future__ import annotations

import dataclasses
import itertools
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from harness.core.causes.differences import OF_GRADIENTS
from harness.core.causes.hypothesis import Broken, Fact, Facts, Hypothesis, Proof, Suspects, tested
from harness.core.judge.result import Cause, Result, Verdict
from harness.core.judge.tolerance import NoBound
from harness.core.judge.trial import Trial
from harness.reference import budget

T = TypeVar("T")
LONGEST = 120  # characters of what an error says
FIRSTS = 6  # hypotheses that are tried as one of two independent mistakes
PASSES = 4000  # forward passes of a step that are computed to find a cause
JUDGED = 500  # hypotheses that are judged for it
ONCE = frozenset({"gradients scaled"})
"""Kinds of which there are not two at once: a factor fits what another one has left."""
FITTED = frozenset({"unequal contributions"})
"""Kinds that are weights of samples: any sums of samples have such."""
OF_GROUPS = frozenset({"traffic", "placements", "process_groups", "shard_contents"})
"""Checks of which ranks sum with which."""
REPORTED = frozenset({"grad_norm", "reported_loss", "reported_numbers", "reported_rate"})
PASSES_ENDED = f"the reference was computed for {PASSES} forward passes"


@dataclasses.dataclass(frozen=True)
class Explanation:
    """proofs: those that explain most, equally simple ones side by side. facts: of checks that no proof explains.

    left: failing checks that neither explains. tried: how many hypotheses were put to the test.
    raised: errors meanwhile.
    ended: where the search met a bound.
    """

    proofs: tuple[Proof, ...] = ()
    facts: tuple[Fact, ...] = ()
    left: tuple[str, ...] = ()
    tried: int = 0
    raised: tuple[str, ...] = ()
    ended: str = ""


def explain(
    trial: Trial,
    results: Sequence[Result],
    suspects: Sequence[Suspects],
    facts: Sequence[Facts],
    costly: Sequence[Suspects] = (),
) -> Explanation:
    """Never raises: what a suspect raises is on record. What is computed and judged is bounded."""
    training = trial.case.training
    with budget.at_most(PASSES * training.global_batch * training.seq_len * trial.case.model.vocab_size):
        return _explained(Search(tuple(suspects), tuple(costly)), trial, results, facts)


def _explained(search: Search, trial: Trial, results: Sequence[Result], facts: Sequence[Facts]) -> Explanation:
    proofs = search.proofs(trial, results)
    stated = list(search.guarded(facts, trial, failing_checks(results)))
    seen = any("gradients" in fact.checks for fact in stated)
    if proofs and "gradients" in proofs[0].left and {one.cause.kind for one in proofs[0].hypotheses} <= ONCE:
        proofs = []  # a factor of gradients that leaves them wrong: anything has a best fit
    if proofs and seen and "gradients" in proofs[0].left and OF_GRADIENTS.issuperset(proofs[0].explained):
        proofs = []  # what was seen of gradients goes before what explains only what follows of them
    if proofs and FITTED & {one.cause.kind for one in proofs[0].hypotheses} and OF_GROUPS & {*proofs[0].left}:
        proofs = []  # weights fit whatever groups have summed: who sums with whom goes first
    unfinished = any("completed" in fact.checks for fact in stated)
    if proofs and unfinished and "gradients" in proofs[0].left and REPORTED.issuperset(proofs[0].explained):
        proofs = []  # what ranks lack, or hold too much, goes before what is reported of it
    moved = proofs and "gradients" in proofs[0].left and "traffic" not in proofs[0].left
    if moved and proofs[0].explained == ("replica_agreement",):
        proofs = []  # all moved as planned, and replicas differ whatever it is that is not the sum
    left = list(proofs[0].left) if proofs else [r.check for r in results if r.verdict is Verdict.FAIL]
    found = []
    known = list(search.guarded(facts, trial, {r.check: r for r in results if r.check in left and r.findings}))
    while known:  # what is the whole content of most checks goes first
        most = max(known, key=lambda fact: (len({*fact.checks} & {*left}), not fact.symptom))
        known.remove(most)
        if {*most.checks} & {*left}:
            found.append(most)
            left = [name for name in left if name not in most.checks]
    return Explanation(tuple(proofs), tuple(found), tuple(left), search.tried, tuple(search.raised), search.ended)


@dataclasses.dataclass
class Search:
    """costly: suspects that compute models to propose something, asked where the others leave a check unexplained."""

    suspects: tuple[Suspects, ...]
    costly: tuple[Suspects, ...] = ()
    tried: int = 0
    raised: list[str] = dataclasses.field(default_factory=list)
    ended: str = ""
    asked: Trial | None = None

    def proofs(self, trial: Trial, results: Sequence[Result]) -> list[Proof]:
        """All of the simplest that explain everything; else two together; else the one that explains most."""
        self.asked = trial
        complete, partial = self._single(trial, results)
        if complete:
            return complete
        best = [proof for proof in partial if proof.explained]
        for first in (proof for proof in partial[:FIRSTS] if not proof.renumbers):
            whole, parts = self._single(first.assumed, rejudged(first, results))
            kinds = ONCE & {one.cause.kind for one in first.hypotheses}
            whole, parts = ([p for p in found if p.hypotheses[0].cause.kind not in kinds] for found in (whole, parts))
            both = [self._together(trial, results, first, second) for second in whole or parts[:1] if second.explained]
            if whole:
                return both
            best += both
        # of two that explain as much, what a check has seen goes first
        best.sort(key=lambda proof: (-len(proof.explained), proof.fitted, -proof.seen))
        said: dict[frozenset[Cause], Proof] = {}
        for proof in best:
            if (proof.explained, proof.fitted, proof.seen) == (best[0].explained, best[0].fitted, best[0].seen):
                said.setdefault(frozenset(one.cause for one in proof.hypotheses), proof)
        return [*said.values()]

    def _single(self, trial: Trial, results: Sequence[Result]) -> tuple[list[Proof], list[Proof]]:
        """Equally simple ones that explain everything; and the others, those that explain most first."""
        partial: list[Proof] = []
        for suspects in (self.suspects, self.costly):
            some = itertools.islice(self.guarded(suspects, trial, failing_checks(results)), JUDGED + 1)
            proposed = sorted(some, key=lambda one: one.fitted)
            for _, alike in itertools.groupby(filter(lambda one: one.assume, proposed), key=lambda one: one.fitted):
                chosen = self._allowed(alike)
                found = [proof for hypothesis in chosen if (proof := self._tested(trial, results, hypothesis))]
                if complete := [proof for proof in found if proof.complete]:
                    return complete, []
                partial += found
        return [], sorted(partial, key=lambda proof: (-len(proof.explained), proof.fitted))

    def _allowed(self, alike: Iterator[Hypothesis]) -> list[Hypothesis]:
        """Return as many as may still be judged."""
        allowed = list(itertools.islice(alike, JUDGED - self.tried))
        if next(alike, None) is not None:
            self.ended = f"{JUDGED} hypotheses were judged"
        self.tried += len(allowed)
        return allowed

    def _together(self, trial: Trial, results: Sequence[Result], first: Proof, second: Proof) -> Proof:
        """Both; the second alone, where that explains as much: what adds nothing is no mistake."""
        both, alone = _joined(first, second, results), self._tested(trial, results, second.hypotheses[0])
        return alone if alone and {*both.explained} <= {*alone.explained} else both

    def _tested(self, trial: Trial, results: Sequence[Result], hypothesis: Hypothesis) -> Proof | None:
        try:
            return tested(trial, results, hypothesis)
        except budget.Spent:
            self.ended = PASSES_ENDED
            return None
        except NoBound:  # no noise was measured for this assumption
            return None
        except Exception as error:
            self._note(hypothesis.cause.kind, error)
            return None

    def guarded(
        self, makers: Iterable[Callable[[Trial, Broken], Iterator[T]]], trial: Trial, broken: Broken
    ) -> Iterator[T]:
        """What they propose, up to where one raises."""
        for make in makers:
            try:
                yield from make(trial, broken)
            except budget.Spent:
                self.ended = PASSES_ENDED
            except Exception as error:
                if trial is self.asked or not isinstance(error, NoBound):
                    self._note(make.__name__, error)

    def _note(self, who: str, error: Exception) -> None:
        """Each once, though most are asked again under each assumption. What no bound was measured for says so itself."""
        text = str(error)
        if not isinstance(error, NoBound):
            where, first = traceback.extract_tb(error.__traceback__)[-1], text.partition("\n")[0][:LONGEST]
            text = f"{who} raised {type(error).__name__}: {first} at {where.name}:{where.lineno}"
        if text not in self.raised:
            self.raised.append(text)


def failing_checks(results: Sequence[Result]) -> dict[str, Result]:
    return {result.check: result for result in results if result.verdict is Verdict.FAIL and result.findings}


def rejudged(proof: Proof, results: Sequence[Result]) -> list[Result]:
    """The results under what a proof assumes. Findings of a check that still fails are those of before."""
    holds = partial(dataclasses.replace, verdict=Verdict.PASS)
    return [holds(result) if result.check in proof.explained else result for result in results]


def _joined(first: Proof, second: Proof, results: Sequence[Result]) -> Proof:
    explained = {*first.explained, *second.explained}
    broken = [result.check for result in results if result.verdict is Verdict.FAIL]
    both = (*first.hypotheses, *second.hypotheses)
    explains, aside = tuple(name for name in broken if name in explained), (*first.aside, *second.aside)
    return Proof(both, explains, second.left, second.assumed, tuple(dict.fromkeys(aside)))
