"""torchtitan's configuration file as a case."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.clusters.config_file import read_titan_file
from harness.core.case.case import CaseError
from harness.core.case.dims import ParallelDims

OF_2025 = """
[model]
name = "llama3"
flavor = "405B"
converters = ["float8"]
[training]
local_batch_size = 2
seq_len = 8192
steps = 3000
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 8
enable_async_tensor_parallel = true
expert_parallel_degree = 1
[activation_checkpoint]
mode = "full"
[compile]
enable = true
"""
OF_2024 = """
[model]
name = "llama3"
flavor = "8B"
[training]
batch_size = 4
seq_len = 8192
data_parallel_replicate_degree = 2
data_parallel_shard_degree = -1
tensor_parallel_degree = 1
[experimental]
pipeline_parallel_degree = 2
pipeline_parallel_microbatches = 4
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
"""


def file(folder: Path, text: str) -> Path:
    path = folder / "train.toml"
    path.write_text(text)
    return path


def test_the_shard_degree_is_what_the_others_leave_of_the_world(tmp_path: Path) -> None:
    found = read_titan_file(file(tmp_path, OF_2025), 512)
    assert (found.case.dims, found.case.model.name) == (ParallelDims(dp_shard=64, tp=8), "405B")
    assert (found.case.training.seq_len, found.case.training.global_batch) == (8192, 128)
    assert found.case.features.activation_checkpointing == "full"


def test_its_precision_and_clipping_are_those_of_the_case(tmp_path: Path) -> None:
    asked = '[training]\nmax_norm = 0.5\nmixed_precision_param = "float32"\nmixed_precision_reduce = "bfloat16"'
    case = read_titan_file(file(tmp_path, OF_2025.replace("[training]", asked)), 512).case
    assert (case.training.dtype, case.training.compute_dtype, case.training.max_norm) == ("float32", None, 0.5)
    assert case.features.reduce_dtype == "bfloat16"


def test_what_is_not_run_is_said(tmp_path: Path) -> None:
    assert read_titan_file(file(tmp_path, OF_2025), 512).set_aside == (
        "torch.compile",
        "8 bits",
        "enable_async_tensor_parallel",
    )


def test_the_words_of_earlier_years_are_read_as_well(tmp_path: Path) -> None:
    case = read_titan_file(file(tmp_path, OF_2024), 512).case
    assert case.dims == ParallelDims(pp=2, dp_replicate=2, dp_shard=128)
    assert (case.microbatches, case.local_batch, case.features.activation_checkpointing) == (4, 1, "op")


@pytest.mark.parametrize(
    ("text", "world", "said"),
    [
        (OF_2025, 100, "8 ranks of the other degrees do not divide the world size 100"),
        (OF_2025.replace("405B", "671B"), 512, "model llama3 671B"),
        (OF_2025.replace("shard_degree = -1", "shard_degree = 4"), 512, "= 32 ranks, --world says 512"),
        ("[model", 512, "train.toml"),
        (OF_2025.replace("tensor_parallel_degree = 8", "tensor_parallel_degree = 0"), 512, "tp must be a whole number"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(tmp_path: Path, text: str, world: int, said: str) -> None:
    with pytest.raises(CaseError, match=said):
        read_titan_file(file(tmp_path, text), world)
