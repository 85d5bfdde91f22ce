"""`harness compare` of the traces of two jobs: structure, traffic, step time and exposed communication."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from json_documents import valid
from literal_traces import GPU, Rank, ddp_step, fsdp_step, load_info, save_info, save_job

from harness.core.cli import main

HSDP = fsdp_step("shard", "replicate")


@pytest.fixture
def compare(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, dict[str, Any]]]:
    def run(*folders: Path, kind: str = "comparison") -> tuple[int, dict[str, Any]]:
        capsys.readouterr()
        return main(["compare", "--json", *map(str, folders)]), valid(capsys.readouterr().out, kind)

    return run


def hidden(computes: float) -> Callable[[Rank], None]:
    """A sum of 40 us whose kernel begins 11 us after a matmul that takes as long."""

    def did(rank: Rank) -> None:
        rank.backward()
        rank.now += 100
        rank.add("kernel", "gemm", computes, GPU, stream=3)
        rank.collective(("allreduce", "world", 1000, 1000))
        rank.optimizer()

    return did


def test_hsdp_that_became_fsdp_is_told_with_what_moved(tmp_path: Path, compare: Any) -> None:
    code, document = compare(save_job(tmp_path / "a", HSDP), save_job(tmp_path / "b", fsdp_step("world")))
    moved = {one["of"]: (one["one"], one["other"]) for one in document["figures"] if one["kind"] == "traffic"}
    assert (code, document["of"]) == (1, "traces")
    assert ["degree"] in [one["where"][2:] for one in document["differences"]]
    assert moved["all_reduce in backward, over 2 ranks"] == (3 * 512 * 4, 0)
    assert moved["all_gather in forward, over 16 ranks"] == (0, 3 * 4096 * 4)


def test_communication_that_is_no_longer_hidden_is_told_and_is_no_structure(tmp_path: Path, compare: Any) -> None:
    jobs = [
        save_job(tmp_path / str(n), hidden(computes), world=2, shards=1, steps=4)
        for n, computes in enumerate((31.0, 16.0))
    ]
    code, document = compare(*jobs)
    (one,) = document["figures"]
    assert (code, document["differences"], one["kind"]) == (0, [], "exposed")
    assert (one["one"], one["other"]) == (pytest.approx(20e-6), pytest.approx(35e-6))
    assert one["within"] is False


def test_only_ranks_that_both_traced_are_compared(tmp_path: Path, compare: Any) -> None:
    code, document = compare(save_job(tmp_path / "a", HSDP), save_job(tmp_path / "b", HSDP, ranks=(0, 9)))
    assert (code, document["differences"], document["figures"]) == (0, [], [])
    assert document["not_compared"] == ["compared: 2 of 16 ranks"]


def test_traces_that_name_no_group_are_not_called_the_same(tmp_path: Path, compare: Any) -> None:
    for name in "ab":
        for path in save_job(tmp_path / name, ddp_step, world=2, shards=1).iterdir():
            info = load_info(path)
            del info["distributedInfo"]["pg_config"]
            for event in info["traceEvents"]:
                event["args"].pop("Process Group Ranks", None)
            save_info(path, info)
    code, document = compare(tmp_path / "a", tmp_path / "b")
    assert (code, document["differences"]) == (2, [])
    assert any("name no group" in text for text in document["not_compared"])


def test_traces_are_not_compared_with_something_else(tmp_path: Path, compare: Any) -> None:
    (tmp_path / "b").mkdir()
    assert compare(save_job(tmp_path / "a", HSDP, ranks=(0,)), tmp_path / "b", kind="error")[0] == 2
