"""The plan by literals worked out by hand, and torch's own arithmetic as an independent oracle."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from literal import ADAMW, TINY, UNEVEN, tiny_case

from harness.core.case.case import Case
from harness.core.case.dims import AXES, ParallelDims
from harness.core.case.features import Features
from harness.core.case.traits import TrainerTraits
from harness.core.plan.grid import coordinate_of_rank, groups_along, rank_grid
from harness.core.plan.make_plan import make_plan
from harness.core.plan.slices import chunk_interval, numel, slice_text, slices_of_rank, tp_dim
from harness.core.plan.stages import layers_of_stage, token_positions_of_rank
from harness.reference.config import PRESETS

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
    assert groups_along(dims, "dp_replicate", "dp_shard") == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert groups_along(dims, *AXES) == ((0, 1, 2, 3, 4, 5, 6, 7),)


def test_the_coordinate_of_the_last_but_one_rank() -> None:
    dims = ParallelDims(dp_replicate=2, dp_shard=2, tp=2)
    assert coordinate_of_rank(dims, 6) == {"pp": 0, "dp_replicate": 1, "dp_shard": 1, "cp": 0, "tp": 0}


def test_the_groups_of_every_axis_partition_the_world() -> None:
    for dims in SOME_DIMS:
        for axis in AXES:
            lines = groups_along(dims, axis)
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
            assert coordinate_of_rank(dims, rank)[axis] == place[index]
            lines.setdefault(place[:index] + place[index + 1 :], []).append(rank)
        assert sorted(map(tuple, lines.values())) == sorted(groups_along(dims, axis))


def test_the_groups_of_16384_ranks_are_listed() -> None:
    dims = ParallelDims(pp=16, dp_replicate=4, dp_shard=32, tp=8)
    assert dims.world_size == 16384
    lines = {axis: groups_along(dims, axis) for axis in AXES}
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
    assert [chunk_interval((0, 7), 4, index) for index in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 7)]
    assert [chunk_interval((0, 5), 4, index) for index in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]
    assert [chunk_interval((0, 1), 3, index) for index in range(3)] == [(0, 1), (1, 1), (1, 1)]


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
                at = coordinate_of_rank(dims, rank)
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
            cut, at = tp_dim(fqn), coordinate_of_rank(dims, rank)
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
    assert [token_positions_of_rank(case, rank, 8).tolist() for rank in range(2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert [token_positions_of_rank(plain, rank, 8).tolist() for rank in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_fsdp_shards_over_dp_shard_and_cp_folded_into_one() -> None:
    plan = make_plan(tiny_case(ParallelDims(dp_replicate=2, dp_shard=2, cp=2), replace(ADAMW, seq_len=8)))
    assert (plan.shard_axis, plan.groups["dp_shard_cp"]) == ("dp_shard_cp", ((0, 1, 2, 3), (4, 5, 6, 7)))
    assert make_plan(tiny_case(ParallelDims(cp=2))).shard_axis == "cp"


def test_under_ddp_ranks_of_cp_are_replicas_and_reduce_whole_gradients_together() -> None:
    dims = ParallelDims(dp_replicate=2, cp=2)
    case = Case("any", "a test", dims, features=Features(wrapper="ddp", cp_rotation="alltoall"))
    plan = make_plan(case, TrainerTraits(cp_sends=True))
    assert (plan.shard_axis, plan.replicate_axis, plan.shard_degree) == ("dp_shard", "dp_replicate_cp", 1)
    assert plan.groups["dp_replicate_cp"] == ((0, 1, 2, 3),)
    assert all(part == slices_of_rank(ParallelDims(), 0, plan.shapes) for part in plan.slices.values())
    moved = {(flow.axis, flow.role, flow.op, flow.phase) for flow in plan.flows[3]}
    ring = {("cp", role, op, "backward") for role in ("keys and values", "gradients of keys and values") for op in SENT}
    ring |= {("cp", "keys and values", op, "forward") for op in SENT}
    assert moved == {("dp_replicate_cp", "gradients", "all_reduce", "backward"), *ring}
    alone = make_plan(replace(case, dims=ParallelDims(cp=2)))
    assert (alone.replicate_axis, alone.groups) == ("cp", {"cp": ((0, 1),)})


SENT = ("send", "recv")


def test_the_plan_of_the_largest_model_covers_all_its_parameters() -> None:
    case = tiny_case(ParallelDims(dp_shard=4, tp=8), replace(ADAMW, seq_len=8), model=PRESETS["405B"])
    plan = make_plan(case)
    assert len(plan.slices[31]) == 126 * 9 + 3


# ---- stages


def layers_held(**features: Any) -> list[list[int]]:
    case = Case("stages", "-", ParallelDims(pp=16), PRESETS["405B"], features=Features(**features))
    return [list(layers_of_stage(case, stage)) for stage in range(case.n_stages)]


def test_405b_has_a_layer_less_on_its_first_and_last_of_16_stages() -> None:
    """126 layers, the embedding and the output: 128 shares."""
    held = layers_held(first_stage_less_layers=1, last_stage_less_layers=1)
    assert [len(layers) for layers in held] == [7, *[8] * 14, 7]
    assert sorted(layer for layers in held for layer in layers) == list(range(126))


def test_of_stages_of_one_layer_the_first_is_the_embedding_alone_and_the_last_the_output_alone() -> None:
    held = layers_held(
        first_stage_less_layers=1, last_stage_less_layers=1, stages_per_rank=8, schedule="Interleaved1F1B"
    )
    assert held == [[], *([layer] for layer in range(126)), []]


def test_layers_left_over_are_the_first_stages_also_where_the_ends_have_less() -> None:
    assert [len(layers) for layers in layers_held()] == [8] * 14 + [7, 7]
    assert [len(layers) for layers in layers_held(first_stage_less_layers=4)] == [5, 9, *[8] * 14]
