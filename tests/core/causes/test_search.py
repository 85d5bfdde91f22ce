"""Which of several hypotheses are the cause, alone and two together. Checks here hold or are broken by declaration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from diagnosed import here
from literal import tiny_case

from harness.core.case.case import Case
from harness.core.causes import engine
from harness.core.causes.engine import Explanation, explain
from harness.core.causes.hypothesis import Broken, Fact, Hypothesis
from harness.core.judge.result import Cause, Result, Verdict
from harness.core.judge.tolerance import NoBound
from harness.core.report.cause_text import cause_line
from harness.reference import budget

CASE = tiny_case("single")
SIZE = CASE.training.global_batch * CASE.training.seq_len * CASE.model.vocab_size


@dataclass(frozen=True)
class Run:
    """In the place of a trial: the checks that pass, because nothing was wrong or because of what is assumed."""

    holding: frozenset[str] = frozenset({"memory"})
    case: Case = CASE
    gradients_from: int = 1
    """The first step in which gradients are wrong, as far as they are."""

    def result_of(self, check: str) -> Result:
        if check in self.holding:
            return Result(check, Verdict.PASS)
        return failing(check, self.gradients_from if check == "gradients" else 1)


def failing(check: str, step: int = 1) -> Result:
    finding = here(check)[1]
    return Result(check, Verdict.FAIL, 1, (replace(finding, step=step),))


def results(*broken: str) -> list[Result]:
    return [*map(failing, broken), Result("memory", Verdict.PASS)]


def one(name: str, *mends: str, fitted: int = 1, breaks: str = "", gradients_from: int = 1, **told: Any) -> Hypothesis:
    """gradients_from: the first step in which gradients are still wrong if this is assumed."""

    def assume(run: Run) -> Run:
        holding = (run.holding | set(mends)) - {breaks}
        return replace(run, holding=holding, gradients_from=gradients_from)

    return Hypothesis(Cause(name, name), assume, fitted, **told)  # type: ignore[arg-type]


Suspect = Callable[[Any, Broken], Iterator[Any]]


def suspecting(*proposed: Any) -> Suspect:
    """All that is proposed, errors raised."""

    def suspects(run: Run, broken: Broken) -> Iterator[Any]:
        for other in proposed:
            if isinstance(other, Exception):
                raise other
            yield other

    return suspects


def explained(
    *proposed: Any, broken: tuple[str, ...] = (), facts: tuple[Any, ...] = (), costly: Any = ()
) -> Explanation:
    checks = results(*(broken or ("gradients", "traffic", "samples")))
    return explain(Run(), checks, (suspecting(*proposed),), (suspecting(*facts),), (suspecting(*costly),))  # type: ignore[arg-type]


def told(found: Explanation) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """The causes of each proof, what it explains and what it leaves."""
    return [
        (" + ".join(cause_line(one.cause) for one in proof.hypotheses), proof.explained, proof.unexplained)
        for proof in found.proofs
    ]


G, T, S = "gradients", "traffic", "samples"
ALL = (G, T, S)


@pytest.mark.parametrize(
    ("proposed", "expected", "tried"),
    [
        # one that explains all: the simplest, and equally simple ones side by side
        ([one("a", *ALL)], [("a", ALL, ())], 1),
        ([one("b", *ALL), one("a", *ALL)], [("b", ALL, ()), ("a", ALL, ())], 2),
        ([one("b", *ALL, fitted=2), one("a", *ALL)], [("a", ALL, ())], 1),
        ([one("a", G), one("b", *ALL, fitted=2), one("c", *ALL, fitted=3)], [("b", ALL, ())], 2),
        # none may break what held, and there must be something to assume
        ([one("a", *ALL, breaks="memory")], [], 1),
        ([Hypothesis(Cause("a", "a"), None), one("b", *ALL)], [("b", ALL, ())], 1),
        ([one("a")], [], 2),
        ([], [], 0),
        # two that explain all together, all that go with the first
        ([one("a", G), one("b", T, S)], [("b + a", ALL, ())], 4),
        ([one("a", G, T), one("b", S), one("c", S)], [("a + b", ALL, ()), ("a + c", ALL, ())], 6),
        ([one("a", G, T), one("b", S, fitted=2), one("c", S, fitted=3)], [("a + b", ALL, ())], 5),
        # what adds nothing is no mistake
        ([one("a", G), one("b", G, T)], [("b", (G, T), (S,))], 6),
        # else what explains most, and of that the simplest
        ([one("a", G), one("b", T)], [("a + b", (G, T), (S,))], 6),
        ([one("a", G), one("b", T, fitted=2)], [("a + b", (G, T), (S,))], 6),
        ([one("a", G), one("b", G)], [("a", (G,), ALL[1:]), ("b", (G,), ALL[1:])], 6),
        ([one("a", G, fitted=2), one("b", G)], [("b", (G,), ALL[1:])], 6),
        ([one("a", G), one("a", G)], [("a", (G,), ALL[1:])], 6),
        # where ranks are numbered otherwise nothing else is looked for
        ([one("a", G, T, renumbers_ranks=True), one("b", S, fitted=2)], [("b + a", ALL, ())], 3),
        ([one("a", G, T, renumbers_ranks=True)], [("a", (G, T), (S,))], 1),
    ],
)
def test_the_simplest_that_explains_all_is_the_cause_else_two_else_what_explains_most(
    proposed: list[Hypothesis], expected: list[Any], tried: int
) -> None:
    found = explained(*proposed)
    assert told(found) == expected
    assert (found.facts, found.errors, found.end_reason, found.tried_count) == ((), (), "", tried)
    assert found.unexplained == (expected[0][2] if expected else ALL)


def test_of_what_explains_as_much_the_one_that_a_check_left_has_seen_is_said() -> None:
    plain, seen = one("plain", G), one("seen", G, seen_by=(T,))
    for proposed in ((plain, seen), (seen, plain)):
        assert told(explained(*proposed)) == [("seen", (G,), (T, S))]
    for elsewhere in (one("seen", G, seen_by=(G,)), one("seen", G, seen_by=("memory",))):
        assert told(explained(plain, elsewhere)) == [("plain", (G,), (T, S)), ("seen", (G,), (T, S))]


def test_a_second_of_a_kind_of_which_there_are_not_two_is_not_looked_for() -> None:
    first, again, other = one("first", G), one("again", T, S), one("other", T, S, fitted=5)
    scaled = [replace(of, cause=Cause("gradients scaled", cause_line(of.cause))) for of in (first, again)]
    assert told(explained(*scaled, other)) == [("other + first", ALL, ())]
    assert told(explained(first, again)) == [("again + first", ALL, ())]
    fitted = replace(again, cause=Cause("gradients scaled", "again"))
    assert told(explained(first, fitted)) == [("again + first", ALL, ())]


def test_a_second_that_explains_a_part_is_said_with_the_first_and_the_best_of_these_alone() -> None:
    """The second ones are proposed where the first is assumed."""
    best, other = one("best", T, S), one("other", S)

    def suspects(run: Run, broken: Broken) -> Iterator[Hypothesis]:
        yield from (one("first", G),) if G in broken else (other, best, one("nothing"))

    found = explain(Run(), results(*ALL, "update"), (suspects,), ())  # type: ignore[arg-type]
    assert told(found) == [("first + best", ALL, ("update",))]
    assert found.tried_count == 4

    def in_vain(run: Run, broken: Broken) -> Iterator[Hypothesis]:
        yield one("first", G) if G in broken else one("nothing")

    assert told(explain(Run(), results(*ALL), (in_vain,), ())) == [("first", (G,), (T, S))]  # type: ignore[arg-type]


def test_of_two_the_second_is_said_alone_where_it_explains_as_much_without_the_first() -> None:
    def suspects(run: Run, broken: Broken) -> Iterator[Hypothesis]:
        yield one("first", G) if G in broken else one("second", *ALL)

    assert told(explain(Run(), results(*ALL), (suspects,), ())) == [("second", ALL, ())]  # type: ignore[arg-type]


def test_a_second_that_breaks_what_the_first_explains_is_no_second() -> None:
    def suspects(run: Run, broken: Broken) -> Iterator[Hypothesis]:
        yield one("first", G) if G in broken else one("second", T, S, breaks=G)

    assert told(explain(Run(), results(*ALL), (suspects,), ())) == [("first", (G,), (T, S))]  # type: ignore[arg-type]


@pytest.mark.parametrize(("before", "expected"), [(5, "half 5 + late"), (6, "half 0")])
def test_so_many_are_tried_as_one_of_two(before: int, expected: str) -> None:
    """A second one is proposed under the last of those that explain one check each."""
    halves = [one(f"half {number}", G, fitted=1 + number) for number in range(before)]
    last = one(f"half {before}", T, fitted=1 + before)

    def suspects(run: Run, broken: Broken) -> Iterator[Hypothesis]:
        if G in broken and T in broken:
            yield from (*halves, last)
        elif G in broken:
            yield one("late", G, S)

    found = told(explain(Run(), results(*ALL), (suspects,), ()))  # type: ignore[arg-type]
    assert [text for text, *_ in found] == [expected]


def test_those_that_cost_more_are_asked_where_the_others_leave_a_check_and_are_said_beside_them() -> None:
    assert told(explained(one("a", *ALL), costly=[one("b", *ALL)])) == [("a", ALL, ())]
    assert told(explained(one("a", G), costly=[one("b", *ALL)])) == [("b", ALL, ())]
    assert told(explained(one("a", G), costly=[one("b", T, S)])) == [("b + a", ALL, ())]


# ---- facts


def fact(name: str, *checks: str) -> Fact:
    return Fact(Cause(name, name), checks)


FIVE = (*ALL, "update", "grad_norm")


@pytest.mark.parametrize(
    ("proposed", "facts", "proofs", "seen", "left"),
    [
        ([], [fact("f", G)], [], ["f"], FIVE[1:]),
        ([], [fact("f", G, T), fact("g", T), fact("h", S)], [], ["f", "h"], FIVE[3:]),
        ([], [fact("f", "loss")], [], [], FIVE),
        ([one("a", T)], [fact("f", T), fact("g", S)], ["a"], ["g"], (G, "update", "grad_norm")),
        ([one("a", T, "update")], [fact("f", G)], ["a"], ["f"], (S, "grad_norm")),
        # what explains only what follows of wrong gradients, and leaves these unexplained, is no proof
        ([one("a", "update", "grad_norm")], [fact("f", G)], [], ["f"], FIVE[1:]),
        ([one("a", "update")], [fact("e", T), fact("f", "loss", G)], [], ["e", "f"], FIVE[2:]),
        ([one("a", "update")], [fact("f", T)], [], ["f"], (G, S, "update", "grad_norm")),
        ([one("a", "update", gradients_from=2)], [fact("f", T)], ["a"], ["f"], (G, S, "grad_norm")),
        ([one("a", G, "update")], [fact("f", G)], ["a"], [], (T, S, "grad_norm")),
    ],
)
def test_facts_are_said_of_checks_that_no_proof_explains(
    proposed: list[Hypothesis], facts: list[Fact], proofs: list[str], seen: list[str], left: tuple[str, ...]
) -> None:
    found = explained(*proposed, facts=tuple(facts), broken=FIVE)
    assert [text for text, *_ in told(found)] == proofs
    assert [cause_line(of.cause) for of in found.facts] == seen
    assert found.unexplained == left


# ---- what is on record besides


def test_what_is_raised_is_on_record_once_with_the_line_and_ends_what_that_suspect_proposes() -> None:
    def deeper(run: Run, broken: Broken) -> Iterator[Hypothesis]:
        yield from suspecting(ValueError("first\nsecond"))(run, broken)

    raising, late = suspecting(one("a", T), KeyError("layers.9"), one("b", *ALL)), suspecting(one("c", S))
    found = explain(Run(), results(*ALL), (deeper, raising, late), ())  # type: ignore[arg-type]
    at = suspecting().__code__.co_firstlineno + 3  # type: ignore[attr-defined]
    texts = [
        f"deeper raised ValueError: first at suspects:{at}",
        f"suspects raised KeyError: 'layers.9' at suspects:{at}",
    ]
    assert found.errors == (*texts,)
    assert told(found) == [("a + c", (T, S), (G,))]


def test_what_an_assumption_raises_is_told_by_its_kind_and_missing_bounds_in_their_words_once() -> None:
    def lost(run: Run) -> Run:
        raise KeyError("layers.9")

    odd = Hypothesis(Cause("odd", "-"), lost)  # type: ignore[arg-type]
    found = explained(odd, one("a", *ALL))
    assert found.errors == (f"odd raised KeyError: 'layers.9' at lost:{lost.__code__.co_firstlineno + 1}",)
    assert told(found) == [("a", ALL, ())] and found.tried_count == 2
    bounds = [NoBound("never measured"), NoBound("never measured"), NoBound("too blunt")]
    suspects = [suspecting(error) for error in bounds]
    found = explain(Run(), results(*ALL), suspects, ())  # type: ignore[arg-type]
    assert found.errors == ("never measured", "too blunt")


@pytest.mark.parametrize(("passes", "ended"), [(0, False), (1, True)])
def test_a_search_ends_where_it_has_computed_all_that_it_may(
    passes: int, ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_bounded_passes", lambda run: budget.logits_budget(SIZE * engine.MOST_PASSES))

    def computing(run: Run) -> Run:
        budget.spend_logits(SIZE * (engine.MOST_PASSES + passes))
        return replace(run, holding=run.holding | set(ALL))

    found = explained(Hypothesis(Cause("a", "a"), computing))  # type: ignore[arg-type]
    assert told(found) == ([] if ended else [("a", ALL, ())])
    assert found.end_reason == "the reference was computed for 4000 forward passes" * ended
    assert found.errors == ()

    def proposing(run: Run, broken: Broken) -> Iterator[Hypothesis]:
        budget.spend_logits(SIZE * (engine.MOST_PASSES + passes))
        yield one("a", *ALL)

    found = explain(Run(), results(*ALL), (proposing,), ())  # type: ignore[arg-type]
    assert (told(found) == [], found.errors, bool(found.end_reason)) == (ended, (), ended)


@pytest.mark.parametrize(
    ("judged", "ended", "expected"),
    [
        (3, "", "b + a"),
        (2, "2 hypotheses were judged", "b"),
        (1, "1 hypotheses were judged", "a"),
    ],
)
def test_no_more_are_judged_than_the_bound_says_over_all_searches(
    monkeypatch: pytest.MonkeyPatch, judged: int, ended: str, expected: str
) -> None:
    monkeypatch.setattr(engine, "MOST_JUDGED", judged)
    found = explained(one("a", G), one("b", T, S, fitted=2))
    assert (found.tried_count, found.end_reason) == (judged, ended)
    assert [text for text, *_ in told(found)] == [expected]
