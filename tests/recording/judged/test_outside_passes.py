"""Collectives outside of forward and backward: clipping, logging, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from literal_recording import hsdp, outside, summary

from harness.core.cli import main
from harness.core.evidence.recording import RankRecord, record_file, save_record
from harness.core.evidence.records import Collective, RankEvidence
from harness.core.evidence.step import StepEvidence
from harness.core.evidence.summary import Summary, summary_of
from harness.core.evidence.summary_parts import Outside
from harness.recording.judged.stored_recording import Recording
from harness.recording.judged.structure import differences, outside_steps_text, structure
from harness.recording.pages.recording_page import recording_text

ALL, STEPS = "0-3", (1, 2, 3)
CLIPS, LOGS = outside(ALL, 1, 4, "1-3"), outside(ALL, 1, 8, "1-3", dtype="float64")


def of(*moved: Outside, whole: tuple[int, ...] = STEPS, **changes: Any) -> dict[str, Any]:
    return structure(recording(*moved, whole=whole, **changes))


def recording(*moved: Outside, whole: tuple[int, ...] = STEPS, **changes: Any) -> Recording:
    ranks = [hsdp(rank, outside=moved, whole=whole, shown=2, parts=("M",), **changes) for rank in range(4)]
    return Recording(Path("run"), {one.rank: one for one in ranks})


def told(one: dict[str, Any], other: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(" ".join(each.where[1:]), each.one, each.other) for each in differences(one, other)]


def test_the_same_job_without_clipping_differs() -> None:
    ((where, one, other),) = told(of(CLIPS, LOGS), of(LOGS))
    assert where == "all_reduce of float32 over all ranks"
    assert (one, other) == ("groups [0-3], calls 1, bytes 4", "none")


def test_five_losses_logged_for_one_differ_in_calls_and_bytes() -> None:
    found = told(of(CLIPS), of(outside(ALL, 5, 20, "1-3")))
    line = "all_reduce of float32 over all ranks"
    assert found == [(f"{line} calls", "1", "5"), (f"{line} bytes", "4", "20")]


def test_what_is_logged_in_every_second_step_is_the_same_whenever_it_runs_and_not_what_is_logged_in_each() -> None:
    every_second = of(outside(ALL, 1, 4, "2"))
    assert told(every_second, of(outside(ALL, 1, 4, "2"))) == []
    line = "all_reduce of float32 over all ranks"
    assert told(every_second, of(CLIPS))[0] == (f"{line} calls", "0 in steps 1,3, 1 in step 2", "1")


def test_of_two_recordings_the_steps_are_compared_that_both_have_and_the_page_of_it_says_which() -> None:
    """A checkpoint in step 100, which one of them did not record."""
    one, other = of(CLIPS), of(CLIPS, outside(ALL, 9, 900, "100", dtype="int64"), whole=(1, 2, 3, 100))
    assert told(one, other) == []
    assert outside_steps_text(one, other) == "compared in steps 1-3, which both have on record"


def test_recordings_without_a_step_in_common_are_not_called_the_same() -> None:
    later = outside(ALL, 1, 4, "7,8")
    assert told(of(CLIPS), of(later, whole=(7, 8))) == [("steps", "1-3", "7,8")]
    assert outside_steps_text(of(whole=()), of(whole=())).startswith("not compared")


def test_sizes_of_pickled_objects_vary_and_are_not_compared_and_their_calls_are() -> None:
    objects = [outside(ALL, calls, size, "1-3", dtype="uint8") for calls, size in ((1, 120), (1, 133), (2, 133))]
    assert told(of(objects[0]), of(objects[1])) == []
    assert told(of(objects[1]), of(objects[2])) == [("all_reduce of uint8 over all ranks calls", "1", "2")]


def test_the_axis_is_named_where_a_wrapper_names_it_and_is_the_same_on_other_numbers_of_ranks() -> None:
    def fsdp(world: int, *, clips: bool) -> dict[str, Any]:
        group = f"0-{world - 1}"
        moved = (outside(group, 1, 4, "1-3"),) if clips else ()
        one: dict[str, Any] = {"roles": {group: "sharded by fsdp2"}, "outside": moved, "whole": STEPS}
        ranks = [summary(rank, world, slices=rank + 1, **one) for rank in range(world)]
        return structure(Recording(Path("run"), {each.rank: each for each in ranks}))

    assert told(fsdp(4, clips=True), fsdp(8, clips=True)) == [("", "4", "8")]
    _, (where, _, other) = told(fsdp(4, clips=True), fsdp(8, clips=False))
    assert (where, other) == ("all_reduce of float32 over ranks sharded by fsdp2", "none")


def test_the_page_shows_them_and_says_it_where_there_are_none() -> None:
    some, none = recording_text(recording(CLIPS, outside(ALL, 1, 8, "2", dtype="int64"))), recording_text(recording())
    assert "  outside passes  all_reduce of float32 over [0-3]: 4 B in 1 call a step\n" in some
    assert "all_reduce of int64 over [0-3]: none in steps 1,3; 8 B in 1 call in step 2" in " ".join(some.split())
    assert "no collective ran outside of forward and backward, in steps 1-3" in " ".join(none.split())


# ---- from what ranks leave


def record(rank: int, *, clips: bool) -> RankRecord:
    """Three steps that reduce gradients, and what comes after the last: a checkpoint."""
    calls = [_call("backward", step, 400) for step in STEPS] + [_call("other", 3, 900)]
    calls += [_call("other", step, 4) for step in STEPS] if clips else []
    steps = tuple(_step(number) for number in STEPS)
    evidence = RankEvidence(rank=rank, world_size=2, parameters=(), groups=(), collectives=tuple(calls), steps=steps)
    return RankRecord(evidence, (), ("Model",), ended="ok", steps_seen=3)


def _call(phase: str, step: int, size: int) -> Collective:
    return Collective("all_reduce", (0, 1), "0", "float32", size, phase, step, 0)


def _step(number: int) -> StepEvidence:
    none: dict[str, Any] = {"gradients": {}, "parameters": {}, "optimizer_state": {}}
    return StepEvidence(step=number, microbatches=(), reported_loss=None, grad_norm=None, lr=None, memory={}, **none)


def stored(folder: Path, *, clips: bool) -> Path:
    for rank in range(2):
        one = record(rank, clips=clips)
        record_file(folder, rank).parent.mkdir(parents=True, exist_ok=True)
        save_record(record_file(folder, rank), summary_of(one), one)
    return folder


def test_what_follows_the_last_step_of_a_job_belongs_to_none() -> None:
    found: Summary = summary_of(record(0, clips=True))
    assert found.traffic.whole == (1, 2)
    assert found.traffic.outside == (Outside("0,1", "all_reduce", "other", "float32", 1, 4, "1,2"),)


def test_compare_and_a_snapshot_tell_clipping_that_was_forgotten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = stored(tmp_path / "a", clips=True), stored(tmp_path / "b", clips=False)
    assert main(["compare", str(one), str(other)]) == 1
    assert "all_reduce of float32 over all ranks: groups [0,1], calls 1, bytes 4 -> none" in " ".join(
        capsys.readouterr().out.split()
    )
    kept = tmp_path / "kept.yaml"
    assert main(["compare", str(kept), str(one), "--accept"]) == 0
    assert main(["compare", str(kept), str(one)]) == 0
    assert "compared in steps 1,2" in capsys.readouterr().out
    assert main(["compare", str(kept), str(other)]) == 1


def test_a_snapshot_of_before_they_were_kept_is_accepted_anew_and_is_not_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, kept = stored(tmp_path / "a", clips=True), tmp_path / "kept.yaml"
    old = {name: part for name, part in of(CLIPS).items() if not name.startswith("outside")}
    kept.write_text(yaml.safe_dump(old))
    assert main(["compare", str(kept), str(one)]) == 2
    said = capsys.readouterr()
    assert "--accept" in said.err and "the same" not in said.out
    assert main(["compare", str(kept), str(one), "--accept"]) == main(["compare", str(kept), str(one)]) == 0


def test_ranks_that_send_between_passes_do_not_train_alone() -> None:
    sends = outside(ALL, 1, 16384, "1-3")
    told_of = {moved: " ".join(recording_text(recording(*moved, uses=())).split()) for moved in ((), (sends,))}
    assert all("no collective ran in forward or backward" in text for text in told_of.values())
    assert "trains alone" in told_of[()] and "trains alone" not in told_of[(sends,)]
