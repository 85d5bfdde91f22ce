"""The plan by literals worked out by hand, and torch's own arithmetic as an independent oracle."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from literal import ADAMW, TINY, UNEVEN, tiny_case

from harness.plan.grid import coordinate, groups, rank_grid
from harness.plan.make_plan import make_plan
from harness.plan.slices import chunk, numel, slice_text, slices_of_rank, tp_dim
from harness.plan.stages import positions
from harness.plan.traffic.flow import Flow
from harness.spec.case import Case
from harness.spec.dims import AXES, ParallelDims
from harness.spec.traits import TrainerTraits
from reference.config import PRESETS

EMBEDDING, WQ, WO = "tok_embeddings.weight", "layers.0.attention.wq.weight", "layers.0.attention.wo.weight"

SOME_DIMS = [
    ParallelDims(pp, replicate, shard, cp, tp)
    for pp, replicate, shard, cp, tp in itertools.product((1, 2), (1, 3), (1, 2), (1, 2), (1, 4))
]


# ---- rank grid and groups


def test_the_rank_grid_of_two_replicas_of_two_shards_of_two_tp_ranks() -> None:
    grid = rank_grid(ParallelDims(dp_replicate=2, dp_shard=2, tp=2))
    assert np.squeeze(grid).tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_the_groups_of_two_replicas_of_two_shards_of_two_tp_ranks() -> None:
    assert make_plan(tiny_case(ParallelDims(dp_replicate=2, dp_shard=2, tp=2))).groups == {
        "dp_replicate": ((0, 4), (1, 5), (2, 6), (3, 7)),
        "dp_shard": ((0, 2), (1, 3), (4, 6), (5, 7)),
        "tp": ((0, 1), (2, 3), (4, 5), (6, 7)),
    }


def test_groups_over_several_axes_are_the_data_parallel_worlds() -> None:
    dims = ParallelDims(dp_replicate=2, dp_shard=2, tp=2)
    assert groups(dims, "dp_replicate", "dp_shard") == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert groups(dims, *AXES) == ((0, 1, 2, 3, 4, 5, 6, 7),)


def test_the_coordinate_of_the_last_but_one_rank() -> None:
    dims = ParallelDims(dp_replicate=2, dp_shard=2, tp=2)
    assert coordinate(dims, 6) == {"pp": 0, "dp_replicate": 1, "dp_shard": 1, "cp": 0, "tp": 0}


def test_the_groups_of_every_axis_partition_the_world() -> None:
    for dims in SOME_DIMS:
        for axis in AXES:
            lines = groups(dims, axis)
            assert sorted(rank for line in lines for rank in line) == list(range(dims.world_size))
            assert {len(line) for line in lines} == {getattr(dims, axis)}


def test_groups_are_the_ranks_whose_device_mesh_coordinates_differ_in_one_axis() -> None:
    torch = pytest.importorskip("torch")
    from torch.distributed.device_mesh import DeviceMesh

    dims = ParallelDims(dp_replicate=2, dp_shard=3, tp=2)
    ranks = torch.arange(12).view(dims.degrees)
    places = {
        rank: tuple(DeviceMesh("cpu", ranks, _init_backend=False, _rank=rank).get_coordinate()) for rank in range(12)
    }
    for index, axis in enumerate(AXES):
        lines: dict[tuple, list[int]] = {}
        for rank, place in places.items():
            assert coordinate(dims, rank)[axis] == place[index]
            lines.setdefault(place[:index] + place[index + 1 :], []).append(rank)
        assert sorted(map(tuple, lines.values())) == sorted(groups(dims, axis))


def test_the_groups_of_16384_ranks_are_listed() -> None:
    dims = ParallelDims(pp=16, dp_replicate=4, dp_shard=32, tp=8)
    assert dims.world_size == 16384
    lines = {axis: groups(dims, axis) for axis in AXES}
    assert {axis: len(found) for axis, found in lines.items()} == {
        "pp": 1024, "dp_replicate": 4096, "dp_shard": 512, "cp": 16384, "tp": 2048
    }  # fmt: skip
    assert lines["tp"][-1] == tuple(range(16376, 16384))


# ---- slices


def rows_of(dims: ParallelDims, fqn: str, model=TINY) -> list[tuple]:
    """What each rank holds of a parameter, as (rows, columns)."""
    shapes = model.parameter_shapes()
    return [slices_of_rank(dims, rank, shapes)[fqn] for rank in range(dims.world_size)]


def test_hsdp_shards_within_a_replica_and_repeats_over_replicas() -> None:
    assert rows_of(ParallelDims(dp_replicate=2, dp_shard=2), EMBEDDING) == [
        ((0, 4), (0, 4)), ((4, 8), (0, 4)), ((0, 4), (0, 4)), ((4, 8), (0, 4))
    ]  # fmt: skip


def test_tensor_parallel_cuts_columns_of_row_parallel_weights_and_never_norms() -> None:
    dims = ParallelDims(tp=2)
    assert rows_of(dims, WQ) == [((0, 2), (0, 4)), ((2, 4), (0, 4))]
    assert rows_of(dims, WO) == [((0, 4), (0, 2)), ((0, 4), (2, 4))]
    assert rows_of(dims, "layers.0.feed_forward.w2.weight") == [((0, 4), (0, 4)), ((0, 4), (4, 8))]
    assert rows_of(dims, "norm.weight") == [((0, 4),), ((0, 4),)]


def test_fsdp_cuts_what_tensor_parallel_left() -> None:
    """Ranks 0 and 1 are tp peers: the vocabulary's first half is theirs to share with 2 and 3 of the same tp index."""
    dims = ParallelDims(dp_shard=2, tp=2)
    assert rows_of(dims, EMBEDDING) == [
        ((0, 2), (0, 4)), ((4, 6), (0, 4)), ((2, 4), (0, 4)), ((6, 8), (0, 4))
    ]  # fmt: skip
    assert rows_of(dims, WO) == [((0, 2), (0, 2)), ((0, 2), (2, 4)), ((2, 4), (0, 2)), ((2, 4), (2, 4))]


def test_uneven_rows_leave_the_last_ranks_less_or_nothing() -> None:
    assert [chunk((0, 7), 4, index) for index in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 7)]
    assert [chunk((0, 5), 4, index) for index in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]
    assert [chunk((0, 1), 3, index) for index in range(3)] == [(0, 1), (1, 1), (1, 1)]


def test_a_vocabulary_of_259_on_two_tp_ranks_of_two_shards() -> None:
    model = replace(TINY, vocab_size=259)
    assert [part[0] for part in rows_of(ParallelDims(dp_shard=2, tp=2), EMBEDDING, model)] == [
        (0, 65), (130, 195), (65, 130), (195, 259)
    ]  # fmt: skip


@pytest.mark.parametrize("model", [TINY, UNEVEN], ids=["even", "uneven"])
def test_slices_tile_every_tensor_exactly_once_per_replica(model) -> None:
    shapes = model.parameter_shapes()
    for replicate, shard, tp in itertools.product((1, 2), (1, 2, 3, 8), (1, 2)):
        dims = ParallelDims(dp_replicate=replicate, dp_shard=shard, tp=tp)
        counts = {fqn: np.zeros(shape, int) for fqn, shape in shapes.items()}
        for rank in range(dims.world_size):
            for fqn, part in slices_of_rank(dims, rank, shapes).items():
                counts[fqn][tuple(slice(*interval) for interval in part)] += 1
        for fqn, count in counts.items():
            times = replicate * (tp if tp_dim(fqn) is None else 1)
            assert (count == times).all(), (dims, fqn)


@pytest.mark.parametrize("shape", [(8, 4), (7, 5), (259, 3), (1, 2), (5,)])
def test_slices_are_torchs_chunks_of_chunks(shape: tuple[int, ...]) -> None:
    torch = pytest.importorskip("torch")
    numbered = torch.arange(int(np.prod(shape))).view(shape)
    for shard, tp in itertools.product((1, 2, 3, 8), (1, 2, 4)):
        dims = ParallelDims(dp_shard=shard, tp=tp)
        for fqn in (WQ, WO, "norm.weight"):
            cut = tp_dim(fqn)
            if cut is not None and cut >= len(shape):
                continue
            for rank in range(dims.world_size):
                at = coordinate(dims, rank)
                local = numbered if cut is None else nth_chunk(torch, numbered, tp, cut, at["tp"])
                local = nth_chunk(torch, local, shard, 0, at["dp_shard"])
                part = slices_of_rank(dims, rank, {fqn: shape})[fqn]
                mine = numbered.numpy()[tuple(slice(*interval) for interval in part)]
                assert mine.tolist() == local.tolist(), (dims, fqn, rank)


def nth_chunk(torch, tensor, parts: int, dim: int, index: int):
    """torch.chunk gives fewer chunks where rows run out; DTensor gives those ranks empty ones."""
    chunks = torch.chunk(tensor, parts, dim)
    return chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)


@pytest.mark.parametrize("model", [TINY, UNEVEN, replace(TINY, vocab_size=259)], ids=["even", "uneven", "259"])
def test_slices_are_those_of_the_dtensors_of_fsdp_over_tensor_parallel(model) -> None:
    """Cut by tp first, as FSDP2 does to the local tensor. Trap: of uneven rows, DTensor's own account of FSDP2's
    (_StridedShard, Shard) is another than what FSDP2 holds, so it is asked only where rows divide evenly."""
    pytest.importorskip("torch")
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as local_part
    from torch.distributed.tensor.placement_types import _StridedShard

    shapes = model.parameter_shapes()
    for shard, tp in ((1, 2), (2, 1), (2, 2), (3, 2), (8, 2)):
        dims = ParallelDims(dp_shard=shard, tp=tp)
        for rank, (fqn, shape) in itertools.product(range(dims.world_size), shapes.items()):
            cut, at = tp_dim(fqn), coordinate(dims, rank)
            inner = Replicate() if cut is None else Shard(cut)
            part = slices_of_rank(dims, rank, shapes)[fqn]
            accounts = [local_part(shape, (tp, shard), [at["tp"], at["dp_shard"]], (inner, Shard(0)))]
            if shape[0] % (shard * tp) == 0:
                outer = _StridedShard(0, split_factor=tp) if cut == 0 and tp > 1 else Shard(0)
                accounts += [local_part(shape, (shard, tp), [at["dp_shard"], at["tp"]], (outer, inner))]
            for local, offset in accounts:
                assert [stop - start for start, stop in part] == list(local), (dims, rank, fqn)
                assert not numel(part) or [start for start, _ in part] == list(offset), (dims, rank, fqn)


def test_a_slice_is_shown_as_a_person_reads_it() -> None:
    assert slice_text(((0, 4), (0, 4)), (8, 4)) == "1/2 of dim 0 [0:4]"
    assert slice_text(((0, 8), (0, 4)), (8, 4)) == "whole"
    assert slice_text(((2, 4), (2, 4)), (8, 4)) == "1/4 of dim 0 [2:4], 1/2 of dim 1 [2:4]"
    assert slice_text(((8, 8), (0, 4)), (8, 4)) == "nothing of dim 0 [8:8]"
    assert numel(((2, 4), (1, 4))) == 6 and numel(((8, 8), (0, 4))) == 0


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
    assert {plan.after_forward[0][fqn].ways for fqn in ("norm.weight", "output.weight")} == {2}
    assert plan.spare_bytes == plain.spare_bytes
    kept = make_plan(case, replace(chunks, keeps_loss_unit=True))
    assert kept.spare_bytes[0] == plain.spare_bytes[0] + last


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


def test_even_steps_of_half_length_move_half_the_activations_and_all_parameters() -> None:
    plan = make_plan(tiny_case("fsdp_2_tp_2", replace(ADAMW, variable_length=True)))
    assert plan.flows == make_plan(tiny_case("fsdp_2_tp_2")).flows
    assert plan.flows_of(0, 1) == plan.flows_of(0, 3) == plan.flows[0]
    ratios = {
        flow.role: short.bytes / flow.bytes for flow, short in zip(plan.flows[0], plan.flows_of(0, 2), strict=True)
    }
    assert ratios == {"parameters": 1.0, "gradients": 1.0, "activations": 0.5, "norm gradients": 1.0}


# ---- memory and what is not planned


def test_a_rank_may_keep_its_slices_and_their_padding() -> None:
    assert make_plan(tiny_case("hsdp_2x2")).parameter_bytes == dict.fromkeys(range(4), (944, 944))
    # rows 4 + 3 of 7 and 3 + 2 of 5; w2 4x5: rank 0 holds 104 elements, rank 1 one row of 4 less in each of four
    assert make_plan(tiny_case("fsdp_2", model=UNEVEN)).parameter_bytes == {0: (832, 832), 1: (704, 832)}


def test_stages_go_round_the_pp_ranks_and_back_where_the_schedule_is_v_shaped() -> None:
    def stages(schedule: str) -> list[tuple[int, ...]]:
        case = tiny_case(ParallelDims(pp=3), model=replace(TINY, n_layers=7), schedule=schedule)
        return list(make_plan(case).stages.values())

    assert stages("1F1B") == [(0,), (1,), (2,)]
    assert stages("Interleaved1F1B") == [(0, 3), (1, 4), (2, 5)]
    assert stages("ZBVZeroBubble") == [(0, 5), (1, 4), (2, 3)]


def test_layers_that_stages_do_not_divide_go_to_the_first_ones() -> None:
    plan = make_plan(tiny_case(ParallelDims(pp=2), model=replace(TINY, n_layers=3)))
    layers = [sorted({fqn.split(".")[1] for fqn in held if fqn.startswith("layers")}) for held in plan.slices.values()]
    ends = [[fqn for fqn in held if not fqn.startswith("layers")] for held in plan.slices.values()]
    assert layers == [["0", "1"], ["2"]]
    assert ends == [["tok_embeddings.weight"], ["norm.weight", "output.weight"]]


def test_a_cp_rank_is_fed_a_chunk_from_the_front_and_one_from_the_back() -> None:
    case = tiny_case(ParallelDims(cp=2), replace(ADAMW, seq_len=8))
    plain = replace(case, features=replace(case.features, cp_load_balance=False))
    assert [positions(case, rank, 8).tolist() for rank in range(2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [positions(plain, rank, 8).tolist() for rank in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_keys_and_values_that_are_not_repeated_for_query_heads_move_fewer_bytes() -> None:
    case = tiny_case(ParallelDims(cp=2), replace(ADAMW, seq_len=8), activation_checkpointing="full")
    model = replace(case.model, dim=8, n_heads=4, n_kv_heads=2)

    def moved(heads: str) -> dict[tuple[str, str], int]:
        plan = make_plan(replace(case, model=model), TrainerTraits(cp_heads=heads))
        return {(f.role, f.phase): f.bytes for f in plan.flows[0] if "keys" in f.role}

    assert moved("key_value") == {key: count // 2 for key, count in moved("query").items()}
    assert len(moved("query")) == 4  # forward, backward, recomputed, and the gradients


def test_fsdp_shards_over_dp_shard_and_cp_folded_into_one() -> None:
    plan = make_plan(tiny_case(ParallelDims(dp_replicate=2, dp_shard=2, cp=2), replace(ADAMW, seq_len=8)))
    assert (plan.shard_axis, plan.groups["dp_shard_cp"]) == ("dp_shard_cp", ((0, 1, 2, 3), (4, 5, 6, 7)))
    assert make_plan(tiny_case(ParallelDims(cp=2))).shard_axis == "cp"


def test_the_plan_of_the_largest_model_covers_all_its_parameters() -> None:
    case = tiny_case(ParallelDims(dp_shard=4, tp=8), replace(ADAMW, seq_len=8), model=PRESETS["405B"])
    plan = make_plan(case)
    assert len(plan.slices[31]) == 126 * 9 + 3


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
