"""Mistakes in reducing and accumulating gradients."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import Any

from harness.faults import Fired, fault, replace


def _in_backward() -> bool:
    import torch

    return torch._C._current_graph_task_id() != -1


@fault(
    breaks="the last microbatch's gradient is added after the reduction, so that it stays each rank's own",
    bug="G03 deepspeedai/DeepSpeed #7985",
    case="ddp_2_accum",
    caught_by="gradients replica_agreement",
    named="gradients of microbatch 2 of 2 are not reduced over dp_replicate",
)
def last_microbatch_added_after_the_reduction(fired: Fired) -> None:
    from harness.trainers.llama3 import parallelize

    def make(original: Any) -> Any:
        def too_early(model: Any, *, last: bool) -> Any:
            fired()
            return original(model, last=not last)  # of two microbatches the first one is reduced

        return too_early

    replace(parallelize, "gradient_sync", make)


@fault(
    breaks="no_sync has no effect under FSDP2: gradients are reduced after every microbatch",
    bug="G06 huggingface/accelerate #3762; Titan #1929; VeOmni #1026",
    case="fsdp_4_accum",
    caught_by="traffic",
    named="gradients are reduced after every microbatch (2 times a step), once a step is requested",
)
def reduced_after_every_microbatch(fired: Fired) -> None:
    from torch.distributed.fsdp import FSDPModule

    def always(self: Any, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        if not requires_gradient_sync:
            fired()

    replace(FSDPModule, "set_requires_gradient_sync", lambda original: always)


@fault(
    breaks="the divide factor is that of the shard group, whose gradients HSDP reduces over the replicas as well",
    bug="G08 pytorch #155903; pytorch/torchtitan #1551",
    case="hsdp_4x2",
    caught_by="gradients grad_norm",
    named="4 times what they should be in every parameter: not divided by dp_replicate (4)",
)
def divide_factor_of_the_shard_group(fired: Fired) -> None:
    from harness.trainers.llama3 import parallelize

    def make(original: Any) -> Any:
        def with_factor(model: Any, mesh: Any, case: Any) -> None:
            original(model, mesh, case)
            for module in model.modules():
                if hasattr(module, "set_gradient_divide_factor"):
                    fired()
                    module.set_gradient_divide_factor(float(mesh["dp_shard"].size()))

        return with_factor

    replace(parallelize, "apply_fsdp", make)


@fault(
    breaks="each time a bucket is reduced, all buckets before it are divided by the number of ranks again",
    bug="G11 NVIDIA/Megatron-LM #3023",
    case="ddp_2",
    caught_by="gradients grad_norm",
    named="from step 2 on gradients are scaled by different factors",
)
def buckets_rescaled_again(fired: Fired) -> None:
    import torch
    import torch.distributed as dist

    from harness.trainers.llama3 import parallelize

    reduced: list[Any] = []

    def hook(group, bucket):  # torch refuses other annotations than its own
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

    def apply(model: Any, mesh: Any, *_: Any) -> Any:
        group = mesh.get_group("dp_replicate")
        wrapped = torch.nn.parallel.DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.25)
        wrapped.register_comm_hook(group, hook)
        return wrapped

    replace(parallelize, "apply_ddp", lambda original: apply)


@fault(
    breaks="the reduction runs on a temporary copy and its result is thrown away",
    bug="G12 NVIDIA/Megatron-LM #5338: all_reduce(x.contiguous()) of an x that is not contiguous",
    case="hsdp_2x2",
    caught_by="gradients replica_agreement",
    named="gradient reduction without effect over dp_replicate",
)
def reduction_of_a_temporary(fired: Fired) -> None:
    import torch.distributed as dist

    def make(original: Any) -> Any:
        def on_a_copy(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if not _in_backward():
                return original(tensor, *args, **kwargs)
            fired()
            return original(tensor.clone(), *args, **kwargs)

        return on_a_copy

    replace(dist, "all_reduce", make)


@fault(
    breaks="gradients are copied to the accumulation buffer in the first microbatch only",
    bug="G15 deepspeedai/DeepSpeed #6550, #7967, #7981",
    case="single_accum",
    caught_by="gradients grad_norm",
    named="microbatches 2 of 2 do not contribute",
)
def only_the_first_microbatch_counts(fired: Fired) -> None:
    from harness.trainers.llama3 import parallelize

    kept: dict[int, Any] = {}

    def make(original: Any) -> Any:
        @contextmanager
        def copying(model: Any, *, last: bool) -> Any:
            with original(model, last=last):
                yield
            for parameter in model.parameters():
                if last:
                    fired()
                    parameter.grad.copy_(kept[id(parameter)])
                else:
                    kept[id(parameter)] = parameter.grad.clone()

        return copying

    replace(parallelize, "gradient_sync", make)


@fault(
    breaks="gradients are zeroed before each microbatch",
    bug="G16 pytorch/torchtitan #3575",
    case="single_accum",
    caught_by="gradients grad_norm",
    named="microbatches 1 of 2 do not contribute",
)
def zeroed_before_each_microbatch(fired: Fired) -> None:
    from harness.trainers.llama3 import parallelize

    def make(original: Any) -> Any:
        def after_zeroing(model: Any, *, last: bool) -> Any:
            fired()
            model.zero_grad()
            return original(model, last=last)

        return after_zeroing

    replace(parallelize, "gradient_sync", make)


@fault(
    breaks="the gradient of a tied weight is added once for each of its names",
    bug="G13 pytorch/torchtitan #3174; NVIDIA/Megatron-LM 3479e6fb26, #6164",
    case="fsdp_2_tied",
    caught_by="gradients grad_norm",
    named="counted for the embedding and again for the output, which share it, or not divided by dp_shard (2)",
)
def tied_gradient_counted_twice(fired: Fired) -> None:
    from harness.trainers.llama3 import parallelize

    def make(original: Any) -> Any:
        def settle(parameters: Any) -> None:
            parameters = list(parameters)
            original(parameters)
            fired()
            parameters[0].grad.mul_(2)  # tok_embeddings, which is the output's weight as well

        return settle

    replace(parallelize, "settle_gradients", make)


@fault(
    breaks="on one rank the reductions of two layers of equal size change places, so that each is summed with the other",
    bug="Z03 NVIDIA/Megatron-LM #2218: parameters reduced in the order of a set",
    case="hsdp_2x2",
    caught_by="gradients replica_agreement",
    named="on ranks [1,3], one group of dp_replicate: its members reduce different tensors with each other",
)
def two_reductions_change_places(fired: Fired) -> None:
    import torch.distributed as dist

    waiting: list[Any] = []
    count = [0]

    def make(original: Any) -> Any:
        def swapped(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if not _in_backward() or os.environ.get("RANK") != "3":
                return original(tensor, *args, **kwargs)
            count[0] += 1
            if count[0] % 4 == 2:  # of layer 3 of 4, after output with norm
                waiting.append(tensor)
                return None
            original(tensor, *args, **kwargs)
            if waiting:
                fired()
                original(waiting.pop(), *args, **kwargs)
            return None

        return swapped

    replace(dist, "all_reduce", make)


@fault(
    breaks="a scalar that is meant for the data-parallel ranks is summed over all ranks, tp peers included",
    bug="M09 NVIDIA/Megatron-LM #7452: a collective called without its group",
    case="fsdp_4_tp_2",
    caught_by="gradients grad_norm",
    named="0.5 times what they should be in every parameter: divided by tp (1/2) once too often",
)
def group_left_out_of_the_token_count(fired: Fired) -> None:
    import torch.distributed as dist

    def make(original: Any) -> Any:
        def over_all(tensor: Any, *args: Any, group: Any = None, **kwargs: Any) -> Any:
            if tensor.dtype.is_floating_point:
                return original(tensor, *args, group=group, **kwargs)
            fired()
            return original(tensor, *args, **kwargs)

        return over_all

    replace(dist, "all_reduce", make)


@fault(
    breaks="every rank gathers everybody's tokens in each block, and makes nothing of them",
    bug="D-class: data is moved that nobody requested",
    case="fsdp_2",
    caught_by="traffic",
    named="bytes moved are not the plan's: rank 0, step 1, integers in forward and backward",
)
def tokens_gathered_in_each_block(fired: Fired) -> None:
    import torch
    import torch.distributed as dist

    from harness.reference import model

    def make(original: Any) -> Any:
        def forward(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
            fired()
            mine = torch.zeros(x.shape[:2], dtype=torch.int64)
            dist.all_gather([torch.empty_like(mine) for _ in range(dist.get_world_size())], mine)
            return original(self, x, *args, **kwargs)

        return forward

    replace(model.TransformerBlock, "forward", make)


@fault(
    breaks="a weight is gathered after each step, for a histogram that somebody once looked at",
    bug="L-class: what is only shown gathers a weight",
    case="fsdp_2",
    caught_by="traffic",
    named="bytes moved are not the plan's: rank 0, step 1, outside forward and backward",
)
def weight_gathered_for_a_histogram(fired: Fired) -> None:
    from harness.trainers.llama3.trainer import Trainer

    def make(original: Any) -> Any:
        def step(self: Any) -> float:
            lr: float = original(self)
            fired()
            self.model_parts[0].layers["0"].attention.wq.weight.full_tensor()
            return lr

        return step

    replace(Trainer, "optimizer_step", make)
