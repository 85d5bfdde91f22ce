"""`harness report` of Flight Recorder dumps: who hangs a job, who waits, and dumps that are none."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from json_documents import valid
from literal_dumps import Issued, save_dumps

from harness.core.cli import main
from harness.core.evidence.store import EvidenceError
from harness.core.judge.result import Verdict
from harness.recording.traces.analyzer import analysis_of
from harness.recording.traces.dumps import load_dumps
from harness.recording.traces.hang import Hang, hang_of
from harness.recording.traces.plain_pickle import NotPlain, load_plain

SUM = ("all_reduce", 100)
DONE = ("all_reduce", 100, "0", "completed")
HALVES = {"0": range(4), "a": (0, 1), "b": (2, 3)}


def hang(folder: Path) -> Hang:
    return hang_of(load_dumps(sorted(folder.iterdir())))


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(
    ("odd", "why"),
    [
        ([DONE] * 5, "#6"),
        ([*[DONE] * 5, ("all_reduce", 200)], "800 B"),
        ([*[DONE] * 5, ("_all_gather_base", 100)], "all_gather"),
    ],
)
def test_the_rank_that_differs_is_blamed(odd: Issued, why: str, plain: bool, tmp_path: Path) -> None:
    ranks = dict.fromkeys(range(4), [*[DONE] * 5, SUM]) | {2: odd}
    found = hang(save_dumps(tmp_path / "d", ranks, plain=plain))
    assert ([*found.blamed], found.verdict, why in found.blamed[2]) == ([2], Verdict.FAIL, True)
    (one,) = found.stuck
    assert (one.call.seq, one.behind) == (6, (2,) if len(odd) == 5 else ())


def test_who_waits_for_another_is_not_blamed_though_others_wait_for_it(tmp_path: Path) -> None:
    """Rank 1 is behind in the world's group, because it waits for rank 0 in theirs; ranks 2 and 3 run ahead."""
    ahead = [DONE, SUM, SUM]
    ranks = {0: [DONE], 1: [DONE, ("all_reduce", 8, "a")], 2: ahead, 3: ahead}
    found = hang(save_dumps(tmp_path / "d", ranks, HALVES))
    assert [*found.blamed] == [0]
    assert {(one.call.group, one.call.seq, one.behind) for one in found.stuck} == {("0", 2, (0, 1)), ("a", 1, (0,))}


def test_nothing_that_is_open_is_no_hang(tmp_path: Path) -> None:
    found = hang(save_dumps(tmp_path / "d", dict.fromkeys(range(2), [DONE, DONE])))
    assert (found.verdict, found.stuck, dict(found.blamed)) == (Verdict.PASS, (), {})


def test_what_all_have_issued_is_nobodys_fault(tmp_path: Path) -> None:
    found = hang(save_dumps(tmp_path / "d", dict.fromkeys(range(2), [DONE, SUM])))
    assert (found.verdict, dict(found.blamed), found.stuck[0].issued) == (Verdict.FAIL, {}, (0, 1))


def test_a_rank_without_a_dump_is_said_and_nobody_else_blamed(tmp_path: Path) -> None:
    found = hang(save_dumps(tmp_path / "d", dict.fromkeys(range(3), [DONE, SUM]), {"0": range(4)}))
    assert (found.verdict, found.missing, dict(found.blamed), found.stuck[0].unknown_ranks) == (
        Verdict.UNKNOWN,
        (3,),
        {},
        (3,),
    )


def test_what_a_recorder_has_overwritten_blames_nobody(tmp_path: Path) -> None:
    """Rank 1 has issued so much over another group that its recorder has nothing of the world's."""
    ranks = {0: [DONE, SUM], 1: [DONE, SUM, *[("all_reduce", 8, "a", "completed")] * 2], 2: [DONE, SUM]}
    folder = save_dumps(tmp_path / "d", ranks, {"0": range(3), "a": (1,)})
    save_dumps(folder, {1: ranks[1]}, {"0": range(3), "a": (1,)}, first=2)
    found = hang(folder)
    assert (dict(found.blamed), found.stuck[0].unknown_ranks, found.verdict) == ({}, (1,), Verdict.UNKNOWN)


def test_a_receive_that_nobody_sends(tmp_path: Path) -> None:
    ranks = {0: [("send 0->1", 8), DONE], 1: [("recv 1<-0", 8), DONE, ("recv 1<-0", 8)]}
    assert [*hang(save_dumps(tmp_path / "d", ranks)).blamed] == [0]


def test_torchs_analyzer_names_the_same_rank(tmp_path: Path) -> None:
    ranks = dict.fromkeys(range(3), [DONE, SUM]) | {1: [DONE]}
    dumps = load_dumps(sorted(save_dumps(tmp_path / "d", ranks).iterdir()))
    said = analysis_of(dumps)
    assert (said.ranks, said.failed) == ((1,), "")


class Runs:
    """What a pickle would run as it is loaded."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (self.what,)


def test_a_pickle_that_would_run_something_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(pickle.dumps({"entries": [Runs(f"touch {tmp_path}/ran")]}, protocol=2))
    with pytest.raises(EvidenceError, match="nccl_trace_rank_0"):
        load_dumps([path])
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "data", [b"", b"\x80\x02", b"\x80\x02}q", b"\x80\x02cos\nsystem\n.", b"\x80\x02X\xff\xff\xff\x7f."]
)
def test_what_is_no_whole_pickle(data: bytes) -> None:
    with pytest.raises(NotPlain):
        load_plain(data)


def test_plain_values_are_read_as_pickle_reads_them() -> None:
    value = {"a": [1, 2.5, None, True, ("x", "ü")], "b": {"c": 2**70}}
    assert [load_plain(pickle.dumps(value, protocol=protocol)) for protocol in range(2, 6)] == [value] * 4


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def without_rank(path: Path) -> None:
    path.rename(path.with_name("dump"))


def twice(path: Path) -> None:
    path.with_name("again_1").write_bytes(path.read_bytes())


def other_fields(path: Path) -> None:
    path.write_bytes(pickle.dumps({"entries": [{"record_id": 0, "process_group": ("0", "")}]}, protocol=2))


@pytest.mark.parametrize("damage", [cut, without_rank, twice, other_fields])
def test_a_damaged_dump_is_one_message(damage: Callable[[Path], None], tmp_path: Path, capsys: Any) -> None:
    folder = save_dumps(tmp_path / "d", dict.fromkeys(range(2), [DONE, SUM]))
    damage(folder / "nccl_trace_rank_1")
    code = main(["report", "--json", str(folder)])
    message = valid(capsys.readouterr().out, "error")["message"]
    assert (code, str(folder) in message, "\n" in message) == (2, True, False)


@pytest.mark.slow("three real ranks; test_the_rank_that_differs_is_blamed has literal dumps")
def test_a_hang_of_real_ranks_is_blamed_from_their_dumps_alone(tmp_path: Path) -> None:
    """Rank 1 of three on gloo leaves a sum out, and the others give up."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "localhost:0", str(Path(__file__).with_name("hanging_job.py")), str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    found = hang(tmp_path)
    assert (found.dumped, [*found.blamed]) == ((0, 1, 2), [1])
    assert [(one.call.seq, one.behind) for one in found.stuck] == [(3, (1,))]


def test_a_damaged_number_makes_no_room_for_values_that_are_not_there() -> None:
    """A pickle may number its values, or say how long they are, as it likes."""
    with pytest.raises(NotPlain):
        load_plain(b"\x80\x05\x96" + (2**40).to_bytes(8, "little") + b".")
    assert load_plain(b"\x80\x02]r" + (2**31).to_bytes(4, "little") + b".") == []
