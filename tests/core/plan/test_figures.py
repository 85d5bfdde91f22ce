"""What a layout costs, by literals worked out by hand; the estimate of activations beside what autograd keeps of a block."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from literal import EIGHT, TINY, UNEVEN, tiny_case

from harness.core.case import case_files
from harness.core.case.case import Case
from harness.core.case.dims import ParallelDims
from harness.core.case.features import Features
from harness.core.case.loading import find_case, load_all
from harness.core.case.traits import MEGATRON_TRAITS
from harness.core.plan.figures.activations import (
    block_activation_bytes,
    block_backward_bytes,
    kept_activation_bytes,
    most_waiting_bytes,
)
from harness.core.plan.figures.balance import (
    attention_over_cp,
    layers_by_stage,
    matmuls_over_pp,
    rows_over_shards,
    unbalanced_attention_over_cp,
)
from harness.core.plan.figures.links import sent_bytes, traffic_by_axis
from harness.core.plan.figures.pipeline_time import pipeline_time, times_of_schedules
from harness.core.plan.figures.rank_bytes import rank_bytes
from harness.core.plan.make_plan import make_plan
from harness.core.plan.traffic.flow import Flow
from harness.reference.config import ModelConfig


def layout(name: str) -> Case:
    return find_case(name, load_all(case_files.LAYOUTS))


# ---- bytes of a rank


def test_fsdp_rank_holds_its_half_and_the_two_units_that_are_gathered_at_once() -> None:
    """Tiny has 236 numbers of float64: embedding and output 32 each, norm 4, a block 168."""
    case = tiny_case("fsdp_2")
    held = rank_bytes(case, make_plan(case), 0)
    assert (held.parameters, held.gradients, held.optimizer, held.padding) == (944, 944, 1888, 0)
    assert (held.gathered, held.unreduced) == (36 * 8 + (168 + 32) * 8, (168 + 36) * 8)  # norm and output stay whole


def test_of_an_uneven_vocabulary_the_last_rank_holds_less_and_pads_as_much() -> None:
    case = tiny_case("fsdp_2", model=UNEVEN)
    first, last = (rank_bytes(case, make_plan(case), rank) for rank in (0, 1))
    assert first.padding == 0 and last.parameters + last.padding // 2 == first.parameters > last.parameters


def test_zero_1_adds_microbatches_up_in_the_gradients_that_it_keeps() -> None:
    case = layout("megatron_8b_8")
    held = rank_bytes(case, make_plan(case, MEGATRON_TRAITS), 0)
    numbers = 8_030_261_248
    assert (held.parameters, held.gradients, held.optimizer) == (2 * numbers, 4 * numbers, 3 * 4 * numbers // 8)
    assert (held.gathered, held.unreduced) == (0, 0)


def test_sgd_has_no_state_and_ddp_a_copy_of_all_gradients_in_buckets() -> None:
    case = tiny_case("ddp_2", replace(EIGHT, optimizer="sgd"))
    held = rank_bytes(case, make_plan(case), 0)
    assert (held.parameters, held.optimizer, held.gathered, held.unreduced) == (1888, 0, 0, 1888)


def test_a_rank_of_405b_on_16384_gpus() -> None:
    """Eight layers of 3,187,671,040 numbers in matrices and 32,768 in norms, over tp 8; of these a shard is 1/128."""
    case = layout("llama3_405b_16384")
    held = rank_bytes(case, make_plan(case), 1024)
    matrices, norms = 8 * 3_187_671_040 // 8, 8 * 32_768
    assert held.parameters == 4 * (matrices + norms) // 128 == 99_622_912
    assert held.optimizer == 2 * held.parameters and held.gathered == 2 * (matrices + norms)
    assert held.unreduced == 4 * (matrices + norms)


# ---- activations


def test_a_pipelines_first_stage_keeps_as_many_microbatches_as_there_are_stages_and_its_last_keeps_one() -> None:
    case = tiny_case(ParallelDims(pp=2), EIGHT, model=replace(TINY, n_layers=2), microbatches=4)
    assert [most_waiting_bytes(case, rank, lambda stage: 1) for rank in (0, 1)] == [2, 1]
    gpipe = replace(case, features=replace(case.features, schedule="GPipe"))
    assert [most_waiting_bytes(gpipe, rank, lambda stage: 1) for rank in (0, 1)] == [4, 4]


def test_recomputed_blocks_keep_their_inputs_and_backward_has_one_of_them_whole() -> None:
    case = tiny_case("single", EIGHT, model=replace(TINY, n_layers=4))
    full = replace(case, features=Features(activation_checkpointing="full"))
    samples_and_tokens = 8 * 8
    inputs = samples_and_tokens * 4 * 8
    assert kept_activation_bytes(case, 0) - kept_activation_bytes(full, 0) == 4 * (
        block_activation_bytes(case) - inputs
    )
    assert block_backward_bytes(full, 0) - block_backward_bytes(case, 0) == block_activation_bytes(case) - inputs


def test_autograd_keeps_of_a_block_what_the_formula_says_and_two_inputs_of_unfused_norms_besides() -> None:
    """And 16 numbers a token at most of rotary tables, the norms' scales and attention's sums."""
    torch = pytest.importorskip("torch")
    from harness.reference.model import TransformerBlock

    model = ModelConfig("one", 64, 1, 8, 8, 16, 192)
    case = tiny_case("single", replace(EIGHT, global_batch=1, seq_len=256, dtype="float32"), model=model)
    block, kept = TransformerBlock(model), {}
    weights = {weight.untyped_storage().data_ptr() for weight in block.parameters()}

    def keep(tensor: Any) -> Any:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _ = block(torch.randn(1, 256, 64, requires_grad=True))
    seen = sum(one.untyped_storage().nbytes() for place, one in kept.items() if place not in weights)
    unfused = 256 * 2 * 64 * 4
    assert 0 <= seen - unfused - block_activation_bytes(case) < 256 * 4 * 32


# ---- links


def test_a_ring_sends_what_others_lack_and_twice_that_to_reduce_for_all() -> None:
    sent = [sent_bytes(Flow("a", "r", op, "forward", 800), 8) for op in ("all_gather", "reduce_scatter", "all_reduce")]
    assert sent == [700, 700, 1400]
    assert [sent_bytes(Flow("pp", "r", op, "pipeline", 800), 8) for op in ("send", "recv")] == [800, 0]


def test_tp_lies_within_a_node_and_the_other_axes_across_nodes() -> None:
    plan = make_plan(layout("llama3_405b_16384_long"))
    assert {one.axis: one.links for one in traffic_by_axis(plan, 1024)} == {
        "tp": "within a node",
        "cp": "across 16 nodes",
        "pp": "across 16 nodes",
        "dp_shard_cp": "across 128 nodes",
    }
    halves = make_plan(
        tiny_case(
            ParallelDims(dp_shard=4, tp=4),
            replace(EIGHT, global_batch=16),
            model=replace(TINY, n_heads=4, n_kv_heads=4, dim=16),
        )
    )
    assert {one.axis: one.links for one in traffic_by_axis(halves, 0)}["dp_shard"] == "across 2 nodes, 2 ranks in each"


# ---- idle and uneven


def pipeline(schedule: str, microbatches: int, stages_per_rank: int = 1, **features: Any) -> Case:
    features |= {"schedule": schedule, "microbatches": microbatches, "stages_per_rank": stages_per_rank}
    return tiny_case(ParallelDims(pp=4), replace(EIGHT, global_batch=32), model=replace(TINY, n_layers=16), **features)


@pytest.mark.parametrize(("schedule", "stages_per_rank"), [("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 2)])
def test_even_stages_wait_as_the_usual_formula_says(schedule: str, stages_per_rank: int) -> None:
    """(pp - 1) / (stages a rank x microbatches)."""
    time = pipeline_time(pipeline(schedule, 8, stages_per_rank))
    assert time.bubble_ratio == pytest.approx(3 / (stages_per_rank * 8))
    assert time.idle_ratio == pytest.approx(1 - 1 / (1 + time.bubble_ratio))


def test_every_schedule_comes_to_an_end_and_halved_backwards_wait_less() -> None:
    bubbles = {name: time.bubble_ratio for name, time in times_of_schedules(pipeline("1F1B", 8))}
    assert list(bubbles) == [
        *("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
    ]
    assert bubbles["InterleavedZeroBubble"] < bubbles["Interleaved1F1B"] and min(bubbles.values()) >= 0


def test_a_stage_that_is_slower_makes_all_others_wait() -> None:
    even, uneven = (
        pipeline_time(pipeline("1F1B", 8), cost) for cost in (lambda stage: 1.0, lambda stage: 1.0 + (stage == 3))
    )
    assert uneven.duration > even.duration and uneven.idle_ratio > even.idle_ratio


def test_the_last_stage_of_405b_has_a_layer_less_and_the_output() -> None:
    case = layout("llama3_405b_16384")
    assert layers_by_stage(case) == (7, *[8] * 14, 7)
    shares = matmuls_over_pp(case).shares
    assert shares[0] < shares[-1] < shares[1]


def test_load_balance_makes_causal_attention_equal_and_without_it_the_last_rank_has_most() -> None:
    case = tiny_case(ParallelDims(cp=2), EIGHT)
    assert attention_over_cp(case).shares == (18.0, 18.0)
    assert unbalanced_attention_over_cp(case).shares == (10.0, 26.0)
    assert unbalanced_attention_over_cp(case).excess == pytest.approx(4 / 9)


def test_of_16032_rows_over_128_shards_the_last_has_30() -> None:
    case = layout("llama3_405b_16384")
    held = rows_over_shards(case, make_plan(case), "tok_embeddings.weight")
    assert {share / 16384 for share in held.shares[:-1]} == {126.0} and held.shares[-1] == 30 * 16384
