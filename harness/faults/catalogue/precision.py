"""Faults of precision: another dtype or format than the one requested, and small errors in recipes with noise."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from harness.faults import fault
from harness.faults import operators as op

reduced_in_bfloat16 = fault(
    breaks="gradients are reduced in bfloat16 where float32 was requested",
    bug="N01 pytorch #190626, N05 deepspeedai/DeepSpeed #5170: a reduction before the cast to the dtype requested",
    case="bf16_fsdp_2",
    caught_by="traffic features",
    named="another feature",
    does=op.change_result(
        ".parallelize:mixed_precision", lambda policy: dataclasses.replace(policy, reduce_dtype=None)
    ),
)


def _in_bfloat16(original: Any, parameter: Any, gradient: Any) -> Any:
    """Return what `original` makes of the gradient in bfloat16, in the gradient's own dtype."""
    import torch

    return original(parameter, gradient.to(torch.bfloat16)).to(gradient.dtype)


norms_summed_over_tp_in_bfloat16 = fault(
    breaks="norms' gradients are summed over tp in bfloat16, before the cast to the float32 that was requested",
    bug="of the family of N01 pytorch #190626: FSDP2's own sum over tp, as torch up to 2.14 does it without accumulation",
    case="fsdp_2_tp_2_accum_bf16",
    caught_by="traffic",
    named="traffic of no plan",
    does=op.instead(
        "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam._get_grad_inner_tensor",
        _in_bfloat16,
        when=lambda _, gradient: any(placement.is_partial() for placement in getattr(gradient, "placements", ())),
    ),
)


def _logits_in_float32(original: Any, module: Any, **keywords: Any) -> Any:
    """Return what fully_shard makes of the module, with an output dtype of float32 if it is the whole model.

    The whole model is the module with `tok_embeddings`. keywords: must have `mp_policy`.
    """
    import torch

    whole = hasattr(module, "tok_embeddings")
    policy = dataclasses.replace(keywords["mp_policy"], output_dtype=torch.float32) if whole else keywords["mp_policy"]
    return original(module, **keywords | {"mp_policy": policy})


logits_cast_by_output_dtype = fault(
    breaks="the root's policy casts the logits to float32 in a run that computes in float64",
    bug="of the family of N01: a dtype of MixedPrecisionPolicy that is not the one of the computation",
    case="fsdp_2",
    caught_by="gradients loss",
    named="rounded",
    does=op.instead(".parallelize:fully_shard", _logits_in_float32),
)
float8_not_applied = fault(
    breaks="the conversion to float8 is requested and silently not done",
    bug="F03 pytorch/torchtitan: the default filter skips the modules meant, silently",
    case="float8_gw_hp_fsdp_2",
    caught_by="features gradients loss",
    named="another feature",
    does=op.skip_call(".quantize:convert"),
)
output_converted_too = fault(
    breaks="the output projection is converted to float8 as well",
    bug="F01 pytorch/torchtitan #4008: the list of exceptions names a module that no longer exists",
    case="float8_gw_hp_fsdp_2",
    caught_by="features gradients",
    named="odd traces",
    does=op.change_result(".quantize:quantized_modules", lambda modules: (*modules, "output")),
)
gradients_one_percent_too_large = fault(
    breaks="gradients are 1% too large",
    bug="L04, G08: a normalisation that is off by little, which clipping and AdamW hide",
    case="bf16_fsdp_2",
    caught_by="gradients grad_norm",
    named="gradients scaled",
    does=op.scale_result(".trainer:scale_loss", 1.01),
)
rotary_angles_in_bfloat16 = fault(
    breaks="rotary angles are computed in bfloat16, as if their table were a buffer that mixed precision casts",
    bug="N03 EleutherAI/gpt-neox #1003; N04 pytorch/torchtitan #2881: the table is cast with the model",
    case="float32_fsdp_2",
    caught_by="loss gradients",
    named="not explained",
    does=op.instead(
        "harness.reference.model:Attention.angles",
        lambda original, attention, positions, like: original(attention, positions, like.bfloat16()).to(like.dtype),
    ),
)
rotary_frequencies_cast_with_the_model = fault(
    breaks="the rotary frequencies are a buffer that is cast to bfloat16 with the model",
    bug="N03 huggingface/transformers #25681, EleutherAI/gpt-neox #1016",
    case="fsdp_2",
    caught_by="loss gradients",
    named="not explained",
    does=op.change_result("harness.reference.model:rotary_frequencies", lambda f: f.bfloat16().to(f.dtype)),
)
rotary_angles_and_tables_in_bfloat16 = fault(
    breaks="rotary angles are bfloat16, and so are the cosines and sines that are computed of them",
    bug="N03 of its family: the whole rotary embedding in the dtype that the model computes in",
    case="bf16_fsdp_2",
    caught_by="loss",
    named="not explained",
    does=op.instead(
        "harness.reference.model:Attention.angles",
        lambda original, attention, positions, like: original(attention, positions, like.bfloat16()),
    ),
)


@fault(
    breaks="the optimizer keeps its second moment in bfloat16",
    bug="E-class: optimizer state in low precision, rounded to the nearest number",
    case="float32_fsdp_2",
    caught_by="update",
    named="rounded",
)
@partial(op.after_call, ".trainer:Trainer.optimizer_step")
def second_moment_in_bfloat16(trainer: Any) -> None:
    """Round each second moment to bfloat16 after each optimizer step."""
    for optimizer in trainer.optimizers:
        for state in optimizer.state.values():
            moment = getattr(state["exp_avg_sq"], "_local_tensor", state["exp_avg_sq"])
            moment.copy_(moment.bfloat16())


@fault(
    breaks="DDP casts gradients to float16 to reduce them, by a communication hook that was left registered",
    bug="E-class: torch's fp16_compress_hook",
    case="float32_ddp",
    caught_by="gradients features traffic",
    named="rounded",
)
@partial(op.instead, ".parallelize:apply_ddp")
def gradients_reduced_in_float16(original: Any, *args: Any) -> Any:
    """Return the model in DDP, with torch's hook that reduces gradients in float16."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = original(*args)
    model.register_comm_hook(None, fp16_compress_hook)
    return model
