"""torchtitan's nested model configurations, since 2026-02-23, with the case's sizes.

Since 2026-04 they come from builders of layers, before from one layer that is repeated. A builder or a configuration
gets only those arguments that its version takes: see `call_with_known`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

from harness.core.case.case import Case
from harness.reference.config import ModelConfig


def call_with_known(make: Callable[..., Any], **given: Any) -> Any:
    """Return make(..), called with those of the arguments that it takes. The others are dropped."""
    taken = inspect.signature(make).parameters
    return make(**{name: value for name, value in given.items() if name in taken})


def put(config: Any, **given: Any) -> None:
    """Set those options that the configuration has. The others are dropped."""
    for name, value in given.items():
        if hasattr(config, name):
            setattr(config, name, value)


def model_of_size(case: Case, *, masked: bool) -> Any:
    """Return torchtitan's configuration of a Llama of the case's sizes, with adapters of low rank if the case has them.

    masked: attention uses a mask made of positions; torchtitan before 2026-04 ignores it.
    """
    from torchtitan.models import llama3

    if not hasattr(llama3, "_build_llama3_layers"):
        return config_of_one_layer(llama3, case)
    return with_adapters(config_of_layers(llama3, case, masked), case)


def with_adapters(config: Any, case: Case) -> Any:
    """Return the configuration with torchtitan's LoRA on the case's targets, which freezes all else.

    Unchanged without `lora`.
    """
    if (lora := case.model.lora) is None:
        return config
    from torchtitan.components.lora import LoRAConverter

    targets = [*lora.targets, *(["wkv"] if "wv" in lora.targets else [])]  # one configuration is of both wk and wv
    asked = LoRAConverter.Config(rank=lora.rank, alpha=lora.alpha, target_modules=targets)
    return LoRAConverter(asked).convert(config)


def config_of_layers(llama3: Any, case: Case, masked: bool) -> Any:
    """Return the model configuration of torchtitan since 2026-04, which has a configuration for each layer. llama3: its
    module.
    """
    sizes = case.model
    rope = rotary(llama3, case)
    output = llama3.Linear.Config(
        in_features=sizes.dim,
        out_features=sizes.vocab_size,
        param_init=llama3._output_linear_init(sizes.dim),
    )
    return call_with_known(
        llama3.Llama3Model.Config,
        dim=sizes.dim,
        vocab_size=sizes.vocab_size,
        enable_weight_tying=sizes.tied_embeddings,
        tok_embeddings=llama3.Embedding.Config(
            num_embeddings=sizes.vocab_size, embedding_dim=sizes.dim, param_init=llama3._EMBEDDING_INIT
        ),
        norm=llama3.RMSNorm.Config(normalized_shape=sizes.dim, eps=sizes.norm_eps, param_init=llama3._NORM_INIT),
        lm_head=output,
        output=output,  # as it was called until 2026-04-27
        rope=rope,
        layers=layers(llama3, sizes, rope, masked),
    )


def layers(llama3: Any, sizes: ModelConfig, rope: Any, masked: bool) -> Any:
    """Return the configurations of all layers. wq, wk and wv are separate, as an option has it.

    Attention is SDPA and causal, unless `masked`: then it is FlexAttention.
    """
    from torchtitan.models.common.attention import ScaledDotProductAttention

    made = call_with_known(
        llama3._build_llama3_layers,
        n_layers=sizes.n_layers,
        dim=sizes.dim,
        n_heads=sizes.n_heads,
        n_kv_heads=sizes.n_kv_heads,
        hidden_dim=sizes.ffn_dim,
        fuse_qkv=False,
        attn_backend="flex",
        rope=rope,
    )
    for layer in made:
        if not masked:
            put(layer.attention, inner_attention=ScaledDotProductAttention.Config(), mask_type="causal")
        layer.attention_norm.eps = layer.ffn_norm.eps = sizes.norm_eps
    return made


def rotary(llama3: Any, case: Case) -> Any:
    """Return the configuration of the rotary embedding, with complex numbers as the reference has it."""
    return call_with_known(
        getattr(llama3, "ComplexRoPE", llama3.RoPE).Config,
        dim=case.model.head_dim,
        max_seq_len=case.training.seq_len,
        max_context_length=case.training.seq_len,
        theta=case.model.rope_theta,
        backend="complex",
        **rope_options(case.model),
    )


def rope_options(sizes: ModelConfig) -> dict[str, Any]:
    """Return the options that scale rotary frequencies, with "scaling" "none" if the model does not."""
    scaling = sizes.rope_scaling
    if scaling is None:
        return {"scaling": "none"}
    return {
        "scaling": "llama",
        "scaling_factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_position,
    }


def config_of_one_layer(llama3: Any, case: Case) -> Any:
    """Return torchtitan's own debug model before 2026-04, with the case's sizes. Its attention is SDPA."""
    sizes = case.model
    debug = llama3.llama3_configs["debugmodel"]
    config = debug() if inspect.isfunction(debug) else copy.deepcopy(debug)  # a function makes it since 2026-04-03
    put(config, dim=sizes.dim, n_layers=sizes.n_layers, vocab_size=sizes.vocab_size, norm_eps=sizes.norm_eps)
    put(config.layer, norm_eps=sizes.norm_eps)
    put(config.layer.attention, n_heads=sizes.n_heads, n_kv_heads=sizes.n_kv_heads)
    config.layer.feed_forward.hidden_dim = sizes.ffn_dim
    put(config.rope, dim=sizes.head_dim, theta=sizes.rope_theta, scaling="none")
    for part in (config, config.layer):
        for name in ("norm", "attention_norm", "ffn_norm"):
            put(getattr(part, name, None), eps=sizes.norm_eps)
    if hasattr(llama3, "expand_layer_configs"):
        llama3.expand_layer_configs(config)
    return config
