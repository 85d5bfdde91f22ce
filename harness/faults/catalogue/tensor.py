"""Mistakes in tensor and sequence parallelism: sums over tp left out, taken twice, or gathered in the wrong order."""

from __future__ import annotations

from typing import Any

from harness.faults import Fired, fault, replace


def _partial_labelled_whole(fired: Fired, where: Any) -> None:
    """Behind the input of where(model), which is whole on every tp rank, each rank's share of its gradient is taken for
    all of it."""
    import torch
    from torch.distributed.tensor import DTensor, Partial, Replicate

    from harness.trainers.llama3 import parallelize

    class Relabel(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: Any) -> Any:
            return x.view_as(x)

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:
            if not any(isinstance(placement, Partial) for placement in gradient.placements):
                return gradient
            fired()
            return DTensor.from_local(gradient.to_local(), gradient.device_mesh, [Replicate()])

    def make(original: Any) -> Any:
        def with_relabel(model: Any, *args: Any) -> None:
            original(model, *args)
            where(model).register_forward_pre_hook(lambda _, inputs: (Relabel.apply(inputs[0]), *inputs[1:]))

        return with_relabel

    replace(parallelize, "apply_tensor_parallel", make)


@fault(
    breaks="the gradient that comes out of the output projection is a share on each tp rank and labelled whole",
    bug="T03 pytorch/torchtitan #3412 (ChunkedCELoss), #1878, #4054",
    case="tp_2",
    caught_by="gradients",
    named="gradients are right in output.weight, and wrong in all that lies before",
)
def gradient_of_the_head_labelled_whole(fired: Fired) -> None:
    _partial_labelled_whole(fired, lambda model: model.output)


@fault(
    breaks="the input gradients of a block's computation that tp cuts default to whole, so that their sum over tp is lost",
    bug="G21 pytorch/torchtitan #4054, #1878, #2416",
    case="tp_2",
    caught_by="gradients",
    named="gradients are right in layers.1.feed_forward.w1.weight, layers.1.feed_forward.w3.weight and what follows",
)
def gradient_of_a_feed_forward_labelled_whole(fired: Fired) -> None:
    _partial_labelled_whole(fired, lambda model: model.layers["1"].feed_forward)


@fault(
    breaks="gradients of norm weights are averaged over tp where they must be summed",
    bug="T02 EleutherAI/gpt-neox #1259",
    case="tp_2",
    caught_by="gradients",
    named="0.5 times what they should be in 5 of 21 parameters",
)
def norm_gradients_averaged_over_tp(fired: Fired) -> None:
    from torch.distributed.tensor import DTensor, Partial

    from harness.trainers.llama3 import parallelize

    def make(original: Any) -> Any:
        def average(parameters: Any) -> None:
            parameters = list(parameters)
            for parameter in parameters:
                if isinstance(parameter.grad, DTensor) and any(p.is_partial() for p in parameter.grad.placements):
                    fired()
                    local, mesh = parameter.grad.to_local(), parameter.device_mesh
                    parameter.grad = DTensor.from_local(local, mesh, [Partial("avg")])
            original(parameters)

        return average

    replace(parallelize, "settle_gradients", make)


@fault(
    breaks="the residual is added on each tp rank before the sum over tp, so that it counts tp times",
    bug="T08 pytorch/torchtitan #4245: an addend inside the region that is summed",
    case="tp_2",
    caught_by="loss gradients reported_loss",
    named="what layers.1.feed_forward gives matches the reference in mean square, what goes into norm does not",
)
def residual_summed_over_tp(fired: Fired) -> None:
    from harness.trainers.llama3 import parallelize

    def make(original: Any) -> Any:
        def with_addend(model: Any, mesh: Any, *args: Any) -> None:
            original(model, mesh, *args)

            def again(_: Any, inputs: Any, output: Any) -> Any:
                fired()
                return output + (mesh.size() - 1) * inputs[0]

            model.layers["1"].register_forward_hook(again)

        return with_addend

    replace(parallelize, "apply_tensor_parallel", make)


@fault(
    breaks="backward of the gathered logits sums over tp a gradient that every rank has whole, so it is tp times too large",
    bug="T10 pytorch/torchtitan #3827",
    case="tp_2_no_loss_parallel",
    caught_by="gradients grad_norm",
    named="2 times what they should be in every parameter: not divided by tp (2)",
)
def gathered_logits_reduced_in_backward(fired: Fired) -> None:
    import torch

    def make(original: Any) -> Any:
        def summed(logits: Any, *args: Any, **kwargs: Any) -> Any:
            def twice(gradient: Any) -> Any:
                fired()
                return gradient * 2

            logits.register_hook(twice)
            return original(logits, *args, **kwargs)

        return summed

    replace(torch.nn.functional, "cross_entropy", make)


@fault(
    breaks="what is gathered along the sequence is stacked on dim 0 and reshaped, so that tokens of samples are mixed",
    bug="T14 NVIDIA/TransformerEngine #530; deepspeedai/DeepSpeed #5664",
    case="tp_2",
    caught_by="loss gradients reported_loss",
    named="what goes into layers.0.attention.wo does not",
)
def gather_along_the_wrong_dim(fired: Fired) -> None:
    from torch.distributed import _functional_collectives as collectives

    def make(original: Any) -> Any:
        def on_dim_0(tensor: Any, gather_dim: int, group: Any, *args: Any, **kwargs: Any) -> Any:
            gathered = original(tensor, 0, group, *args, **kwargs)
            if gather_dim == 0:
                return gathered
            fired()
            shape = list(tensor.shape)
            shape[gather_dim] *= gathered.shape[0] // tensor.shape[0]
            return gathered.reshape(shape)

        return on_dim_0

    for name in ("all_gather_tensor", "all_gather_single"):  # the second is DTensor's since torch 2.13
        if hasattr(collectives, name):
            replace(collectives, name, make)


@fault(
    breaks="sequence parallelism is never applied: norms and residuals are whole on every tp rank",
    bug="of the family of T01: tensor parallelism with another plan for the norms than requested",
    case="fsdp_2_tp_2",
    caught_by="traffic",
    named="sequence_parallel True is requested, False is observed",
)
def sequence_parallel_not_applied(fired: Fired) -> None:
    import dataclasses

    from harness.trainers.llama3 import parallelize

    def make(original: Any) -> Any:
        def without(model: Any, mesh: Any, features: Any) -> None:
            fired()
            original(model, mesh, dataclasses.replace(features, sequence_parallel=False))

        return without

    replace(parallelize, "apply_tensor_parallel", make)


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
