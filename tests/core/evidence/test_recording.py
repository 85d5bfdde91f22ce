"""What a rank of a recorded job leaves is read as it was written, without values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from literal import tiny_case, trial_of

from harness.core.evidence.recording import (
    RankRecord,
    RecordedStep,
    load_record,
    load_summary,
    record_file,
    save_record,
)
from harness.core.evidence.records import BACKGROUND, Collective, Wrapper
from harness.core.evidence.store import EvidenceError
from harness.core.evidence.summary import Summary, summary_of


def record(rank: int) -> RankRecord:
    evidence = trial_of(tiny_case("hsdp_2x2")).ranks[rank]
    return RankRecord(evidence, (RecordedStep(1, {"norm.weight": 7}),), parts=("Model",), ended="ok", steps_seen=3)


def test_claims_come_back_and_values_do_not(tmp_path: Path) -> None:
    one, path = record(3), record_file(tmp_path, 3)
    save_record(path, summary_of(one), one)
    read = load_record(path)
    assert read.evidence.collectives == one.evidence.collectives
    for before, after in zip(one.evidence.parameters, read.evidence.parameters, strict=True):
        assert (after.fqn, after.mesh, after.placements) == (before.fqn, before.mesh, before.placements)
        assert after.value.shape == before.value.shape
        assert not np.any(after.value)
    assert load_summary(path, Summary) == summary_of(one)
    assert summary_of(read) == summary_of(one)


def test_a_mesh_of_thousands_of_ranks_takes_little_room_and_an_uneven_one_comes_back_too(tmp_path: Path) -> None:
    wide = np.arange(16384).reshape(128, 128).T.tolist()
    save_record(record_file(tmp_path, 1), summary_of(record(0)), record(0))
    usual = record_file(tmp_path, 1).stat().st_size
    for mesh in (wide, [[0, 5], [1, 2]], [3]):
        one, path = record(0), record_file(tmp_path, 0)
        tensors = tuple(replace(tensor, mesh=mesh) for tensor in one.evidence.parameters)
        one = replace(one, evidence=replace(one.evidence, parameters=tensors))
        save_record(path, summary_of(record(0)), one)
        assert {str(t.mesh) for t in load_record(path).evidence.parameters} == {str(mesh)}
        assert path.stat().st_size < usual + 100


def test_ranks_on_one_mesh_share_it_however_many_are_read(tmp_path: Path) -> None:
    paths = [record_file(tmp_path, rank) for rank in (0, 1)]
    for rank, path in enumerate(paths):
        save_record(path, summary_of(record(rank)), record(rank))
    assert len({id(t.mesh) for path in paths for t in load_record(path).evidence.parameters if t.mesh}) == 1


def test_replicas_claim_the_same_parts_and_others_do_not() -> None:
    parts = [summary_of(record(rank)).parameters.slices for rank in range(4)]
    assert parts[0] == parts[2] != parts[1] == parts[3]


def test_what_moved_in_one_step_alone_is_told_with_its_step() -> None:
    one = record(0)
    every = {step: Collective("all_gather", (0, 1), "s", "float32", 8, "forward", step, step) for step in (1, 2, 3)}
    once = Collective("broadcast", (0, 1), "s", "uint8", 32, "forward", 2, 2)
    steps = tuple(replace(one.evidence.steps[0], step=step) for step in every)
    evidence = replace(one.evidence, steps=steps, collectives=(*every.values(), once))
    found = summary_of(replace(one, evidence=evidence)).traffic.uses
    assert [(use.op, use.calls, use.bytes, use.steps) for use in found] == [
        ("all_gather", 1, 8, ""),
        ("broadcast", 1, 32, "2"),
    ]


def test_what_dtensors_copy_over_a_group_over_which_they_cut_the_rest_is_told_apart() -> None:
    evidence = trial_of(tiny_case("fsdp_2_tp_2")).ranks[3]
    one = RankRecord(evidence, (RecordedStep(1, {tensor.fqn: 7 for tensor in evidence.parameters}),))
    assert list(summary_of(one).contents.copies) == ["2,3"]
    other = RankRecord(evidence, (RecordedStep(1, {t.fqn: 7 + ("norm" in t.fqn) for t in evidence.parameters}),))
    third = RankRecord(evidence, (RecordedStep(1, {t.fqn: 7 + ("norm" not in t.fqn) for t in evidence.parameters}),))
    assert summary_of(other).contents.copies != summary_of(one).contents.copies == summary_of(third).contents.copies
    assert summary_of(record(0)).contents.copies == {}


def test_a_damaged_recording_is_named(tmp_path: Path) -> None:
    one, path = record(0), record_file(tmp_path, 0)
    save_record(path, summary_of(one), one)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(EvidenceError, match="rank_00000.record: damaged .*; record the job again"):
        load_record(path)


def test_ranks_are_alike_whenever_another_thread_issues_its_collectives() -> None:
    calls = record(0).evidence.collectives
    beside = Collective("all_reduce", (0, 1, 2, 3), "checkpoints", "float32", 8, BACKGROUND, 0, 0)
    kinds = []
    for at in (0, 4):
        evidence = replace(record(0).evidence, collectives=(*calls[:at], beside, *calls[at:]))
        kinds.append(summary_of(replace(record(0), evidence=evidence)).rank_class.number)
    assert kinds[0] == kinds[1] != summary_of(record(0)).rank_class.number


@pytest.mark.parametrize(("shards", "role"), [((), "replicated by fsdp1 alone"), ((0, 1), "replicated by fsdp1")])
def test_fsdp1_without_shards_claims_replicas_and_is_no_hsdp(shards: tuple[int, ...], role: str) -> None:
    evidence = trial_of(tiny_case("ddp_2")).ranks[0]
    wrapper = Wrapper("fsdp1", shards, (0, 1) if not shards else (0, 2))
    one = summary_of(RankRecord(replace(evidence, structure={"": wrapper}), ()))
    assert one.groups.roles["0,1" if not shards else "0,2"] == role
    assert bool(one.parameters.slices) == (not shards)


def test_what_ddp_ignores_is_no_part_of_its_replica_and_is_told_apart_unless_it_begins_as_a_constant() -> None:
    evidence = trial_of(tiny_case("ddp_2")).ranks[0]
    names = [tensor.fqn for tensor in evidence.parameters]
    first, second, *rest = names
    structure = {"": Wrapper("ddp", replicate_ranks=(0, 1), ignored=(first, second))}

    def of(expert: int, other: int) -> Summary:
        held = {first: expert, second: expert, **dict.fromkeys(rest, other)}
        steps = (RecordedStep(0, held, constant=(second,)), RecordedStep(1, held))
        return summary_of(RankRecord(replace(evidence, structure=structure), steps))

    assert of(1, 7).contents.by_step == of(2, 7).contents.by_step != of(1, 8).contents.by_step
    assert of(1, 7).parameters.slices == of(2, 7).parameters.slices != 0
    assert of(1, 7).contents.ignored == {first: {0: 1, 1: 1}}
