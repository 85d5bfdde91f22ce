"""A hypothesis is confirmed by the checks alone, and one that could fit anything confirms nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from diagnosed import fsdp_4
from literal import tiny_case, trial_of, with_every_rank, with_step, with_step_1_gradients

from harness.checks import judge
from harness.diagnosis import diagnose, engine, hypothesis
from harness.diagnosis.engine import explain, failing_checks
from harness.diagnosis.hypothesis import Broken, Fact, Hypothesis, as_seen, stated
from harness.diagnosis.words import finding_line
from harness.evidence.provided import Provided
from harness.judge.result import Cause, Result, Verdict
from harness.judge.tolerance import NoBound
from harness.judge.trial import Trial
from harness.reference import budget
from harness.report.cause_text import diagnosis_line, evidence_rows


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


def test_the_simplest_of_two_that_hold_is_the_cause_and_equally_simple_ones_are_both_said() -> None:
    simple, other = suspect("simple", twice_the_gradients), suspect("other", twice_the_gradients)
    fitted = suspect("fitted", twice_the_gradients, fitted=3)
    assert named(DOUBLED, fitted, simple) == ["simple"]
    assert named(DOUBLED, simple, other) == ["simple", "other"]


def test_what_a_check_has_seen_is_said_before_what_explains_as_much() -> None:
    def seen(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
        yield Hypothesis(Cause("seen", "seen"), twice_the_gradients, seen=("reported_loss",))

    other, trial = suspect("other", twice_the_gradients), with_step(DOUBLED, 0, 1, reported_loss=9.0)
    for suspects in ((seen, other), (other, seen)):
        found = explain(trial, judge(trial), suspects, ())  # type: ignore[arg-type]
        assert [proof.hypotheses[0].cause.kind for proof in found.proofs] == ["seen"]


def test_what_a_suspect_raises_is_on_record_and_keeps_no_other_from_being_tried() -> None:
    def raising(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
        raise KeyError("layers.9")
        yield

    found = explain(DOUBLED, judge(DOUBLED), (raising, suspect("doubled", twice_the_gradients)), ())  # type: ignore[arg-type]
    assert [text.split(" at ")[0] for text in found.raised] == ["raising raised KeyError: 'layers.9'"]
    assert found.proofs[0].complete


def test_bounds_that_nobody_measured_are_said_once_and_in_their_own_words() -> None:
    def one(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
        raise NoBound("its noise was never measured")
        yield

    def another(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
        yield from one(trial, broken)

    assert explain(DOUBLED, judge(DOUBLED), (one, another), ()).raised == ("its noise was never measured",)


def test_what_is_raised_without_a_word_is_on_record_without_one() -> None:
    def raising(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
        raise ValueError
        yield

    (text,) = explain(DOUBLED, judge(DOUBLED), (raising,), ()).raised
    assert text.startswith("raising raised ValueError:  at raising:")


def test_what_an_assumption_raises_is_on_record_by_the_kind_of_its_cause() -> None:
    def unknown(trial: Trial) -> Trial:
        raise KeyError("layers.9")

    found = explain(DOUBLED, judge(DOUBLED), (suspect("odd", unknown), suspect("doubled", twice_the_gradients)), ())  # type: ignore[arg-type]
    assert [text.split(" at ")[0] for text in found.raised] == ["odd raised KeyError: 'layers.9'"]
    assert [one.cause.kind for one in found.proofs[0].hypotheses] == ["doubled"]


def test_a_fact_takes_the_checks_that_no_hypothesis_explains() -> None:
    def fact(trial: Trial, broken: Broken) -> Iterator[Fact]:
        yield Fact(Cause("seen", "seen"), ("gradients", "grad_norm"))

    found = explain(DOUBLED, judge(DOUBLED), (), (fact,))
    assert ([one.cause.kind for one in found.facts], found.left) == (["seen"], ())


def test_what_a_check_saw_of_a_hypothesis_that_is_not_proven_is_said_with_its_lines() -> None:
    cause, lines = Cause("seen", "seen"), (("gradients", "twice as large"),)

    def suspects(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
        yield Hypothesis(Cause("unseen", "unseen"), None)
        yield Hypothesis(cause, None, lines=lines, seen=("gradients",))
        yield Hypothesis(Cause("later", "later"), None, seen=("gradients",))

    found = explain(DOUBLED, judge(DOUBLED), (suspects,), (as_seen(suspects),))
    assert found.facts == (Fact(cause, ("gradients",), lines),)
    assert len(list(as_seen(suspects)(DOUBLED, {}))) == 1


def test_a_check_that_holds_under_the_first_of_two_is_not_broken_for_the_second() -> None:
    seen = []

    def second(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
        seen.append(set(broken))
        return iter(())

    reported = with_every_rank(DOUBLED, lambda trial, rank: with_step(trial, rank, 2, reported_loss=9.0))
    named(reported, suspect("doubled", twice_the_gradients), second)
    assert seen[0] - seen[-1] == {"grad_norm", "gradients"}
    assert "reported_loss" in seen[-1]


def as_reported(trial: Trial) -> Trial:
    return trial.assuming(reports={"grad_norm": lambda rank, step: trial.ranks[rank].steps[step - 1].grad_norm})


def test_of_two_the_second_is_named_alone_where_alone_it_explains_as_much() -> None:
    """It is only proposed where the first is assumed."""

    def second(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
        if "grad_norm" not in broken:
            yield Hypothesis(Cause("doubled", "doubled"), twice_the_gradients)

    assert named(DOUBLED, suspect("report", as_reported), second) == ["doubled"]


def test_a_change_besides_is_made_after_the_first() -> None:
    again = Hypothesis(Cause("doubled", "doubled"), twice_the_gradients).and_then(twice_the_gradients)
    norms = [trial.reference.steps[0].grad_norm for trial in (RIGHT, again.assume(RIGHT))]
    assert norms[1] == 4 * norms[0]
    assert Hypothesis(Cause("seen", "seen"), None).and_then(twice_the_gradients).assume is None


def test_what_a_check_saw_is_stated_with_its_first_finding_and_what_is_said_besides() -> None:
    broken = failing_checks(judge(DOUBLED))
    fact = stated(broken, "gradients", "doubled", "twice as large", "grad_norm", more=(("why", "so"),))
    assert fact == Fact(
        Cause("doubled", "twice as large"),
        ("gradients", "grad_norm"),
        (finding_line(broken["gradients"]), ("why", "so")),
    )


def test_what_was_seen_of_gradients_goes_before_what_explains_only_what_follows_of_them() -> None:
    def fact(trial: Trial, broken: Broken) -> Iterator[Fact]:
        yield Fact(Cause("seen", "seen"), ("gradients", "grad_norm"))

    def other_bytes(trial: Trial, broken: Broken) -> Iterator[Fact]:
        yield Fact(Cause("bytes", "bytes"), ("traffic",))

    report = suspect("report", as_reported)
    found = explain(DOUBLED, judge(DOUBLED), (report,), (fact,))  # type: ignore[arg-type]
    assert (found.proofs, [one.cause.kind for one in found.facts]) == ((), ["seen"])
    found = explain(DOUBLED, judge(DOUBLED), (report,), (other_bytes,))  # type: ignore[arg-type]
    assert ([proof.explained for proof in found.proofs], found.facts) == ([("grad_norm",)], ())


def test_a_right_trial_has_nothing_to_explain() -> None:
    trial = trial_of(tiny_case("ddp_2"))
    assert explain(trial, judge(trial), (), ()).left == ()


@pytest.mark.parametrize(
    ("check", "apart", "holds"),
    [("reshard", {}, True), ("replica_agreement", {0: RIGHT.reference}, True)]
    + [("replica_agreement", {}, False), ("gradients", {0: RIGHT.reference}, False)],
)
def test_a_check_that_has_nothing_to_judge_holds_only_where_that_is_what_is_assumed(
    monkeypatch: pytest.MonkeyPatch, check: str, apart: object, holds: bool
) -> None:
    monkeypatch.setattr(hypothesis, "verdict_of", lambda trial, name: Verdict.NOT_APPLICABLE)
    one = Hypothesis(Cause("apart", "apart"), lambda trial: trial.assuming(references=apart))  # type: ignore[arg-type]
    proof = hypothesis.tested(RIGHT, [Result(check, Verdict.FAIL)], one)
    assert proof is not None
    assert (proof.explained, proof.left) == (((check,), ()) if holds else ((), (check,)))


def test_a_check_is_judged_by_its_own_name_as_far_as_its_evidence_is_on_record() -> None:
    provided = Provided().without(("claims",), "-").without(("flows",), "-", unknown=True)
    recorded = replace(RIGHT, run=replace(RIGHT.run, provided=provided))
    found = [hypothesis.verdict_of(recorded, name) for name in ("placements", "traffic", "process_groups", "golden")]
    assert found == [Verdict.NOT_APPLICABLE, Verdict.UNKNOWN, Verdict.PASS, Verdict.PASS]


def test_two_proofs_that_read_alike_are_said_once() -> None:
    found = diagnose(DOUBLED, judge(DOUBLED), (suspect("doubled", twice_the_gradients),) * 2, (), ())
    assert found is not None
    assert (diagnosis_line(found), "or else" in dict(evidence_rows(found.evidence))) == ("doubled", False)


# ---- what is computed and judged is bounded


SIZE = RIGHT.case.training.global_batch * RIGHT.case.training.seq_len * RIGHT.case.model.vocab_size


def computing(name: str, assume: object, passes: int) -> object:
    """A suspect whose hypothesis takes so many forward passes to be tried."""

    def after_these(trial: Trial) -> Trial:
        for _ in range(passes):
            budget.spend(SIZE)
        return assume(trial)  # type: ignore[operator,no-any-return]

    return suspect(name, after_these)


def endless(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Logits that are twice as many in every pass."""
    size = SIZE
    while True:
        budget.spend(size)
        size *= 2
    yield


def test_a_search_that_computes_too_much_ends_and_says_so() -> None:
    found = diagnose(DOUBLED, judge(DOUBLED), (endless,), (), ())
    assert found is not None
    assert (
        dict(evidence_rows(found.evidence))["not searched further"]
        == "the reference was computed for 4000 forward passes"
    )


def test_what_takes_more_than_is_left_is_not_named_and_what_takes_less_is() -> None:
    most = engine.PASSES
    assert named(DOUBLED, computing("doubled", twice_the_gradients, most)) == ["doubled"]
    more = computing("doubled", twice_the_gradients, most + 1)
    assert named(DOUBLED, more) == []
    assert explain(DOUBLED, judge(DOUBLED), (more,), ()).ended == engine.PASSES_ENDED  # type: ignore[arg-type]
    assert named(DOUBLED, endless, suspect("doubled", twice_the_gradients)) == ["doubled"]
    assert named(DOUBLED, endless, computing("doubled", twice_the_gradients, 1)) == []


def test_each_search_has_all_of_its_passes_and_outside_of_one_there_is_no_bound() -> None:
    for _ in range(2):
        assert named(DOUBLED, computing("doubled", twice_the_gradients, engine.PASSES)) == ["doubled"]
    budget.spend(10 * engine.PASSES * SIZE)


def test_no_more_hypotheses_are_judged_than_the_bound_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def many(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
        while True:
            yield Hypothesis(Cause("nothing", "nothing"), lambda trial: trial)

    monkeypatch.setattr(engine, "JUDGED", 3)
    found = explain(DOUBLED, judge(DOUBLED), (many,), ())
    assert (found.tried, found.ended) == (3, "3 hypotheses were judged")
    monkeypatch.setattr(engine, "JUDGED", 1)
    found = explain(DOUBLED, judge(DOUBLED), (suspect("doubled", twice_the_gradients),), ())  # type: ignore[arg-type]
    assert (found.tried, found.ended, found.proofs[0].complete) == (1, "", True)


def test_facts_are_asked_of_all_failing_checks_and_then_of_those_that_a_proof_leaves() -> None:
    asked = []

    def fact(trial: Trial, broken: Broken) -> Iterator[Fact]:
        asked.append((trial is DOUBLED, {*broken}))
        return iter(())

    found = explain(DOUBLED, judge(DOUBLED), (suspect("report", as_reported),), (fact,))  # type: ignore[arg-type]
    assert asked == [(True, {"gradients", "grad_norm"}), (True, {"gradients"})]
    assert found.left == ("gradients",)


def test_suspects_that_cost_more_are_asked_where_the_others_leave_a_check() -> None:
    asked = []

    def costly(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
        asked.append({*broken})
        yield Hypothesis(Cause("doubled", "doubled"), twice_the_gradients)

    assert explain(DOUBLED, judge(DOUBLED), (), (), (costly,)).proofs[0].complete
    assert explain(DOUBLED, judge(DOUBLED), (suspect("other", twice_the_gradients),), (), (costly,)).proofs[0].complete  # type: ignore[arg-type]
    assert asked == [{"gradients", "grad_norm"}]
