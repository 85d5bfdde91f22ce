"""Which backward passes are tried, in which modules, and when none is. Literal evidence, and a model that is not there."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from diagnosed import DDP_2, broken, dims, gradients_of
from literal import tiny_case, trial_of, with_step, with_step_1_gradients
from noisy import with_noise

from harness.diagnosis import backward
from harness.diagnosis.assume import another_reference
from harness.diagnosis.backward import _near, other_gradient_flows, wrong_backward
from harness.diagnosis.differences import wrong_pairs
from harness.diagnosis.hypothesis import Hypothesis
from harness.diagnosis.words import Arrays
from harness.judge.result import Cause
from harness.judge.trial import Trial
from harness.reference import altered, gradient_flow

WQ, WK, WV = (f"layers.0.attention.{name}.weight" for name in ("wq", "wk", "wv"))


@dataclass(frozen=True)
class Named:
    """What stands for a variation."""

    name: str
    part: str = "attention"


@dataclass
class Model:
    """In the place of `Tries`: what gives gradients, by variation, module and step; all others give the usual ones."""

    gradients_of: dict[tuple[str, str, int], Arrays]
    usual: Arrays
    rows: dict[int, np.ndarray] = field(default_factory=lambda: {0: np.arange(8)})
    modules_of: dict[str, list[list[str]]] = field(default_factory=dict)
    others: tuple[Named, ...] = ()
    counts: list[int] = field(default_factory=list)
    tried: list[tuple[str, tuple[str, ...], int]] = field(default_factory=list)
    of: tuple[Trial, int] | None = None

    @property
    def bench(self) -> Model:
        return self

    def modules(self, part: str) -> list[list[str]]:
        return self.modules_of.get(part, [[f"layers.0.{part}"]])

    def variations(self, parts: set[str]) -> list[Named]:
        return [one for one in self.others if one.part in parts]

    def gradients(self, way: tuple[str, tuple[str, ...], int]) -> Arrays:
        self.tried.append(way)
        name, modules, step = way
        return self.gradients_of.get((name, ",".join(modules), step), self.usual)

    def cause(self, variation: Named, modules: list[str], ranks: list[int]) -> Cause:
        return Cause(variation.name, f"{variation.name} in {modules} of {ranks}")


@pytest.fixture(name="put")
def _put(monkeypatch: pytest.MonkeyPatch) -> Callable[[Model, list[Named]], Model]:
    def put(model: Model, flows: list[Named]) -> Model:
        def tries(trial: Trial, step: int) -> Model:
            model.of = trial, step
            return model

        def known(counts: list[int]) -> list[Named]:
            model.counts += counts
            return [*flows]

        monkeypatch.setattr(backward, "Tries", tries)
        monkeypatch.setattr(gradient_flow, "gradient_flows", known)
        monkeypatch.setattr(gradient_flow, "recomputed", lambda one: Named(f"{one.name} again", "block"))
        monkeypatch.setattr(altered, "altering", lambda one, modules, step: (one.name, tuple(modules), step))
        return model

    return put


LOST = Named("lost")
WRONG = gradients_of(DDP_2) | {WQ: gradients_of(DDP_2)[WQ] ** 2}
Put = Callable[[Model, list[Named]], Model]


@functools.cache
def wrong(layout: Any = "ddp_2", **features: Any) -> Trial:
    return with_step_1_gradients(trial_of(tiny_case(layout, **features)), lambda _, fqn: WRONG[fqn])


def losing(**changes: Any) -> Model:
    return Model({("lost", "layers.0.attention", 1): WRONG}, gradients_of(DDP_2), **changes)


def proposed(trial: Trial, *laws: str) -> list[Hypothesis]:
    return list(other_gradient_flows(trial, broken(*laws)))


def test_what_gives_the_gradients_that_were_seen_is_proposed_with_where_and_looked_for_near_what_is_wrong(
    put: Put,
) -> None:
    """Wrong is layer 0's attention: of others, only what layer 1 passes on may be."""
    places = [f"layers.{n}.attention" for n in range(3)]
    modules_of = {"attention": [places, *[[place] for place in places]], "norm": [["norm"]]}
    model = losing(rows={0: np.arange(4), 1: np.arange(4, 8)}, modules_of=modules_of)
    put(model, [LOST, Named("scaled", "norm")])
    (found,) = proposed(trial := wrong(), "gradients", "update")
    assert found.cause == Cause("lost", "lost in ['layers.0.attention'] of [0, 1]")
    assert (found.fitted, found.lines, found.seen) == (1, (), ())
    assert found.assume.func is another_reference  # type: ignore[union-attr]
    assert found.assume.keywords == {"altered": ("lost", ("layers.0.attention",), 1)}  # type: ignore[union-attr]
    alone = [("lost", (place,), 1) for place in places[:2]]
    assert model.tried == [("lost", tuple(places), 1), *alone, ("scaled", ("norm",), 1)]
    assert model.of == (trial, 1)
    assert list(wrong_backward(trial, broken("gradients"))) == [], "nothing is told of it without a model"


def test_where_gradients_are_vectors_what_the_model_gives_is_flattened(put: Put) -> None:
    put(losing(), [LOST])
    usual = gradients_of(trial_of(tiny_case("fsdp_2", wrapper="fsdp1")))
    trial = with_step_1_gradients(
        trial_of(tiny_case("fsdp_2", wrapper="fsdp1")), lambda _, fqn: usual[fqn] ** (1 + (fqn == WQ))
    )
    assert [one.cause.kind for one in proposed(trial, "gradients")] == ["lost"]


def test_of_a_later_step_its_own_backward_pass_is_tried(put: Put) -> None:
    trial = trial_of(tiny_case("ddp_2"))
    later = trial.reference.steps[1].gradients
    squared = later | {WQ: later[WQ] ** 2}
    for rank in trial.ranks:
        trial = with_step(trial, rank, 2, gradients=squared)
    model = put(Model({("lost", "layers.0.attention", 2): squared}, later), [LOST])
    assert [one.cause.kind for one in proposed(trial, "gradients")] == ["lost"]
    assert model.of == (trial, 2)


@pytest.mark.parametrize(
    ("layout", "counts"),
    [
        (dims(2), [2]),
        (dims(shard=4), [2, 4]),
        (dims(2, 4), [2, 4]),
        (dims(shard=4, tp=2), [2, 4]),
        (dims(), [2]),
    ],
    ids=str,
)
def test_gradients_are_counted_as_often_as_an_axis_has_ranks_or_twice(put: Put, layout: Any, counts: list[int]) -> None:
    model = put(losing(), [LOST])
    assert len(proposed(wrong(layout), "gradients")) == 1
    assert model.counts == counts


@pytest.mark.parametrize("checkpointing", ["none", "full", "op"])
def test_attention_may_be_given_other_positions_only_where_blocks_are_computed_again(
    put: Put, checkpointing: str
) -> None:
    others = (Named("rotary positions"), Named("mask"), Named("rotary left out"), Named("rotary positions", "model"))
    model = put(losing(others=others), [LOST])
    assert len(proposed(wrong(activation_checkpointing=checkpointing), "gradients")) == 1
    again = ["rotary positions again", "rotary left out again"] * (checkpointing != "none")
    assert model.tried == [("lost", ("layers.0.attention",), 1), *((name, ("layers.0.block",), 1) for name in again)]


def test_gradients_that_are_all_multiples_of_the_right_ones_are_no_backward_pass_s(put: Put) -> None:
    twice = {fqn: (1.0 + (fqn in (WQ, WK))) * gradient for fqn, gradient in gradients_of(DDP_2).items()}
    put(Model({("lost", "layers.0.attention", 1): twice}, gradients_of(DDP_2)), [LOST])
    trial = with_step_1_gradients(trial_of(tiny_case("ddp_2")), lambda _, fqn: twice[fqn])
    assert proposed(trial, "gradients") == []
    some = twice | {WV: twice[WV] ** 2}
    put(Model({("lost", "layers.0.attention", 1): some}, gradients_of(DDP_2)), [LOST])
    trial = with_step_1_gradients(trial, lambda _, fqn: some[fqn])
    assert [one.cause.kind for one in proposed(trial, "gradients")] == ["lost"]


@pytest.mark.parametrize(
    "law", ["samples", "positions", "placements", "shard_contents", "process_groups", "initial_weights", "resume"]
)
def test_no_backward_pass_is_tried_beside_a_mistake_that_comes_before(put: Put, law: str) -> None:
    put(losing(), [LOST])
    assert proposed(wrong(), "gradients", law) == []


def test_no_backward_pass_is_tried_where_the_loss_or_no_gradient_is_wrong_or_ranks_train_apart(put: Put) -> None:
    put(losing(), [LOST])
    trial = wrong()
    assert proposed(trial, "update") == []
    assert proposed(trial_of(tiny_case("ddp_2")), "gradients") == []
    (part,) = trial.ranks[1].steps[0].microbatches
    assert part.loss_sum is not None
    dear = with_step(trial, 1, 1, microbatches=(replace(part, loss_sum=2 * part.loss_sum),))
    assert proposed(dear, "gradients") == []
    assert proposed(replace(trial, references={0: trial.reference}), "gradients") == []
    put(losing(rows={}), [LOST])
    assert proposed(trial, "gradients") == []


def test_no_backward_pass_is_tried_in_a_recipe_with_noise(put: Put) -> None:
    put(losing(), [LOST])
    trial = with_noise(wrong())
    assert wrong_pairs(trial, 1) == [(0, WQ), (1, WQ)]
    assert proposed(trial, "gradients") == []


# ---- near what is wrong


def test_what_of_the_model_lies_near_the_last_wrong_block() -> None:
    blocks = [["layers.0.attention"], ["layers.1.attention"], ["layers.2.attention"], ["layers.13.attention"]]
    assert [_near(modules, deepest=1) for modules in blocks] == [False, True, True, False]
    assert [_near(modules, deepest=-1) for modules in blocks] == [True, False, False, False]
    assert [_near(modules, deepest=math.inf) for modules in blocks] == [False] * 4
    assert [_near([*modules, modules[0] + ".inner"], deepest=1) for modules in blocks] == [True] * 4
    assert all(
        _near(modules, deepest=9) for modules in ([""], ["norm"], ["layers.0.ffn_norm", "norm"], ["tok_embeddings"])
    )
