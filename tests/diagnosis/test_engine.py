"""A hypothesis is confirmed by the laws alone, and one that could fit anything confirms nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from diagnosed import fsdp_4
from literal import tiny_case, trial_of, with_step_1_gradients

from harness.checks import judge
from harness.diagnosis.engine import explain
from harness.diagnosis.hypothesis import Broken, Fact, Hypothesis
from harness.judge.result import Cause
from harness.judge.trial import Trial


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


def test_a_hypothesis_under_which_the_broken_law_holds_is_the_cause() -> None:
    assert named(DOUBLED, suspect("doubled", twice_the_gradients)) == ["doubled"]


def test_a_hypothesis_that_changes_nothing_is_not_the_cause() -> None:
    assert named(DOUBLED, suspect("nothing", lambda trial: trial)) == []


def test_a_hypothesis_that_breaks_a_law_that_held_is_not_the_cause() -> None:
    other_samples = lambda trial: replace(  # noqa: E731
        twice_the_gradients(trial), reference=replace(twice_the_gradients(trial).reference, samples=((99,),) * 3)
    )
    assert named(DOUBLED, suspect("other samples", other_samples)) == []


def test_the_simplest_of_two_that_hold_is_the_cause_and_equally_simple_ones_are_both_said() -> None:
    simple, other = suspect("simple", twice_the_gradients), suspect("other", twice_the_gradients)
    fitted = suspect("fitted", twice_the_gradients, fitted=3)
    assert named(DOUBLED, fitted, simple) == ["simple"]
    assert named(DOUBLED, simple, other) == ["simple", "other"]


def test_what_a_suspect_raises_is_on_record_and_keeps_no_other_from_being_tried() -> None:
    def raising(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
        raise KeyError("layers.9")
        yield

    found = explain(DOUBLED, judge(DOUBLED), (raising, suspect("doubled", twice_the_gradients)), ())  # type: ignore[arg-type]
    assert [text.split(" at ")[0] for text in found.raised] == ["raising raised KeyError: 'layers.9'"]
    assert found.proofs[0].complete


def test_a_fact_takes_the_laws_that_no_hypothesis_explains() -> None:
    def fact(trial: Trial, broken: Broken) -> Iterator[Fact]:
        yield Fact(Cause("seen", "seen"), ("gradients", "grad_norm"))

    found = explain(DOUBLED, judge(DOUBLED), (), (fact,))
    assert ([one.cause.kind for one in found.facts], found.left) == (["seen"], ())


def test_a_right_trial_has_nothing_to_explain() -> None:
    trial = trial_of(tiny_case("ddp_2"))
    assert explain(trial, judge(trial), (), ()).left == ()
