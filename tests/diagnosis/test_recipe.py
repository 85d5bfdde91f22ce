"""Another recipe than the requested one: what is named, and that it is proven. Literal evidence, no ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from diagnosed import LOW_CLIP, NORM, broken, is_listed, trained_as
from literal import ADAMW, SGD, tiny_case, trained_otherwise, trial_of, with_rank, with_step, with_value
from literal_reference import clip
from resuming import resumed

from harness.checks import judge
from harness.checks.update import observed_norm
from harness.diagnosis import diagnose
from harness.diagnosis.engine import explain
from harness.diagnosis.recipe import HALF, rule_of, wrong_recipe
from harness.judge.result import Cause, Verdict
from harness.judge.trial import Trial
from harness.plan.slices import tp_dim
from harness.reference.config import TrainingConfig

Arrays = dict[str, np.ndarray]
LOW = replace(SGD, max_norm=0.25)
LITTLE = replace(LOW_CLIP, max_norm=0.01)
RATES = (0.025, 0.05, 0.0375)  # of SGD


def named(trial: Trial) -> Cause:
    """The only cause, under which all failing checks pass."""
    results = judge(trial)
    found = diagnose(trial, results)
    assert found is not None and len(found.causes) == 1 and is_listed(found.kinds[0]), found
    failing = {result.check for result in results if result.verdict is Verdict.FAIL}
    assert found.kinds == ("not explained",) or {*found.causes[0].explains} == failing, found.causes[0]
    return found.causes[0]


def kind(trial: Trial) -> str:
    return named(trial).kind


def proposed(trial: Trial) -> dict[str, int]:
    """By kind, of how many choices the simplest is."""
    found = [(one.fitted, one.cause.kind) for one in wrong_recipe(trial, broken("update"))]
    return {kind: fitted for fitted, kind in sorted(found, reverse=True)}


def moved(rate: Callable[[int, str], float], layout: str = "fsdp_2", training: TrainingConfig = LOW) -> Trial:
    return trained_otherwise(trial_of(tiny_case(layout, training)), rate=rate)


def given(by: Callable[[int, str, Arrays, float], Any], training: TrainingConfig, layout: str = "fsdp_2") -> Trial:
    """The optimizer receives gradients times by(step, fqn, gradients, norm); not at all where that is None."""

    def those(step: int, gradients: Arrays, norm: float, parameters: Arrays) -> Arrays:
        made = {fqn: (by(step, fqn, gradients, norm), g) for fqn, g in gradients.items()}
        return {fqn: times * g for fqn, (times, g) in made.items() if times is not None}

    return trained_otherwise(trial_of(tiny_case(layout, training)), given=those)


# ---- fields


MATRICES, UNCLIPPED = replace(ADAMW, decay="matrices"), replace(ADAMW, max_norm=None)


@pytest.mark.parametrize(
    ("requested", "kind", "changes"),
    [
        (ADAMW, "weight decay", {"weight_decay": 0.0}),
        (SGD, "weight decay", {"weight_decay": 0.0}),
        (ADAMW, "weight decay", {"weight_decay": 0.01}),
        (ADAMW, "weight decay", {"weight_decay": 0.123456}),
        (replace(ADAMW, lr=0.03), "weight decay", {"weight_decay": 3.0}),
        (ADAMW, "weight decay", {"decay": "matrices"}),
        (MATRICES, "weight decay", {"decay": "all"}),
        (ADAMW, "beta1", {"beta1": 0.95}),
        (ADAMW, "beta2", {"beta2": 0.999}),
        (ADAMW, "eps", {"eps": 1e-5}),
        (LOW_CLIP, "max_norm", {"max_norm": 0.5}),
        (replace(LOW_CLIP, max_norm=0.3), "max_norm", {"max_norm": 0.6}),
        (UNCLIPPED, "max_norm", {"max_norm": 1.0}),
        (ADAMW, "beta1", {"beta1": 0.95, "beta2": 0.9}),
        (ADAMW, "beta2", {"beta2": 0.999, "weight_decay": 0.01}),
        (LOW_CLIP, "beta2", {"beta2": 0.99, "max_norm": 0.5}),
    ],
)
def test_fields_that_are_otherwise_are_named_with_their_values(
    requested: TrainingConfig, kind: str, changes: dict[str, Any]
) -> None:
    cause = named(trained_as(replace(requested, **changes), requested=requested))
    assert (cause.kind, dict(cause.details)) == (kind, changes)
    assert bool(cause.hint) == (changes == {"beta1": 0.95, "beta2": 0.9}), "swapped"
    assert not cause.where


def test_of_two_fields_that_are_wrong_together_none_alone_is_proven() -> None:
    trial = trained_as(replace(ADAMW, beta1=0.95, beta2=0.999))
    assert proposed(trial) == {"beta1": 3}
    assert proposed(trained_as(replace(ADAMW, beta2=0.999))) == {"beta2": 2}


@pytest.mark.parametrize("factor", [1.5, 3.0, 1 / 3, 10.0])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_moves_that_are_a_multiple_are_named_by_the_rate(factor: float, optimizer: str) -> None:
    recipe = replace(LOW, optimizer=optimizer)
    cause = named(moved(lambda step, fqn: factor * RATES[step - 1], training=recipe))
    assert cause.kind == "learning rate" and dict(cause.details)["lr"] == pytest.approx(factor * recipe.lr)


@pytest.mark.parametrize(("chosen", "count"), [("norm", 3), ("output", 1), ("attention.w", 4)])
def test_parameters_with_another_rate_or_decay_are_named(chosen: str, count: int) -> None:
    cause = named(moved(lambda step, fqn: (1.5 if chosen in fqn else 1.0) * RATES[step - 1]))
    assert (cause.kind, len(cause.parameters)) == ("learning rate", count) and f"{count} of 12" in cause.where
    trial = trial_of(tiny_case("fsdp_2", LOW))
    spared = trained_otherwise(trial, recipe=lambda step, fqn: replace(LOW, weight_decay=0.3 if chosen in fqn else 0.1))
    cause = named(spared)
    assert (cause.kind, dict(cause.details)) == ("weight decay", {"weight_decay": 0.3})
    assert f"{count} of 12" in cause.where


def test_a_number_that_nobody_uses_and_noise_are_explained_by_nothing() -> None:
    assert kind(trained_as(replace(ADAMW, beta1=0.876))) == "not explained"
    draw = np.random.default_rng(1)

    def left(step: int, parameters: Arrays) -> Arrays:
        return {fqn: p + 1e-3 * draw.standard_normal(p.shape) for fqn, p in parameters.items()}

    for layout in ("ddp_2", "fsdp_2", "fsdp_2_tp_2"):
        for recipe in (ADAMW, LOW, LOW_CLIP):
            trial = trained_otherwise(trial_of(tiny_case(layout, recipe)), left=left)
            assert [*wrong_recipe(trial, broken("update"))] == []
    one = with_value(trial_of(tiny_case("fsdp_2")), 1, 2, "parameters", NORM, lambda value: value + 1e-3)
    assert explain(one, judge(one), (wrong_recipe,), ()).left == ("update",)


def test_what_takes_too_much_of_a_weight_is_no_decay() -> None:
    def decaying(by: float) -> Trial:
        return trained_as(replace(LOW, weight_decay=by), requested=LOW)

    assert "weight decay" in proposed(decaying(7.9)) and "weight decay" not in proposed(decaying(8.1))


def test_a_number_that_explains_the_first_step_alone_costs_more() -> None:
    trial = trained_as(replace(ADAMW, eps=1e-3))
    for rank in (0, 1):
        last = trial.ranks[rank].steps[2].parameters
        trial = with_step(trial, rank, 3, parameters={fqn: value + 0.01 for fqn, value in last.items()})
    assert proposed(trial) == {"eps": 2 + HALF}
    assert proposed(trial_of(tiny_case("fsdp_2"))) == {}


def test_a_launch_that_resumes_is_judged_from_its_first_step_on() -> None:
    trial = resumed(training=LOW_CLIP)
    for rank, evidence in trial.ranks.items():
        held, (last,) = evidence.resumed, evidence.steps
        assert held is not None
        left, state, rate = {}, {}, trial.reference.steps[2].lr
        for fqn, gradient in last.gradients.items():
            before = {key: held.optimizer_state[fqn][key] for key in ("exp_avg", "exp_avg_sq")}
            g = clip(trial.reference.steps[2].grad_norm, LOW_CLIP) * gradient
            first, second = 0.9 * before["exp_avg"] + 0.1 * g, 0.99 * before["exp_avg_sq"] + 0.01 * g**2
            step = rate * first / (1 - 0.9**3) / (np.sqrt(second / (1 - 0.99**3)) + ADAMW.eps)
            left[fqn] = held.parameters[fqn] * (1 - rate * ADAMW.weight_decay) - step
            state[fqn] = {"exp_avg": first, "exp_avg_sq": second}
        trial = with_step(trial, rank, 3, parameters=left, optimizer_state=state)
    cause = named(trial)
    assert (cause.kind, dict(cause.details)) == ("beta2", {"beta2": 0.99})


# ---- algorithms


def test_a_decay_that_is_not_multiplied_by_the_rate() -> None:
    trial = trial_of(tiny_case("fsdp_2", LOW))
    recipe = lambda step, fqn: replace(LOW, weight_decay=0.1 / RATES[step - 1])  # noqa: E731
    assert kind(trained_otherwise(trial, recipe=recipe)) == "weight decay"


@pytest.mark.parametrize("requested", [ADAMW, MATRICES])
def test_weight_decay_in_the_gradients_is_told_from_another_weight_decay(requested: TrainingConfig) -> None:
    trial = trial_of(tiny_case("fsdp_2", requested))

    def adding(decay: float) -> Trial:
        def those(step: int, gradients: Arrays, norm: float, parameters: Arrays) -> Arrays:
            own = {fqn: decay * (requested is ADAMW or "norm" not in fqn) for fqn in gradients}
            return {fqn: clip(norm, ADAMW) * g + own[fqn] * parameters[fqn] for fqn, g in gradients.items()}

        return trained_otherwise(trial, given=those, recipe=lambda step, fqn: replace(requested, weight_decay=0.0))

    assert kind(adding(0.1)) == "weight decay in the gradients"
    assert kind(adding(0.05)) == "not explained"


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_that_was_not_requested(nesterov: bool) -> None:
    held: Arrays = {}

    def those(step: int, gradients: Arrays, norm: float, parameters: Arrays) -> Arrays:
        decayed = {fqn: clip(norm, SGD) * g + SGD.weight_decay * parameters[fqn] for fqn, g in gradients.items()}
        held.update({fqn: 0.9 * held.get(fqn, 0.0) + g for fqn, g in decayed.items()})
        return {fqn: g + 0.9 * held[fqn] if nesterov else held[fqn] for fqn, g in decayed.items()}

    undecayed = replace(SGD, weight_decay=0.0)
    trial = trained_otherwise(trial_of(tiny_case("fsdp_2", SGD)), given=those, recipe=lambda step, fqn: undecayed)
    for rank, step, _ in list(trial.steps()):
        kept = step.memory | {"optimizer_state": step.memory["parameters"]}
        trial = with_step(trial, rank, step.step, memory=kept)
    cause = named(trial)
    assert (cause.kind, dict(cause.details)) == ("momentum", {"momentum": 0.9, "nesterov": nesterov})


def test_an_optimizer_that_is_a_step_late() -> None:
    held: Arrays = {}

    def late(step: int, gradients: Arrays, norm: float, parameters: Arrays) -> Arrays:
        before = {fqn: held.get(fqn, 0 * g) for fqn, g in gradients.items()}
        held.update({fqn: clip(norm, ADAMW) * g for fqn, g in gradients.items()})
        return before

    assert kind(trained_otherwise(trial_of(tiny_case("fsdp_2")), given=late)) == "one step late"


def test_averages_that_are_not_corrected() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    rates = [step.lr for step in trial.reference.steps]
    for rank, evidence in trial.ranks.items():
        value, first, second = {t.fqn: t.value for t in evidence.parameters}, Arrays(), Arrays()
        for step in evidence.steps:
            by, rate = clip(trial.reference.steps[step.step - 1].grad_norm, ADAMW), rates[step.step - 1]
            for fqn, g in step.gradients.items():
                first[fqn] = 0.9 * first.get(fqn, 0.0) + 0.1 * by * g
                second[fqn] = 0.95 * second.get(fqn, 0.0) + 0.05 * (by * g) ** 2
                value[fqn] = value[fqn] * (1 - 0.1 * rate) - rate * first[fqn] / (np.sqrt(second[fqn]) + ADAMW.eps)
            kept = {fqn: {"exp_avg": first[fqn], "exp_avg_sq": second[fqn]} for fqn in first} if step.step == 3 else {}
            trial = with_step(trial, rank, step.step, parameters=dict(value), optimizer_state=kept)
    assert kind(trial) == "bias correction"


def test_amsgrad_is_blamed_only_where_updates_are_wrong() -> None:
    def keeping(trial: Trial) -> Trial:
        state = trial.ranks[0].steps[2].optimizer_state
        kept = {fqn: arrays | {"max_exp_avg_sq": arrays["exp_avg_sq"]} for fqn, arrays in state.items()}
        return with_step(trial, 0, 3, optimizer_state=kept)

    right = trial_of(tiny_case("fsdp_2"))
    wrong = with_value(right, 1, 2, "parameters", NORM, lambda value: value + 1e-3)
    assert kind(keeping(wrong)) == "not explained"
    assert proposed(keeping(wrong)) == {"amsgrad": 1} and proposed(wrong) == {}
    assert diagnose(keeping(right), judge(keeping(right))) is None


# ---- clipping


@pytest.mark.parametrize("training", [LOW, LOW_CLIP])
def test_clipping_left_out(training: TrainingConfig) -> None:
    never = replace(training, max_norm=None)
    cause = named(trained_as(never, requested=training))
    assert (cause.kind, dict(cause.details)) == ("clipping left out", {"coefficient": pytest.approx(0.1537, rel=1e-3)})
    for layout, ranks in (("hsdp_2x2", (1, 3)), ("ddp_2", (1,))):
        trial, wrong = trial_of(tiny_case(layout, training)), trained_as(never, layout, training)
        for rank in ranks:
            trial = with_rank(trial, rank, steps=wrong.ranks[rank].steps)
        cause = named(trial)
        assert cause.kind == "clipping left out" and str([*ranks][0]) in cause.where


def length(of: Arrays, chosen: Callable[[str], bool] = lambda fqn: True) -> float:
    return math.hypot(*(float(entry) for fqn, g in of.items() if chosen(fqn) for entry in g.ravel()))


@pytest.mark.parametrize("own", [False, True])
def test_clipping_left_out_for_one_parameter_and_with_the_norm_of_the_others(own: bool) -> None:
    def by(step: int, fqn: str, of: Arrays, norm: float) -> float:
        return 1.0 if fqn == NORM else clip(length(of, lambda fqn: fqn != NORM) if own else norm, LOW_CLIP)

    cause = named(given(by, LOW_CLIP))
    assert cause.kind == "clipping left out" and "1 of 12" in cause.where and bool(cause.hint) == own


NORMS: dict[tuple[str, object], Callable[[Arrays], float]] = {
    ("of norm type", math.inf): lambda of: max(float(np.abs(g).max()) for g in of.values()),
    ("of norm type", 1.0): lambda of: sum(float(np.abs(g).sum()) for g in of.values()),
    ("added up over", "parameters"): lambda of: sum(length({fqn: g}) for fqn, g in of.items()),
    ("to the power of", 2): lambda of: length(of) ** 2,
    ("of", "norm weights"): lambda of: length(of, lambda fqn: "norm" in fqn),
    ("without", "norm weights"): lambda of: length(of, lambda fqn: "norm" not in fqn),
    ("of", "embedding and output"): lambda of: length(of, lambda fqn: fqn.startswith(("tok_", "output"))),
}


@pytest.mark.parametrize("detail", NORMS)
def test_gradients_clipped_by_another_norm_of_all_ranks(detail: tuple[str, object]) -> None:
    cause = named(given(lambda step, fqn, of, norm: clip(NORMS[detail](of), LITTLE), LITTLE))
    assert (cause.kind, cause.details) == ("clipped by another norm", (detail,))


@pytest.mark.parametrize(
    ("name", "of", "layout"),
    [
        ("parameters", lambda fqn: fqn, "fsdp_2"),
        ("layers", lambda fqn: ".".join(fqn.split(".")[:2]), "fsdp_2"),
        ("kinds of parameters", lambda fqn: "norm" in fqn, "fsdp_2"),
        ("placements over tp", tp_dim, "tp_2"),
    ],
)
def test_each_group_of_parameters_clipped_by_its_own_norm(name: str, of: Callable[[str], object], layout: str) -> None:
    def by(step: int, fqn: str, gradients: Arrays, norm: float) -> float:
        return clip(length({other: g for other, g in gradients.items() if of(other) == of(fqn)}), LOW_CLIP)

    cause = named(given(by, LOW_CLIP, layout))
    assert (cause.kind, cause.details) == ("clipped by another norm", (("norms of", name),))


@pytest.mark.parametrize(
    ("layout", "axes", "peers"),
    [
        ("fsdp_2", ("dp_shard",), lambda rank: (rank,)),
        ("hsdp_2x2", ("dp_shard",), lambda rank: (rank,)),
        ("fsdp_2_tp_2", ("tp",), lambda rank: (rank % 2, rank % 2 + 2)),
        ("fsdp_2_tp_2", ("dp_shard",), lambda rank: (rank // 2 * 2, rank // 2 * 2 + 1)),
        ("fsdp_2_tp_2", ("dp_shard", "tp"), lambda rank: (rank,)),
    ],
)
@pytest.mark.parametrize("reported", [False, True])
def test_ranks_clip_by_a_norm_that_is_not_reduced_and_may_report_it(
    layout: str, axes: tuple[str, ...], peers: Callable[[int], tuple[int, ...]], reported: bool
) -> None:
    trial = trial_of(tiny_case(layout, LITTLE))
    norms = {(r, s): observed_norm(trial, s, peers(r)) for r in trial.ranks for s in trial.case.steps}
    for rank in trial.ranks:

        def those(step: int, of: Arrays, norm: float, parameters: Arrays, rank: int = rank) -> Arrays:
            return {fqn: clip(norms[rank, step], LITTLE) * g for fqn, g in of.items()}

        trial = trained_otherwise(trial, [rank], given=those)
        for step in trial.case.steps if reported else ():
            trial = with_step(trial, rank, step, grad_norm=norms[rank, step])
    found = diagnose(trial, judge(trial))  # tp ranks then differ in what they hold alike, which nothing is assumed of
    assert found is not None and (len(found.causes) == 1 or "tp" in axes)
    cause = found.causes[0]
    assert (cause.kind, cause.details) == ("clipped by another norm", (("not reduced over", axes),))


@pytest.mark.parametrize(("layout", "axis", "again"), [("hsdp_2x2", "dp_replicate", ""), ("tp_2", "tp", "norm")])
def test_a_norm_that_counts_replicas(layout: str, axis: str, again: str) -> None:
    def by(step: int, fqn: str, gradients: Arrays, norm: float) -> float:
        return clip(math.hypot(length(gradients), length(gradients, lambda fqn: again in fqn)), LOW_CLIP)

    cause = named(given(by, LOW_CLIP, layout))
    assert (cause.kind, cause.details) == ("clipped by another norm", (("with replicas counted along", axis),))


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("reported", [False, True])
def test_gradients_clipped_by_the_norm_of_the_step_before(own: bool, reported: bool) -> None:
    norms: dict[int, float] = {}

    def by(step: int, fqn: str, gradients: Arrays, norm: float) -> float:
        norms[step] = norm
        return clip(norms.get(step - 1, norm if own else 0.0), LOW_CLIP)

    trial = given(by, LOW_CLIP)
    for rank, step, _ in [*trial.steps()] if reported else []:
        trial = with_step(trial, rank, step.step, grad_norm=norms.get(step.step - 1, norms[1] if own else 0.0))
    cause = named(trial)
    assert cause.kind == "clipped by another norm" and len(cause.details) == 1 + own


def test_a_norm_that_ranks_report_may_be_what_they_clip_by() -> None:
    trial = given(lambda step, fqn, gradients, norm: clip(7.0 * step, LOW_CLIP), LOW_CLIP)
    for rank, step, _ in [*trial.steps()]:
        trial = with_step(trial, rank, step.step, grad_norm=7.0 * step.step)
    assert named(trial).details == (("as", "reported"),)


@pytest.mark.parametrize(("limit", "step"), [(100.0, 1), (1.6, 2)])
def test_clipping_that_enlarges(limit: float, step: int) -> None:
    high = replace(LOW_CLIP, max_norm=limit)
    cause = named(given(lambda step, fqn, gradients, norm: limit / (norm + 1e-6), replace(high, optimizer="sgd")))
    assert (cause.kind, dict(cause.details)["step"]) == ("clipping enlarges gradients", step)


@pytest.mark.parametrize("limit", [0.25, 1.6])
def test_clipping_without_the_millionth_that_torch_adds(limit: float) -> None:
    recipe = replace(LOW_CLIP, max_norm=limit)
    assert kind(given(lambda step, fqn, of, norm: min(1.0, limit / norm), recipe)) == "clipped without 1e-6"


def test_gradients_clipped_entry_by_entry() -> None:
    by = lambda step, fqn, of, norm: np.clip(of[fqn], -0.01, 0.01) / of[fqn]  # noqa: E731
    assert named(given(by, LITTLE)).details == (("value", 0.01),)


def test_no_way_to_clip_is_tried_where_replicas_have_other_gradients() -> None:
    trial = trained_as(replace(LOW_CLIP, max_norm=None), "ddp_2", LOW_CLIP)
    assert "clipping left out" in proposed(trial)
    own = {fqn: 3 * g for fqn, g in trial.ranks[1].steps[0].gradients.items()}
    assert proposed(with_step(trial, 1, 1, gradients=own)) == {}


# ---- what is not moved


@pytest.mark.parametrize("layout", ["ddp_2", "fsdp_2", "hsdp_2x2"])
@pytest.mark.parametrize("ranks", [None, [1]])
@pytest.mark.parametrize("training", [LOW, ADAMW])
@pytest.mark.parametrize(
    ("moves", "step"),
    [
        (lambda step, fqn: fqn != NORM, 1),
        (lambda step, fqn: step != 2, 2),
        (lambda step, fqn: step < 2, 2),
    ],
)
def test_what_the_optimizer_does_not_move(
    layout: str, ranks: list[int] | None, training: TrainingConfig, moves: Callable[[int, str], bool], step: int
) -> None:
    def those(number: int, gradients: Arrays, norm: float, parameters: Arrays) -> Arrays:
        return {fqn: clip(norm, training) * g for fqn, g in gradients.items() if moves(number, fqn)}

    trial = trained_otherwise(trial_of(tiny_case(layout, training)), *([ranks] if ranks else []), given=those)
    cause = named(trial)
    assert (cause.kind, dict(cause.details)) == ("not stepped", {"step": step})
    assert ("on rank" in cause.where) == bool(ranks) and (NORM in cause.where) == (step == 1)


def test_what_need_not_move_is_not_blamed() -> None:
    trial = given(lambda step, fqn, of, norm: None if step == 1 else clip(norm, LOW), LOW)
    assert "not stepped" in proposed(trial)
    first, *rest = trial.reference.steps
    still = replace(trial, reference=replace(trial.reference, steps=(replace(first, lr=0.0), *rest)))
    assert "not stepped" not in proposed(still)


# ---- rates that the optimizer shows


def showing(by_rank: dict[int, Iterable[float]], layout: str = "fsdp_2", reported: Iterable[float] = ()) -> Trial:
    """These rates are taken, shown and reported; of other ranks those requested."""
    trial = trial_of(tiny_case(layout, LOW))
    for rank, rates in by_rank.items():
        taken = [*rates]
        trial = trained_otherwise(trial, [rank], rate=lambda step, fqn, taken=taken: taken[step - 1])
        for step, lr in enumerate(taken, start=1):
            trial = with_step(trial, rank, step, lr=lr, reported_lr=([*reported] or taken)[step - 1])
    return trial


@pytest.mark.parametrize("layout", ["ddp_2", "fsdp_2"])
@pytest.mark.parametrize(
    ("by_rank", "step", "rate"),
    [
        ({0: (0.07, 0.05, 0.0375), 1: (0.07, 0.05, 0.0375)}, 1, 0.07),
        ({1: (0.05, 0.05, 0.0375)}, 1, 0.05),
        ({0: (0.025, 0.05, 0.04), 1: (0.025, 0.07, 0.0375)}, 2, 0.07),
        ({0: (0.0, 0.05, 0.0375), 1: (0.0, 0.05, 0.0375)}, 1, 0.0),
    ],
)
def test_a_rate_is_named_with_its_first_step_and_the_ranks_that_have_it(
    layout: str, by_rank: dict[int, tuple[float, ...]], step: int, rate: float
) -> None:
    cause = named(showing(by_rank, layout))
    ranks = tuple(rank for rank, rates in by_rank.items() if rates[step - 1] != RATES[step - 1])
    assert (cause.kind, dict(cause.details) | {"rule": ""}) == (
        "learning rate",
        {"step": step, "rate": rate, "ranks": ranks, "rule": ""},
    )


def test_requested_rates_may_be_reported_beside_others_that_are_taken() -> None:
    both = {rank: (0.07, 0.05, 0.0375) for rank in (0, 1)}
    assert kind(showing(both, reported=RATES)) == "learning rate"
    found = diagnose(other := showing(both, reported=(0.025, 0.06, 0.05)), judge(other))
    assert found is not None and {"learning rate", "wrong report"} == {*found.kinds} | {"wrong report"}


# ---- which schedule gives them

TEN = replace(ADAMW, lr=0.01, steps=10, warmup_steps=4, final_lr_fraction=0.2)


def scheduled(step: int, warmup: int = 4, steps: int = 10, last: float = 0.2, peak: float = 0.01) -> float:
    if 0 < warmup >= step:
        return peak * step / warmup
    done = min(1.0, (step - warmup) / (steps - warmup))
    return peak * (last + (1 - last) * (1 + math.cos(math.pi * done)) / 2)


def rule(by: Callable[[int], float], training: TrainingConfig = TEN, taken: Iterable[int] = range(1, 11)) -> str:
    trial = trial_of(tiny_case("single"))
    shown = {step: by(step) for step in taken}
    wrong = [step for step, lr in shown.items() if not math.isclose(lr, scheduled(step))]
    return rule_of(replace(trial, case=replace(trial.case, training=training)), wrong, shown.items())


@pytest.mark.parametrize(
    ("by", "words"),
    [
        (lambda step: scheduled(step - 1), ("every step", "before")),
        (lambda step: scheduled(step + 1), ("next step",)),
        (lambda step: scheduled(2 * step - 1), ("advances", "by 2")),
        (lambda step: scheduled(5 * step - 4), ("advances", "by 5")),
        (lambda step: scheduled(step - (step >= 9)), ("from step 9 on", "before")),
        (lambda step: scheduled(step, warmup=0), ("warmup_steps 0",)),
        (lambda step: scheduled(step, warmup=5), ("warmup_steps 5",)),
        (lambda step: scheduled(step, last=0.1), ("final_lr_fraction 0.1",)),
        (lambda step: scheduled(step, steps=20), ("steps 20",)),
        (lambda step: scheduled(step, peak=0.02), ("lr 0.02",)),
        (lambda step: 0.01, ("warmup_steps 0", "final_lr_fraction 1")),
        (lambda step: scheduled(step, warmup=0, steps=20), ("warmup_steps 0", "steps 20")),
        (lambda step: 0.001 + 0.0001 * step**2, ()),
    ],
)
def test_a_schedule_is_a_shift_in_steps_or_a_field_or_two(by: Callable[[int], float], words: tuple[str, ...]) -> None:
    assert all(word in rule(by) for word in words) and bool(rule(by)) == bool(words)
