"""The adapter of DeepSpeed: what it refuses, and where a rank's part of a parameter lies."""

from __future__ import annotations

import importlib.util
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from literal import ADAMW, tiny_case

from harness import ROOT
from harness.adapters import deepspeed
from harness.adapters.deepspeed import shards
from harness.core import trainers
from harness.core.case.dims import ParallelDims
from harness.core.case.loading import load_cases
from harness.core.case.variants import with_dtype
from harness.core.judge.result import Verdict
from harness.core.run.options import Options
from harness.core.run.run_case import run_case

THERE = importlib.util.find_spec("deepspeed") is not None
FLOAT32 = replace(ADAMW, dtype="float32")
CASES = ROOT / "harness" / "adapters" / "deepspeed" / "cases" / "zero.yaml"


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize(
    ("dims", "training", "wrapper", "reason"),
    [
        (ParallelDims(dp_shard=2), FLOAT32, "zero1", None),
        (ParallelDims(dp_replicate=2), FLOAT32, None, None),
        (ParallelDims(dp_shard=2), FLOAT32, None, "wrapper fsdp2: DeepSpeed has none but its own"),
        (ParallelDims(tp=2), FLOAT32, None, "tp 2: deepspeed has no such option"),
        (ParallelDims(dp_shard=2), replace(FLOAT32, decay="matrices"), "zero2", "zero2 with decay matrices"),
    ],
)
def test_what_it_does_not_run_is_refused_with_the_reason(dims, training, wrapper, reason) -> None:
    told = trainers.load_adapter("deepspeed").unsupported(tiny_case(dims, training, wrapper=wrapper))
    assert told is None if reason is None else str(told).startswith(reason), told


def test_without_deepspeed_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install deepspeed" in str(trainers.load_adapter("deepspeed").unsupported(tiny_case("ddp_2")))


def test_a_checkout_goes_before_what_is_installed_and_a_folder_without_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", ["installed"])
    adapter = trainers.load_adapter(f"deepspeed@{tmp_path}")
    wanted = tiny_case(ParallelDims(dp_shard=2), FLOAT32, wrapper="zero1")
    assert adapter.unsupported(wanted) == f"{tmp_path}/deepspeed: no DeepSpeed there"
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").touch()
    adapter.importable()
    assert adapter.unsupported(wanted) is None and sys.path == [str(tmp_path), "installed"]
    assert adapter.preload == () and trainers.load_adapter("deepspeed").preload == ("deepspeed",)


def test_what_offload_keeps_on_the_host_is_allowed_with_its_bytes_and_nothing_without_it() -> None:
    offloaded = deepspeed.DeepSpeed(offload=True)
    wanted = {case.name: case for case in load_cases(CASES)}
    sizes = [math.prod(shape) for shape in wanted["zero2_2"].model.parameter_shapes().values()]
    once = 4 * (sum(sizes) // 2 + 2 * max(sizes))
    kept = {name: [one.bytes for one in offloaded.traits(wanted[name]).allow] for name in ("zero2_2", "zero2_2_accum")}
    assert kept == {"zero2_2": [once], "zero2_2_accum": [2 * once]}
    assert deepspeed.adapter.traits(wanted["zero2_2"]).allow == ()


def test_all_its_cases_are_refused_by_the_trainer_that_does_not_run_zero() -> None:
    told = {trainers.load_adapter("llama3").unsupported(case) for case in load_cases(CASES)}
    cut = "this trainer cuts optimizer state and gradients as it cuts parameters (FSDP)"
    assert told == {f"wrapper zero{stage}: {cut}" for stage in (1, 2, 3)}


def test_the_last_rank_holds_what_is_left_of_a_parameter_and_no_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten entries over four ranks: parts of three, of which the last has one, and of two entries the last two have none."""
    model, held = torch.nn.Linear(2, 1, bias=False), {10: [], 2: []}
    for numel, ranks in held.items():
        part = -(-numel // 4)
        shard = SimpleNamespace(ds_numel=part)
        for rank in range(4):
            monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
            found = shards.PartitionedParameters(model, None).held_numel(
                SimpleNamespace(ds_tensor=shard, ds_numel=numel)
            )
            ranks.append(found)
    assert held == {10: [3, 3, 3, 1], 2: [1, 1, 0, 0]}


def test_gradients_are_the_interval_of_the_vector_that_the_engine_says() -> None:
    model = torch.nn.Linear(3, 2, bias=False)
    address = SimpleNamespace(start=2, numel=3)
    model.weight._hp_mapping = SimpleNamespace(hp_fragment_address=address, param_group_index=0)
    vector = torch.zeros(6, requires_grad=True)
    zero = SimpleNamespace(single_partition_of_fp32_groups=[vector], optimizer=SimpleNamespace(state={}))
    found = shards.Vectors(model, zero)
    assert list(found.gradients()) == []
    vector.grad = torch.arange(6.0)
    assert [(name, part.tolist()) for name, part in found.gradients()] == [("weight", [2.0, 3.0, 4.0])]


@pytest.mark.skipif(not THERE, reason="deepspeed is not installed")
def test_zero2_of_the_real_one_passes_every_check(tmp_path: Path) -> None:
    (wanted,) = (case for case in load_cases(CASES) if case.name == "zero2_2_accum")
    options = Options(out=tmp_path, trainer="deepspeed")
    assert run_case(with_dtype(wanted, "float32"), options).verdict is Verdict.PASS
