"""The bytes that the plan gives each axis and purpose, by literals worked out by hand."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
from literal import ADAMW, TINY, UNEVEN, tiny_case

from harness.core.case.case import Case
from harness.core.case.dims import ParallelDims
from harness.core.case.measured import Unit
from harness.core.case.traits import TrainerTraits
from harness.core.plan.make_plan import make_plan
from harness.core.plan.traffic.flow import Flow

# ---- traffic


#
# The tiny model in elements, 8 bytes each:
#   tok_embeddings 8x4 = 32        layer: wq wk wv wo 4x4 = 64, w1 w3 8x4 and w2 4x8 = 96, two norms of 4 = 8: 168
#   last unit: norm 4 + output 8x4 = 36        all: 32 + 168 + 36 = 236, 1888 bytes
#   all but the last unit: 200, 1600 bytes
def flows(layout, rank: int = 0, **changes) -> list[tuple]:
    plan = make_plan(tiny_case(layout, **changes))
    return [(f.axis, f.op, f.phase, f.bytes) for f in plan.flows[rank]]


def test_one_rank_moves_nothing() -> None:
    assert flows("single") == []


def test_ddp_all_reduces_all_gradients_once() -> None:
    assert flows("ddp_2") == [("dp_replicate", "all_reduce", "backward", 1888)]
    assert flows("ddp_2", accumulation=4) == [("dp_replicate", "all_reduce", "backward", 1888)]


@pytest.mark.parametrize(("policy", "again"), [("default", [1600]), ("always", [1888]), ("never", [])])
def test_fsdp_gathers_again_in_backward_what_it_resharded(policy: str, again: list[int]) -> None:
    assert flows("fsdp_2", reshard_after_forward=policy) == [
        ("dp_shard", "all_gather", "forward", 1888),
        *(("dp_shard", "all_gather", "backward", count) for count in again),
        ("dp_shard", "reduce_scatter", "backward", 1888),
    ]


def test_accumulation_gathers_for_every_microbatch_and_reduces_once() -> None:
    assert flows("fsdp_2", accumulation=4) == [
        ("dp_shard", "all_gather", "forward", 4 * 1888),
        ("dp_shard", "all_gather", "backward", 4 * 1600),
        ("dp_shard", "reduce_scatter", "backward", 1888),
    ]


def test_a_loss_in_chunks_gathers_final_norm_and_output_for_itself_and_again_in_backward() -> None:
    case, chunks = tiny_case(ParallelDims(dp_shard=2)), TrainerTraits(loss_chunks=8)
    plain, plan = make_plan(case), make_plan(case, chunks)
    last = 8 * (4 + 8 * 4)  # norm and output
    gathered = [[f.bytes for f in plan.flows_of(0, step) if f.op == "all_gather"] for step in (1, 2)]
    forward, backward = (f.bytes for f in plain.flows_of(0, 1) if f.op == "all_gather")
    assert gathered == [[forward, backward + last], [forward, backward + last, last]]
    assert {plan.after_forward[0][fqn].degree for fqn in ("norm.weight", "output.weight")} == {2}
    assert plan.spare_bytes == plain.spare_bytes
    kept = make_plan(case, replace(chunks, keeps_loss_unit=True))
    assert kept.spare_bytes[0] == plain.spare_bytes[0] + last


def test_a_loss_in_chunks_inside_of_the_models_forward_moves_what_a_loss_in_one_piece_does_where_one_module_is_wrapped() -> (
    None
):
    case, chunks = tiny_case(ParallelDims(dp_shard=2)), TrainerTraits(loss_chunks=8, loss_in_forward=True)
    names = tuple(case.model.parameter_shapes())
    block = tuple(name for name in names if name.startswith("layers."))
    units = dict.fromkeys(range(2), (Unit(block, 2), Unit(tuple(name for name in names if name not in block), 1)))
    plain, plan = make_plan(case, TrainerTraits().with_units(units)), make_plan(case, chunks.with_units(units))
    assert [plan.flows_of(0, step) for step in (1, 2)] == [plain.flows_of(0, step) for step in (1, 2)]
    assert plan.after_forward[0] == plain.after_forward[0]


@pytest.mark.parametrize("chunks", [2, 8])
def test_an_output_in_chunks_that_is_wrapped_as_one_with_the_norm_is_gathered_once_more(chunks: int) -> None:
    """FSDP2 takes the output's second call for the unit's next forward, and none after it."""
    last = 8 * (4 + 8 * 4)  # norm and output

    def moved(traits: TrainerTraits, **features: Any) -> dict[tuple[str, str], int]:
        total: dict[tuple[str, str], int] = defaultdict(int)
        for flow in make_plan(tiny_case(ParallelDims(dp_shard=2), **features), traits).flows[0]:
            total[flow.op, flow.phase] += flow.bytes
        return total

    def more(**features: Any) -> dict[tuple[str, str], int]:
        in_chunks = moved(TrainerTraits(loss_chunks=chunks, loss_in_forward=True), **features)
        whole = moved(TrainerTraits(), **features)
        return {key: size - whole[key] for key, size in in_chunks.items() if size != whole[key]}

    assert more() == more(reshard_after_forward="never") == {("all_gather", "backward"): last}
    assert more(reshard_after_forward="always") == {("all_gather", "backward"): last, ("all_gather", "forward"): last}
    assert more(accumulation=2, defer_sync=True) == {
        ("all_gather", "backward"): 2 * last,
        ("reduce_scatter", "backward"): last,
    }


def test_a_unit_that_is_always_freed_is_gathered_again_for_a_loss_in_chunks_from_the_first_step_on() -> None:
    plan = make_plan(tiny_case(ParallelDims(dp_shard=2), reshard_after_forward="always"), TrainerTraits(loss_chunks=8))
    again = [[flow.bytes for flow in plan.flows_of(0, step) if flow.phase == "forward"] for step in (1, 2)]
    assert again == [[1888, 8 * (4 + 8 * 4)]] * 2


# An output that is a unit of its own: 8x4 = 32 elements, 256 bytes. The block: 1344 bytes. The rest stays.
def of_output_alone(degree: int, traits: TrainerTraits, **features: Any) -> dict[tuple[str, str], int]:
    case = tiny_case(ParallelDims(dp_shard=2), **features)
    names = list(case.model.parameter_shapes())
    block, output = tuple(name for name in names if name.startswith("layers.")), ("output.weight",)
    rest = tuple(name for name in names if name not in block + output)
    units = (Unit(rest, 1), Unit(block, 2), Unit(output, degree))
    found: dict[tuple[str, str], int] = defaultdict(int)
    for flow in make_plan(case, traits.with_units(dict.fromkeys(range(2), units))).flows[0]:
        found[flow.op, flow.phase] += flow.bytes
    return dict(found)


@pytest.mark.parametrize("inside", [True, False])
def test_an_output_that_is_a_unit_of_its_own_is_gathered_for_every_chunk_of_a_loss(inside: bool) -> None:
    chunks = TrainerTraits(loss_chunks=4, loss_in_forward=inside)
    assert of_output_alone(2, chunks) == {
        ("all_gather", "forward"): 1888 + 3 * 256,
        ("all_gather", "backward"): 1344 + 4 * 256,
        ("reduce_scatter", "backward"): 1888,
    }
    assert of_output_alone(1, chunks) == {
        ("all_gather", "forward"): 1888,
        ("all_gather", "backward"): 1344 + 3 * 256,
        ("reduce_scatter", "backward"): 1888,
    }
    assert of_output_alone(2, TrainerTraits())["all_gather", "backward"] == 1344 + 256


def test_an_output_that_is_held_for_all_chunks_is_gathered_once_and_all_else_again_in_backward() -> None:
    """At the end of a chunk's backward FSDP2 frees whatever is gathered, by whatever policy."""
    held = TrainerTraits(loss_chunks=4, holds_output=True)
    assert (
        of_output_alone(2, held)
        == of_output_alone(1, held)
        == {
            ("all_gather", "forward"): 1888,
            ("all_gather", "backward"): 1888 - 256,
            ("reduce_scatter", "backward"): 1888,
        }
    )


def test_gradients_that_waited_are_reduced_at_a_chunks_backward_and_then_those_of_the_last_microbatch() -> None:
    def reduced(**traits: Any) -> list[int]:
        traits = TrainerTraits(loss_chunks=4, **traits)
        return [
            of_output_alone(2, traits, accumulation=2, defer_sync=defers)["reduce_scatter", "backward"]
            for defers in (True, False)
        ]

    assert reduced(loss_in_forward=True) == [1888 + 256, 2 * 1888]
    assert reduced(holds_output=True) == [1888 + 1888 - 256, 2 * 1888]


def test_in_a_pipeline_each_microbatch_gathers_the_freed_output_for_every_other_chunk() -> None:
    case = tiny_case(ParallelDims(pp=2, dp_shard=2))
    case = replace(case, model=replace(case.model, n_layers=2))
    names = [name for name in case.model.parameter_shapes() if name != "output.weight"]

    def gathered(chunks: int, degree: int) -> int:
        units = {rank: (Unit(tuple(names), 1), Unit(("output.weight",), degree)) for rank in range(4)}
        plan = make_plan(case, TrainerTraits(loss_chunks=chunks, loss_in_forward=True).with_units(units))
        return sum(flow.bytes for flow in plan.flows[2] if (flow.op, flow.phase) == ("all_gather", "forward"))

    assert gathered(4, degree=2) - gathered(1, degree=2) == 3 * case.microbatches * 256
    assert gathered(4, degree=1) == gathered(1, degree=1)


def test_hsdp_all_reduces_only_its_shard_of_the_gradients() -> None:
    assert flows("hsdp_2x2", rank=3) == [
        ("dp_shard", "all_gather", "forward", 1888),
        ("dp_shard", "all_gather", "backward", 1600),
        ("dp_shard", "reduce_scatter", "backward", 1888),
        ("dp_replicate", "all_reduce", "backward", 944),
    ]


def test_uneven_chunks_are_moved_padded() -> None:
    # 7 rows of the vocabulary count as 8, 5 of the feed-forward as 6; w2 is 4x5:
    # 8x4 + (64 + 6x4 + 6x4 + 4x5 + 8) + (4 + 8x4) = 32 + 140 + 36 = 208 elements
    assert flows("fsdp_2", model=UNEVEN)[0] == ("dp_shard", "all_gather", "forward", 208 * 8)


def test_narrow_parameters_and_wide_reduction_count_their_own_bytes() -> None:
    training = replace(ADAMW, dtype="float32", compute_dtype="bfloat16")
    assert flows("fsdp_2", training=training, reduce_dtype="float32") == [
        ("dp_shard", "all_gather", "forward", 236 * 2),
        ("dp_shard", "all_gather", "backward", 200 * 2),
        ("dp_shard", "reduce_scatter", "backward", 236 * 4),
    ]


def test_sequence_parallel_gathers_and_scatters_every_crossing_of_the_residual_stream() -> None:
    # activation: 8 samples x 4 positions x 4 wide x 8 bytes = 1024; crossings: attention, feed-forward, output = 3
    plan = make_plan(tiny_case("tp_2"))
    assert plan.flows[1] == (
        Flow("tp", "activations", "all_gather", "forward", 3072),
        Flow("tp", "activations", "reduce_scatter", "forward", 3072),
        Flow("tp", "activations", "all_gather", "backward", 3072),
        Flow("tp", "activations", "reduce_scatter", "backward", 3072),
        Flow("tp", "norm gradients", "all_reduce", "backward", 3 * 4 * 8, optional=True),
    )


def test_tensor_parallel_without_sequence_parallel_all_reduces_every_crossing() -> None:
    assert flows("tp_2", sequence_parallel=False) == [
        ("tp", "all_reduce", "forward", 3072),
        ("tp", "all_reduce", "backward", 3072),
    ]


def test_logits_that_are_not_kept_in_parts_are_gathered() -> None:
    # 8 samples x 4 positions x 8 tokens x 8 bytes; 7 tokens are gathered as 2 x 4
    assert flows("tp_2", loss_parallel=False)[-1] == ("tp", "all_gather", "forward", 2048)
    assert flows("tp_2", loss_parallel=False, model=replace(TINY, vocab_size=7))[-1][-1] == 2048


def test_an_input_that_is_not_kept_is_gathered_again_for_its_weights_gradient() -> None:
    # of the layers that are column parallel: wq, wk and wv together, w1 and w3 together, the output
    again = Flow("tp", "activations again", "all_gather", "backward", 3072)
    traits = TrainerTraits(gathers_input_again=True)
    assert set(make_plan(tiny_case("tp_2"), traits).flows[0]) - set(make_plan(tiny_case("tp_2")).flows[0]) == {again}
    whole = tiny_case("tp_2", sequence_parallel=False)
    assert make_plan(whole, traits).flows[0] == make_plan(whole).flows[0]


def test_the_gradient_of_a_gathered_sequence_that_chunks_are_cut_from_is_all_reduced() -> None:
    cut = TrainerTraits(loss_chunks=4, loss_in_forward=True, cuts_gathered=True)
    usual, gathered = (make_plan(tiny_case("tp_2"), traits) for traits in (replace(cut, cuts_gathered=False), cut))
    assert set(gathered.flows[0]) - set(usual.flows[0]) == {
        Flow("tp", "activations", "reduce_scatter", "backward", 2048),
        Flow("tp", "gradient of what chunks are cut from", "all_reduce", "backward", 1024),
    }
    assert Flow("tp", "activations", "reduce_scatter", "backward", 3072) in usual.flows[0]
    for whole in (replace(cut, loss_chunks=1), replace(cut, loss_chunks=1, cuts_gathered=False)):
        assert (
            Flow("tp", "activations", "reduce_scatter", "backward", 3072)
            in make_plan(tiny_case("tp_2"), whole).flows[0]
        )


def test_a_loss_within_the_models_forward_is_summed_over_tp_there_and_not_outside() -> None:
    # 8 samples x 4 positions x 8 bytes, three times: the largest logit, the sum of exponentials, the label's logit
    case, traits = tiny_case("tp_2"), TrainerTraits(loss_in_forward=True)
    usual, inside = make_plan(case), make_plan(case, traits)
    assert set(inside.flows[0]) - set(usual.flows[0]) == {Flow("tp", "loss", "all_reduce", "forward", 768)}
    assert usual.outside_bytes[0] - inside.outside_bytes[0] == 768
    gathered = tiny_case("tp_2", loss_parallel=False)
    assert make_plan(gathered, traits).flows[0] == make_plan(gathered).flows[0]


def test_fsdp_over_tensor_parallel_moves_this_tp_ranks_part() -> None:
    # half of all but the norms: (236 - 12) / 2 + 12 = 124 elements; without the last unit (4 + 16): 104
    # 4 samples x 4 x 4 x 8 = 512 a crossing
    assert flows("fsdp_2_tp_2", rank=1) == [
        ("dp_shard", "all_gather", "forward", 124 * 8),
        ("dp_shard", "all_gather", "backward", 104 * 8),
        ("dp_shard", "reduce_scatter", "backward", 124 * 8),
        ("tp", "all_gather", "forward", 3 * 512),
        ("tp", "reduce_scatter", "forward", 3 * 512),
        ("tp", "all_gather", "backward", 3 * 512),
        ("tp", "reduce_scatter", "backward", 3 * 512),
        ("tp", "all_reduce", "backward", 96),
    ]


def test_tensor_parallel_activations_do_not_depend_on_accumulation() -> None:
    assert flows("tp_2", accumulation=4)[0] == ("tp", "all_gather", "forward", 3072)


def test_norm_gradients_that_wait_for_their_reduction_are_summed_over_tp_in_its_dtype() -> None:
    # 12 elements; at once: in bfloat16, of each microbatch; kept until the last microbatch: in float32, once
    narrow = replace(ADAMW, dtype="float32", compute_dtype="bfloat16")

    def norms(**features) -> int:
        return flows("fsdp_2_tp_2", training=narrow, reduce_dtype="float32", **features)[-1][-1]

    assert norms() == 12 * 2
    assert norms(accumulation=2) == 12 * 4
    assert norms(accumulation=2, defer_sync=False) == 2 * 12 * 2


def test_of_hsdp_shards_are_reduced_as_often_as_is_said_and_replicas_perhaps_less_often() -> None:
    def reductions(defer_sync: bool | str) -> list[int]:
        return [size for _, op, _, size in flows("hsdp_2x2", accumulation=2, defer_sync=defer_sync) if "reduce" in op]

    once, every, scattered = (reductions(defer_sync) for defer_sync in (True, False, "all_reduce"))
    assert [every[0] / once[0], every[1] / once[1]] == [2, 2]
    assert scattered == [every[0], once[1]]


def test_even_steps_of_half_length_move_half_the_activations_and_all_parameters() -> None:
    plan = make_plan(tiny_case("fsdp_2_tp_2", replace(ADAMW, variable_length=True)))
    assert plan.flows == make_plan(tiny_case("fsdp_2_tp_2")).flows
    assert plan.flows_of(0, 1) == plan.flows_of(0, 3) == plan.flows[0]
    ratios = {
        flow.role: short.bytes / flow.bytes for flow, short in zip(plan.flows[0], plan.flows_of(0, 2), strict=True)
    }
    assert ratios == {"parameters": 1.0, "gradients": 1.0, "activations": 0.5, "norm gradients": 1.0}


# ---- memory and what is not planned


def test_keys_and_values_that_are_not_repeated_for_query_heads_move_fewer_bytes() -> None:
    case = tiny_case(ParallelDims(cp=2), replace(ADAMW, seq_len=8), activation_checkpointing="full")
    model = replace(case.model, dim=8, n_heads=4, n_kv_heads=2)

    def moved(heads: str) -> dict[tuple[str, str], int]:
        plan = make_plan(replace(case, model=model), TrainerTraits(cp_heads=heads))
        return {(f.role, f.phase): f.bytes for f in plan.flows[0] if "keys" in f.role}

    assert moved("key_value") == {key: count // 2 for key, count in moved("query").items()}
    assert len(moved("query")) == 4  # forward, backward, recomputed, and the gradients


def test_keys_and_values_go_round_over_cp_forward_and_back_with_their_gradients() -> None:
    """tiny: 1 layer, dim 4, 8 samples of 8 tokens: keys and values are 2 x 8 x 8 x 4 float64 numbers = 4096 bytes."""
    case = tiny_case(ParallelDims(cp=4), replace(ADAMW, seq_len=8))
    gathered = cp_flows(case)
    passed_on = cp_flows(replace(case, features=replace(case.features, cp_rotation="alltoall")))
    assert gathered == [
        Flow("cp", "keys and values", "all_gather", "forward", 4096),
        Flow("cp", "keys and values", "all_gather", "backward", 4096),
        Flow("cp", "gradients of keys and values", "all_to_all", "backward", 4096),
    ]
    assert passed_on == [
        Flow("cp", "keys and values", "all_to_all", "forward", 3072),
        Flow("cp", "keys and values", "all_to_all", "backward", 3072),
        Flow("cp", "gradients of keys and values", "all_to_all", "backward", 4096),
    ]


def test_of_bfloat16_keys_the_gradients_go_round_in_float32_and_tp_leaves_a_rank_its_heads() -> None:
    case = tiny_case(ParallelDims(cp=4, tp=2), replace(ADAMW, seq_len=8, compute_dtype="bfloat16"))
    assert [flow.bytes for flow in cp_flows(case)] == [512, 512, 1024]


def cp_flows(case: Case) -> list[Flow]:
    return [flow for flow in make_plan(case).flows[0] if "keys" in flow.role]


# Muon: matrices of the layer, 64 + 96 = 160 elements, of which a tp rank has half: 640 bytes of 1280.


@pytest.mark.parametrize(
    ("layout", "gathered"),
    [
        ("ddp_2", []),
        ("fsdp_2", [("dp_shard", 1280)]),
        ("hsdp_2x2", [("dp_shard", 1280)]),
        ("tp_2", [("tp", 1280)]),
        ("fsdp_2_tp_2", [("dp_shard", 640), ("tp", 1280)]),
    ],
)
def test_muon_gathers_whole_matrices_or_sends_them_to_their_owners(layout: str, gathered: list[tuple]) -> None:
    case = tiny_case(layout, replace(ADAMW, optimizer="muon"))
    plan, owned = make_plan(case), make_plan(case, TrainerTraits(muon_owner=True))
    assert [(f.axis, f.bytes) for f in plan.flows[0] if f.role == "matrices"] == gathered
    assert {f.phase for f in plan.flows[0] if f.role == "matrices"} <= {"outside"}
    assert not [f for f in owned.flows[0] if f.role == "matrices"]
    assert owned.outside_bytes[0] - plan.outside_bytes[0] == 2 * sum(size for _, size in gathered)


def test_units_that_are_kept_over_an_accumulation_are_gathered_by_the_first_forward_pass_alone() -> None:
    case = tiny_case("fsdp_2", accumulation=2)
    kept = TrainerTraits(keeps_over_accumulation=True)
    usual, once = (make_plan(case, traits).flows[0] for traits in (TrainerTraits(), kept))
    ((before, after),) = [(a, b) for a, b in zip(usual, once, strict=True) if a != b]
    assert (before.op, before.phase, before.bytes) == ("all_gather", "forward", 2 * after.bytes)
