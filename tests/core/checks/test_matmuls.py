"""The check `features` where it counts: matmuls, attention and formats of 8 bits, on literal evidence."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from checked import cause, found, like, where, with_activity
from literal import (
    ADAMW,
    APART,
    TINY,
    judged,
    tiny_case,
    trial_of,
    with_rank,
    with_step,
)

from harness.core.case.dims import ParallelDims
from harness.core.checks.features import QUANTIZED_MATMULS
from harness.core.evidence.step import Attention, Call, Matmul, QuantizedMatmul
from harness.core.judge.finding import Finding, Limit
from harness.core.judge.output_layer import judge_output_calls
from harness.core.judge.result import Verdict
from harness.core.judge.trial import Trial
from harness.core.plan.make_plan import make_plan

# ---- 8 bits


def quantized(recipe: str, matmuls: dict[str, int]) -> Trial:
    """One layer; `matmuls` alters what rank 1 did in step 2."""
    trial = trial_of(tiny_case("fsdp_2", training=replace(ADAMW, quantize=recipe)))
    format, backward = QUANTIZED_MATMULS[recipe]
    right = {QuantizedMatmul("forward", fqn, format): 1 for fqn in trial.plan.quantized}
    right |= {QuantizedMatmul("backward", fqn, format): backward for fqn in trial.plan.quantized}
    for rank in trial.ranks:
        for step in (1, 2, 3):
            trial = with_activity(trial, rank, step, quantized=right)
    return with_activity(trial, 1, 2, quantized={k: v for k, v in (right | matmuls).items() if v})


@pytest.mark.parametrize("recipe", QUANTIZED_MATMULS)
def test_products_of_all_blocks_in_the_format_requested_pass(recipe: str) -> None:
    assert judged("features", quantized(recipe, {})).verdict is Verdict.PASS


def test_a_module_that_was_left_out_of_the_conversion_is_named() -> None:
    missing = {QuantizedMatmul(phase, "layers.0.feed_forward.w2", "mxfp8"): 0 for phase in ("forward", "backward")}
    assert found(quantized("mxfp8", missing)) == [
        like(1, 2, 0, step=2, name="layers.0.feed_forward.w2", quantity="mxfp8 matmuls"),
        like(1, 1, 0, step=2, name="layers.0.feed_forward.w2", quantity="mxfp8 matmuls"),
    ]


def test_a_module_that_was_converted_too_is_named() -> None:
    trial = quantized("float8_rowwise", {QuantizedMatmul("forward", "output", "float8_rowwise"): 1})
    assert found(trial) == [like(1, 0, 1, step=2, name="output", quantity="float8_rowwise matmuls")]
    assert cause(trial) == found(trial)[0]


def test_a_conversion_that_did_not_take_place_is_named() -> None:
    trial = trial_of(tiny_case("fsdp_2", training=replace(ADAMW, quantize="float8_rowwise")))
    assert cause(trial) == {"quantize": None}


# ---- attention


@pytest.mark.parametrize(
    ("changed", "finding"),
    [
        ({Attention("forward", "attention"): 2}, like(0, 1, 2, step=1, quantity="attention in forward")),
        ({Attention("backward", "attention"): 1}, like(0, 0, 1, step=1, quantity="attention recomputed")),
        ({Attention("backward", "attention_backward"): 2}, like(0, 1, 2, step=1, quantity="attention's gradients")),
        ({Attention("forward", "batched matmul"): 2}, like(0, Limit(most=1), 2, step=1, quantity="batched matmuls")),
    ],
)
def test_attention_that_is_done_once_too_often_is_seen(changed: dict[str, int], finding: Finding) -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    seen = trial.ranks[0].steps[0].activity.attention
    assert found(with_activity(trial, 0, 1, attention=seen | changed)) == [finding]


def test_attention_is_done_for_each_part_of_the_sequence_that_a_rank_may_look_at() -> None:
    for balanced, parts in ((True, (2, 2)), (False, (1, 2))):
        trial = trial_of(tiny_case(ParallelDims(cp=2), cp_load_balance=balanced))
        for rank, count in enumerate(parts):
            right = {Attention("forward", "attention"): count, Attention("backward", "attention_backward"): count}
            for step in (1, 2, 3):
                trial = with_activity(trial, rank, step, attention=right)
        assert found(trial) == []
        for rank in trial.ranks:
            assert len(found(with_activity(trial, rank, 1, attention={key: 3 for key in right}))) == 2


MATMULS = {Attention("forward", "batched matmul"): 2, Attention("backward", "batched matmul"): 4}


def all_attend(trial: Trial, attention: dict[str, int]) -> Trial:
    for rank, step in itertools.product(trial.ranks, (1, 2, 3)):
        trial = with_activity(trial, rank, step, attention=attention)
    return trial


def test_a_table_of_angles_breaks_nothing() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    seen = trial.ranks[0].steps[0].activity.attention
    assert found(with_activity(trial, 0, 1, attention=seen | {Attention("forward", "batched matmul"): 1})) == []


def test_a_trainer_whose_attention_is_plain_matmuls_everywhere_is_right() -> None:
    assert found(all_attend(trial_of(tiny_case("fsdp_2")), MATMULS)) == []
    assert found(all_attend(trial_of(tiny_case("fsdp_2")), {})) == []  # flex attention is one kernel of its own


def test_fused_attention_that_was_requested_and_fell_back_to_matmuls_is_named() -> None:
    trial = all_attend(trial_of(tiny_case("fsdp_2"), traits=replace(APART, attention="fused")), MATMULS)
    assert found(trial)[:3] == [
        like(0, 1, 0, step=1, quantity="attention in forward"),
        like(0, 1, 0, step=1, quantity="attention's gradients"),
        like(0, Limit(most=1), 6, step=1, quantity="batched matmuls"),
    ]
    assert cause(trial) == replace(found(trial)[0], ranks=(0, 1))


def test_attention_that_falls_back_in_one_step_of_one_rank_is_named_whoever_chose_it() -> None:
    trial = with_activity(trial_of(tiny_case("fsdp_2")), 1, 2, attention=MATMULS)
    assert where(found(trial)[0]) == (1, 2, "attention in forward")
    assert cause(trial) == found(trial)[0]


def test_gpus_have_no_fused_attention_in_float64() -> None:
    trial = all_attend(trial_of(tiny_case("fsdp_2"), traits=replace(APART, attention="fused")), MATMULS)
    for rank in trial.ranks:
        trial = with_rank(trial, rank, environment={"device": "NVIDIA H200"})
    assert found(trial) == []


def test_attention_computed_twice_is_named() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    seen = trial.ranks[0].steps[0].activity.attention
    trial = with_activity(trial, 0, 1, attention=seen | {Attention("forward", "attention"): 2})
    assert cause(trial) == found(trial)[0]


# ---- what is computed besides


@pytest.mark.parametrize("phase", ["other", "pipeline", "optimizer"])
def test_a_second_pass_of_the_bare_model_is_named(phase: str) -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    record = trial.ranks[0].steps[1].activity
    matmuls, calls = record.matmuls | {Matmul(phase, "float64"): 8}, record.calls | {Call(phase, "layers.0"): 1}
    trial = with_activity(trial, 0, 2, matmuls=matmuls, calls=calls)
    assert found(trial) == [like(0, 0, 8, step=2, quantity="matmuls outside training passes")]
    assert cause(trial) == found(trial)[0]


def two_layers(case: dict[str, Any]) -> Trial:
    """Forward without the output's matmul, which a loss does in two chunks: 2 x 7 of blocks, and 2 beside them."""
    trial = trial_of(tiny_case("fsdp_2", model=replace(TINY, n_layers=2)))
    for rank, step in itertools.product(trial.ranks, (1, 2, 3)):
        calls = {Call("forward", f"layers.{layer}"): 1 for layer in (0, 1)} | {
            Call("forward", f"layers.{layer}.attention.wq"): 1 for layer in (0, 1)
        }
        attention = {Attention("forward", "attention"): 2, Attention("backward", "attention_backward"): 2}
        trial = with_activity(trial, rank, step, calls=calls, attention=attention, **case)
    return trial


def test_a_loss_that_projects_to_the_vocabulary_itself_is_no_second_pass() -> None:
    matmuls = {Matmul("forward", "float64"): 14, Matmul("other", "float64"): 2, Matmul("backward", "float64"): 32}
    assert found(two_layers({"matmuls": matmuls})) == []
    assert (
        found(two_layers({"matmuls": matmuls | {Matmul("backward", "float64"): 34}})) == []
    )  # the chunks are recomputed
    # gradients of the chunks are computed at once
    fused = {Matmul("forward", "float64"): 14, Matmul("other", "float64"): 6, Matmul("backward", "float64"): 28}
    assert found(two_layers({"matmuls": fused})) == []
    more = found(two_layers({"matmuls": matmuls | {Matmul("backward", "float64"): 35}}))
    assert more[0].quantity == "matmuls in backward beyond planned gradients"
    whole = {Matmul("forward", "float64"): 15, Matmul("other", "float64"): 2, Matmul("backward", "float64"): 30}
    assert found(two_layers({"matmuls": whole}))[0].quantity == "matmuls outside training passes"


def in_chunks(*, recomputed: int = 0, **traits: Any) -> Trial:
    """Forward applies the output four times, one for each chunk of the loss: 2 x 7 matmuls of blocks, and 4."""
    trial = trial_of(tiny_case("fsdp_2", model=replace(TINY, n_layers=2)), traits=replace(APART, **traits))
    blocks = {Call("forward", f"layers.{layer}{part}"): 1 for layer in (0, 1) for part in ("", ".attention.wq")}
    calls = blocks | {Call("forward", "output"): 4} | ({Call("backward", "output"): recomputed} if recomputed else {})
    attention = {Attention("forward", "attention"): 2, Attention("backward", "attention_backward"): 2}
    matmuls = {Matmul("forward", "float64"): 14 + 4, Matmul("backward", "float64"): 2 * (14 + 4) + recomputed}
    for rank, step in itertools.product(trial.ranks, (1, 2, 3)):
        trial = with_activity(trial, rank, step, calls=calls, attention=attention, matmuls=matmuls)
    return trial


CHUNKS = {"loss_chunks": 4, "loss_in_forward": True}


def test_an_output_that_forward_applies_in_chunks_is_right_where_that_is_declared() -> None:
    assert found(in_chunks(**CHUNKS)) == []
    assert found(in_chunks(recomputed=4, recomputes_output=True, **CHUNKS)) == []


def test_an_output_in_chunks_that_nobody_declared_is_found() -> None:
    assert found(in_chunks())[0] == like(0, 1, 4, step=1, name="output", quantity="calls")
    again = found(in_chunks(recomputed=4, **CHUNKS))[0]
    assert again == like(0, 0, 4, step=1, name="output", quantity="recomputations")


def test_chunks_that_are_declared_and_not_recomputed_are_named() -> None:
    again = like(0, 4, 0, step=1, name="output", quantity="recomputations")
    wanted = [again, like(0, 4, 0, step=1, quantity="matmuls in backward beyond planned gradients")]
    assert found(in_chunks(recomputes_output=True, **CHUNKS))[:2] == wanted


def test_an_identity_in_the_place_of_the_output_on_another_stage_than_the_last_is_none() -> None:
    case = tiny_case(ParallelDims(pp=2), schedule="1F1B", microbatches=4)
    trial = replace(trial_of(tiny_case("ddp_2")), case=case, plan=make_plan(case))
    step = with_activity(trial, 0, 1, calls={Call("forward", "output"): 7}).ranks[0].steps[0]
    assert list(judge_output_calls(trial, 0, step)) == []
    ((expected, observed),) = [(one.expected, one.observed) for one in judge_output_calls(trial, 1, step) if one]
    assert (expected, observed) == (4, 7)


# ---- what the mutants of the checks requested


def quantized_and_recomputed(repeated: bool, kind: str = "full") -> Trial:
    trial = trial_of(
        tiny_case("fsdp_2", replace(ADAMW, quantize="float8_rowwise"), activation_checkpointing=kind, model=TWO)
    )
    assert trial.plan.quantized
    matmuls = {QuantizedMatmul("forward", fqn, "float8_rowwise"): 1 for fqn in trial.plan.quantized}
    for fqn in trial.plan.quantized:
        again = repeated and (kind == "full" or fqn.startswith("layers.1."))
        matmuls[QuantizedMatmul("backward", fqn, "float8_rowwise")] = 3 if again else 2
    for rank in trial.ranks:
        for step in trial.ranks[rank].steps:
            trial = with_step(trial, rank, step.step, activity=replace(step.activity, quantized=matmuls))
    return trial


TWO = replace(TINY, name="two", n_layers=2)


def about_formats(trial: Trial) -> list[Finding]:
    return [finding for finding in judged("features", trial).findings if finding.quantity == "float8_rowwise matmuls"]


def test_a_quantized_product_may_be_repeated_where_its_layer_is_recomputed_and_nowhere_else() -> None:
    assert about_formats(quantized_and_recomputed(False)) == about_formats(quantized_and_recomputed(True)) == []
    assert about_formats(quantized_and_recomputed(True, kind="layer")) == []
    trial = quantized_and_recomputed(False, kind="none")
    step = trial.ranks[0].steps[0]
    matmuls = step.activity.quantized | {QuantizedMatmul("backward", "layers.0.attention.wq", "float8_rowwise"): 3}
    more = with_step(trial, 0, 1, activity=replace(step.activity, quantized=matmuls))
    assert (
        like(0, 2, 3, step=1, name="layers.0.attention.wq", quantity="float8_rowwise matmuls", phase="backward")
        in judged("features", more).findings
    )


def test_modules_of_a_block_that_were_called_differently_often_are_told_together() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    step = trial.ranks[1].steps[0]
    calls = step.activity.calls | {
        Call("forward", "layers.0.attention.wq"): 1,
        Call("forward", "layers.0.attention.wk"): 2,
    }
    told = judged("features", with_step(trial, 1, 1, activity=replace(step.activity, calls=calls)))
    assert told.findings == (like(1, 1, (1, 2), step=1, name="layers.0", quantity="calls of each module"),)


@pytest.mark.parametrize(
    ("wrapper", "why"),
    [("fsdp2", "with one rank a shard group"), ("ddp", "shards nothing"), ("replicate", "shards nothing")],
)
def test_a_wrapper_that_gathers_nothing_says_why(wrapper: str, why: str) -> None:
    told = judged("reshard", trial_of(tiny_case("ddp_2", wrapper=wrapper)))
    assert (told.verdict, told.note) == (Verdict.NOT_APPLICABLE, f"nothing is gathered: wrapper {wrapper} {why}")
