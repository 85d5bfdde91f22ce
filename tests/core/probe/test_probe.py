"""The probe on real ranks: what it says it saw is what was done, by whomever, and it leaves nothing behind."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.adapters.torchtitan.source import HOW_TO_GET_IT
from harness.core.case.case import to_json
from harness.core.case.loading import from_json
from harness.core.evidence.records import Wrapper
from harness.core.launch import Job, launch
from harness.core.probe.values import add_states


def on_ranks(world_size: int, entry: str, folder: Path, **options: Any) -> list[Any]:
    job = Job(folder / "job", world_size, f"probe_entries:{entry}", {"result": str(folder), **options}, timeout=60)
    exits = launch(job)
    assert [exit.how for exit in exits] == ["ok"] * world_size, [exit.error or exit.stack for exit in exits]
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(world_size)]


def test_a_rank_that_waits_for_a_late_one_is_blocked_by_as_much(tmp_path: Path) -> None:
    """A wait is not counted if another call comes before it."""
    late, waits = on_ranks(2, "late_rank", tmp_path)
    assert [one["began"] for one in waits] == sorted(one["began"] for one in waits)
    assert all(one["blocked"] > 0.2 for one in waits[:2])
    assert all(0 < one["blocked"] < 0.2 for one in [*late, *waits[2:]])


def test_every_collective_is_seen_with_the_ranks_it_ran_over(tmp_path: Path) -> None:
    expected = [
        ("all_reduce", "world", "float32", 32),
        ("all_reduce", "half", "float32", 32),
        ("all_gather", "half", "float32", 64),
        ("reduce_scatter", "half", "float32", 32),
        ("broadcast", "half", "float64", 64),
        ("reduce", "half", "float32", 32),
        ("gather", "half", "float32", 32),
        ("scatter", "half", "float32", 32),
        ("all_gather", "half", "float32", 64),
        ("all_reduce", "half", "float32", 32),  # from another thread
        ("all_reduce", "half", "float32", 8),  # in inference mode
        ("all_gather", "half", "float32", 64),  # a functional collective
        ("send or recv", "world", "float32", 32),
        ("send or recv", "world", "float32", 32),  # received from any source
        ("barrier", "half", "any", 0),
    ]
    ranks_of = {"world": [0, 1, 2, 3]}
    for rank, records in enumerate(on_ranks(4, "known_sequence", tmp_path)):
        ranks_of["half"] = [0, 1] if rank < 2 else [2, 3]
        assert len(records) == len(expected)
        for record, (op, group, dtype, size) in zip(records, expected, strict=True):
            assert record["op"] in op.split(" or ")
            assert (record["ranks"], record["bytes"]) == (ranks_of[group], size)
            assert dtype in (record["dtype"], "any")
            assert (record["step"], record["phase"]) == (7, "other")
        assert [r["peer"] for r in records if r["op"] in ("send", "recv")] == [
            rank ^ 1,
            None if rank % 2 else rank ^ 1,
        ]
        roots = {(r["op"], r["root"]) for r in records if r["root"] is not None}
        assert roots == {(op, ranks_of["half"][0]) for op in ("broadcast", "reduce", "gather", "scatter")}
        of_half = [r["seq"] for r in records if r["ranks"] == ranks_of["half"]]
        assert of_half == list(range(12))


def test_a_group_that_ddp_outlives_is_not_freed_for_that_can_hang_a_rank(tmp_path: Path) -> None:
    assert on_ranks(2, "outlived_group", tmp_path) == [True, True]


HSDP, FSDP_TP = {"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 2, "tp": 2}


@pytest.mark.slow("real ranks each; the first is witnessed in the same way", after=1)
@pytest.mark.parametrize("dims", [{"dp_replicate": 2}, HSDP, {"tp": 2}, FSDP_TP], ids=str)
def test_other_witnesses_tell_of_the_same_collectives(tmp_path: Path, dims: dict[str, int]) -> None:
    case = from_json({"name": "witness", "why": "a test", "dims": dims, "features": {"accumulation": 2}})
    assert_same_told(on_ranks(case.dims.world_size, "beside_other_witnesses", tmp_path, case=to_json(case)))


@pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason=f"not installed; {HOW_TO_GET_IT}")
@pytest.mark.parametrize("dims", [HSDP, FSDP_TP, {"dp_shard": 2, "cp": 2}, {"pp": 2, "dp_shard": 2}], ids=str)
def test_other_witnesses_tell_of_the_same_collectives_of_torchtitan(tmp_path: Path, dims: dict[str, int]) -> None:
    case = to_json(from_json({"name": "witness", "why": "a test", "dims": dims}))
    assert_same_told(on_ranks(4, "beside_other_witnesses", tmp_path, case=case, trainer="torchtitan"))


def assert_same_told(ranks: list[Any]) -> None:
    """The profiler as many of each kind. gloo as many over the same ranks, of the same dtype and bytes: it knows its
    groups by name, and those who used one are its ranks."""
    users: dict[str, list[int]] = {}
    for rank, told in enumerate(ranks):
        for group in {group for group, *_ in told["flown"]}:
            users.setdefault(group, []).append(rank)
    for told in ranks:
        assert sum(told["recorder"].values()) > 5
        assert told["recorder"] == told["profiler"]
        flown = [(users[group], *rest) for group, *rest in told["flown"]]
        assert sorted(map(whole, flown)) == sorted(tuple(map(str, record)) for record in told["moved"])


def whole(flown: tuple[Any, ...]) -> tuple[str, ...]:
    """With the bytes of what all gave, where that is what comes out."""
    ranks, op, dtype, size = flown
    return str(ranks), op, dtype, str(size * (len(ranks) if op == "all_gather" else 1))


def test_what_only_contains_optimizers_hides_no_state_of_theirs() -> None:
    """Its step begins before theirs and ends after."""
    known: dict[str, Any] = {}
    for states in ({"w": {}}, {"w": {"step": torch.tensor(2.0)}}, {"w": {}}):
        add_states(known, states)
    assert {fqn: sorted(state) for fqn, state in known.items()} == {"w": ["step"]}


def test_a_trainer_it_knows_nothing_of_is_seen_from_outside(tmp_path: Path) -> None:
    for rank, seen in enumerate(on_ranks(2, "seen_from_outside", tmp_path)):
        assert seen["steps"] == [1, 2]
        assert seen["fqns"] == ["0.weight", "1.weight"]
        assert seen["tokens"] == [[[1 + rank, 2, 3]], [[1 + rank, 2, 4]]]
        assert (seen["labels"], seen["valid"], seen["lr"]) == ([[2, 3, -100]], 2, 0.5)
        assert seen["phases"] == [["all_reduce", "backward"], ["broadcast", "forward"]]
        assert seen["broadcast in step 2"] == {"float32": 24, "bool": 5}
        assert seen["gradient_after_clipping"] < 1e-3 < seen["gradient_before_clipping"]
        wrapper = Wrapper("ddp", replicate_ranks=(0, 1), float_buffers=24, other_buffers=5)
        assert seen["structure"] == {"": json.loads(json.dumps(asdict(wrapper)))}
        assert seen["patched"] == "torch.nn.functional"


def test_a_gradient_that_a_dtensor_left_partial_is_noted_and_not_moved(tmp_path: Path) -> None:
    for rank, (found, values) in enumerate(on_ranks(2, "partial_gradient", tmp_path)):
        weight = {"mesh": [0, 1], "placements": ["Partial(sum)"], "wanted": ["Replicate"], "bytes": 16}
        table = {"mesh": [0, 1], "placements": ["Replicate"], "wanted": ["Shard(0)"], "bytes": 32}
        assert found == {"weight": {**weight, "settled_bytes": 16}, "table": {**table, "settled_bytes": 16}}
        assert values == [rank + 1.0] * 4
