"""Mistakes of precision: another dtype or format than the one requested, and small errors in recipes with noise."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from harness.faults import fault
from harness.faults import operators as op

_norms: list[Any] = []


def _first_norm(norm: Any, x: Any) -> bool:
    if not _norms:
        _norms.append(norm)
    return norm is _norms[0]


def _allow_tf32(*_: Any) -> None:
    import torch

    torch.backends.cuda.matmul.fp32_precision = "tf32"


def _bfloat16_policy(_: Any) -> Any:
    import torch
    from torch.distributed.fsdp import MixedPrecision

    return MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


fsdp1_computes_in_bfloat16 = fault(
    breaks="FSDP1 is given a mixed-precision policy that nobody requested",
    bug="E-class: a policy is the default of a helper, not the recipe's",
    case="fsdp1_4",
    caught_by="features gradients loss",
    named="another feature",
    does=op.change_argument(
        "torch.distributed.fsdp:FullyShardedDataParallel.__init__", mixed_precision=_bfloat16_policy
    ),
)
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
tf32_by_the_newer_setting = fault(
    breaks="rank 1 lets TF32 into float32 matmuls by torch's newer setting, of which the older ones refuse to tell anything",
    bug="Z-class: a switch of precision set by one library for all others",
    case="float32_fsdp_2",
    caught_by="settings",
    named="another setting",
    does=op.on_rank(1, op.before_call(".trainer:build_parts", _allow_tf32)),
)
gradients_one_percent_too_large = fault(
    breaks="gradients are 1% too large",
    bug="L04, G08: a normalisation that is off by little, which clipping and AdamW hide",
    case="bf16_fsdp_2",
    caught_by="gradients grad_norm",
    named="gradients scaled",
    does=op.scale_result(".trainer:scaled", 1.01),
)
one_gradient_two_percent_too_large = fault(
    breaks="the gradient of one weight is 2% too large, in a recipe whose noise is 5% of the largest entry",
    bug="of the family of L04 and G08: a normalisation that is off by little, in one parameter only",
    case="bf16_fsdp_2",
    caught_by="gradients",
    named="gradients scaled",
    does=op.after_call(  # layers.0.ffn_norm, of which the norm shows nothing
        ".parallelize:settle_gradients", lambda parameters: parameters[9].grad.mul_(1.02)
    ),
)


@fault(
    breaks="the gradient of one norm weight is summed over its tokens in bfloat16, one after the other",
    bug="of the family of N01: a kernel of its own for the norm, which adds up in the dtype of what it is given",
    case="bf16_fsdp_2",
    caught_by="gradients",
    named="not explained",
)
@partial(op.instead, "harness.reference.model:RMSNorm.forward", when=_first_norm)
def norm_gradient_summed_in_bfloat16(original: Any, norm: Any, x: Any) -> Any:
    """The gradient of the weight is summed over the tokens one after the other."""
    import torch

    class Weighted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            ctx.save_for_backward(x, weight)
            return x * weight

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            x, weight = ctx.saved_tensors
            total = torch.zeros_like(weight)
            for row in (gradient * x).flatten(0, -2):
                total = total + row
            return gradient * weight, total

    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
    return Weighted.apply(normed.to(x.dtype), norm.weight)


def _by_rounded_tables(_: Any, attention: Any, x: Any, angles: Any) -> Any:
    from harness.reference.model import turn_by

    return turn_by(x, *(table.bfloat16().to(angles.dtype) for table in (angles.cos(), angles.sin())))


policy_not_passed_to_blocks = fault(
    breaks="blocks are wrapped without the mixed precision policy, and compute in float32",
    bug="of the family of N01 pytorch/pytorch #190626: a policy that holds of some of what it is meant for",
    case="bf16_fsdp_2",
    caught_by="features",
    named="another feature",
    does=op.instead(
        ".parallelize:fully_shard",
        lambda original, unit, mp_policy=None, **rest: original(unit, **rest),
        when=lambda unit, **_: hasattr(unit, "ffn_norm"),
    ),
)
rotary_scaled_linearly = fault(
    breaks="Llama 3.1's rescaling divides all rotary frequencies, as linear interpolation does",
    bug="N-class: another model's kind of rotary scaling",
    case="tp_2_rope_scaling",
    caught_by="loss gradients",
    named="not explained",
    does=op.instead(
        "harness.reference.model:rescale", lambda original, frequencies, scaling: frequencies / scaling.factor
    ),
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
rotary_tables_in_bfloat16 = fault(
    breaks="tables of the angles' cosines and sines are rounded to bfloat16 in a run whose dtype is float32",
    bug="Z-class: picotron 59714b1 reads their type from a variable of the environment that its train.py never sets",
    case="float32_fsdp_2",
    caught_by="loss gradients",
    named="not explained",
    does=op.instead("harness.reference.model:Attention.turn", _by_rounded_tables),
)
loss_in_bfloat16 = fault(
    breaks="logits stay in bfloat16, and so do the softmax, the losses of the tokens and their sum",
    bug="N-class: logits.float() is left out before the cross entropy",
    case="bf16_fsdp_2",
    caught_by="loss gradients reported_loss",
    named="not explained",
    does=op.instead(".trainer:at_least_float32", lambda _, logits: logits),
)
