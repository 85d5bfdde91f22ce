"""Ranks that share a GPU: by which library they talk, what they are told, what is said of it. No GPU is needed for that."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from harness.core.case.loading import from_json
from harness.core.cli.parsing import BadInput, Parser, add_how_to_run
from harness.core.cli.work.options import run_options_of
from harness.core.launch import machine
from harness.core.launch.rank import share_gpus
from harness.core.run import communication, supported
from harness.core.run.folders import folder_of
from harness.core.run.launches import describe_origin, slots_for
from harness.core.run.options import Options
from harness.core.trainers.support.process_group import backend_for

CUDA = Options(device="cuda")
SHARED = replace(CUDA, ranks_per_gpu=2)
FSDP = from_json({"name": "four", "why": "a test", "dims": {"dp_shard": 4}})
PIPELINE = from_json({"name": "stages", "why": "a test", "dims": {"pp": 2}})


def nccl(monkeypatch: pytest.MonkeyPatch, *version: int) -> None:
    monkeypatch.setattr(communication, "nccl_version", lambda: version)


def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supported, "count_visible_gpus", lambda: 1)


@pytest.mark.parametrize(
    ("options", "version", "told"),
    [
        (Options(), (0,), {}),
        (CUDA, (2, 28, 9), {"HARNESS_BACKEND": "nccl"}),
        (SHARED, (2, 28, 9), {"HARNESS_BACKEND": "gloo"}),
        (SHARED, (2, 30, 7), {"HARNESS_BACKEND": "nccl", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}),
        (replace(SHARED, backend="gloo"), (2, 30, 7), {"HARNESS_BACKEND": "gloo"}),
    ],
)
def test_ranks_that_share_a_gpu_talk_by_nccl_where_it_can(
    monkeypatch: pytest.MonkeyPatch, options: Options, version: tuple[int, ...], told: dict[str, str]
) -> None:
    nccl(monkeypatch, *version)
    assert communication.communication_environment(options, FSDP) == told


def test_a_case_that_runs_twice_has_cublas_add_up_in_one_order() -> None:
    twice = replace(FSDP, runs=2)
    assert communication.communication_environment(CUDA, twice)["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert communication.communication_environment(Options(), twice) == {}


def test_a_trainer_that_asks_is_told_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HARNESS_BACKEND", raising=False)
    assert (backend_for("cuda"), backend_for("cpu")) == ("nccl", "gloo")
    monkeypatch.setenv("HARNESS_BACKEND", "gloo")
    assert backend_for("cuda") == "gloo"


def test_what_is_shared_is_said_with_the_verdict_and_lies_in_a_folder_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nccl(monkeypatch, 2, 28, 9)
    made = describe_origin(FSDP, SHARED)
    assert made["replaced"] == "communication: NCCL by gloo, through the host (up to 2 ranks share a GPU)"
    assert (made["backend"], made["ranks-per-gpu"]) == ("gloo", "2")
    assert "replaced" not in describe_origin(FSDP, CUDA)
    assert folder_of(FSDP, SHARED) == Path("out/four+cuda+2_ranks_per_gpu")


def test_two_ranks_on_each_of_two_gpus_take_two_slots_and_name_one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (slots_for(FSDP, SHARED), slots_for(FSDP, CUDA), slots_for(FSDP, Options())) == (2, 4, None)
    found = []
    for rank in range(4):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        share_gpus({"device": "cuda", "ranks_per_gpu": 2})
        found.append(os.environ["LOCAL_RANK"])
    assert found == ["0", "0", "1", "1"]


def test_on_cpu_local_ranks_are_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    share_gpus({"device": "cpu", "ranks_per_gpu": 1})
    assert os.environ["LOCAL_RANK"] == "3"


def test_a_case_that_needs_more_gpus_is_told_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    one_gpu(monkeypatch)
    nccl(monkeypatch, 2, 28, 9)
    remedy = "use more machines, or let ranks share a GPU with --ranks-per-gpu"
    assert supported.reason_unsupported(FSDP, CUDA) == f"needs 4 GPUs, and 1 are visible; {remedy}"
    assert supported.reason_unsupported(FSDP, replace(CUDA, ranks_per_gpu=4)) is None


def test_where_no_gpu_is_visible_the_message_says_how_to_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supported, "count_visible_gpus", lambda: 0)
    reason = supported.reason_unsupported(FSDP, CUDA)
    assert reason is not None and reason.endswith("or leave out --device cuda to run on CPU")


def test_gloo_sends_no_tensors_of_gpus_so_no_pipeline_runs_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    one_gpu(monkeypatch)
    nccl(monkeypatch, 2, 28, 9)
    why = "pp with gloo on GPUs: gloo sends no tensor of a GPU from one rank to another"
    assert supported.reason_unsupported(PIPELINE, SHARED) == why
    nccl(monkeypatch, 2, 30, 7)
    assert supported.reason_unsupported(PIPELINE, SHARED) is None


def test_a_trainer_that_joins_nccl_only_shares_no_gpu_with_an_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl(monkeypatch, 2, 28, 9)
    own = str(Path(__file__).parents[2] / "own_trainer.py")
    told = communication.reason_against_backend(FSDP, replace(SHARED, trainer=own))
    assert told.endswith("joins no group of gloo on GPUs, and NCCL 2.28.9 lets no two ranks share one (2.30 does)")


@pytest.mark.parametrize(
    ("typed", "problem"),
    [
        (["--ranks-per-gpu", "2"], "need --device cuda"),
        (["--backend", "gloo"], "need --device cuda"),
        (
            ["--device", "cuda", "--ranks-per-gpu", "2", "--launcher", "torchrun", "--torchrun-args=--nnodes=2"],
            "share the GPUs of one machine",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused(typed: list[str], problem: str) -> None:
    parser = Parser()
    add_how_to_run(parser)
    with pytest.raises(BadInput, match=problem):
        run_options_of(parser.parse_args(typed))


def test_noise_measured_on_one_kind_of_gpu_is_not_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "NAME_GPUS", ("echo", "NVIDIA H200"))
    machine.gpu_model.cache_clear()
    assert machine.gpu_model() == "NVIDIA-H200"
    monkeypatch.setattr(machine, "NAME_GPUS", ("no-such-tool",))
    machine.gpu_model.cache_clear()
    assert machine.gpu_model() == "unknown"
    machine.gpu_model.cache_clear()
