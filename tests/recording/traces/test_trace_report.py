"""`harness report` of profiler traces: which layout they show, what they do not say, and files that are none."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from json_documents import valid
from literal_traces import Rank, ddp_step, fsdp_step, load_info, save_info, save_job

from harness.core.cli import main

HSDP = ("--layout", "dp_replicate=2,dp_shard=8")
SHARDED_AND_COPIED = fsdp_step("shard", "replicate")
Document = dict[str, Any]


def tensor_parallel(rank: Rank) -> None:
    rank.forward()
    rank.collective(("allreduce", "shard", 64, 64))
    rank.backward(("allreduce", "shard", 64, 64), ("allreduce", "replicate", 512, 512))
    rank.optimizer()


def accumulates(rank: Rank) -> None:
    """A ProfilerStep is a microbatch, an optimizer is not annotated, and gradients are summed in the last one."""
    rank.forward()
    rank.backward(*[("allreduce", "world", 12288, 12288)] * (rank.step == 3))


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Document]]:
    def run(*words: object, kind: str = "traces") -> tuple[int, Document]:
        capsys.readouterr()
        code = main(["report", "--json", *map(str, words)])
        return code, valid(capsys.readouterr().out, kind)

    return run


def verdicts(document: Document) -> dict[str, str]:
    return {one["check"]: one["verdict"] for one in document["results"]}


def cause(document: Document) -> tuple[str, dict[str, Any]]:
    (one,) = document["diagnosis"]["causes"]
    return one["kind"], dict(one["details"])


def test_hsdp_that_ran_as_fsdp_is_named_from_traces_alone(tmp_path: Path, report: Any) -> None:
    """torchtitan #711: the groups of both axes exist, and every collective runs over all ranks."""
    code, document = report(save_job(tmp_path / "t", fsdp_step("world")), *HSDP)
    assert code == 1
    assert {name for name, verdict in verdicts(document).items() if verdict == "FAIL"} == {"exchange"}
    kind, details = cause(document)
    assert (kind, details["dp_replicate"], details["dp_shard"]) == ("another layout", 1, 16)


def test_the_traces_of_two_ranks_of_sixteen_name_it_too(tmp_path: Path, report: Any) -> None:
    code, document = report(save_job(tmp_path / "t", fsdp_step("world"), ranks=(0, 9)), *HSDP)
    assert (code, document["traced"], document["world"]) == (1, [0, 9], 16)
    assert cause(document)[0] == "another layout"
    assert verdicts(document)["process_groups"] == "UNKNOWN"


@pytest.mark.parametrize(
    ("did", "asked", "shards"),
    [
        (ddp_step, "dp_shard=16", 1),
        (fsdp_step("world"), "dp_replicate=16", 16),
        (SHARDED_AND_COPIED, "dp_shard=16", 8),
        (ddp_step, "dp_replicate=2,dp_shard=8", 1),
    ],
)
def test_other_degrees_are_named(
    did: Callable[[Rank], None], asked: str, shards: int, tmp_path: Path, report: Any
) -> None:
    code, document = report(save_job(tmp_path / "t", did), "--layout", asked)
    assert (code, cause(document)[1]["dp_shard"]) == (1, shards)


@pytest.mark.parametrize(
    ("did", "asked"),
    [
        (SHARDED_AND_COPIED, HSDP[1]),
        (ddp_step, "dp_replicate=16"),
        (fsdp_step("world"), "dp_shard=16"),
        (tensor_parallel, "dp_replicate=2,tp=8"),
        (accumulates, "dp_replicate=16"),
    ],
)
def test_what_runs_as_requested_passes(did: Callable[[Rank], None], asked: str, tmp_path: Path, report: Any) -> None:
    code, document = report(save_job(tmp_path / "t", did), "--layout", asked)
    judged = {name: verdict for name, verdict in verdicts(document).items() if verdict != "NOT APPLICABLE"}
    assert (code, judged) == (0, dict.fromkeys(("collective_order", "exchange", "process_groups"), "PASS"))


def test_a_missing_rank_is_said_and_what_is_right_is_not_proven(tmp_path: Path, report: Any) -> None:
    code, document = report(save_job(tmp_path / "t", SHARDED_AND_COPIED, ranks=range(15)), *HSDP)
    assert (code, verdicts(document)["exchange"], document.get("diagnosis")) == (2, "UNKNOWN", None)
    assert 15 not in document["traced"]


def test_a_rank_that_leaves_a_collective_out_is_found_without_a_layout(tmp_path: Path, report: Any) -> None:
    folder = save_job(tmp_path / "t", ddp_step, world=4, shards=2)
    info = load_info(folder / "rank2.json.gz")
    last = max(n for n, event in enumerate(info["traceEvents"]) if event["name"] == "record_param_comms")
    del info["traceEvents"][last - 1 : last + 1]
    save_info(folder / "rank2.json.gz", info)
    code, document = report(*sorted(folder.iterdir()))
    assert (code, verdicts(document)) == (1, {"collective_order": "FAIL"})
    assert document["results"][0]["findings"][0]["group"] == [0, 1, 2, 3]


@pytest.mark.parametrize("lacks", ["Process Group Ranks", "Collective name"])
def test_collectives_without_a_group_are_unknown(lacks: str, tmp_path: Path, report: Any) -> None:
    folder = save_job(tmp_path / "t", ddp_step, world=2, shards=1)
    for path in folder.iterdir():
        info = load_info(path)
        del info["distributedInfo"]["pg_config"]
        for event in info["traceEvents"]:
            event["args"].pop(lacks, None)
        save_info(path, info)
    code, document = report(folder, "--layout", "dp_replicate=2")
    assert code == 2
    assert {name for name, verdict in verdicts(document).items() if verdict == "UNKNOWN"} == {
        *("collective_order", "exchange", "process_groups")
    }


def test_tensor_parallelism_is_not_taken_from_what_fsdp_gathers(tmp_path: Path, report: Any) -> None:
    code, document = report(save_job(tmp_path / "t", fsdp_step("shard"), shards=16), "--layout", "tp=16")
    assert (code, verdicts(document)["exchange"]) == (2, "UNKNOWN")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def no_rank(path: Path) -> None:
    save_info(path, load_info(path) | {"distributedInfo": {"backend": "nccl"}})


def another_job(path: Path) -> None:
    info = load_info(path)
    info["distributedInfo"]["world_size"] = 8
    save_info(path, info)


def twice(path: Path) -> None:
    path.with_name("again.json.gz").write_bytes(path.read_bytes())


def no_json(path: Path) -> None:
    path.write_bytes(gzip.compress(b'{"schemaVersion": 1, "traceEvents": [{]}'))


def odd_values(path: Path) -> None:
    info = load_info(path)
    info["distributedInfo"]["rank"] = "first"
    save_info(path, info)


@pytest.mark.parametrize("damage", [cut, no_rank, another_job, twice, no_json, odd_values])
def test_a_damaged_trace_is_one_message_with_its_file(
    damage: Callable[[Path], None], tmp_path: Path, report: Any
) -> None:
    folder = save_job(tmp_path / "t", ddp_step, world=2, shards=1)
    damage(folder / "rank1.json.gz")
    code, document = report(folder, kind="error")
    assert (code, "rank1.json.gz" in document["message"], document["message"].count("\n")) == (2, True, 0)


@pytest.mark.slow("two real ranks; test_collectives_without_a_group_are_unknown has literal traces")
def test_real_traces_of_gloo_have_steps_and_groups_and_no_members(tmp_path: Path, report: Any) -> None:
    """Two ranks under torch.profiler: gloo's events name no group."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "localhost:0", str(Path(__file__).with_name("traced_job.py")), str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    code, document = report(tmp_path, "--layout", "dp_replicate=2")
    assert (code, document["traced"], document["steps"]) == (2, [0, 1], [1, 2])
    lacking = {one["check"]: one["note"] for one in document["results"] if one["verdict"] == "UNKNOWN"}
    assert {*lacking} == {"collective_order", "exchange", "process_groups"}
    assert all("4 all_reduce" in note for note in lacking.values()), json.dumps(lacking)
