"""In which pass and which modules a model that computes otherwise is looked for, and by which numbers. No ranks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from diagnosed import broken
from literal import TINY, tiny_case, trial_of, with_step

from harness.diagnosis import forward
from harness.diagnosis.forward import BEFORE, Tries, first_wrong_pass
from harness.judge.trial import Trial
from harness.spec.dims import ParallelDims


def tries(dims: ParallelDims = ParallelDims(), layers: int = 3, step: int = 1, bound: float = 0.0) -> Tries:  # noqa: B008
    """Of a trial of which no more is known than its model, its ranks, and how close its losses are."""
    case = tiny_case(dims, model=replace(TINY, n_layers=layers))
    trial: Any = SimpleNamespace(case=case, bounds=SimpleNamespace(loss={step: bound}))
    found = Tries(trial, step)
    found.__dict__["observed"] = {0: 0.75, 1: 0.25}
    return found


# ---- in which pass


def with_loss(trial: Trial, step: int, factor: float) -> Trial:
    for rank in trial.ranks:
        parts = trial.ranks[rank].steps[step - 1].microbatches
        wrong = tuple(replace(part, loss_sum=factor * part.loss_sum) for part in parts if part.loss_sum is not None)
        trial = with_step(trial, rank, step, microbatches=wrong)
    return trial


@pytest.mark.parametrize("step", [1, 2, 3])
def test_the_first_pass_whose_loss_is_wrong_is_looked_at(step: int) -> None:
    trial = with_loss(trial_of(tiny_case("fsdp_2")), step, 1.5)
    trial = with_loss(trial, 3, 1.5) if step < 3 else trial
    found = first_wrong_pass(trial, broken("loss"))
    assert found is not None and (found.step, found.trial) == (step, trial)
    for besides in ("update", "resume"):
        later = first_wrong_pass(trial, broken("loss", besides))
        assert (later is not None) is (step == 1)
    assert first_wrong_pass(trial, broken("gradients")) is None
    assert first_wrong_pass(trial, broken("loss", "completed")) is None
    assert first_wrong_pass(trial.assuming(references={0: trial.reference}), broken("loss")) is None


def test_a_pass_after_gradients_that_are_wrong_is_not_looked_at() -> None:
    trial = with_loss(trial_of(tiny_case("fsdp_2")), 2, 1.5)
    seen = trial.ranks[0].steps[0].gradients
    wrong = with_step(trial, 0, 1, gradients={fqn: 2 * gradient for fqn, gradient in seen.items()})
    assert first_wrong_pass(wrong, broken("loss")) is None
    later = trial.ranks[0].steps[1].gradients
    same = with_step(trial, 0, 2, gradients={fqn: 2 * gradient for fqn, gradient in later.items()})
    assert first_wrong_pass(same, broken("loss")) is not None
    assert first_wrong_pass(trial_of(tiny_case("fsdp_2")), broken("loss")) is None


# ---- in which modules

ANYWHERE = {"model", *(kind for kinds in BEFORE.values() for kind in kinds)}


@pytest.mark.parametrize(
    ("wrong", "kinds"),
    [
        ("layers.1.attention.wo", {"model", "attention", "inner"}),
        ("layers.0.ffn_norm", {"model", "inner", "block"}),
        ("layers.0.attention", {"model", "norm"}),
        ("layers.0", {"model", "embedding"}),
        ("norm", {"model", "feed_forward", "block"}),
        ("output", {"model", "norm"}),
        ("layers.1", ANYWHERE),
        ("tok_embeddings", ANYWHERE),
    ],
)
def test_what_may_be_wrong_lies_between_an_input_that_is_right_and_one_that_is_not(wrong: str, kinds: set[str]) -> None:
    assert tries()._parts(wrong) == kinds
    assert tries(step=2)._parts(wrong) == ANYWHERE, "inputs are seen in step 1"


def test_where_all_inputs_were_seen_and_are_right_the_model_itself_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "first_wrong_input", lambda trial: ": every length is right")
    assert tries()._parts("") == {"model"}
    assert tries(step=2)._parts("") == ANYWHERE
    assert tries()._parts("norm") == {"model", "feed_forward", "block"}
    monkeypatch.setattr(forward, "first_wrong_input", lambda trial: "")
    assert tries()._parts("") == ANYWHERE


@pytest.mark.parametrize(("step", "first", "match"), [(1, "", True), (1, "norm", False), (2, "norm", True)])
def test_inputs_of_the_first_step_must_be_those_of_the_model_tried(
    step: int, first: str, match: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def differing(trial: object, inputs: object) -> tuple[str, str]:
        asked.append(inputs)
        return "", first

    monkeypatch.setattr(forward, "inputs_that_differ", differing)
    bench = tries(step=step)
    bench.__dict__["bench"] = SimpleNamespace(inputs=lambda altered: ("inputs of", altered))
    altered: Any = "altered"
    assert bench._inputs_match(altered) is match
    assert asked == [("inputs of", "altered")] * (step == 1)


def attention(*layers: int) -> list[str]:
    return [f"layers.{layer}.attention" for layer in layers]


def test_modules_of_a_kind_are_tried_together_and_alone() -> None:
    alone = [attention(layer) for layer in range(3)]
    assert tries().modules("attention") == [attention(0, 1, 2), *alone]
    assert tries(layers=1).modules("attention") == [attention(0)]
    assert len(tries(layers=24).modules("attention")) == 1 + 24
    assert tries(layers=25).modules("attention") == [attention(*range(25))]
    assert tries().modules("embedding") == [["tok_embeddings"]] and tries().modules("model") == [[""]]


def test_norms_are_tried_without_the_last_one_too() -> None:
    blocks = [f"layers.{layer}.{norm}" for layer in range(2) for norm in ("attention_norm", "ffn_norm")]
    every, within, *alone = tries(layers=2).modules("norm")
    assert (sorted(every), sorted(within)) == (sorted([*blocks, "norm"]), blocks)
    assert sorted(alone) == sorted([name] for name in [*blocks, "norm"])


def test_modules_of_a_pipeline_are_tried_by_its_stages_and_from_one_on() -> None:
    found = tries(ParallelDims(pp=3), layers=6).modules("attention")
    stages = [attention(0, 1), attention(2, 3), attention(4, 5)]
    later = [attention(2, 3, 4, 5)]
    assert found == [attention(*range(6)), *stages, *later, *(attention(layer) for layer in range(6))]


# ---- by which numbers

NUMBER = 0.123456789


@pytest.mark.parametrize(
    ("close", "digits"),
    [(3e-2, 0.1), (4e-3, 0.12), (5e-4, 0.123), (5e-5, 0.1235), (3.5e-6, 0.123457), (1e-8, 0.12345679), (1e-13, NUMBER)],
)
def test_a_number_has_as_few_digits_as_the_loss_lets_it(close: float, digits: float) -> None:
    assert tries(bound=close / 4)._few_digits(NUMBER, lambda x: x - NUMBER) == digits


def test_a_number_is_looked_for_wherever_the_loss_crosses_the_observed_one() -> None:
    exact = tries(bound=1e-14)
    for wanted in (0.0025, 0.05, 0.7):
        assert exact._root(1e-3, 1.0, lambda x, wanted=wanted: x - wanted) == wanted
        assert exact._root(1e-3, 1.0, lambda x, wanted=wanted: wanted - x) == wanted
    assert exact._root(1e-3, 1.0, lambda x: x + 1.0) is None
