"""Mistakes of precision: another dtype or format than the one requested, and small errors in recipes with noise."""

from __future__ import annotations

from typing import Any

from harness.faults import Fired, fault, replace


@fault(
    breaks="gradients are reduced in bfloat16 where float32 was requested",
    bug="N01 pytorch #190626, N05 deepspeedai/DeepSpeed #5170: a reduction before the cast to the dtype requested",
    case="bf16_fsdp_2",
    caught_by="traffic features",
    named="gradients are reduced in bfloat16, requested float32",
)
def reduced_in_bfloat16(fired: Fired) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from harness.trainers.llama3 import parallelize

    def make(original: Any) -> Any:
        def without_reduce_dtype(case: Any) -> Any:
            fired()
            return MixedPrecisionPolicy(param_dtype=original(case).param_dtype)

        return without_reduce_dtype

    replace(parallelize, "mixed_precision", make)


@fault(
    breaks="the conversion to float8 is requested and silently not done",
    bug="F03 pytorch/torchtitan: the default filter skips the modules meant, silently",
    case="float8_gw_hp_fsdp_2",
    caught_by="features gradients loss",
    named="float8_rowwise_with_gw_hp is requested, no matmul ran in that format",
)
def float8_not_applied(fired: Fired) -> None:
    from harness.trainers.llama3 import quantize

    replace(quantize, "convert", lambda _: lambda *args: fired())


@fault(
    breaks="the output projection is converted to float8 as well",
    bug="F01 pytorch/torchtitan #4008: the list of exceptions names a module that no longer exists",
    case="float8_gw_hp_fsdp_2",
    caught_by="features gradients",
    named="float8_rowwise matmuls of output, which nobody requested",
)
def output_converted_too(fired: Fired) -> None:
    from harness.trainers.llama3 import quantize

    def make(original: Any) -> Any:
        def one_more(model: Any) -> Any:
            fired()
            return (*original(model), "output")

        return one_more

    replace(quantize, "quantized_modules", make)


@fault(
    breaks="gradients are 1% too large",
    bug="L04, G08: a normalisation that is off by little, which clipping and AdamW hide",
    case="bf16_fsdp_2",
    caught_by="gradients grad_norm",
    named="gradients are 1.01 times what they should be in every parameter, and rounded otherwise",
)
def gradients_one_percent_too_large(fired: Fired) -> None:
    from harness.trainers.llama3 import trainer

    def make(original: Any) -> Any:
        def larger(*args: Any, **kwargs: Any) -> Any:
            fired()
            return original(*args, **kwargs) * 1.01

        return larger

    replace(trainer, "scaled", make)


@fault(
    breaks="the gradient of one weight is 2% too large, in a recipe whose noise is 5% of the largest entry",
    bug="of the family of L04 and G08: a normalisation that is off by little, in one parameter only",
    case="bf16_fsdp_2",
    caught_by="gradients",
    named="gradients are 1.02 times what they should be in 1 of 21 parameters (layers.0.ffn_norm.weight)",
)
def one_gradient_two_percent_too_large(fired: Fired) -> None:
    from harness.trainers.llama3 import parallelize

    def make(original: Any) -> Any:
        def settle(parameters: Any) -> None:
            parameters = list(parameters)
            original(parameters)
            fired()
            parameters[9].grad.mul_(1.02)  # layers.0.ffn_norm, of which the norm shows nothing

        return settle

    replace(parallelize, "settle_gradients", make)


@fault(
    breaks="the gradient of one norm weight is summed over its tokens in bfloat16, one after the other",
    bug="of the family of N01: a kernel of its own for the norm, which adds up in the dtype of what it is given",
    case="bf16_fsdp_2",
    caught_by="gradients",
    named="in 1 of 21 parameters (layers.0.attention_norm.weight), and no factor explains it",
)
def norm_gradient_summed_in_bfloat16(fired: Fired) -> None:
    import torch

    from harness.reference.model import RMSNorm

    first: list[Any] = []

    class Weighted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            ctx.save_for_backward(x, weight)
            return x * weight

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            x, weight = ctx.saved_tensors
            fired()
            total = torch.zeros_like(weight)
            for row in (gradient * x).flatten(0, -2):
                total = total + row
            return gradient * weight, total

    def make(original: Any) -> Any:
        def forward(self: Any, x: Any) -> Any:
            first.append(self)
            if self is not first[0]:
                return original(self, x)
            wide = x.float()
            normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
            return Weighted.apply(normed.to(x.dtype), self.weight)

        return forward

    replace(RMSNorm, "forward", make)


@fault(
    breaks="rotary angles are computed in bfloat16, as if their table were a buffer that mixed precision casts",
    bug="N03 EleutherAI/gpt-neox #1003; N04 pytorch/torchtitan #2881: the table is cast with the model",
    case="float32_fsdp_2",
    caught_by="loss gradients",
    named="the forward pass is wrong",
)
def rotary_angles_in_bfloat16(fired: Fired) -> None:
    import torch

    from harness.reference.model import Attention

    def make(original: Any) -> Any:
        def coarse(self: Any, positions: Any, like: Any) -> Any:
            fired()
            return original(self, positions, like.to(torch.bfloat16)).to(like.dtype)

        return coarse

    replace(Attention, "angles", make)
