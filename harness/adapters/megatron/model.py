"""Megatron-core's GPT model for a case: its configuration, the chunks of this rank, names and marks of parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import TransformerConfig
from torch import nn

from harness.adapters.megatron import Megatron
from harness.core.case.case import Case
from harness.core.probe.structure import note_placement, note_wrapper
from harness.core.trainers.support.weights import load_weights, tensor_parallel


def build_config(case: Case, device: str) -> TransformerConfig:
    """Return Megatron's configuration for the case: its sizes, layout and recomputation. Dropout, fusions and casts are off.

    All else is as Megatron-core has it.
    """
    dtype = getattr(torch, case.training.dtype)
    return TransformerConfig(
        **_sizes(case),
        **_layout(case),
        **_recomputation(case),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=False,
        apply_rope_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        calculate_per_token_loss=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        use_cpu_initialization=device == "cpu",
    )


def _sizes(case: Case) -> dict[str, Any]:
    """Return the sizes of the model by the names of TransformerConfig."""
    model = case.model
    return {
        "num_layers": model.n_layers,
        "hidden_size": model.dim,
        "ffn_hidden_size": model.ffn_dim,
        "num_attention_heads": model.n_heads,
        "num_query_groups": model.n_kv_heads,
        "normalization": "RMSNorm",
        "layernorm_epsilon": model.norm_eps,
        "gated_linear_unit": True,
        "activation_func": nn.functional.silu,
        "add_bias_linear": False,
    }


def _layout(case: Case) -> dict[str, Any]:
    """Return the degrees of tp and pp, and options that follow from them, by the names of TransformerConfig.

    Trap: with two pipeline ranks the interleaved schedule exchanges the wrong tensors unless sends and receives are
    separate (upstream_bugs/megatron_interleaved_two_ranks.py). megatron.training refuses that, too.
    """
    dims = case.dims
    interleaved = case.stages_per_rank > 1
    return {
        "tensor_model_parallel_size": dims.tp,
        "sequence_parallel": dims.tp > 1 and case.features.sequence_parallel,
        "pipeline_model_parallel_size": dims.pp,
        "virtual_pipeline_model_parallel_size": case.stages_per_rank if interleaved else None,
        "batch_p2p_comm": not interleaved,
        "overlap_p2p_comm": interleaved,
    }


def _recomputation(case: Case) -> dict[str, Any]:
    """Return the options for full activation checkpointing of each layer, by the names of TransformerConfig.

    Empty without it.
    """
    if case.features.activation_checkpointing == "none":
        return {}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def build_chunks(case: Case, config: TransformerConfig, weights: Path | None, adapter: Megatron) -> list[nn.Module]:
    """Return one model for each pipeline stage of this rank, in Megatron's DDP, with the seed weights."""
    numbers = [None] if case.stages_per_rank == 1 else range(case.stages_per_rank)
    chunks = [_build_chunk(case, config, number) for number in numbers]
    cut = tensor_parallel(ps.get_tensor_model_parallel_rank(), case.dims.tp)
    load_weights(chunks, case, weights, adapter.fqn, adapter.rows(case), cut, adapter.fused(case))
    options = DistributedDataParallelConfig(
        overlap_grad_reduce=adapter.overlap_grad_reduce,
        overlap_param_gather=adapter.overlap_param_gather and case.wrapper == "zero1",
        use_distributed_optimizer=case.wrapper == "zero1",
    )
    wrapped = [DistributedDataParallel(config, options, chunk) for chunk in chunks]
    for chunk in wrapped:
        _note_layout(chunk)
    return wrapped


def _build_chunk(case: Case, config: TransformerConfig, number: int | None) -> nn.Module:
    """Return the GPTModel of one pipeline stage, on the current device, without loaded weights.

    number: of the virtual stage; None if a rank has one stage.
    """
    model = case.model
    scaling = case.model.rope_scaling
    virtual_stage = {"ignore_virtual": False, "vp_stage": number}
    chunk = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        model.vocab_size,
        case.training.seq_len,
        pre_process=ps.is_pipeline_first_stage(**virtual_stage),
        post_process=ps.is_pipeline_last_stage(**virtual_stage),
        share_embeddings_and_output_weights=model.tied_embeddings,
        position_embedding_type="rope",
        rotary_base=model.rope_theta,
        rope_scaling=scaling is not None,
        rope_scaling_factor=scaling.factor if scaling else 1.0,
        vp_stage=number,
    )
    chunk.to(device=torch.cuda.current_device(), dtype=config.params_dtype)
    _number_by_model(chunk.decoder.layers)
    return chunk


class _NumberedLayers(nn.ModuleList):
    """Layers that are named by their number in the whole model. `first`: the number of the first one in the stage."""

    first = 0

    def _get_abs_string_index(self, index: Any) -> str:
        return str(self.first + int(super()._get_abs_string_index(index)))


def _number_by_model(layers: Any) -> None:
    """Name layers by their number in the whole model.

    Megatron names the layers of each stage, and of each chunk of a rank, 0, 1, ..: several would have the same name.
    """
    modules = list(layers)
    if modules:
        layers.__class__ = _NumberedLayers
        layers.first = modules[0].layer_number - 1
        layers._modules = {str(layer.layer_number - 1): layer for layer in modules}


def _note_layout(chunk: nn.Module) -> None:
    """Report to the probe over which ranks a chunk's DDP replicates or shards, and how tp cuts its parameters.

    Around a single rank the DDP is not reported, for memory would allow it the buckets that torch's keeps there.
    """
    data = dist.get_process_group_ranks(chunk.dp_cp_group)
    if chunk.ddp_config.use_distributed_optimizer:
        note_wrapper(chunk, "zero1", shard_ranks=data)
    elif len(data) > 1:
        note_wrapper(chunk, "ddp", replicate_ranks=data)
    ranks = dist.get_process_group_ranks(ps.get_tensor_model_parallel_group())
    if len(ranks) == 1:
        return
    for parameter in chunk.parameters():
        cut = getattr(parameter, "tensor_model_parallel", False)
        note_placement(parameter, ranks, parameter.partition_dim if cut else None)
