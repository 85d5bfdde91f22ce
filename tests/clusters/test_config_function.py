"""torchtitan's configuration as a function returns it, as a case."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from harness.clusters.config_function import case_of_config
from harness.core.case.case import CaseError
from harness.core.case.dims import ParallelDims
from harness.reference.config import RopeScaling


@dataclass(frozen=True)
class Training:
    local_batch_size: int = 8
    global_batch_size: int = -1
    seq_len: int = 2048
    dtype: str = "float32"
    mixed_precision_param: str = "bfloat16"
    gc_freq: int = 50


@dataclass(frozen=True)
class Parallelism:
    data_parallel_shard_degree: int = -1
    tensor_parallel_degree: int = 1
    pipeline_parallel_degree: int = 1
    pipeline_parallel_schedule: str = "1F1B"
    pipeline_parallel_first_stage_less_layers: int = 1
    pipeline_parallel_layers_per_stage: int | None = None
    enable_sequence_parallel: bool = True
    enable_fsdp_symm_mem: bool = False


@dataclass(frozen=True)
class Compile:
    enable: bool = False
    enable_async_tensor_parallel: bool = False


class Linear:
    @dataclass(frozen=True)
    class Config:
        out_features: int = 1536


class Float8Linear:
    class Config(Linear.Config): ...


class FullAC:
    @dataclass(frozen=True)
    class Config: ...


class MemoryBudgetAC:
    @dataclass(frozen=True)
    class Config: ...


class ComplexRoPE:
    @dataclass(frozen=True)
    class Config:
        theta: float = 500_000
        scaling: str = "llama"
        scaling_factor: float = 8.0
        low_freq_factor: float = 1.0
        high_freq_factor: float = 4.0
        original_max_position_embeddings: int = 8192


class RMSNorm:
    @dataclass(frozen=True)
    class Config:
        eps: float = 1e-6


class FlexAttention:
    @dataclass(frozen=True)
    class Config: ...


class GQAttention:
    @dataclass(frozen=True)
    class Config:
        n_heads: int = 8
        n_kv_heads: int | None = 2
        inner_attention: Any = FlexAttention.Config()
        rope: Any = ComplexRoPE.Config()


class FeedForward:
    @dataclass(frozen=True)
    class Config:
        w1: Any = Linear.Config()


class Llama3TransformerBlock:
    @dataclass(frozen=True)
    class Config:
        attention: Any = GQAttention.Config()
        feed_forward: Any = FeedForward.Config()
        attention_norm: Any = RMSNorm.Config()


class Llama3Model:
    @dataclass(frozen=True)
    class Config:
        dim: int = 512
        vocab_size: int = 4096
        enable_weight_tying: bool = False
        layers: tuple[Any, ...] = (Llama3TransformerBlock.Config(),) * 6


@dataclass(frozen=True)
class Spec:
    name: str = "llama3"
    flavor: str = "ours"
    model: Any = Llama3Model.Config()


@dataclass(frozen=True)
class Config:
    model_spec: Any = Spec()
    training: Any = field(default_factory=Training)
    parallelism: Any = field(default_factory=Parallelism)
    activation_checkpoint: Any = FullAC.Config()
    compile: Any = Compile()


def test_sizes_are_those_of_the_model_that_is_returned() -> None:
    case = case_of_config("ours:big", Config(), 64).case
    model = case.model
    assert (model.dim, model.n_layers, model.n_heads, model.n_kv_heads, model.ffn_dim) == (512, 6, 8, 2, 1536)
    assert (model.vocab_size, model.norm_eps, model.rope_scaling) == (4096, 1e-6, RopeScaling(8.0))
    assert (case.dims, case.training.global_batch) == (ParallelDims(dp_shard=64), 512)
    assert (case.training.compute_dtype, case.features.activation_checkpointing) == ("bfloat16", "full")


def test_the_first_stage_has_a_layer_less_unless_it_is_told_otherwise() -> None:
    pipeline = Parallelism(pipeline_parallel_degree=2, tensor_parallel_degree=2, enable_sequence_parallel=False)
    case = case_of_config("ours:big", Config(parallelism=pipeline), 64).case
    assert case.dims == ParallelDims(pp=2, dp_shard=16, tp=2)
    assert (case.features.first_stage_less_layers, case.features.sequence_parallel, case.microbatches) == (1, False, 8)
    told = replace(pipeline, pipeline_parallel_first_stage_less_layers=0)
    assert case_of_config("ours:big", Config(parallelism=told), 64).case.features.first_stage_less_layers == 0


def test_what_is_not_run_is_said_by_its_name() -> None:
    layer = Llama3TransformerBlock.Config(feed_forward=FeedForward.Config(Float8Linear.Config()))
    config = Config(
        model_spec=Spec(model=Llama3Model.Config(layers=(layer,) * 6)),
        training=Training(gc_freq=1),
        parallelism=Parallelism(enable_fsdp_symm_mem=True, pipeline_parallel_layers_per_stage=3),
        compile=Compile(True, True),
    )
    assert case_of_config("ours:big", config, 64).set_aside == (
        *("torch.compile", "enable_async_tensor_parallel"),
        *("pipeline_parallel_layers_per_stage", "enable_fsdp_symm_mem"),
        *("FlexAttention", "Float8Linear"),
    )


@pytest.mark.parametrize(
    ("config", "world", "said"),
    [
        (object(), 64, "ours:big: returns no configuration of torchtitan's llama3"),
        (Config(model_spec=Spec(name="qwen3")), 64, "returns no configuration of torchtitan's llama3"),
        (Config(activation_checkpoint=MemoryBudgetAC.Config()), 64, "activation_checkpoint MemoryBudgetAC"),
        (Config(parallelism=Parallelism(tensor_parallel_degree=8)), 100, "do not divide the world size 100"),
        (Config(model_spec=Spec(model=Llama3Model.Config(layers=()))), 64, "layers of its model are not spelled out"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(config: Any, world: int, said: str) -> None:
    with pytest.raises(CaseError, match=said):
        case_of_config("ours:big", config, world)
