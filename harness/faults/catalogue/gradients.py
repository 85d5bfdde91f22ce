"""Mistakes between backward and the optimizer: reduction, accumulation, normalisation, clipping."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

from harness.faults import Fired, fault, replace


@fault(
    breaks="every microbatch's gradient is reduced and then overwritten by the next, so only the last one counts",
    bug="G01 NVIDIA/Megatron-LM #7186; the hazard is described in pytorch #125484",
    case="hsdp_2x2_accum",
    caught_by="gradients grad_norm",
    named="microbatches 1 of 2 do not contribute",
)
def only_the_last_microbatch_counts(fired: Fired) -> None:
    from harness.trainers.llama3 import parallelize

    def make(original: Any) -> Any:
        @contextmanager
        def overwriting(model: Any, *, last: bool) -> Any:
            if last:
                fired()
            for parameter in model.parameters():
                parameter.grad = None
            with original(model, last=True):
                yield

        return overwriting

    replace(parallelize, "gradient_sync", make)


@fault(
    breaks="each rank divides its loss by its own number of valid tokens, and the ranks' means are averaged",
    bug="L01 pytorch/torchtitan #2206; also transformers #35203, torchtune #1875",
    case="fsdp_4",
    caught_by="gradients grad_norm reported_loss",
    named="the loss is averaged per rank",
)
def loss_averaged_per_rank(fired: Fired) -> None:
    from harness.reference.data import IGNORED
    from harness.trainers.llama3 import trainer

    def make(_: Any) -> Any:
        def local_count(microbatches: Any, mesh: Any, device: Any) -> int:
            fired()
            ranks = 1 if mesh is None else mesh.size()  # the case has no other axes than data-parallel ones
            return ranks * sum(int((part.labels != IGNORED).sum()) for part in microbatches)

        return local_count

    replace(trainer, "count_valid", make)


@fault(
    breaks="with sequence parallel, gradients of norm weights are not summed over tp",
    bug="T01 NVIDIA/Megatron-LM #1446; EleutherAI/gpt-neox #1257, #1259",
    case="tp_2",
    caught_by="gradients replica_agreement",
    named="gradients of norm weights are not summed over tp",
)
def norm_gradients_not_summed_over_tp(fired: Fired) -> None:
    from torch.distributed.tensor import DTensor

    from harness.trainers.llama3 import parallelize

    def make(original: Any) -> Any:
        def label_as_summed(parameters: Any) -> None:
            parameters = list(parameters)
            for parameter in parameters:
                if parameter.dim() == 1 and isinstance(parameter.grad, DTensor):
                    fired()
                    local = parameter.grad.to_local()
                    parameter.grad = DTensor.from_local(local, parameter.device_mesh, parameter.placements)
            original(parameters)

        return label_as_summed

    replace(parallelize, "settle_gradients", make)


@fault(
    breaks="parameters that are whole on every tp rank are clipped on tp rank 0 only",
    bug="C07 deepspeedai/DeepSpeed #1801 (BLOOM-176B)",
    case="fsdp_2_tp_2",
    caught_by="update replica_agreement",
    named="clipping is not applied to",
)
def replicated_parameters_clipped_on_tp_rank_0_only(fired: Fired) -> None:
    import torch

    def make(original: Any) -> Any:
        def clip_some(parameters: Any, max_norm: float, total_norm: Any, *args: Any, **kwargs: Any) -> None:
            parameters = list(parameters)
            left_out = [p for p in parameters if p.dim() == 1 and p.device_mesh["tp"].get_local_rank() != 0]
            if left_out:
                fired()
            chosen = [p for p in parameters if all(p is not other for other in left_out)]
            original(chosen, max_norm, total_norm, *args, **kwargs)

        return clip_some

    replace(torch.nn.utils, "clip_grads_with_norm_", make)


@fault(
    breaks="HSDP reduces gradients inside each shard group and never between the replicas",
    bug="G05 pytorch #144530 and M03 pytorch/torchtitan #685: one axis' reduction is missing",
    case="hsdp_2x2",
    caught_by="traffic gradients replica_agreement",
    named="gradient reduction missing over dp_replicate",
)
def replicas_not_reduced(fired: Fired) -> None:
    import torch
    import torch.distributed as dist

    def make(original: Any) -> Any:
        def outside_backward_only(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if torch._C._current_graph_task_id() == -1:
                return original(tensor, *args, **kwargs)
            fired()  # in backward it is FSDP2's, over the replicas
            return None

        return outside_backward_only

    replace(dist, "all_reduce", make)


@fault(
    breaks="the sync flag of DDP is set after forward, when it has already decided not to reduce",
    bug="G02 karpathy/build-nanogpt #30",
    case="ddp_2_accum",
    caught_by="traffic gradients replica_agreement",
    named="gradient reduction missing over dp_replicate",
)
def ddp_sync_flag_set_too_late(fired: Fired) -> None:
    from harness.trainers.llama3 import parallelize

    def make(original: Any) -> Any:
        def never(model: Any, *, last: bool) -> Any:
            fired()
            return original(model, last=False)

        return never

    replace(parallelize, "gradient_sync", make)


@fault(
    breaks="the averaging over data-parallel ranks is not undone, so gradients are too small by their number",
    bug="L06, G09: an average over ranks of a loss that is already a global mean",
    case="fsdp_4",
    caught_by="gradients grad_norm",
    named="dp_shard (1/4)",
)
def gradients_divided_by_dp_once_more(fired: Fired) -> None:
    from harness.trainers.llama3 import trainer

    def make(original: Any) -> Any:
        def smaller(*args: Any, **kwargs: Any) -> Any:
            fired()
            loss = original(*args, **kwargs)
            if loss.requires_grad:  # the value stays, its gradient is a quarter: FSDP's mean over 4 ranks
                loss.register_hook(lambda gradient: gradient / 4)
            return loss

        return smaller

    replace(trainer, "loss_of", make)
