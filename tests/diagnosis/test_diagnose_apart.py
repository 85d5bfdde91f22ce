"""Causes that lie close together, each told from its neighbours by literal evidence. See tests/diagnosis/test_diagnose.py."""

# ruff: noqa: E501 - what is shown is asserted as it is shown

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from literal import (
    ADAMW,
    EIGHT,
    TINY,
    cause_of,
    judged,
    optimize,
    tiny_case,
    trial_of,
    with_every_rank,
    with_parameter,
    with_rank,
    with_step,
    with_step_1_gradients,
    with_value,
    without_rank,
)
from test_diagnose import (
    LOW_CLIP,
    NORM,
    dims,
    first_line,
    fsdp_4,
    in_noise,
    ran_as,
    received,
    reference_gradient,
    shows,
    told,
    waited,
    with_exits,
)

from harness.checks import judge
from harness.diagnosis import diagnose
from harness.diagnosis.data import _mask_is_off, wrong_positions
from harness.diagnosis.features import wrong_features, wrong_masks
from harness.diagnosis.forward import documents_see_each_other
from harness.diagnosis.gradients import _lost_before, _mean_over_none, _missing_reduction, _scaled_by_stage
from harness.diagnosis.later import wrong_loss
from harness.diagnosis.layout import wrong_contents
from harness.diagnosis.processes import process_failed
from harness.diagnosis.rest import out_of_order, wrong_reports, wrong_structure
from harness.diagnosis.words import groups_text
from harness.evidence.records import Exit, HeldTensor
from harness.judge.result import Finding, Result, Verdict
from harness.judge.trial import Trial
from harness.spec.case import Saved
from harness.spec.dims import ParallelDims
from reference.config import TrainingConfig

THREE = replace(TINY, n_layers=3)
PP_2 = tiny_case(ParallelDims(pp=2), schedule="1F1B", microbatches=4)


def broken(*laws: str) -> dict[str, Result]:
    return {law: Result(law, Verdict.FAIL, 1, (Finding("here", "this", "that"),)) for law in laws}


# ---- features


def recomputing(*blocks: int, asked: str = "layer") -> Trial:
    """Three blocks, of which these are called inside backward."""
    trial = trial_of(tiny_case("ddp_2", model=THREE, activation_checkpointing=asked))
    for rank, evidence in trial.ranks.items():
        for step in evidence.steps:
            forward = {key: count for key, count in step.activity.calls.items() if key.startswith("forward")}
            again = {f"backward layers.{block}.ffn_norm": 1 for block in blocks}
            trial = with_step(trial, rank, step.step, activity=replace(step.activity, calls=forward | again))
    return trial


def test_blocks_recomputed_in_the_place_of_others_are_named_beside_those_asked_for() -> None:
    told = "activation checkpointing layer is in the wrong place: recomputed are"
    assert (
        cause_of(wrong_features(recomputing(0, 2), broken("features")))
        == f"{told} layers.0, layers.2, requested layers.1"
    )
    assert cause_of(wrong_features(recomputing(2), broken("features"))) == f"{told} layers.2, requested layers.1"


def test_a_rank_that_recomputes_other_blocks_than_its_peers_is_named() -> None:
    trial, odd = recomputing(1), recomputing(0)
    trial = with_rank(trial, 1, steps=odd.ranks[1].steps)
    assert cause_of(wrong_features(trial, broken("features"))) == (
        "activation checkpointing layer is in the wrong place on rank 1: recomputed are layers.0, requested layers.1"
    )


def test_masks_are_blamed_only_where_random_numbers_were_drawn_again_and_gradients_are_wrong() -> None:
    case = tiny_case("single", model=replace(TINY, dropout=0.1), activation_checkpointing="full")
    trial = trial_of(case)
    (first, *_) = trial.ranks[0].steps

    def drawing(random: dict[str, int]) -> Trial:
        return with_step(trial, 0, 2, activity=replace(first.activity, random=random))

    other = drawing({"forward": 2, "backward": 2, "other state layers.0": 1, "other state layers.0.attention": 1})
    told = "recomputation of layers.0 began with another random state than forward: its masks are not those that the loss was computed with"
    assert cause_of(wrong_masks(other, broken("gradients"))) == told
    assert wrong_masks(other, broken("features")) is None
    assert wrong_masks(drawing({"forward": 2, "other state layers.0": 1}), broken("gradients")) is None
    assert wrong_masks(drawing({"forward": 2, "backward": 2}), broken("gradients")) is None


# ---- gradients


@pytest.mark.parametrize(
    ("right", "shown"),
    [
        (("w2",), "layers.0.feed_forward.w2.weight and what follows"),
        (("w2", "w1", "w3"), "layers.0.feed_forward.w1.weight, layers.0.feed_forward.w3.weight and what follows"),
        (("w2", "w1", "w3", "ffn_norm"), "layers.0.ffn_norm.weight and what follows"),
        (("w2", "w1", "w3", "ffn_norm", "wo"), "layers.0.attention.wo.weight and what follows"),
        (
            ("w2", "w1", "w3", "ffn_norm", "wo", "wq", "wk", "wv"),
            "layers.0.attention.wq.weight, layers.0.attention.wk.weight and 1 more and what follows",
        ),
        (
            ("w2", "w1", "w3", "ffn_norm", "wo", "wq", "wk", "wv", "attention_norm"),
            "layers.0.attention_norm.weight and what follows",
        ),
    ],
)
def test_where_backward_loses_something_is_told_by_the_place_in_the_block(right: tuple[str, ...], shown: str) -> None:
    trial = trial_of(tiny_case("tp_2"))
    wrong = [fqn for fqn in trial.plan.shapes if fqn.split(".")[-2] not in (*right, "norm", "output")]
    told = _lost_before(trial, [(0, fqn) for fqn in wrong])
    assert told == f"gradients are right in {shown}, and wrong in all that lies before: backward loses something there"


def test_what_is_wrong_on_both_sides_of_something_right_was_not_lost_on_the_way() -> None:
    trial = trial_of(tiny_case("tp_2"))
    assert _lost_before(trial, [(0, "tok_embeddings.weight"), (0, NORM)]) is None
    assert _lost_before(trial, [(0, fqn) for fqn in trial.plan.shapes]) is None


def test_gradients_off_by_stage_are_told_with_each_stages_factor() -> None:
    trial = trial_of(tiny_case("single"))
    first = ("tok_embeddings", "layers.0")
    halved = with_step_1_gradients(
        trial, lambda _, fqn: reference_gradient(trial, fqn) * (0.5 if fqn.startswith(first) else 1.0)
    )
    wrong = [(0, fqn) for fqn in trial.plan.shapes if fqn.startswith(first)]
    told = _scaled_by_stage(replace(halved, case=PP_2), wrong)
    assert told is not None and told.startswith(
        "gradients are off by stage, times 0.5 in stage 0, 1 in stage 1: what a stage sends back"
    )
    assert _scaled_by_stage(halved, wrong) is None, "without a pipeline there are no stages"
    noise = with_step_1_gradients(trial, lambda _, fqn: reference_gradient(trial, fqn) ** 2)
    assert _scaled_by_stage(replace(noise, case=PP_2), wrong) is None, "no multiple"


def test_a_reduction_over_other_groups_than_any_axis_names_them() -> None:
    trial = trial_of(tiny_case("hsdp_2x2"))
    partners = {(0, 2): (0, 3), (1, 3): (1, 2)}
    for rank, evidence in trial.ranks.items():
        calls = tuple(
            replace(call, ranks=partners.get(call.ranks, call.ranks) if call.phase == "backward" else call.ranks)
            for call in evidence.collectives
        )
        trial = with_rank(trial, rank, collectives=calls)
    trial = with_step_1_gradients(trial, lambda rank, fqn: reference_gradient(trial, fqn) + rank)
    assert _missing_reduction(trial, []) == (
        "gradient reduction missing over dp_replicate: no all_reduce ran over [0,2] [1,3], but over [0,3] [1,2]"
    )


@pytest.mark.parametrize(("silent", "told"), [((3,), "rank 3 has"), ((1, 3), "ranks [1,3] have")])
def test_ranks_without_a_valid_token_are_named(silent: tuple[int, ...], told: str) -> None:
    trial = fsdp_4()
    labels = trial.reference.labels.copy()
    for rank in silent:
        labels[2 * rank : 2 * rank + 2] = -100
    trial = replace(trial, reference=replace(trial.reference, labels=labels))
    assert _mean_over_none(trial) == f": {told} no valid token, and a mean over none is 0/0"


def test_a_label_of_token_0_is_a_valid_one() -> None:
    assert _mask_is_off([(1, 0, 3)]) == _mask_is_off([(1, 3, 0)]) == ""
    trial = fsdp_4()
    labels = np.where(trial.reference.labels >= 0, 0, -100)
    assert _mean_over_none(replace(trial, reference=replace(trial.reference, labels=labels))) == ""


def test_a_loss_that_is_off_beside_right_gradients_shows_both_numbers() -> None:
    trial = fsdp_4()
    for rank in trial.ranks:
        (batch,) = trial.ranks[rank].steps[0].microbatches
        trial = with_step(trial, rank, 1, microbatches=(replace(batch, loss_sum=1.01 * batch.loss_sum),))
    found = wrong_loss(trial, {"loss": judged("loss", trial)})
    assert cause_of(found) == "the loss of step 1 is off by 1.0e-02, its gradients match within the bound of 2.5e-14"
    assert [label for label, _ in found.evidence] == ["loss"]


def test_without_a_document_mask_nobody_is_said_to_look_past_it() -> None:
    assert documents_see_each_other(fsdp_4(), []) is None


# ---- what is reported, and the way to right numbers


def test_gradients_a_little_too_long_are_told_where_their_noise_hides_each_entry() -> None:
    trial = in_noise(trial_of(tiny_case("ddp_2")))
    for rank, evidence in trial.ranks.items():
        for step in evidence.steps:
            longer = {
                fqn: 1.018 * reference for fqn, reference in trial.reference.steps[step.step - 1].gradients.items()
            }
            shown = 1.018 * trial.reference.steps[step.step - 1].grad_norm
            trial = with_step(trial, rank, step.step, gradients=longer, grad_norm=shown)
    assert judged("gradients", trial).verdict is Verdict.PASS
    law = {"grad_norm": judged("grad_norm", trial)}
    told = "gradients are 1.02 times as long as the reference's, though no entry is beyond its noise"
    assert cause_of(wrong_reports(trial, law)) == told
    shown = with_every_rank(trial, lambda t, rank: with_step(t, rank, 3, grad_norm=9.0))
    assert cause_of(wrong_reports(shown, law)).startswith("the reported gradient norm is wrong")


def shown_instead(trial: Trial, what: str) -> str:
    found = wrong_reports(trial, {what: judged(what, trial)})
    return cause_of(found).removeprefix("the reported ").partition(" is wrong, the training itself is right: ")[2]


@pytest.mark.parametrize(("what", "kind"), [("reported_loss", "loss"), ("grad_norm", "grad_norm")])
def test_a_display_that_lags_a_step_behind_is_told_from_one_that_stands_still(what: str, kind: str) -> None:
    trial = fsdp_4()
    right = {step.step: getattr(step, kind) for step in trial.reference.steps}
    assert shown_instead(shows(trial, what, lambda s: right[max(s.step - 1, 1)]), what) == (
        "each rank shows that of the step before"
    )
    assert shown_instead(shows(trial, what, lambda s: right.get(s.step - 1, 0.0)), what) == (
        "each rank shows that of the step before"
    )
    assert shown_instead(with_step(trial, 3, 2, **{what: right[1]}), what) == "rank 3 shows that of the step before"
    assert shown_instead(shows(trial, what, lambda s: right[1]), what) == "each rank shows another number"
    assert shown_instead(with_step(trial, 3, 1, **{what: 2.5}), what).startswith("rank 3 shows 2.5 once, where ")


def test_a_displayed_norm_of_what_clipping_left_is_told_if_it_is_so_everywhere() -> None:
    trial = trial_of(tiny_case("fsdp_2", LOW_CLIP))
    told = "each rank shows the norm after clipping (0.25), requested that before it"
    assert shown_instead(shows(trial, "grad_norm", lambda s: min(s.grad_norm, 0.25)), "grad_norm") == told
    assert shown_instead(shows(trial, "grad_norm", lambda s: 0.25 * (1 - 1e-6)), "grad_norm") == told
    alone = with_every_rank(trial, lambda t, rank: with_step(t, 1, rank + 1, grad_norm=0.25))
    assert shown_instead(alone, "grad_norm") == "rank 1 shows another number"
    never = trial_of(tiny_case("fsdp_2", replace(LOW_CLIP, max_norm=9.0)))
    off = shows(never, "grad_norm", lambda s: s.grad_norm * (1 + 1e-6))
    assert shown_instead(off, "grad_norm") == "each rank shows a number that is off by 1.0e-06"
    rounded = shows(never, "grad_norm", lambda s: float(np.float32(s.grad_norm)))
    assert shown_instead(rounded, "grad_norm") == "each rank shows it rounded to float32"


# ---- what the optimizer receives


def optimizing(trial: Trial, feed: Any, training: TrainingConfig) -> Trial:
    """What AdamW of that recipe leaves if it receives feed(fqn, gradient, parameter before)."""
    for rank, evidence in trial.ranks.items():
        starts = {t.fqn: t.value for t in evidence.parameters}
        given: dict[str, list[np.ndarray]] = {fqn: [] for fqn in starts}
        before, state = starts, {}
        for step in evidence.steps:
            for fqn, gradient in step.gradients.items():
                given[fqn].append(feed(fqn, gradient, before[fqn], trial.reference.steps[step.step - 1].grad_norm))
            made = {fqn: optimize(start, given[fqn], training) for fqn, start in starts.items()}
            before, state = {f: value for f, (value, _) in made.items()}, {f: s for f, (_, s) in made.items()}
            kept = state if step.step == 3 else {}
            trial = with_step(trial, rank, step.step, parameters=before, optimizer_state=kept)
    return trial


NO_DECAY = replace(ADAMW, weight_decay=0.0)


def test_weight_decay_in_the_gradients_is_told_from_another_weight_decay() -> None:
    trial = trial_of(tiny_case("fsdp_2"))

    def adding(decay: float, spared: str = "-") -> Trial:
        def feed(fqn: str, gradient: np.ndarray, before: np.ndarray, norm: float) -> np.ndarray:
            return gradient / (norm + 1e-6) + (0 if spared in fqn else decay) * before

        return optimizing(trial, feed, NO_DECAY)

    told = "weight decay is added to the gradients (L2, as Adam does), requested decoupled (AdamW)"
    assert first_line(adding(0.1)) == told
    assert first_line(adding(0.05)).startswith("the optimizer step is wrong")
    asked = replace(trial.case, training=replace(ADAMW, decay="matrices"))
    assert first_line(replace(adding(0.1, spared="norm"), case=asked)) == told
    assert first_line(replace(adding(0.1), case=asked)).startswith("the optimizer step is wrong")


@pytest.mark.parametrize("limit", [0.25, 1.6])
def test_a_coefficient_without_the_1e_6_is_told_from_no_clipping(limit: float) -> None:
    """Of the norms of these steps one is above 1.6, two below."""
    training = replace(ADAMW, max_norm=limit)

    def feed(fqn: str, gradient: np.ndarray, before: np.ndarray, norm: float) -> np.ndarray:
        return min(1.0, limit / norm) * gradient

    trial = trial_of(tiny_case("fsdp_2", training))
    told = "clipping multiplies by max_norm / norm, requested max_norm / (norm + 1e-6), as torch does"
    assert first_line(optimizing(trial, feed, training)) == told


def test_a_largest_second_moment_is_blamed_only_where_updates_are_wrong() -> None:
    def keeping(trial: Trial, name: str) -> Trial:
        state = trial.ranks[0].steps[2].optimizer_state
        kept = {fqn: arrays | {name: arrays["exp_avg_sq"]} for fqn, arrays in state.items()}
        return with_step(trial, 0, 3, optimizer_state=kept)

    right = trial_of(tiny_case("fsdp_2"))
    wrong = with_value(right, 1, 2, "parameters", NORM, lambda value: value + 1e-3)
    told = "the optimizer is AMSGrad (it keeps max_exp_avg_sq and divides by that), requested AdamW without it"
    assert first_line(keeping(wrong, "max_exp_avg_sq")) == told
    assert first_line(keeping(wrong, "exp_inf")).startswith("the optimizer step is wrong")
    assert diagnose(keeping(right, "max_exp_avg_sq"), judge(keeping(right, "max_exp_avg_sq"))) is None


@pytest.mark.parametrize("law", ["loss", "gradients", "grad_norm", "reported_loss"])
def test_collectives_in_another_order_explain_numbers_of_any_kind(law: str) -> None:
    found = out_of_order(fsdp_4(), broken("collective_order", law))
    assert cause_of(found) == "ranks of a group do not issue the same collectives: here: that, this"
    assert found.evidence == (("collective_order", "here: expected this, observed that"),)
    assert out_of_order(fsdp_4(), broken(law)) is None
    assert out_of_order(fsdp_4(), broken("collective_order", "memory")) is None


@pytest.mark.parametrize(
    ("law", "told"),
    [
        ("collective_order", "ranks of a group do not issue the same collectives"),
        ("process_groups", "process groups are not the plan's"),
        ("traffic", "bytes moved are not the plan's"),
        ("placements", "wrappers or placements claim something else than the plan"),
        ("memory", "memory held between steps is not the plan's"),
    ],
)
def test_a_structure_that_no_feature_explains_is_told_by_its_law(law: str, told: str) -> None:
    trial = fsdp_4()
    doubled = with_rank(trial, 0, collectives=trial.ranks[0].collectives * 3)
    assert cause_of(wrong_structure(doubled, broken(law))) == f"{told}: here: expected this, observed that"


# ---- layout and processes


def test_slices_of_no_known_layout_are_told_with_their_ranks_and_the_first_of_them() -> None:
    trial = fsdp_4()
    full = trial.reference.weights["output.weight"]
    trial = with_parameter(trial, 2, "output.weight", value=full[1:3])
    found = wrong_contents(trial, broken("shard_contents"))
    assert cause_of(found) == "ranks hold other slices than planned in 1 of 12 parameters (output.weight) on rank 2"
    assert found.evidence == (
        (
            "contents",
            "1 of 12 parameters; output.weight on rank 2: expected 1/4 of dim 0 [4:6], observed 1/4 of dim 0 [1:3]",
        ),
    )
    assert wrong_contents(trial, broken("traffic")) is None


def test_flattened_slices_are_told_in_elements() -> None:
    trial = trial_of(tiny_case(dims(shard=4), wrapper="fsdp1"))
    value = next(t.value for t in trial.ranks[2].parameters if t.fqn == NORM)
    found = wrong_contents(with_parameter(trial, 1, NORM, value=value), broken("shard_contents"))
    assert cause_of(found) and found.evidence[0][1].endswith(
        "expected 1/2 of its elements [0:2], observed 1/2 of its elements [2:4]"
    )


def test_a_layout_is_not_looked_for_where_a_rank_left_no_evidence() -> None:
    trial = without_rank(ran_as(dims(2, 2), dims(1, 4)), 3)
    assert first_line(trial) == "rank 3 left no evidence: its process ended with code 0 and wrote no file"


def test_a_rank_that_ended_in_a_way_of_its_own_is_told_by_it() -> None:
    exits = [Exit(1, "vanished", 1, blamed=True), *waited(0, 2, 3)]
    assert first_line(with_exits(fsdp_4(), *exits)) == "rank 1 vanished"


def test_three_kinds_of_culprits_are_told_and_no_more() -> None:
    blamed = [Exit(rank, "raised", 1, error=f"ValueError: {rank}", blamed=True) for rank in range(4)]
    assert first_line(with_exits(fsdp_4(), *blamed)) == "; ".join(f"rank {r} raised: ValueError: {r}" for r in range(3))


def test_where_nobody_can_be_blamed_the_first_ones_stack_is_shown() -> None:
    killed = [
        Exit(rank, "killed", signal="SIGKILL", error="no answer", stack=f"{rank}:1\n {rank}:2") for rank in (1, 2)
    ]
    found = process_failed(with_exits(fsdp_4(), *killed), {})
    assert cause_of(found) == "ranks [1,2] did not finish, and nothing tells which of them is the cause"
    assert found.evidence == (
        ("rank 1", "killed: no answer"),
        ("rank 2", "killed: no answer"),
        ("stack", "1:1"),
        ("", "1:2"),
    )
    alone = process_failed(with_exits(fsdp_4(), killed[0]), {})
    assert cause_of(alone).startswith("rank 1 did not finish")


def test_ranks_that_take_themselves_for_others_are_not_said_to_be_alone() -> None:
    trial = with_every_rank(fsdp_4(), lambda t, rank: with_rank(t, rank, rank=3 - rank))
    assert first_line(trial) == "ranks do not know who they are: ranks [0-3] ran as rank 3 of 4, requested 4 ranks"


def test_a_parameter_of_no_model_is_named() -> None:
    trial = fsdp_4()
    extra = replace(trial.ranks[2].parameters[0], fqn="a.buffer")
    trial = with_rank(trial, 2, parameters=(*trial.ranks[2].parameters, extra))
    assert first_line(trial) == "rank 2 holds a.buffer, which the model does not have"


# ---- samples and positions


def test_what_is_fed_wrongly_in_a_later_step_is_told_with_the_step() -> None:
    assert first_line(received(fsdp_4(), 3, 3, [21, 22])) == (
        "dp ranks draw overlapping samples in step 3: some are received twice and some by nobody"
    )


def test_a_step_of_another_length_is_looked_for_at_its_own_positions() -> None:
    case = tiny_case(ParallelDims(cp=2), replace(EIGHT, variable_length=True), cp_load_balance=False)
    trial = trial_of(case)
    full = np.arange(4, 8)
    trial = with_step(trial, 1, 2, positions=(full,))
    found = wrong_positions(trial, {"positions": judged("positions", trial)})
    assert cause_of(found) == "wrong rotary positions: rank 1 is told 4-7 for its tokens at 2-3"


def test_three_groups_are_shown_and_of_more_the_first_two_and_the_last() -> None:
    groups = [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert groups_text(groups[:3]) == "[0,1] [2,3] [4,5]"
    assert groups_text(groups) == "[0,1] [2,3] .. [6,7]"


# ---- what goes with the first line


def test_what_else_is_broken_is_told_where_no_rule_knows_the_cause() -> None:
    trial = with_step(fsdp_4(), 1, 3, memory={"parameters": 1888, "gradients": 472, "optimizer_state": 944})
    trial = replace(trial, golden=replace(trial.golden, losses=(9.0, 9.0, 9.0)))  # type: ignore[type-var]
    found = diagnose(trial, judge(trial), ())
    assert found is not None and dict(found.evidence)["also broken"] == "golden"
    assert dict(found.evidence)["golden"] == "the reference moved as well: model, data, recipe or torch changed"


def test_a_law_that_is_broken_without_saying_where_is_told() -> None:
    assert cause_of(diagnose(fsdp_4(), [Result("loss", Verdict.FAIL, 1)])) == "loss is broken and does not say where"


def test_a_listing_of_groups_passes_where_only_placements_are_wrong() -> None:
    trial = with_parameter(fsdp_4(), 1, NORM, placements=("Replicate",))
    assert "a listing of process groups passes here" in told(trial)
    memory = with_step(fsdp_4(), 1, 3, memory={"parameters": 1888, "gradients": 472, "optimizer_state": 944})
    assert "a listing of process groups" not in told(memory)


def test_rules_of_the_caller_are_those_of_earlier_launches_too() -> None:
    trial = trial_of(tiny_case("ddp_2", resume=(Saved(1, ParallelDims()),)))
    before = with_value(trial.saved[0], 0, 1, "gradients", NORM, lambda g: 2 * g)
    trial = replace(trial, saved=(before,))
    assert first_line(trial).startswith("saved_1: gradients are 2 times")
    assert cause_of(diagnose(trial, judge(trial), ())).startswith("saved_1: gradients: ")


# ---- what happens to weights after the optimizer


def changed_on(step: int, change: Any, *, ranks: tuple[int, ...] = (0, 1)) -> Trial:
    trial = trial_of(tiny_case("ddp_2"))
    for rank in ranks:
        left = trial.ranks[rank].steps[step - 1].parameters
        trial = with_step(trial, rank, step, changed={fqn: change(value) for fqn, value in left.items()})
    return trial


@pytest.mark.parametrize(
    ("change", "how"),
    [
        (lambda left: 0.9 * left, ""),
        (np.zeros_like, "to 0, "),
        (lambda left: left.astype(np.float32), "to another shape or dtype, "),
        (lambda left: left.astype(np.float32).astype(np.float64), "rounded to float32, "),
        (lambda left: left.astype(np.float16).astype(np.float64), "rounded to float16, "),
    ],
)
def test_what_was_done_to_weights_after_the_optimizer_is_told(change: Any, how: str) -> None:
    told = "weights are changed between steps 1 and 2, when the optimizer is done: {}in every parameter"
    assert first_line(changed_on(1, change)) == told.format(how)


def test_weights_changed_after_the_last_step_are_told_with_their_rank() -> None:
    told = "weights are changed after the last step, when the optimizer is done: in every parameter on rank 1"
    assert first_line(changed_on(3, lambda left: 2 * left, ranks=(1,))) == told


def test_gradients_that_were_wrong_before_come_first() -> None:
    trial = changed_on(2, np.zeros_like)
    for rank in (0, 1):
        trial = with_value(trial, rank, 1, "gradients", NORM, lambda gradient: 2 * gradient)
    assert first_line(trial).startswith("gradients are 2 times")


# ---- what is kept


@pytest.mark.parametrize(
    ("shapes", "told"),
    [
        (((8, 4), (4, 4)), "whole parameters"),
        (((4, 4), (2, 4)), "its slices"),
        (((300,),), "no parameter's shape"),
    ],
)
def test_copies_are_told_by_whose_shapes_they_have(shapes: tuple[tuple[int, ...], ...], told: str) -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    held = tuple(HeldTensor(shape, "float32", 600) for shape in shapes)
    line = first_line(with_rank(trial, 1, held=held))
    size = "600 B" if len(shapes) == 1 else "1.2 kB"
    kept = f"{size} of float32 are kept beside parameters, gradients and optimizer state on rank 1"
    assert line.startswith(kept) and line.endswith(told)
