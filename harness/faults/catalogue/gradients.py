"""Faults of accumulating and reducing gradients."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from harness.faults import Fired, fault
from harness.faults import operators as op

ALL_REDUCE = "torch.distributed:all_reduce"
SYNC = ".parallelize:gradient_sync"
SETTLE = ".parallelize:settle_gradients"

# ---- microbatches


@contextmanager
def _first_kept(original: Any, model: Any, features: Any, *, last: bool) -> Any:
    """Yield within the original. In the last microbatch, replace gradients by those after the microbatch before it."""
    with original(model, features, last=last):
        yield
    for parameter in model.parameters():
        if last:
            parameter.grad.copy_(parameter.first)
        else:
            parameter.first = parameter.grad.clone()


only_the_last_microbatch_counts = fault(
    breaks="every microbatch's gradient is reduced and then overwritten by the next, so only the last one counts",
    bug="G01 NVIDIA/Megatron-LM #7186; the hazard is described in pytorch #125484",
    case="hsdp_2x2_accum",
    caught_by="gradients grad_norm",
    named="unequal contributions",
    does=op.together(
        op.before_call(SYNC, lambda model, *_, **__: model.zero_grad()), op.override_argument(SYNC, last=True)
    ),
)
only_the_first_microbatch_counts = fault(
    breaks="gradients are copied to the accumulation buffer in the first microbatch only",
    bug="G15 deepspeedai/DeepSpeed #6550, #7967, #7981",
    case="single_accum",
    caught_by="gradients grad_norm",
    named="unequal contributions",
    does=op.instead(SYNC, _first_kept),
)
zeroed_before_each_microbatch = fault(
    breaks="gradients are zeroed before each microbatch",
    bug="G16 pytorch/torchtitan #3575",
    case="single_accum",
    caught_by="gradients grad_norm",
    named="unequal contributions",
    does=op.before_call(SYNC, lambda model, *_, **__: model.zero_grad()),
)
ddp_sync_flag_set_too_late = fault(
    breaks="the sync flag of DDP is set after forward, when it has already decided not to reduce",
    bug="G02 karpathy/build-nanogpt #30",
    case="ddp_2_accum",
    caught_by="traffic gradients replica_agreement",
    named="gradients not reduced",
    does=op.override_argument(SYNC, last=False),
)
last_microbatch_added_after_the_reduction = fault(
    breaks="the last microbatch's gradient is added after the reduction, so that it is only each rank's own",
    bug="G03 deepspeedai/DeepSpeed #7985",
    case="ddp_2_accum",
    caught_by="gradients replica_agreement",
    named="gradients not reduced",
    does=op.change_argument(SYNC, last=lambda last: not last),  # of two microbatches the first one is reduced
)
reduced_after_every_microbatch = fault(
    breaks="no_sync has no effect under FSDP2: gradients are reduced after every microbatch",
    bug="G06 huggingface/accelerate #3762; Titan #1929; VeOmni #1026",
    case="fsdp_4_accum",
    caught_by="traffic",
    named="another feature",
    does=op.skip_call(
        "torch.distributed.fsdp:FSDPModule.set_requires_gradient_sync", when=lambda self, sync, **_: not sync
    ),
)
only_the_all_reduce_deferred = fault(
    breaks="the flag that holds back HSDP's all-reduce is set in place of the one that holds back both reductions",
    bug="G06 of its family: set_requires_all_reduce for set_requires_gradient_sync",
    case="hsdp_2x2_accum",
    caught_by="traffic",
    named="another feature",
    does=op.change_argument(SYNC, features=lambda features: replace(features, defer_sync="all_reduce")),
)


# ---- reduction


def delay_reduction(due: op.Condition) -> op.Act:
    """Return an act for a reduction: if due() holds at its call it waits, and is run after the next one that is not due."""
    waiting: list[Any] = []

    def reduce(original: Any, tensor: Any, *args: Any, **kwargs: Any) -> None:
        if due():
            waiting.append(tensor)
            return
        original(tensor, *args, **kwargs)
        if waiting:
            original(waiting.pop(), *args, **kwargs)

    return reduce


replicas_not_reduced = fault(
    breaks="HSDP reduces gradients inside each shard group and never between the replicas",
    bug="G05 pytorch #144530 and M03 pytorch/torchtitan #685: one axis' reduction is missing",
    case="hsdp_2x2",
    caught_by="traffic gradients replica_agreement",
    named="gradients not reduced",
    does=op.skip_call(ALL_REDUCE, when=op.in_backward),
)
reduction_of_a_temporary = fault(
    breaks="the reduction runs on a temporary copy and its result is thrown away",
    bug="G12 NVIDIA/Megatron-LM #5338: all_reduce(x.contiguous()) of an x that is not contiguous",
    case="hsdp_2x2",
    caught_by="gradients replica_agreement",
    named="gradients not reduced",
    does=op.change_argument(ALL_REDUCE, tensor=lambda tensor: tensor.clone(), when=op.in_backward),
)
two_reductions_change_places = fault(
    breaks="on one rank the reductions of two layers of equal size change places, so that each is summed with the other",
    bug="Z03 NVIDIA/Megatron-LM #2218: parameters reduced in the order of a set",
    case="hsdp_2x2",
    caught_by="gradients replica_agreement",
    named="reductions exchanged",
    does=op.on_rank(  # of four, that of layer 3 (after output with norm)
        3, op.instead(ALL_REDUCE, delay_reduction(op.nth_call(*range(2, 80, 4))), when=op.in_backward)
    ),
)
group_left_out_of_the_token_count = fault(
    breaks="a scalar that is meant for the data-parallel ranks is summed over all ranks, tp peers included",
    bug="M09 NVIDIA/Megatron-LM #7452: a collective called without its group",
    case="fsdp_4_tp_2",
    caught_by="gradients grad_norm",
    named="gradients scaled",
    does=op.override_argument(ALL_REDUCE, group=None, when=lambda tensor, *_, **__: not tensor.dtype.is_floating_point),
)


@fault(
    breaks="the divide factor is that of the shard group, whose gradients HSDP reduces over the replicas as well",
    bug="G08 pytorch #155903; pytorch/torchtitan #1551",
    case="hsdp_4x2",
    caught_by="gradients grad_norm",
    named="gradients scaled",
)
@partial(op.after_call, ".parallelize:apply_fsdp")
def divide_factor_of_the_shard_group(model: Any, mesh: Any, case: Any) -> None:
    """Set the divide factor of all FSDP units to the shard degree."""
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(float(mesh["dp_shard"].size()))


gradients_divided_by_dp_once_more = fault(
    breaks="the averaging over data-parallel ranks is not undone, so gradients are too small by their number",
    bug="L06, G09: an average over ranks of a loss that is already a global mean",
    case="fsdp_4",
    caught_by="gradients grad_norm",
    named="gradients scaled",
    does=op.scale_gradient(".trainer:loss_of", 1 / 4),  # FSDP's mean over 4 ranks
)
tied_gradient_counted_twice = fault(
    breaks="the gradient of a tied weight is added once for each of its names",
    bug="G13 pytorch/torchtitan #3174; NVIDIA/Megatron-LM 3479e6fb26, #6164",
    case="fsdp_2_tied",
    caught_by="gradients grad_norm",
    named="gradients scaled",
    does=op.after_call(SETTLE, lambda parameters: parameters[0].grad.mul_(2)),  # tok_embeddings, the output's as well
)
weight_gathered_for_a_histogram = fault(
    breaks="a weight is gathered after each step, for a histogram that somebody once looked at",
    bug="L-class: what is only shown gathers a weight",
    case="fsdp_2",
    caught_by="traffic",
    named="traffic of no plan",
    does=op.after_call(
        ".trainer:Trainer.optimizer_step",
        lambda trainer: trainer.model_parts[0].layers["0"].attention.wq.weight.full_tensor(),
    ),
)


@fault(
    breaks="each time a bucket is reduced, all buckets before it are divided by the number of ranks again",
    bug="G11 NVIDIA/Megatron-LM #3023",
    case="ddp_2",
    caught_by="gradients grad_norm",
    named="gradients scaled",
)
def buckets_rescaled_again(fired: Fired) -> None:
    """Put DDP with a hook in the place of DDP: it divides a bucket by the number of ranks again with each later bucket.

    Fires from the second bucket on.
    """
    import torch
    import torch.distributed as dist

    reduced: list[Any] = []

    def hook(group, bucket):  # torch refuses other annotations than its own
        """Sum a bucket over ranks, and divide it and all buckets before it. Return a future of the bucket."""
        dist.all_reduce(bucket.buffer(), group=group)
        reduced.append(bucket.buffer())
        for buffer in reduced:
            buffer.div_(group.size())
        if len(reduced) > 1:
            fired()
        if bucket.is_last():
            reduced.clear()
        done: Any = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    def wrap(original: Any, model: Any, mesh: Any, case: Any) -> Any:
        """Return the model in DDP with small buckets and the hook."""
        group = mesh.get_group("dp_replicate")
        wrapped = torch.nn.parallel.DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.25)
        wrapped.register_comm_hook(group, hook)
        return wrapped

    op.instead(".parallelize:apply_ddp", wrap)(lambda: None)


last_window_not_reduced = fault(
    breaks="gradients are reduced at every second microbatch, which the last window of an epoch does not have",
    bug="of the family of G06: the count of microbatches decides, and not whether one is the last",
    case="ddp_2_accum_last_window",
    caught_by="traffic gradients grad_norm replica_agreement",
    named="gradients not reduced",
    does=op.override_argument(SYNC, last=False, when=op.nth_call(5)),  # two microbatches a step, and one in the third
)
