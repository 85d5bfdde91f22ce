"""The structure of a recorded job, and what differs between two of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from literal_recording import GATHER, SUM, hsdp, outside, summary

from harness.core.evidence.summary import Summary
from harness.core.evidence.summary_parts import Use
from harness.recording.judged.stored_recording import Recording
from harness.recording.judged.structure import costs, differences, structure


def recording(ranks: list[Summary]) -> Recording:
    return Recording(Path("run"), {one.rank: one for one in ranks})


def fsdp(rank: int, world: int = 4, **changes: Any) -> Summary:
    whole = f"0-{world - 1}"
    return summary(
        rank, world, roles={whole: "sharded by fsdp2"}, uses=(Use(whole, *GATHER),), slices=rank + 1, **changes
    )


HSDP = structure(recording([hsdp(rank) for rank in range(4)]))
FSDP = structure(recording([fsdp(rank) for rank in range(4)]))


def test_a_job_has_the_structure_that_it_had() -> None:
    assert differences(HSDP, structure(recording([hsdp(rank) for rank in range(4)]))) == []


def test_hsdp_that_became_fsdp_differs_in_its_axes() -> None:
    found = {each.where: (each.one, each.other) for each in differences(HSDP, FSDP)}
    assert found["axes", "sharded by fsdp2", "degree"] == ("2", "4")
    assert found["axes", "sharded by fsdp2", "groups"] == ("[0,1] [2,3]", "[0-3]")
    assert found["axes", "replicated by fsdp2"][1] == "none"
    assert found["replicas",] == ("sets of 2", "none claimed")


def test_another_type_or_number_of_calls_is_a_difference() -> None:
    other = [hsdp(rank, uses=(Use("0,1" if rank < 2 else "2,3", *GATHER[:3], 4, 1000),)) for rank in range(4)]
    where = ("axes", "sharded by fsdp2", "all_gather in forward", "calls")
    assert where in [each.where for each in differences(HSDP, structure(recording(other)))]


def test_a_collective_whose_type_changed_is_one_that_differs_and_not_two() -> None:
    def of(dtype: str, size: int) -> dict[str, Any]:
        return structure(
            recording(
                [
                    summary(
                        rank,
                        uses=(Use("0-3", *SUM), Use("0-3", *SUM[:2], dtype, 1, size)),
                        outside=(outside("0-3", 1, size, "1-2", dtype=dtype),),
                        whole=(1, 2),
                    )
                    for rank in range(4)
                ]
            )
        )

    axis = ("axes", "unnamed, all_reduce", "all_reduce in backward")
    apart = ("outside of forward and backward", "all_reduce over all ranks")
    assert [(each.where, each.one, each.other) for each in differences(of("float64", 80), of("bfloat16", 20))] == [
        ((*axis, "dtype"), "float64", "bfloat16"),
        ((*axis, "bytes"), "80", "20"),
        ((*apart, "dtype"), "float64", "bfloat16"),
        ((*apart, "bytes"), "80", "20"),
    ]


def test_jobs_on_other_numbers_of_ranks_are_compared_by_degrees() -> None:
    eight = structure(recording([fsdp(rank, 8) for rank in range(8)]))
    found = [each.where for each in differences(FSDP, eight)]
    assert found == [("ranks",), ("axes", "sharded by fsdp2", "degree")]


def test_a_switch_of_one_rank_is_a_difference() -> None:
    odd = [hsdp(rank, settings={"cudnn.benchmark": "on" if rank == 2 else "off"}) for rank in range(4)]
    (found,) = [e for e in differences(HSDP, structure(recording(odd))) if e.where[0] == "settings"]
    assert found.other == "off 3, on 1"


def test_step_time_and_peak_memory_are_costs_and_no_structure() -> None:
    slow = recording([hsdp(rank, seconds={0: 9.0}, peak=100) for rank in range(4)])
    assert differences(HSDP, structure(slow)) == []
    assert costs(slow) == {"step time": 9.0, "peak memory": 100.0}


def test_unnamed_axes_that_look_alike_stay_apart() -> None:
    ranks = [
        summary(r, uses=(Use("0,1" if r < 2 else "2,3", *SUM), Use("0,2" if r % 2 == 0 else "1,3", *SUM)))
        for r in range(4)
    ]
    assert list(structure(recording(ranks))["axes"]) == ["unnamed, all_reduce", "unnamed, all_reduce (2)"]


def test_one_collective_in_two_types_is_two_entries() -> None:
    """The entry of one type took the place of the other's."""
    both = (Use("0-3", *SUM[:2], "float32", 2, 800), Use("0-3", *SUM[:2], "bfloat16", 1, 200))
    found = structure(recording([summary(rank, 4, uses=both) for rank in range(4)]))
    (axis,) = found["axes"].values()
    assert {name: part["bytes"] for name, part in axis.items() if " in " in name} == {
        "all_reduce in backward of bfloat16": 200,
        "all_reduce in backward of float32": 800,
    }
