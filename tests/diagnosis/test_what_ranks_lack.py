"""Parameters, gradients and updates that ranks do not have, or have in another's place. Literal evidence, no ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
import pytest
from diagnosed import EMBEDDING, LAST, NORM, broken, fsdp_4, proposed
from literal import ADAMW, TINY, tiny_case, trial_of, with_every_rank, with_rank, with_step

from harness.diagnosis import assume
from harness.diagnosis.processes import layers_lost, missing_parameters, not_trained
from harness.judge.trial import Trial
from harness.plan.make_plan import make_plan
from harness.reference.config import ModelConfig
from harness.report.cause_text import cause_line
from harness.spec.dims import ParallelDims

FROZEN = "frozen, unused, or in no optimizer that steps"
NONE = "none was in place as the optimizer stepped"
WQ, WK = "layers.0.attention.wq.weight", "layers.0.attention.wk.weight"


def piped(layers: int, pp: int, held: Mapping[int, Iterable[str]] | None = None, data: int = 1) -> Trial:
    """Pipelines of so many ranks, each of which has what is planned. held: by rank, how names begin of what it has instead."""
    model = replace(TINY, n_layers=layers)
    case = tiny_case(ParallelDims(pp=pp, dp_replicate=data), model=model, schedule="1F1B", microbatches=pp)
    whole = trial_of(tiny_case(ParallelDims(dp_replicate=pp * data), model=model))
    trial = replace(whole, case=case, plan=make_plan(case))
    for rank in trial.ranks:
        chosen = tuple((held or {}).get(rank, trial.plan.slices[rank]))
        trial = holding(trial, rank, {fqn for fqn in trial.plan.shapes if fqn.startswith(chosen)})
    return trial


def holding(trial: Trial, rank: int, fqns: set[str]) -> Trial:
    evidence = trial.ranks[rank]
    for step in evidence.steps:
        kept = {
            what: {f: v for f, v in getattr(step, what).items() if f in fqns} for what in ("gradients", "parameters")
        }
        trial = with_step(trial, rank, step.step, **kept)
    return with_rank(trial, rank, parameters=tuple(tensor for tensor in evidence.parameters if tensor.fqn in fqns))


def lacking(trial: Trial, what: str, fqns: Iterable[str], ranks: Iterable[int] | None = None, since: int = 1) -> Trial:
    """what: gradients or parameters, which these ranks (all) do not have from a step on."""
    for rank in ranks or trial.ranks:
        for step in trial.ranks[rank].steps[since - 1 :]:
            rest = {fqn: value for fqn, value in getattr(step, what).items() if fqn not in {*fqns}}
            trial = with_step(trial, rank, step.step, **{what: rest})
    return trial


def layers(*numbers: int) -> list[str]:
    return [f"layers.{number}." for number in numbers]


FIRST, ENDS = "tok_embeddings.", ["norm.", "output."]

# ---- stages


@pytest.mark.parametrize(
    ("trial", "told"),
    [
        (
            piped(4, 2, {0: [FIRST, *layers(0, 1, 2)], 1: [*layers(3), *ENDS]}),
            "rank 0 has layers 0-2, requested 0,1; rank 1 has layers 3, requested 2,3",
        ),
        (
            piped(2, 2, {0: [FIRST, *layers(0, 1)], 1: ENDS}),
            "rank 0 has layers 0,1, requested 0; rank 1 has layers none, requested 1",
        ),
        (
            piped(3, 3, {0: [FIRST, *layers(1)], 1: layers(0)}),
            "rank 0 has layers 1, requested 0; rank 1 has layers 0, requested 1",
        ),
        (
            piped(5, 5, {rank: layers((rank + 1) % 5) for rank in range(5)}),
            "; ".join(f"rank {rank} has layers {rank + 1}, requested {rank}" for rank in range(4)),
        ),
        (
            piped(2, 2, {0: layers(1), 1: layers(1), 2: layers(0), 3: layers(0)}, data=2),
            "rank 0 has layers 1, requested 0; rank 2 has layers 0, requested 1",
        ),
    ],
)
def test_a_pipeline_cut_at_other_layers_is_told_by_its_first_ranks(trial: Trial, told: str) -> None:
    assert missing_parameters(trial) == f"stages are cut at other layers: {told}"


def test_a_pipeline_of_which_one_rank_left_nothing_is_told_by_the_others() -> None:
    trial = piped(2, 3, {0: [FIRST, *layers(0, 1)], 1: [], 2: ENDS})
    ranks = {rank: evidence for rank, evidence in trial.ranks.items() if rank != 2}
    told = missing_parameters(replace(trial, run=replace(trial.run, ranks=ranks)))
    assert told == (
        "stages are cut at other layers: rank 0 has layers 0,1, requested 0; rank 1 has layers none, requested 1"
    )


@pytest.mark.parametrize(
    ("trial", "told"),
    [
        (piped(2, 2), ""),
        (
            piped(2, 2, {1: [*layers(0), *ENDS]}),
            "rank 1 does not hold layers.1.attention.wk.weight, layers.1.attention.wo.weight and 7 more,"
            " requested 11 parameters",
        ),
        (
            piped(2, 2, {0: layers(0), 1: [FIRST, *layers(1), *ENDS]}),
            f"rank 0 does not hold {EMBEDDING}, which rank 1 holds, requested 10 parameters",
        ),
        (
            piped(2, 2, {rank: [FIRST, *layers(1), *ENDS] if rank > 1 else layers(0) for rank in range(4)}, data=2),
            f"rank 0 does not hold {EMBEDDING}, which ranks [2,3] hold, requested 10 parameters",
        ),
        (piped(2, 2, {0: layers(0)}), f"rank 0 does not hold {EMBEDDING}, requested 10 parameters"),
        (
            piped(2, 2, {0: [FIRST, *layers(0), "norm."]}),
            f"rank 0 holds {NORM}, which belongs to rank 1",
        ),
        (
            piped(2, 2, {0: [FIRST, *layers(0, 1), *ENDS]}),
            "rank 0 holds layers.1.attention.wk.weight, layers.1.attention.wo.weight and 9 more, which belong to rank 1",
        ),
        (
            piped(2, 2, {0: layers(0), 1: [FIRST]}),
            f"rank 0 does not hold {EMBEDDING}, which rank 1 holds, requested 10 parameters",
        ),
        (
            piped(2, 2, {0: [FIRST, *layers(0), *ENDS], 1: [*layers(1), *ENDS]}),
            f"rank 0 holds {NORM}, {LAST}, which belong to rank 1",
        ),
    ],
)
def test_what_a_stage_lacks_is_told_with_who_has_it_and_what_it_has_beside_with_its_owner(
    trial: Trial, told: str
) -> None:
    assert missing_parameters(trial) == told


# ---- parameters


def beside(trial: Trial, rank: int, *names: str) -> Trial:
    first = trial.ranks[rank].parameters[0]
    return with_rank(trial, rank, parameters=(*trial.ranks[rank].parameters, *(replace(first, fqn=n) for n in names)))


def test_what_several_ranks_hold_beside_is_told_of_all_of_these() -> None:
    trial = beside(beside(fsdp_4(), 3, "b", "a", "c"), 1, "c", "b")
    assert missing_parameters(trial) == "ranks [1,3] hold b, c, which the model does not have"
    trial = beside(beside(fsdp_4(), 3, "b"), 1, "c", "a", "b")
    assert missing_parameters(trial) == "rank 1 holds a, b and 1 more, which the model does not have"


# ---- gradients and updates


@pytest.mark.parametrize(
    ("what", "ranks", "told"),
    [
        ("gradients", (2,), "rank 2 has no gradient of"),
        ("gradients", (1, 2), "ranks [1,2] have no gradient of"),
        ("parameters", (2,), "rank 2 does not update"),
        ("parameters", (0, 1, 2, 3), "ranks [0-3] do not update"),
    ],
)
def test_what_ranks_lack_is_told_of_the_first_step_without(what: str, ranks: tuple[int, ...], told: str) -> None:
    trial = lacking(fsdp_4(), what, (NORM, WK, WQ), ranks, since=2)
    assert (
        missing_parameters(trial)
        == f"{told} {WQ}, {WK} and 1 more in step 2: {NONE if what == 'gradients' else FROZEN}"
    )


def test_of_gradients_and_updates_that_ranks_lack_the_gradients_are_told_and_of_ranks_all_they_lack() -> None:
    trial = lacking(lacking(fsdp_4(), "gradients", (WQ,), (1,)), "gradients", (EMBEDDING,), (3,))
    trial = lacking(trial, "parameters", (NORM,), (0,))
    of_rank_1, of_rank_3 = missing_parameters(trial).split("; ")  # of each rank what it lacks, and no union of both
    assert of_rank_1.startswith(f"rank 1 has no gradient of {WQ} in step 1")
    assert of_rank_3.startswith(f"rank 3 has no gradient of {EMBEDDING} in step 1")


@pytest.mark.parametrize(
    ("pp", "stages", "who", "told"),
    [
        (3, (1,), "rank 1 does", " (all of stage 1)"),
        (3, (0, 2), "ranks [0,2] do", " (all of stages 0 and 2)"),
        (2, (1,), "rank 1 does", " (all of stage 1)"),
        (2, (), "rank 0 does", ""),
    ],
)
def test_whole_stages_that_do_not_train_are_named(pp: int, stages: tuple[int, ...], who: str, told: str) -> None:
    trial = piped(pp, pp)
    gone = {fqn for stage in stages for fqn in trial.plan.slices[stage]} or {WQ, WK}
    names = [fqn for fqn in trial.plan.shapes if fqn in gone]
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    found = missing_parameters(lacking(trial, "parameters", gone))
    assert found == f"{who} not update {names[0]}, {names[1]}{more}{told} in step 1: {FROZEN}"


def test_without_a_pipeline_no_stage_is_named() -> None:
    trial = fsdp_4()
    first, second, *rest = trial.plan.shapes
    told = f"ranks [0-3] have no gradient of {first}, {second} and {len(rest)} more in step 1: {NONE}"
    assert missing_parameters(lacking(trial, "gradients", [*trial.plan.shapes])) == told


# ---- what follows of it

CLIPPED = trial_of(tiny_case("fsdp_2", replace(ADAMW, max_norm=0.25)))


def test_what_has_no_gradient_stays_and_is_in_no_norm() -> None:
    trial = lacking(lacking(CLIPPED, "gradients", (NORM, WQ)), "parameters", (NORM,))
    (only,) = not_trained(trial, broken("completed"))
    assert (only.cause.kind, cause_line(only.cause)) == ("incomplete", missing_parameters(trial))
    assert cause_line(only.cause) == f"ranks [0,1] have no gradient of {WQ}, {NORM} in step 1: {NONE}"
    assert only.assume is not None
    usual, found = trial.reference, only.assume(trial).reference
    for before, step in zip(usual.steps, found.steps, strict=True):
        assert {fqn for fqn, value in step.gradients.items() if not value.any()} == {NORM, WQ}
        assert all(value.shape == trial.plan.shapes[fqn] for fqn, value in step.gradients.items())
        rest = {fqn: value for fqn, value in before.gradients.items() if fqn not in (NORM, WQ)}
        assert all(np.array_equal(step.gradients[fqn], value) for fqn, value in rest.items())
        same = {fqn for fqn, value in step.parameters.items() if np.array_equal(value, usual.weights[fqn])}
        assert same == {NORM, WQ}
        assert np.isclose(step.grad_norm, np.sqrt(sum(np.sum(value**2) for value in rest.values())))


def test_what_no_optimizer_has_may_have_gradients_of_its_own_or_those_that_nothing_sets_to_zero() -> None:
    trial = lacking(CLIPPED, "parameters", (NORM, WQ))
    text = f"ranks [0,1] do not update {WQ}, {NORM} in step 1: {FROZEN}"
    added = f"{text}; nothing sets their gradients to zero either, so no optimizer has them"
    alone, summed = not_trained(trial, broken("completed"))
    assert [(one.cause.kind, cause_line(one.cause)) for one in (alone, summed)] == [
        ("incomplete", text),
        ("incomplete", added),
    ]
    assert alone.assume is not None and summed.assume is not None
    usual = trial.reference
    kept: dict[str, np.ndarray] = {}
    for before, own, more in zip(
        usual.steps, alone.assume(trial).reference.steps, summed.assume(trial).reference.steps, strict=True
    ):
        for step in (own, more):
            same = {fqn for fqn, value in step.parameters.items() if np.array_equal(value, usual.weights[fqn])}
            assert same == {NORM, WQ}
        assert all(np.array_equal(own.gradients[fqn], value) for fqn, value in before.gradients.items())
        total = {f: g + kept.get(f, 0) if f in (NORM, WQ) else g for f, g in before.gradients.items()}
        assert all(np.allclose(more.gradients[fqn], value, rtol=1e-12) for fqn, value in total.items())
        norm = np.sqrt(sum(np.sum(value**2) for value in total.values()))
        assert norm > 0.25
        kept = {fqn: 0.25 / (norm + 1e-6) * value for fqn, value in total.items()}


@pytest.mark.parametrize(
    ("trial", "checks"),
    [
        (CLIPPED, ("completed",)),
        (lacking(CLIPPED, "gradients", (NORM,)), ("gradients",)),
        (beside(lacking(CLIPPED, "gradients", (NORM,)), 0, "a"), ("completed",)),
        (with_every_rank(CLIPPED, lambda t, rank: with_rank(t, rank, steps=())), ("completed",)),
        (lacking(CLIPPED, "gradients", (NORM,), (1,)), ("completed",)),
        (lacking(CLIPPED, "parameters", (NORM,), since=2), ("completed",)),
    ],
)
def test_nothing_is_said_to_be_untrained_where_all_is_or_was_or_no_step_is_seen(
    trial: Trial, checks: tuple[str, ...]
) -> None:
    assert proposed(not_trained, trial, *checks) == []


# ---- layers


def of_layers(count: int, *lost: int) -> Trial:
    trial = trial_of(tiny_case("fsdp_2", model=replace(TINY, n_layers=count)))
    kept = {fqn for fqn in trial.plan.shapes if not fqn.startswith(tuple(layers(*lost)) or ("nothing",))}
    return with_every_rank(trial, lambda t, rank: holding(t, rank, kept))


@pytest.mark.parametrize(
    ("trial", "told"),
    [
        (of_layers(2, 1), "layers.1 is on no rank: 1 layer trains"),
        (of_layers(3, 2), "layers.2 is on no rank: 2 layers train"),
        (of_layers(4, 1, 2, 3), "layers.1, layers.2 and 1 more are on no rank: 1 layer trains"),
    ],
)
def test_last_layers_that_are_on_no_rank_leave_a_shallower_model(
    trial: Trial, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[ModelConfig] = []
    monkeypatch.setattr(assume, "retrain", lambda model, recipe, reference: (trained.append(model), reference)[1])
    (one,) = layers_lost(trial, broken("completed"))
    count = trial.case.model.n_layers
    assert (one.cause.kind, cause_line(one.cause), one.cause.expected) == (
        "layers lost",
        f"{told}, requested {count}",
        str(count),
    )
    assert one.assume is not None
    assumed = one.assume(trial)
    left = {tensor.fqn for tensor in trial.ranks[0].parameters}
    assert set(assumed.reference.weights) == set(assumed.plan.shapes) == left
    assert assumed.case == replace(trial.case, model=assumed.case.model)
    shallower = replace(trial.case.model, n_layers=int(told.split(": ")[1].split()[0]))
    assert trained == [assumed.case.model] == [shallower]


@pytest.mark.parametrize(
    ("trial", "checks"),
    [
        (of_layers(2), ("completed",)),
        (of_layers(2, 0), ("completed",)),
        (of_layers(2, 0, 1), ("completed",)),
        (of_layers(2, 1), ("gradients",)),
    ],
)
def test_other_layers_than_the_last_or_all_of_them_are_not_said_to_be_lost(
    trial: Trial, checks: tuple[str, ...]
) -> None:
    assert proposed(layers_lost, trial, *checks) == []
