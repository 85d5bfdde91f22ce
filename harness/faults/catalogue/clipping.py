"""Mistakes in the global gradient norm and in clipping by it."""

from __future__ import annotations

from typing import Any

from harness.faults import Fired, fault, replace


def _extra_sum(fired: Fired, axis: str, whole_only: bool = False) -> None:
    """The sum of squares is also summed over an axis along which ranks hold the same."""
    import torch.distributed as dist

    from harness.trainers.llama3 import clip

    def make(original: Any) -> Any:
        def too_much(family: Any, mesh: Any, placements: Any) -> Any:
            total = original(family, mesh, placements)
            names = mesh.mesh_dim_names if mesh is not None else ()
            if axis in names and placements[names.index(axis)].is_replicate():
                fired()
                dist.all_reduce(total, group=mesh.get_group(axis))
            return total

        return too_much

    replace(clip, "sum_of_squares", make)


@fault(
    breaks="the gradient norm is summed over replicas too, so that HSDP clips harder than FSDP",
    bug="C04 ByteDance-Seed/VeOmni #862",
    case="hsdp_2x2",
    caught_by="grad_norm update",
    named="each replica along dp_replicate counted again",
)
def norm_summed_over_replicas(fired: Fired) -> None:
    _extra_sum(fired, "dp_replicate")


@fault(
    breaks="parameters that are whole on every tp rank are counted tp times in the gradient norm",
    bug="C06 deepspeedai/DeepSpeed #5411; NVIDIA/Megatron-LM #5916",
    case="tp_2",
    caught_by="grad_norm update",
    named="each replica along tp counted again",
)
def replicated_parameters_counted_tp_times(fired: Fired) -> None:
    _extra_sum(fired, "tp")


@fault(
    breaks="each rank clips by the norm of its own shards",
    bug="of the family of C01 pytorch/torchtitan #649: a norm that lacks the sum over an axis",
    case="fsdp_2",
    caught_by="grad_norm update",
    named="each rank clips by the norm of its own shards",
)
def norm_of_own_shards_only(fired: Fired) -> None:
    from harness.trainers.llama3 import clip

    def make(original: Any) -> Any:
        def own(family: Any, mesh: Any, placements: Any) -> Any:
            fired()
            return original(family, None, ())

        return own

    replace(clip, "sum_of_squares", make)


@fault(
    breaks="the reported gradient norm is that of the rank's own shards, clipping is right",
    bug="C02 pytorch/torchtitan #766, #769; pytorch #170862",
    case="fsdp_2",
    caught_by="grad_norm",
    named="the reported gradient norm is wrong, the training itself is right: each rank shows the norm of its own shards",
)
def displayed_norm_is_local(fired: Fired) -> None:
    from torch.distributed.tensor import DTensor

    from harness.trainers.llama3 import clip

    def make(original: Any) -> Any:
        def local(parameters: Any, *args: Any) -> float:
            shards = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in parameters]
            own = sum(float(shard.square().sum()) for shard in shards) ** 0.5
            original(parameters, *args)
            fired()
            return own

        return local

    replace(clip, "clip_gradients", make)


def _coefficient(fired: Fired, choose: Any) -> None:
    """torch clips with another coefficient than min(1, max_norm / norm)."""
    import torch

    def clip(parameters: Any, max_norm: float, total_norm: Any, *args: Any, **kwargs: Any) -> None:
        fired()
        for parameter in parameters:
            parameter.grad.mul_(choose(max_norm / (float(total_norm) + 1e-6)))

    replace(torch.nn.utils, "clip_grads_with_norm_", lambda original: clip)


@fault(
    breaks="the clip coefficient is max(1, c) instead of min(1, c): small gradients are enlarged, large ones left",
    bug="C05 deepspeedai/DeepSpeed #5150",
    case="fsdp_4_high_clip",
    caught_by="update",
    named="clipping enlarges gradients: it multiplies by",
)
def clipping_enlarges(fired: Fired) -> None:
    _coefficient(fired, lambda c: max(1.0, c))


@fault(
    breaks="the branch that clips is never entered",
    bug="of the family of P13: a feature applied to another object than the one that trains",
    case="fsdp_2",
    caught_by="update",
    named="gradients are not clipped",
)
def clipping_not_applied(fired: Fired) -> None:
    _coefficient(fired, lambda c: 1.0)


@fault(
    breaks="a gradient that overflowed is not noticed before the optimizer uses it",
    bug="C11 pytorch/torchtitan #4226",
    case="fsdp_2",
    caught_by="gradients update",
    named="gradients are NaN or infinite in step 1",
)
def overflow_goes_into_the_weights(fired: Fired) -> None:
    from harness.trainers.llama3 import trainer

    def make(original: Any) -> Any:
        def overflowing(*args: Any, **kwargs: Any) -> Any:
            fired()
            return original(*args, **kwargs) * float("inf")

        return overflowing

    replace(trainer, "scaled", make)


@fault(
    breaks="the reported gradient norm is that after clipping",
    bug="of the family of C02 pytorch/torchtitan #766: another norm is reported than the one that is requested",
    case="fsdp_2",
    caught_by="grad_norm",
    named="each rank shows the norm after clipping (1), requested is the one before it",
)
def displayed_norm_after_clipping(fired: Fired) -> None:
    from harness.trainers.llama3 import clip

    def make(original: Any) -> Any:
        def after(parameters: Any, max_norm: Any, groups: Any = ()) -> float:
            fired()
            original(parameters, max_norm, groups)
            return original(parameters, None, groups)

        return after

    replace(clip, "clip_gradients", make)


@fault(
    breaks="clipping multiplies by max_norm / norm, without the 1e-6 that torch adds to the norm",
    bug="of the family of C05 deepspeedai/DeepSpeed #5150: another coefficient than torch's",
    case="fsdp_2",
    caught_by="update",
    named="clipping multiplies by max_norm / norm, requested max_norm / (norm + 1e-6), as torch does",
)
def clipped_without_the_1e_6(fired: Fired) -> None:
    import torch

    def make(original: Any) -> Any:
        def clip(parameters: Any, max_norm: float, total_norm: Any, **kwargs: Any) -> None:
            fired()
            original(parameters, max_norm, total_norm - 1e-6, **kwargs)

        return clip

    replace(torch.nn.utils, "clip_grads_with_norm_", make)


@fault(
    breaks="a clipping function of the trainer's own takes the norm of the rank's shards for that of all",
    bug="of the family of C01 pytorch/torchtitan #649: a norm that lacks the sum over an axis",
    case="fsdp_2",
    caught_by="grad_norm update",
    named="each rank clips by the norm of its own shards",
)
def own_clipping_by_own_shards(fired: Fired) -> None:
    from harness.trainers.llama3 import clip

    def own(parameters: Any, max_norm: float | None, groups: Any = ()) -> float:
        shards = [parameter.grad.to_local() for parameter in parameters]
        norm = sum(float(shard.square().sum()) for shard in shards) ** 0.5
        fired()
        for shard in shards:
            shard.mul_(min(1.0, (max_norm or norm) / (norm + 1e-6)))
        return norm

    replace(clip, "clip_gradients", lambda original: own)
