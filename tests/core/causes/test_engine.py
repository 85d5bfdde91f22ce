"""A hypothesis is confirmed by the checks alone, and one that could fit anything confirms nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from diagnosed import fsdp_4
from literal import tiny_case, trial_of, with_step_1_gradients

from harness.core.causes import engine, hypothesis
from harness.core.causes.engine import explain
from harness.core.causes.hypothesis import Broken, Fact, Hypothesis, facts_of_unproven
from harness.core.checks import judge
from harness.core.evidence.provided import Provided
from harness.core.judge.finding import Finding
from harness.core.judge.result import Cause, Result, Verdict
from harness.core.judge.trial import Trial
from harness.reference import budget


def twice_the_gradients(trial: Trial) -> Trial:
    steps = tuple(
        replace(step, gradients={f: 2 * g for f, g in step.gradients.items()}, grad_norm=2 * step.grad_norm)
        if step.step == 1
        else step
        for step in trial.reference.steps
    )
    return replace(trial, reference=replace(trial.reference, steps=steps))


def suspect(name: str, assume: object, fitted: int = 1) -> object:
    def propose(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
        yield Hypothesis(Cause(name, name), assume, fitted)  # type: ignore[arg-type]

    return propose


RIGHT = fsdp_4()
DOUBLED = with_step_1_gradients(RIGHT, lambda rank, fqn: 2 * RIGHT.reference.steps[0].gradients[fqn])


def named(trial: Trial, *suspects: object) -> list[str]:
    found = explain(trial, judge(trial), suspects, ())  # type: ignore[arg-type]
    return [one.cause.kind for proof in found.proofs if proof.explained for one in proof.hypotheses]


def test_a_hypothesis_under_which_the_failing_check_holds_is_the_cause() -> None:
    assert named(DOUBLED, suspect("doubled", twice_the_gradients)) == ["doubled"]


def test_a_hypothesis_that_changes_nothing_is_not_the_cause() -> None:
    assert named(DOUBLED, suspect("nothing", lambda trial: trial)) == []


def test_a_hypothesis_that_breaks_a_check_that_held_is_not_the_cause() -> None:
    other_samples = lambda trial: replace(  # noqa: E731
        twice_the_gradients(trial), reference=replace(twice_the_gradients(trial).reference, samples=((99,),) * 3)
    )
    assert named(DOUBLED, suspect("other samples", other_samples)) == []


def test_what_a_check_saw_of_a_hypothesis_that_is_not_proven_is_said_with_its_lines() -> None:
    cause, lines = Cause("seen", "seen"), (("gradients", "twice as large"),)

    def suspects(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
        yield Hypothesis(Cause("unseen", "unseen"), None)
        yield Hypothesis(cause, None, lines=lines, seen_by=("gradients",))
        yield Hypothesis(Cause("later", "later"), None, seen_by=("gradients",))

    found = explain(DOUBLED, judge(DOUBLED), (suspects,), (facts_of_unproven(suspects),))
    assert found.facts == (Fact(cause, ("gradients",), lines),)
    assert len(list(facts_of_unproven(suspects)(DOUBLED, {}))) == 1


def test_a_change_besides_is_made_after_the_first() -> None:
    again = Hypothesis(Cause("doubled", "doubled"), twice_the_gradients).and_then(twice_the_gradients)
    norms = [trial.reference.steps[0].grad_norm for trial in (RIGHT, again.assume(RIGHT))]
    assert norms[1] == 4 * norms[0]
    assert Hypothesis(Cause("seen", "seen"), None).and_then(twice_the_gradients).assume is None


def test_a_right_trial_has_nothing_to_explain() -> None:
    trial = trial_of(tiny_case("ddp_2"))
    assert explain(trial, judge(trial), (), ()).unexplained == ()


@pytest.mark.parametrize(
    ("check", "apart", "holds"),
    [("reshard", {}, True), ("replica_agreement", {0: RIGHT.reference}, True)]
    + [("replica_agreement", {}, False), ("gradients", {0: RIGHT.reference}, False)],
)
def test_a_check_that_has_nothing_to_judge_holds_only_where_that_is_what_is_assumed(
    monkeypatch: pytest.MonkeyPatch, check: str, apart: object, holds: bool
) -> None:
    monkeypatch.setattr(hypothesis, "verdict_of", lambda trial, name: Verdict.NOT_APPLICABLE)
    one = Hypothesis(Cause("apart", "apart"), lambda trial: trial.with_assumption(references=apart))  # type: ignore[arg-type]
    proof = hypothesis.prove(RIGHT, [Result(check, Verdict.FAIL)], one)
    assert proof is not None
    assert (proof.explained, proof.unexplained) == (((check,), ()) if holds else ((), (check,)))


def test_a_check_is_judged_by_its_own_name_as_far_as_its_evidence_is_on_record() -> None:
    provided = Provided().lacking_words(("claims",), "-").lacking_words(("flows",), "-", unknown=True)
    recorded = replace(RIGHT, run=replace(RIGHT.run, provided=provided))
    found = [hypothesis.verdict_of(recorded, name) for name in ("placements", "traffic", "process_groups", "golden")]
    assert found == [Verdict.NOT_APPLICABLE, Verdict.UNKNOWN, Verdict.PASS, Verdict.PASS]


# ---- what is computed and judged is bounded


SIZE = RIGHT.case.training.global_batch * RIGHT.case.training.seq_len * RIGHT.case.model.vocab_size


def computing(name: str, assume: object, passes: int) -> object:
    """A suspect whose hypothesis takes so many forward passes to be tried."""

    def after_these(trial: Trial) -> Trial:
        for _ in range(passes):
            budget.spend_logits(SIZE)
        return assume(trial)  # type: ignore[operator,no-any-return]

    return suspect(name, after_these)


def test_each_search_has_all_of_its_passes_and_outside_of_one_there_is_no_bound() -> None:
    for _ in range(2):
        assert named(DOUBLED, computing("doubled", twice_the_gradients, engine.MOST_PASSES)) == ["doubled"]
    budget.spend_logits(10 * engine.MOST_PASSES * SIZE)


@dataclass(frozen=True)
class Numbers:
    """Evidence that is no trial: two numbers, of which each should be 1."""

    gradients: float
    update: float

    def result_of(self, check: str) -> Result:
        return Result(check, Verdict.PASS if getattr(self, check) == 1 else Verdict.FAIL)


def test_evidence_that_is_no_trial_is_judged_again_by_itself() -> None:
    def halved(numbers: Numbers, broken: Broken) -> Iterator[Hypothesis[Numbers]]:
        yield Hypothesis(Cause("halved", ""), lambda assumed: replace(assumed, gradients=2 * assumed.gradients))

    def all_doubled(numbers: Numbers, broken: Broken) -> Iterator[Hypothesis[Numbers]]:
        yield Hypothesis(Cause("doubled", ""), lambda assumed: Numbers(2 * assumed.gradients, 2 * assumed.update))

    wrong = Result("gradients", Verdict.FAIL, 1, (Finding(check="gradients"),))
    results = [wrong, Result("update", Verdict.PASS, 1)]
    found = explain(Numbers(0.5, 1), results, [halved, all_doubled], [])
    assert [proof.hypotheses[0].cause.kind for proof in found.proofs] == ["halved"]
    assert explain(Numbers(0.5, 1), results, [all_doubled], []).unexplained == ("gradients",)


def test_a_proof_that_a_rule_cannot_judge_is_not_named_and_the_reason_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def halved(numbers: Numbers, broken: Broken) -> Iterator[Hypothesis[Numbers]]:
        yield Hypothesis(Cause("halved", ""), lambda assumed: replace(assumed, gradients=2 * assumed.gradients))

    def raising(*_: object) -> bool:
        raise KeyError("step 4")

    monkeypatch.setattr(engine, "is_undercut", raising)
    wrong = Result("gradients", Verdict.FAIL, 1, (Finding(check="gradients"),))
    found = explain(Numbers(0.5, 1), [wrong], [halved], [])
    assert (found.proofs, found.unexplained) == ((), ("gradients",))
    assert [error.partition(" at ")[0] for error in found.errors] == ["is_undercut raised KeyError: 'step 4'"]
