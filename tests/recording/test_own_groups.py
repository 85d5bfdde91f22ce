"""Process groups that a trainer makes itself: what runs over them is on record, and no check takes it for nothing."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked_jobs import Main

from harness.core.case.layout import parse_layout
from harness.core.evidence.records import OwnGroup
from harness.core.judge.result import Verdict
from harness.core.judge.separate_models import connected_rank_sets
from harness.core.probe.clock import Clock
from harness.recording.judged.recorded_layout import judge_recording
from harness.recording.judged.stored_recording import Recording, load_recording
from harness.recording.pages.recording_page import recording_text
from harness.recording.progress import Progress
from harness.recording.trace import TracedCollectives

SCRIPT = str(Path(__file__).parents[1] / "own_groups_script.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ON_MEMBERS = ("collective_order", "exchange", "process_groups")
GRADIENTS = 288  # bytes of a step


def recorded(how: str, folder: Path, monkeypatch: pytest.MonkeyPatch, forked_main: Main) -> Recording:
    monkeypatch.setenv("HOW", how)
    monkeypatch.setenv("OWN_STORE", str(folder / "store"))
    assert forked_main(["record", "-o", str(folder / "out"), "--", *TORCHRUN, SCRIPT]) == 0
    recording = load_recording(folder / "out")
    assert sorted(recording.summaries) == [0, 1]
    assert not any(one.recorder.failed for one in recording.summaries.values())
    assert len({one.contents.by_step[3] for one in recording.summaries.values()}) == 1
    return recording


def verdicts(recording: Recording) -> dict[str, Verdict]:
    results, _ = judge_recording(recording, parse_layout("dp_replicate=2", 2))
    return {result.check: result.verdict for result in results}


@pytest.mark.slow("a job each; the first two are recorded in the same way", after=2)
@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("backend", "ProcessGroupGloo"),
        ("without_a_name", "ProcessGroup"),
        ("helper", "ProcessGroup"),
        ("over_another", "ProcessGroupGloo"),
        ("by_store", "ByStore"),
    ],
)
def test_what_runs_over_a_group_without_ranks_is_on_record_and_not_judged(
    how: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_main: Main
) -> None:
    recording = recorded(how, tmp_path, monkeypatch, forked_main)
    for rank, one in recording.summaries.items():
        (group,) = one.groups.own
        assert (group.kind, group.place, group.size, group.issued) == (kind, rank, 2, 8)
        assert {(c.op, c.dtype, c.phase) for c in group.calls} == {("all_reduce", "float32", "other")}
        assert {c.step: (c.calls, c.bytes) for c in group.calls} == {step: (2, GRADIENTS) for step in (1, 2, 3)}
    found = verdicts(recording)
    assert {found[check] for check in ON_MEMBERS} == {Verdict.UNKNOWN}
    assert connected_rank_sets([*recording.summaries.values()]) == ()
    assert "trains alone" not in " ".join(recording_text(recording).split())


@pytest.mark.parametrize("how", ["backend_of_a_group", "registered_class", "registered_creator"])
def test_what_passes_the_dispatcher_by_on_a_group_with_ranks_is_a_collective_over_them(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_main: Main
) -> None:
    recording = recorded(how, tmp_path, monkeypatch, forked_main)
    for one in recording.summaries.values():
        assert one.groups.own == ()
        assert [(use.ranks, use.op, use.calls, use.bytes) for use in one.traffic.outside] == [
            ("0,1", "all_reduce", 2, GRADIENTS)
        ]
    assert {verdicts(recording)[check] for check in ("collective_order", "process_groups")} == {Verdict.PASS}


def test_ddp_over_a_group_without_ranks_claims_no_replicas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forked_main: Main
) -> None:
    recording = recorded("without_a_name_of_ddp", tmp_path, monkeypatch, forked_main)
    for one in recording.summaries.values():
        assert (one.modules.wrappers, one.parameters.slices) == ({"ddp": 1}, 0)
        assert (
            sum(call.bytes for call in one.groups.own[0].calls if call.phase == "backward" and call.step == 2)
            >= GRADIENTS
        )
    assert verdicts(recording)["process_groups"] is Verdict.UNKNOWN


# ---- in this process, over groups of one


@pytest.fixture
def traced() -> Iterator[TracedCollectives]:
    recorder = TracedCollectives(clock := Clock(), lambda: True, Progress(clock))
    recorder.install()
    yield recorder
    recorder.remove()


def gloo(folder: Path) -> dist.ProcessGroup:
    return dist.ProcessGroupGloo(dist.FileStore(str(folder / "own"), 1), 0, 1, datetime.timedelta(seconds=9))


def only(traced: TracedCollectives) -> OwnGroup:
    (group,) = traced.own_groups.final_groups()
    return group


def test_of_each_method_the_largest_argument_is_counted(traced: TracedCollectives, tmp_path: Path) -> None:
    group, one = gloo(tmp_path), torch.ones(3)
    group.allgather([[torch.zeros(3)]], [one]).wait()
    group.broadcast(one, root=0).wait()
    group.barrier().wait()
    assert {(call.op, call.dtype, call.bytes) for call in only(traced).calls} == {
        ("all_gather", "float32", 12),
        ("broadcast", "float32", 12),
        ("barrier", "none", 0),
    }


def test_where_it_was_made_is_a_line_outside_its_constructors(traced: TracedCollectives) -> None:
    class Own(dist.ProcessGroup):
        def __init__(self, size: int) -> None:
            super().__init__(0, size)

    class Silent(Own):
        def size(self) -> int:
            raise NotImplementedError

    kept = [Own(2), Silent(2)]
    line = sys._getframe().f_lineno - 1
    found = [(one.kind, one.made, one.size, one.issued) for one in traced.own_groups.final_groups()]
    assert found == [("Own", f"test_own_groups.py:{line}", 2, 0), ("Silent", f"test_own_groups.py:{line}", None, 0)]
    assert kept


def test_classes_are_as_they_were_when_nobody_records() -> None:
    class Own(dist.ProcessGroup):
        def allreduce(self, tensors: object, opts: object = None) -> None: ...

    kinds = (dist.ProcessGroup, dist.ProcessGroupGloo, Own)
    before = [dict(vars(kind)) for kind in kinds]
    recorder = TracedCollectives(clock := Clock(), lambda: True, Progress(clock))
    recorder.install()
    Own(0, 2)
    recorder.remove()
    assert [dict(vars(kind)) for kind in kinds] == before


def test_a_method_that_raises_still_raises_and_leaves_nothing_behind(traced: TracedCollectives, tmp_path: Path) -> None:
    class Broken(dist.ProcessGroup):
        def allreduce(self, tensors: object, opts: object = None) -> None:
            raise KeyError("its own")

    broken = Broken(0, 2)
    with pytest.raises(KeyError, match="its own"):
        dist.all_reduce(torch.ones(1), group=broken)
    gloo(tmp_path).allreduce([torch.ones(1)]).wait()
    assert {one.kind: one.issued for one in traced.own_groups.final_groups()} == {"Broken": 1, "ProcessGroupGloo": 1}
    assert traced.failed == ""
