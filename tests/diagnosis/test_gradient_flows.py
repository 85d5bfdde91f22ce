"""Which backward passes are tried, in which modules, and when none is. Literal evidence, and a model that is not there."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from diagnosed import DDP_2, EMBEDDING, LAST, NORM, broken, dims, gradients_of
from literal import tiny_case, trial_of, with_step, with_step_1_gradients
from noisy import with_noise

from harness.diagnosis import backward
from harness.diagnosis.assume import another_reference
from harness.diagnosis.backward import _gives, _near, other_gradient_flows, wrong_backward
from harness.diagnosis.differences import wrong_pairs
from harness.diagnosis.hypothesis import Hypothesis
from harness.diagnosis.words import Arrays
from harness.judge.contents import take
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


def proposed(trial: Trial, *checks: str) -> list[Hypothesis]:
    return list(other_gradient_flows(trial, broken(*checks)))


def kinds(trial: Trial) -> list[str]:
    return [one.cause.kind for one in proposed(trial, "gradients")]


RIGHT, VECTORS = DDP_2, trial_of(tiny_case("fsdp_2", wrapper="fsdp1"))
BY_COUNTS = [
    (wrong(dims(2)), [2]),
    (wrong(dims(shard=4, tp=2)), [2, 4]),
    (wrong(dims(shard=4)), [2, 4]),
    (wrong(dims()), [2]),
]
BY_CHECKPOINTING = {way: wrong(activation_checkpointing=way) for way in ("none", "full", "op")}


def near_what_is_wrong(put: Put) -> None:
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


def of_vectors(put: Put) -> None:
    """What the model gives is flattened where gradients are."""
    put(losing(), [LOST])
    assert kinds(with_gradients(VECTORS, 1, {WQ: VECTORS.reference.steps[0].gradients[WQ] ** 2})) == ["lost"]


def of_a_later_step(put: Put) -> None:
    squared = {WQ: RIGHT.reference.steps[1].gradients[WQ] ** 2}
    later = RIGHT.reference.steps[1].gradients
    trial = with_gradients(RIGHT, 2, squared)
    model = put(Model({("lost", "layers.0.attention", 2): later | squared}, later), [LOST])
    assert kinds(trial) == ["lost"]
    assert model.of == (trial, 2)


def counted_too_often(put: Put) -> None:
    """As often as an axis has ranks, or twice."""
    for trial, counts in BY_COUNTS:
        model = put(losing(), [LOST])
        assert kinds(trial) == ["lost"]
        assert model.counts == counts


def computed_again(put: Put) -> None:
    """Attention may be given other positions where blocks are, only there."""
    others = (Named("rotary positions"), Named("mask"), Named("rotary left out"), Named("rotary positions", "model"))
    for way, trial in BY_CHECKPOINTING.items():
        model = put(losing(others=others), [LOST])
        assert kinds(trial) == ["lost"]
        again = ["rotary positions again", "rotary left out again"] * (way != "none")
        assert model.tried == [("lost", ("layers.0.attention",), 1), *((n, ("layers.0.block",), 1) for n in again)]


def multiples_of_the_right_ones(put: Put) -> None:
    """No backward pass is tried where all gradients are, which have their own rules."""
    usual = gradients_of(RIGHT)
    twice = usual | {fqn: 2 * usual[fqn] for fqn in (WQ, WK)}
    put(Model({("lost", "layers.0.attention", 1): twice}, usual), [LOST])
    assert kinds(with_gradients(RIGHT, 1, twice)) == []
    some = twice | {WV: usual[WV] ** 2}
    put(Model({("lost", "layers.0.attention", 1): some}, usual), [LOST])
    assert kinds(with_gradients(RIGHT, 1, some)) == ["lost"]


def beside_another_mistake(put: Put) -> None:
    """None is tried where another check fails that comes before, the loss is wrong, or ranks train apart."""
    put(losing(), [LOST])
    trial = wrong()
    for check in EARLIER:
        assert proposed(trial, "gradients", check) == [], check
    (part,) = trial.ranks[1].steps[0].microbatches
    assert part.loss_sum is not None
    assert kinds(with_step(trial, 1, 1, microbatches=(replace(part, loss_sum=2 * part.loss_sum),))) == []
    assert kinds(trial.assuming(references={0: trial.reference})) == []


def of_nothing_known(put: Put) -> None:
    """None is tried where no gradient is wrong, none is judged to the last bits, or samples are none of the step's."""
    put(losing(), [LOST])
    trial = wrong()
    assert proposed(trial, "update") == []
    assert kinds(RIGHT) == []
    noisy = with_noise(trial)
    assert wrong_pairs(noisy, 1) == [(0, WQ), (1, WQ)]
    assert kinds(noisy) == []
    put(losing(rows={}), [LOST])
    assert kinds(trial) == []


def in_the_last_wrong_block_or_the_next(_: Put) -> None:
    """One block alone; several, and what is in none, are always tried."""
    blocks = [["layers.0.attention"], ["layers.1.attention"], ["layers.2.attention"], ["layers.13.attention"]]
    assert [_near(modules, deepest=1) for modules in blocks] == [False, True, True, False]
    assert [_near(modules, deepest=-1) for modules in blocks] == [True, False, False, False]
    assert [_near(modules, deepest=math.inf) for modules in blocks] == [False] * 4
    assert [_near([*modules, modules[0] + ".inner"], deepest=1) for modules in blocks] == [True] * 4
    assert all(
        _near(modules, deepest=9) for modules in ([""], ["norm"], ["layers.0.ffn_norm", "norm"], ["tok_embeddings"])
    )


def as_close_as_the_check_says(_: Put) -> None:
    """What is wrong as it was seen, all else as it should be, within four times the check's bound of the largest."""
    trial = with_step_1_gradients(trial_of(tiny_case("fsdp_2")), lambda _, fqn: with_norm_twice(fqn))
    wrong, seen_as = [(0, NORM), (1, NORM)], {fqn: with_norm_twice(fqn) for fqn in trial.plan.shapes}
    assert wrong_pairs(trial, 1) == wrong and _gives(trial, 1, seen_as, wrong)

    def off_by(bounds: float, fqn: str) -> dict[str, np.ndarray]:
        entry, largest = np.zeros(seen_as[fqn].size), np.max(np.abs(gradients_of(trial)[fqn]))
        entry[-1] = bounds * trial.bounds.gradient[1] * largest
        return seen_as | {fqn: seen_as[fqn] + entry.reshape(seen_as[fqn].shape)}

    for fqn in (NORM, LAST, EMBEDDING):
        assert [_gives(trial, 1, off_by(bounds, fqn), wrong) for bounds in (3.5, 4.5)] == [True, False]
    assert not _gives(trial, 1, {fqn: g for fqn, g in seen_as.items() if fqn != LAST}, wrong)
    none = {fqn: g for fqn, g in seen_as.items() if fqn != NORM}
    assert not _gives(trial, 1, none, wrong)
    lost = with_step_1_gradients(trial, lambda _, fqn: (fqn != NORM) * with_norm_twice(fqn))
    assert _gives(lost, 1, none, wrong), "a gradient that is not there is zero"


def with_norm_twice(fqn: str) -> np.ndarray:
    return (1 + (fqn == NORM)) * gradients_of(DDP_2)[fqn]


def with_gradients(trial: Trial, step: int, wrong: Arrays) -> Trial:
    for rank in trial.ranks:
        parts = {fqn: trial.gradient_slice_of(rank, fqn) for fqn in wrong}
        own = {fqn: take(wrong[fqn], part) for fqn, part in parts.items() if part is not None}
        trial = with_step(trial, rank, step, gradients=trial.ranks[rank].steps[step - 1].gradients | own)
    return trial


EARLIER = ["samples", "positions", "placements", "shard_contents", "process_groups", "initial_weights", "resume"]
LOOKS = [near_what_is_wrong, of_vectors, of_a_later_step, counted_too_often, computed_again]
LOOKS += [
    multiples_of_the_right_ones,
    beside_another_mistake,
    of_nothing_known,
    in_the_last_wrong_block_or_the_next,
    as_close_as_the_check_says,
]


def test_backward_passes_are_tried_that_may_give_the_gradients_seen_and_none_beside_another_mistake(put: Put) -> None:
    for look in LOOKS:
        look(put)
