"""A layout is read from words, or from the configuration that a job is started with."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from harness.core.case.case import CaseError
from harness.core.case.dims import ParallelDims
from harness.core.case.layout import parse_layout

ND = """
distributed_type: FSDP
fsdp_config: {fsdp_version: 2}
num_processes: 8
parallelism_config:
  parallelism_config_cp_size: 1
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 2
  parallelism_config_tp_size: 2
"""
HYBRID = "distributed_type: FSDP\nnum_machines: 2\nfsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD}"


@pytest.mark.parametrize(
    ("told", "dims"),
    [
        (ND, ParallelDims(dp_replicate=2, dp_shard=2, tp=2)),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}", ParallelDims(dp_shard=8)),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: 3}", ParallelDims(dp_replicate=8)),
        (HYBRID, ParallelDims(dp_replicate=2, dp_shard=4)),
        ("distributed_type: MULTI_GPU", ParallelDims(dp_replicate=8)),
    ],
)
def test_accelerates_configuration_is_a_layout(told: str, dims: ParallelDims, tmp_path: Path) -> None:
    (tmp_path / "some.yaml").write_text(told)
    assert parse_layout(str(tmp_path / "some.yaml"), 8) == dims


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ("a: [", "not valid YAML"),
        ("cases: {}", "distributed_type is missing"),
        ("distributed_type: DEEPSPEED", "distributed_type DEEPSPEED does not define a layout"),
        ("distributed_type: FSDP\nparallelism_config: {parallelism_config_sp_size: 2}", "sp_size: not an axis"),
        (
            "distributed_type: FSDP\nparallelism_config: {parallelism_config_tp_size: two}",
            "must be a number of ranks, got 'two'",
        ),
        ("distributed_type: FSDP\nparallelism_config: 2", "parallelism_config: expected a mapping"),
    ],
)
def test_what_of_accelerates_configuration_is_no_layout_is_said(told: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "some.yaml").write_text(told)
    with pytest.raises(CaseError, match=f"some.yaml: .*{reason}|some.yaml: {reason}"):
        parse_layout(str(tmp_path / "some.yaml"), 8)


def test_a_layout_is_read_from_words() -> None:
    assert parse_layout("dp_replicate=2, dp_shard=8", 16) == ParallelDims(dp_replicate=2, dp_shard=8)
    with pytest.raises(CaseError, match="the axes are pp, dp_replicate, dp_shard, cp, tp"):
        parse_layout("fsdp=2", 2)
    with pytest.raises(CaseError, match="^'dp_shards=2': write AXIS=DEGREE"):
        parse_layout("dp_shards=2", 2)


OLD = "[training]\ndata_parallel_replicate_degree = 2\n[experimental]\npipeline_parallel_degree = 1"
NEW = "[parallelism]\ndata_parallel_replicate_degree = 2\ndata_parallel_shard_degree = 4"


@pytest.mark.parametrize("told", [OLD, NEW])
def test_torchtitans_toml_is_a_layout_wherever_it_has_its_degrees(told: str, tmp_path: Path) -> None:
    (tmp_path / "some.toml").write_text(told)
    assert parse_layout(str(tmp_path / "some.toml"), 8) == ParallelDims(dp_replicate=2, dp_shard=4)


CONFIG = """
class Parallelism:
    data_parallel_replicate_degree, data_parallel_shard_degree, tensor_parallel_degree = 2, -1, 2
class Config:
    parallelism = Parallelism
def hsdp():
    return Config
"""


def test_a_function_that_returns_torchtitans_configuration_is_a_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_registry_of_configs.py").write_text(CONFIG)
    monkeypatch.syspath_prepend(tmp_path)
    assert parse_layout("my_registry_of_configs:hsdp", 16) == ParallelDims(dp_replicate=2, dp_shard=4, tp=2)
    with pytest.raises(
        CaseError, match="my_registry_of_configs:fsdp: no configuration with `parallelism` was returned"
    ):
        parse_layout("my_registry_of_configs:fsdp", 16)
    del sys.modules["my_registry_of_configs"]
