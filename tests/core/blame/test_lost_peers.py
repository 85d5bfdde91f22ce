"""A lost peer is known by type and place of the error, a waiting rank by its stack: literal errors and stacks, no ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.core.blame.culprits import blame_of
from harness.core.blame.rank_exit import (
    Frame,
    RaisedIn,
    RankExit,
    code_that_raised,
    has_lost_peer,
    is_busy,
    is_in_collective,
)
from harness.core.evidence.lost_peer import is_lost_peer_error

LIBRARY = "/v/lib/python3.11/site-packages/torch/"
C10D = [f"{LIBRARY}distributed/distributed_c10d.py", 3252, "all_reduce"]
LIMIT = "killed by the harness at the time limit of 5 s"


def raised(message: str, *inside: list[Any], kind: str = "RuntimeError", **more: Any) -> RankExit:
    failure = {"type": kind, "message": message, "time": 2.0, "inside": list(inside), **more}
    return RankExit(0, 1, failure=failure)


@pytest.fixture
def trainer(tmp_path: Path) -> str:
    source = tmp_path / "train.py"
    source.write_text("import torch\nraise RuntimeError(message)\nwork.wait()\nloss.backward()\n")
    return str(source)


@pytest.mark.parametrize(
    "message",
    [
        "could not restore the checkpoint: read timed out",
        "the store timed out, keys: a",
        "[/x/gloo/a.cc:7] Timed out waiting",
    ],
)
def test_what_a_trainer_raises_by_itself_is_its_own_error_whatever_its_words(message: str, trainer: str) -> None:
    own = raised(message, [trainer, 2, "train_step"])
    assert (has_lost_peer(own), blame_of([own, raised("Connection closed by peer [::1]", C10D)]).reasons) == (
        False,
        {0: ""},
    )


@pytest.mark.parametrize("message", ["could not restore the checkpoint: read timed out", "keys: read timed out"])
def test_words_alone_show_no_lost_peer_where_the_place_is_not_known(message: str) -> None:
    assert not has_lost_peer(raised(message)) and not is_lost_peer_error(f"RuntimeError: {message}")


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: [/x/gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:1",
        "RuntimeError: Application timeout caused pair closure",
        "RuntimeError: Wait timeout",
        "DistStoreError: wait timeout after 1000ms, keys: /default_pg/0//cpu//0/0",
        "DistBackendError: NCCL communicator was aborted on rank 1",
    ],
)
def test_texts_of_torchs_own_network_show_a_lost_peer(error: str) -> None:
    kind, _, message = error.partition(": ")
    assert is_lost_peer_error(error) and has_lost_peer(raised(message, kind=kind))


@pytest.mark.parametrize("place", [3, 4])
def test_an_error_that_came_out_of_a_wait_or_a_backward_is_a_lost_peers(place: int, trainer: str) -> None:
    graph = [[f"{LIBRARY}autograd/graph.py", 829, "_engine_run_backward"]] * (place == 4)
    assert has_lost_peer(raised("Operation timed out!", *graph, [trainer, place, "train_step"]))


def test_what_is_raised_again_is_judged_by_its_first_cause(trainer: str) -> None:
    cause = ["RuntimeError", "Operation timed out!"]
    again = {"cause": cause, "chain": [cause], "kind": "ValueError"}
    assert has_lost_peer(raised("stage 0 failed", C10D, [trainer, 2, "run"], **again))
    assert not has_lost_peer(raised("stage 0 failed: it timed out", [trainer, 2, "run"], **again))


@pytest.mark.parametrize(
    ("file", "raised_in"),
    [
        ("distributed/distributed_c10d.py", RaisedIn.COLLECTIVE),
        ("distributed/_functional_collectives.py", RaisedIn.COLLECTIVE),
        ("distributed/checkpoint/state_dict_loader.py", RaisedIn.UNKNOWN),
        ("distributed/tensor/_dispatch.py", RaisedIn.UNKNOWN),
    ],
)
def test_parts_of_torch_distributed_that_compute_or_read_files_are_no_collective(
    file: str, raised_in: RaisedIn
) -> None:
    assert code_that_raised([Frame(LIBRARY + file, 1, "f"), Frame("/t/train.py", 7, "step")]) is raised_in


def stack(*files: str) -> str:
    frames = "".join(f'  File "{file}", line 1 in f\n' for file in files)
    return f"main thread 0x00aa\nThread 0x00aa (most recent call first):\n{frames}"


@pytest.mark.parametrize(
    ("files", "computes"),
    [
        (["_ops.py", "distributed/tensor/_dispatch.py", "distributed/tensor/_api.py"], True),
        (["_ops.py", "distributed/_functional_collectives.py", "distributed/tensor/_redistribute.py"], False),
        (["nn/functional.py", "distributed/fsdp/_fully_shard/_fsdp_state.py"], True),
        (["distributed/distributed_c10d.py", "distributed/fsdp/_fully_shard/_fsdp_collectives.py"], False),
    ],
)
def test_frames_of_dtensor_and_fsdp_wait_only_with_a_collective_below(files: list[str], computes: bool) -> None:
    at = RankExit(0, -9, kill_reason=LIMIT, stack=stack(*[LIBRARY + file for file in files], "/t/train.py"))
    assert (is_busy(at), is_in_collective(at)) == (computes, not computes)
