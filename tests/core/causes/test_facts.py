"""What checks see themselves, named without a proof; and processes, parameters and layers that are not there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from caused import cause_of, causes_of, data_of
from diagnosed import DDP_2, EMBEDDING, NORM, broken, dims, fsdp_4, seen
from literal import (
    ADAMW,
    TINY,
    judged,
    tiny_case,
    trained_otherwise,
    trial_of,
    with_every_rank,
    with_rank,
    with_step,
    with_value,
    without_rank,
    without_step,
)
from resuming import FSDP_4, TP_2, WEIGHT

from harness.core.case.case import Saved
from harness.core.case.dims import ParallelDims
from harness.core.causes import diagnose
from harness.core.causes.facts import (
    FINDING_ROWS,
    facts_of_other_stages,
    facts_of_table,
    layers_lost,
    not_finite,
    not_trained,
    process_failed,
)
from harness.core.causes.words import elsewhere_text, first_finding
from harness.core.checks import judge
from harness.core.evidence.checkpoint_index import SavedTensor
from harness.core.evidence.records import Collective, Exit, HeldTensor
from harness.core.judge.finding import Finding
from harness.core.judge.trial import Trial
from harness.core.plan.make_plan import make_plan

RING = "each waits for the other: rank 0 in x; rank 1 in y"
WQ, LOGITS = "layers.0.attention.wq.weight", "float64 [2, 4, 8]"

# ---- processes


def with_exits(trial: Trial, *exits: Exit) -> Trial:
    """These ranks left no evidence."""
    ended = {exit.rank: exit for exit in trial.run.exits} | {exit.rank: exit for exit in exits}
    for exit in exits:
        trial = without_rank(trial, exit.rank)
    return replace(trial, run=replace(trial.run, exits=tuple(ended[rank] for rank in sorted(ended))))


def waited(*ranks: int) -> list[Exit]:
    return [Exit(rank, "raised", 1, error="RuntimeError: Connection closed by peer") for rank in ranks]


@pytest.mark.parametrize(
    ("blamed", "says"),
    [
        ([Exit(1, "signal", signal="SIGKILL", error="died by SIGKILL, not sent by the harness.")], ["died by SIGKILL"]),
        ([Exit(3, "killed", signal="SIGKILL", error="no answer for 30 s")], ["hung", "no answer for 30 s"]),
        ([Exit(0, "raised", 1, error="ValueError: no such token: 9")], ["raised", "ValueError: no such token: 9"]),
        ([Exit(2, "ok", 0, error="exited while others still waited")], ["left early"]),
        ([Exit(1, "vanished", 1)], ["vanished"]),
        (
            [Exit(0, "raised", 1, error="x", reason="issued a barrier", diverged=True)],
            ["issued a barrier, then raised"],
        ),
        ([Exit(rank, "raised", 1, error="MemoryError: 8 GB") for rank in (0, 1)], ["ranks [0,1] raised: MemoryError"]),
        (
            [Exit(rank, "raised", 1, error=f"no {error}", reason=RING) for rank, error in ((0, "recv"), (1, "send"))],
            [f"{RING}, then rank 0 raised: no recv; rank 1 raised: no send"],
        ),
    ],
)
def test_who_died_hung_raised_or_left_is_told_from_who_only_waited(blamed: list[Exit], says: list[str]) -> None:
    ranks = tuple(exit.rank for exit in blamed)
    others = [rank for rank in range(4) if rank not in ranks]
    trial = with_exits(fsdp_4(), *(replace(exit, blamed=True) for exit in blamed), *waited(*others))
    found = diagnose(trial, judge(trial))
    assert found is not None
    assert data_of(found.causes[0], "ranks", "how") == ("a process failed", ranks, blamed[0].how)
    assert all(text in found.causes[0].observed for text in says)
    assert "not to blame" in dict(found.evidence)


def test_a_rank_that_has_made_its_last_step_did_not_leave_early() -> None:
    trial, done = with_exits(fsdp_4(), *waited(0)), Exit(1, "ok", 0, error="exited while rank 0 waited", blamed=True)
    exits = tuple(done if exit.rank == 1 else exit for exit in trial.run.exits)
    fact = seen(process_failed, replace(trial, run=replace(trial.run, exits=exits)))
    assert fact is not None and "ended after the last step" in fact.cause.observed
    assert [label for label, _ in fact.lines] == ["either"]


def test_the_stack_and_the_last_collective_of_a_culprit_stand_below() -> None:
    stack = "\n".join(f"line {number}" for number in range(6))
    exit = Exit(1, "raised", 1, error="x", blamed=True, stack=stack, last_collective="all_gather #7")
    found = seen(process_failed, with_exits(fsdp_4(), exit))
    assert found is not None
    assert [label for label, _ in found.lines] == ["rank 1", "stack", "", "", ""]
    assert found.checks == ("completed",)


def test_two_ranks_of_which_each_waits_for_the_other_are_shown_in_the_line_of_the_trainer_that_each_is_in() -> None:
    def lines(*stacks: str) -> list[tuple[str, str]]:
        exits = [Exit(rank, "raised", 1, error="x", blamed=True, stack=stack) for rank, stack in enumerate(stacks)]
        found = seen(process_failed, with_exits(fsdp_4(), *exits))
        assert found is not None
        return [(label, text) for label, text in found.lines if label != "not to blame"]

    assert lines("train.py:7 in f", "train.py:9 in f") == [
        ("rank 0 in", "train.py:7 in f"),
        ("rank 1 in", "train.py:9 in f"),
    ]
    assert lines("train.py:7 in f", "train.py:7 in f") == lines("train.py:7 in f") == [("stack", "train.py:7 in f")]
    assert lines("train.py:7 in f", "train.py:8 in f", "train.py:9 in f") == [("stack", "train.py:7 in f")]


@pytest.mark.parametrize(
    ("exit", "kind", "text"),
    [
        (Exit(0, "killed", error="killed at the time limit of 9 s, still at work: --timeout"), "too slow", "9 s"),
        (Exit(0, "killed", error="no answer for 30 s"), "a process failed", "nothing shows which"),
        (Exit(0, "killed", error="no answer", undelivered="what 0 sent did not arrive"), "a process failed", "arrive"),
    ],
)
def test_where_nobody_can_be_blamed_nobody_is(exit: Exit, kind: str, text: str) -> None:
    cause = cause_of(with_exits(fsdp_4(), *(replace(exit, rank=rank) for rank in range(4))))
    assert (cause.kind, cause.details) == (kind, ()) and text in cause.observed


# ---- what ranks lack


def without(trial: Trial, what: str, fqns: Iterable[str], ranks: Iterable[int] | None = None) -> Trial:
    """what: gradients or parameters, which these ranks (all) have in no step."""
    for rank in ranks or trial.ranks:
        for step in trial.ranks[rank].steps:
            rest = {fqn: value for fqn, value in getattr(step, what).items() if fqn not in {*fqns}}
            trial = with_step(trial, rank, step.step, **{what: rest})
    return trial


def not_holding(trial: Trial, rank: int, fqns: Iterable[str]) -> Trial:
    kept = tuple(one for one in trial.ranks[rank].parameters if one.fqn not in {*fqns})
    trial = with_rank(trial, rank, parameters=kept)
    return without(without(trial, "gradients", fqns, [rank]), "parameters", fqns, [rank])


EXTRA = replace(fsdp_4().ranks[2].parameters[0], fqn="a.buffer")


@pytest.mark.slow("many of a kind; the first run in the same way", after=2)
@pytest.mark.parametrize(
    ("trial", "ranks"),
    [
        (without_rank(fsdp_4(), 1), (1,)),
        (with_rank(fsdp_4(), 1, steps=()), (1,)),
        (without_step(fsdp_4(), 1, 3), (1,)),
        (with_rank(fsdp_4(), 1, steps=(*fsdp_4().ranks[1].steps, replace(fsdp_4().ranks[1].steps[-1], step=4))), (1,)),
        (trial_of(tiny_case("hsdp_2x2"), tiny_case("fsdp_2")), ()),
        (with_every_rank(fsdp_4(), lambda t, rank: with_rank(t, rank, rank=0, world_size=1)), (0, 1, 2, 3)),
        (with_every_rank(fsdp_4(), lambda t, rank: with_rank(t, rank, rank=3 - rank)), (0, 1, 2, 3)),
        (not_holding(fsdp_4(), 1, [EMBEDDING]), (1,)),
        (with_rank(fsdp_4(), 2, parameters=(*fsdp_4().ranks[2].parameters, EXTRA)), (2,)),
        (without(fsdp_4(), "gradients", [NORM], [1]), (1,)),
        (without(fsdp_4(), "parameters", [NORM, WQ], [0, 1]), (0, 1)),
    ],
)
def test_what_ranks_lack_is_named_with_them(trial: Trial, ranks: tuple[int, ...]) -> None:
    cause = cause_of(trial)
    assert cause.kind == "incomplete" and cause.finding is not None and cause.finding.check == "completed"
    assert not ranks or {*cause.finding.ranks} <= {*ranks}
    assert not ranks or {*ranks} <= {*cause.ranks}


def test_whole_ranks_that_are_missing_break_every_check_and_what_they_lack_those_of_it() -> None:
    (whole, *_), (part, *_) = (
        list(facts_of_table(trial, {"completed": judged("completed", trial), "loss": broken("loss")["loss"]}))
        for trial in (without_rank(DDP_2, 1), with_rank(DDP_2, 1, steps=()))
    )
    assert {"completed", "loss"} <= {*whole.checks}
    assert "loss" not in part.checks and "completed" in part.checks


@pytest.mark.slow("many findings; test_what_ranks_lack_is_named_with_them has few")
def test_more_steps_than_requested_are_one_cause_of_what_is_counted_by_steps() -> None:
    def doubled(trial: Trial, rank: int) -> Trial:
        steps = [replace(one, step=2 * one.step - late) for one in trial.ranks[rank].steps for late in (1, 0)]
        shown = [replace(one, reported_loss=None, grad_norm=None, reported_lr=None) for one in steps[::2]]
        both = [one for pair in zip(shown, steps[1::2], strict=True) for one in pair]
        return with_rank(trial, rank, steps=tuple(both))

    trial = with_every_rank(fsdp_4(), doubled)
    causes = causes_of(trial)
    assert not [one for one in causes if one.kind in ("report lacking", "wrong report", "samples lost")]
    assert causes[0].kind == "incomplete" and causes[0].finding is not None
    assert causes[0].finding.ranks == (0, 1, 2, 3) and {"completed", "reported_loss", "grad_norm"} <= {
        *causes[0].explains
    }
    (fewer, *_) = causes_of(without_step(fsdp_4(), 1, 3))
    assert fewer.kind == "incomplete" and "reported_loss" not in fewer.explains


def test_a_finding_is_of_all_ranks_of_which_it_is_the_same_and_names_where_there_are_others() -> None:
    here = Finding(ranks=(1,), step=1, quantity="bytes", expected=2, observed=3)
    same = [replace(here, ranks=(0,)), replace(here, ranks=(3,))]
    assert first_finding([here, *same]) == replace(here, ranks=(0, 1, 3)) and elsewhere_text([here, *same]) == ""
    more, later = replace(here, ranks=(2,), observed=4), replace(here, step=3)
    assert first_finding([here, more, later]) == here
    assert [word in elsewhere_text([here, more, later]) for word in ("rank 2", "step 3", "rank 1")] == [
        True,
        True,
        False,
    ]
    assert elsewhere_text([here, replace(more, quantity="calls")]) == ""


# ---- parameters that nobody trains, layers that are lost


@pytest.mark.parametrize("gradient", [False, True])
def test_parameters_that_nobody_trains_explain_all_that_follows(gradient: bool) -> None:
    """gradient: they have one, which nothing sets to zero."""
    trial = trial_of(tiny_case("fsdp_2", replace(ADAMW, max_norm=None)))
    start, sums = trial.reference.weights[NORM], [np.zeros_like(trial.reference.weights[NORM])]

    def gradients(step: int, own: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        sums.append(sums[-1] + own[NORM])
        return own | {NORM: sums[-1] if gradient else 0 * own[NORM]}

    trial = trained_otherwise(trial, gradients=gradients, left=lambda step, of: {**of, NORM: start})
    trial = without(trial, "parameters" if gradient else "gradients", [NORM])
    cause = cause_of(trial)
    assert data_of(cause, "parameters", "gradient") == ("incomplete", (NORM,), gradient)
    assert ("gradients" if gradient else "grad_norm") in cause.explains


@pytest.mark.parametrize(
    ("trial", "check"),
    [
        (fsdp_4(), "completed"),
        (without(fsdp_4(), "gradients", [NORM]), "gradients"),
        (without(fsdp_4(), "gradients", [NORM], [1]), "completed"),
        (with_every_rank(fsdp_4(), lambda t, rank: with_rank(t, rank, steps=())), "completed"),
        (with_rank(fsdp_4(), 2, parameters=(*fsdp_4().ranks[2].parameters, EXTRA)), "completed"),
    ],
)
def test_nothing_is_said_to_be_untrained_where_all_is_or_no_step_is_seen(trial: Trial, check: str) -> None:
    assert list(not_trained(trial, broken(check))) == []


def of_layers(count: int, *lost: int) -> Trial:
    trial = trial_of(tiny_case("fsdp_2", model=replace(TINY, n_layers=count)))
    gone = [fqn for fqn in trial.plan.shapes if fqn.startswith(tuple(f"layers.{layer}." for layer in lost) or "-")]
    return with_every_rank(trial, lambda t, rank: not_holding(t, rank, gone))


@pytest.mark.parametrize(
    ("trial", "layers"),
    [
        (of_layers(2, 1), ("layers.1",)),
        (of_layers(4, 1, 2, 3), ("layers.1", "layers.2", "layers.3")),
        *((of_layers(2), ()), (of_layers(2, 0), ()), (of_layers(2, 0, 1), ())),
    ],
)
def test_last_layers_that_are_on_no_rank_leave_a_shallower_model(trial: Trial, layers: tuple[str, ...]) -> None:
    found = [data_of(one.cause, "layers") for one in layers_lost(trial, broken("completed"))]
    assert found == ([("layers lost", layers)] if layers else [])
    assert list(layers_lost(trial, broken("gradients"))) == []


# ---- numbers that are not finite


def nan(value: np.ndarray) -> np.ndarray:
    return value * np.nan


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize(("what", "first"), [("gradients", "gradients"), ("parameters", "parameters")])
def test_what_is_not_finite_first_is_named_with_its_step(what: str, first: str, step: int) -> None:
    trial = DDP_2
    for later in range(step, 4):
        trial = with_every_rank(trial, lambda t, rank, later=later: with_value(t, rank, later, what, NORM, nan))
    assert data_of(cause_of(trial), "first", "step") == ("not finite", first, step)


def test_a_loss_that_is_not_finite_comes_before_its_gradients() -> None:
    trial = with_every_rank(DDP_2, lambda t, rank: with_value(t, rank, 2, "gradients", NORM, nan))
    (part,) = trial.ranks[1].steps[1].microbatches
    trial = with_step(trial, 1, 2, microbatches=(replace(part, loss_sum=np.nan),))
    assert data_of(cause_of(trial), "first", "step") == ("not finite", "the loss", 2)
    assert list(not_finite(DDP_2, broken("gradients"))) == []


# ---- the table

Alter = Callable[[Trial], Trial]
FSDP = trial_of(tiny_case("fsdp_2"))


def by_step(trial: Trial, rank: int, *changes: Mapping[str, Any]) -> Trial:
    for step, change in enumerate(changes, start=1):
        trial = with_step(trial, rank, step, **change)
    return trial


def switched(trial: Trial, name: str, value: str, ranks: tuple[int, ...] = (0, 1)) -> Trial:
    for rank in ranks:
        for step in trial.ranks[rank].steps:
            trial = with_step(trial, rank, step.step, settings=step.settings | {name: (value,)})
    return trial


def waiting(trial: Trial, phase: str = "forward") -> Trial:
    call = Collective("barrier", tuple(trial.ranks), "0", "uint8", 0, phase, 2, 99)
    return with_every_rank(trial, lambda t, rank: with_rank(t, rank, collectives=(*t.ranks[rank].collectives, call)))


def saving(change: Callable[[tuple[SavedTensor, ...]], Iterable[SavedTensor]]) -> Trial:
    """The launch that saves after step 2, whose checkpoint holds this."""
    trial = trial_of(tiny_case(FSDP_4, resume=(Saved(2, TP_2),))).saved[0]
    assert trial.run.checkpoint is not None
    held = replace(trial.run.checkpoint, tensors=tuple(change(trial.run.checkpoint.tensors)))
    return replace(trial, run=replace(trial.run, checkpoint=held))


GROWN = [{"kept": {LOGITS: 512 * step}} for step in (1, 2, 3)]


@pytest.mark.parametrize(
    ("trial", "kind", "ranks"),
    [
        (by_step(FSDP, 1, *GROWN), "growing", (1,)),
        (with_rank(FSDP, 0, held=(HeldTensor((300,), "float32", 1200),)), "retained", (0,)),
        (by_step(FSDP, 1, {}, {"graphs_retained": 2}, {"graphs_retained": 1}), "retained graph", (1,)),
        (by_step(FSDP, 1, {}, {"copied": {"backward": 936}}), "copied", (1,)),
        (switched(DDP_2, "autograd anomaly detection", "on", (1,)), "another setting", (1,)),
        (
            switched(switched(DDP_2, "cudnn.benchmark", "on"), "default dtype", "bfloat16", (1,)),
            "another setting",
            (1,),
        ),
        (waiting(trial_of(tiny_case(dims(shard=4)))), "ranks wait", (0,)),
        (saving(lambda all_: [one for one in all_ if one.name != f"model.{WEIGHT}"]), "checkpoint", ()),
        (saving(lambda all_: [*all_, SavedTensor("cache", "", (4,), "float32", 4)]), "checkpoint", ()),
        (saving(lambda all_: [replace(one, dtype="bfloat16") for one in all_]), "checkpoint", ()),
    ],
)
def test_what_a_check_sees_is_the_cause(trial: Trial, kind: str, ranks: tuple[int, ...]) -> None:
    cause = cause_of(trial)
    assert cause.kind == kind and cause.finding is not None
    assert {*ranks} <= {*cause.finding.ranks}
    assert len(causes_of(trial)) == 1


def test_a_switch_that_changes_numbers_is_named_before_others() -> None:
    trial = switched(switched(DDP_2, "autograd anomaly detection", "on"), "default dtype", "bfloat16")
    finding = cause_of(trial).finding
    assert finding is not None and finding.name == "default dtype"


def test_of_all_that_is_kept_what_is_retained_is_named_before_what_is_copied() -> None:
    trial = by_step(FSDP, 1, *[{"graphs_retained": 1, "copied": {"other": 936}}] * 3)
    trial = with_rank(trial, 0, held=(HeldTensor((300,), "float32", 1200),))
    kinds = [fact.cause.kind for fact in facts_of_table(trial, {"memory": judged("memory", trial)})]
    assert kinds[:3] == ["retained", "retained graph", "copied"]
    declared = next(facts_of_table(trial, {"memory": judged("memory", trial)})).lines
    assert [label for label, _ in declared] == ["if intended", "", "failing then"] and "kept" in str(declared[0])


def test_traffic_of_no_plan_is_a_symptom_and_none_where_numbers_are_wrong() -> None:
    call = Collective("all_reduce", (0, 1), "0", "float64", 640, "forward", 2, 99)
    trial = with_every_rank(FSDP, lambda t, rank: with_rank(t, rank, collectives=(*t.ranks[rank].collectives, call)))
    results = {"traffic": judged("traffic", trial)}
    (fact,) = facts_of_table(trial, results)
    assert (fact.cause.kind, fact.is_symptom) == ("traffic of no plan", True)
    assert list(facts_of_table(trial, results | broken("loss"))) == []


def test_a_golden_that_fails_alone_says_that_the_reference_moved() -> None:
    (fact,) = facts_of_table(FSDP, broken("golden"))
    assert (fact.cause.kind, fact.checks) == ("reference moved", ("golden",))
    assert not [one for one in facts_of_table(FSDP, broken("golden", "loss")) if one.cause.kind == "reference moved"]


def test_a_check_that_passes_states_nothing() -> None:
    assert list(facts_of_table(FSDP, {})) == [] and all(row.check for row in FINDING_ROWS)
    assert list(process_failed(FSDP, {})) == [] and list(layers_lost(FSDP, broken("completed"))) == []


@pytest.mark.parametrize("check", ["process_groups", "traffic", "placements", "memory"])
def test_a_structure_that_no_request_explains_is_named_by_its_check(check: str) -> None:
    assert [fact.cause.kind for fact in facts_of_table(FSDP, broken(check))] == [f"{check} of no plan"]
    assert list(facts_of_table(FSDP, broken(check, "gradients"))) == []


# ---- parameters of other stages


def test_a_layer_on_two_stages_and_one_on_none_are_told_by_ranks_and_layers() -> None:
    model = replace(TINY, n_layers=2)
    case = tiny_case(ParallelDims(pp=2), model=model)
    trial = replace(trial_of(tiny_case("ddp_2", model=model)), case=case, plan=make_plan(case))
    right = {
        rank: [one for one in trial.ranks[rank].parameters if one.fqn in trial.plan.slices[rank]] for rank in (0, 1)
    }
    layer = [one for one in right[0] if one.fqn.startswith("layers.0.")]
    rest = [one for one in right[0] if one not in layer]
    names = {one.fqn for one in layer}
    twice, moved = (
        "rank 1 holds layers.0 as well, which the plan gives to rank 0 alone",
        ("rank 1 holds layers.0, which the plan gives to rank 0; rank 0 lacks layers.0"),
    )
    for first, details, text in (
        (right[0], {"hold": {1, *names}}, twice),
        (rest, {"hold": {1, *names}, "lack": {0, *names}}, moved),
    ):
        odd = with_rank(with_rank(trial, 0, parameters=(*first,)), 1, parameters=(*layer, *right[1]))
        (fact,) = facts_of_other_stages(odd, {"completed": judged("completed", odd)})
        assert {key: {*held} for key, held in fact.cause.details} == details
        assert fact.cause.observed == text
    assert not [
        *facts_of_other_stages(fsdp_4(), {"completed": judged("completed", not_holding(fsdp_4(), 1, [EMBEDDING]))})
    ]
