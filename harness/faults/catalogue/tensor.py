"""Faults of tensor and sequence parallelism: sums over tp left out, taken twice, or gathered in the wrong order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.faults import Fired, fault
from harness.faults import operators as op

APPLY = ".parallelize:apply_tensor_parallel"


def _share_taken_for_all(where: Callable[[Any], Any]) -> op.Operator:
    """Return the operator that labels each tp rank's share of a gradient as the whole one.

    The gradient is that of the input of where(model), which is whole on every tp rank.
    """

    def apply(fired: Fired) -> None:
        """Patch tensor parallel so that the module's input passes through Relabel.

        Fires in backward, where it changes a label.
        """
        import torch
        from torch.distributed.tensor import DTensor, Replicate

        class Relabel(torch.autograd.Function):
            """A function that returns its input; in backward it labels a Partial gradient Replicate, without a sum."""

            @staticmethod
            def forward(context: Any, x: Any) -> Any:
                return x.view_as(x)

            @staticmethod
            def backward(context: Any, gradient: Any) -> Any:
                if not any(placement.is_partial() for placement in gradient.placements):
                    return gradient
                fired()
                return DTensor.from_local(gradient.to_local(), gradient.device_mesh, [Replicate()])

        def relabel(model: Any, *_: Any) -> None:
            where(model).register_forward_pre_hook(lambda _, inputs: (Relabel.apply(inputs[0]), *inputs[1:]))

        op.after_call(APPLY, relabel)(lambda: None)

    return apply


def _norm_gradients_labelled(*, average: bool) -> op.Operator:
    """Return the operator that labels gradients still to be summed over tp as whole, or as shares to be averaged.

    Under sequence parallel gradients of norms are what each rank's part of the sequence gave, to be summed.
    """

    def label(parameters: Any) -> None:
        """Give such gradients the placements of their parameter, or Partial("avg")."""
        from torch.distributed.tensor import DTensor, Partial

        for parameter in filter(_has_shares, parameters):
            placements = [Partial("avg")] if average else parameter.placements
            parameter.grad = DTensor.from_local(parameter.grad.to_local(), parameter.device_mesh, placements)

    return op.before_call(
        ".parallelize:settle_gradients", label, when=lambda parameters: any(map(_has_shares, parameters))
    )


def _has_shares(parameter: Any) -> bool:
    return any(placement.is_partial() for placement in getattr(parameter.grad, "placements", ()))


def _averaged_over_tp(gradients: Any) -> None:
    """Average gradients over tp, in place."""
    import torch.distributed as dist

    for gradient in gradients:
        mesh = gradient.device_mesh
        dist.all_reduce(gradient.to_local(), group=mesh.get_group("tp"))
        gradient.to_local().div_(mesh["tp"].size())


gradient_of_the_head_labelled_whole = fault(
    breaks="the gradient that comes out of the output projection is a share on each tp rank and labelled whole",
    bug="T03 pytorch/torchtitan #3412 (ChunkedCELoss), #1878, #4054",
    case="tp_2",
    caught_by="gradients",
    named="lost in backward",
    does=_share_taken_for_all(lambda model: model.output),
)
gradient_of_a_feed_forward_labelled_whole = fault(
    breaks="the input gradients of a block's computation that tp cuts default to whole, so that their sum over tp is lost",
    bug="G21 pytorch/torchtitan #4054, #1878, #2416",
    case="tp_2",
    caught_by="gradients",
    named="lost in backward",
    does=_share_taken_for_all(lambda model: model.layers["1"].feed_forward),
)
norm_gradients_not_summed_over_tp = fault(
    breaks="with sequence parallel, gradients of norm weights are not summed over tp",
    bug="T01 NVIDIA/Megatron-LM #1446; EleutherAI/gpt-neox #1257, #1259",
    case="tp_2",
    caught_by="gradients replica_agreement",
    named="norms not summed",
    does=_norm_gradients_labelled(average=False),
)
norm_gradients_averaged_over_tp = fault(
    breaks="gradients of norm weights are averaged over tp where they must be summed",
    bug="T02 EleutherAI/gpt-neox #1259",
    case="tp_2",
    caught_by="gradients",
    named="gradients scaled",
    does=_norm_gradients_labelled(average=True),
)
whole_gradient_labelled_a_share = fault(
    breaks="backward labels a whole gradient a share behind an output that was summed over tp, and adds it up once more",
    bug="of the family of T03: pytorch #172932, to_local and from_local of a Partial output",
    case="tp_2",
    caught_by="gradients grad_norm",
    named="gradients scaled",
    does=op.after_call(  # tp is 2
        APPLY,
        lambda model, *_: [
            layer.attention.register_forward_hook(lambda _, inputs, output: op.with_scaled_gradient(output, 2))
            for layer in model.layers.values()
        ],
    ),
)
residual_summed_over_tp = fault(
    breaks="the residual is added on each tp rank before the sum over tp, so that it counts tp times",
    bug="T08 pytorch/torchtitan #4245: an addend inside the region that is summed",
    case="tp_2",
    caught_by="loss gradients reported_loss",
    named="not explained",
    does=op.after_call(  # tp is 2
        APPLY, lambda model, *_: model.layers["1"].register_forward_hook(lambda _, inputs, output: output + inputs[0])
    ),
)
gradients_averaged_over_the_world = fault(
    breaks="gradients are averaged over all ranks, over those of tp as well, which hold other slices",
    bug="E-class: DDP around what tp has cut, over the default group",
    case="fsdp_2_tp_2",
    caught_by="gradients grad_norm traffic",
    named="slices mixed",
    does=op.after_call(
        ".parallelize:settle_gradients",
        lambda parameters: _averaged_over_tp(parameter.grad for parameter in parameters),
    ),
)
norm_gradients_summed_once_more_over_tp = fault(
    breaks="gradients of norm weights, which FSDP2 has summed over tp, are summed over tp again and divided by its degree",
    bug="of the family of T02 EleutherAI/gpt-neox #1259: the numbers are right, and the traffic is paid twice",
    case="fsdp_2_tp_2",
    caught_by="traffic",
    named="traffic of no plan",
    does=op.after_call(
        ".parallelize:settle_gradients",
        lambda parameters: _averaged_over_tp(parameter.grad for parameter in parameters if parameter.ndim == 1),
    ),
)
gathered_logits_reduced_in_backward = fault(
    breaks="backward of the gathered logits sums over tp a gradient that every rank has whole, so it is tp times too large",
    bug="T10 pytorch/torchtitan #3827",
    case="tp_2_no_loss_parallel",
    caught_by="gradients grad_norm",
    named="gradients scaled",
    does=op.before_call(
        "torch.nn.functional:cross_entropy", lambda logits, *_, **__: op.with_scaled_gradient(logits, 2)
    ),
)


@fault(
    breaks="what is gathered along the sequence is stacked on dim 0 and reshaped, so that tokens of samples are mixed",
    bug="T14 NVIDIA/TransformerEngine #530; deepspeedai/DeepSpeed #5664",
    case="tp_2",
    caught_by="loss gradients reported_loss",
    named="not explained",
)
def gather_along_the_wrong_dim(fired: Fired) -> None:
    """Patch torch's gather of sharded tensors to gather along dim 0, and to reshape the result to the right shape."""
    from torch.distributed import _functional_collectives as collectives

    def on_dim_0(original: Any, tensor: Any, gather_dim: int, *args: Any, **kwargs: Any) -> Any:
        """Return what is gathered along dim 0, in the shape that gathering along gather_dim has."""
        gathered = original(tensor, 0, *args, **kwargs)
        shape = list(tensor.shape)
        shape[gather_dim] *= gathered.shape[0] // tensor.shape[0]
        return gathered.reshape(shape)

    for name in ("all_gather_tensor", "all_gather_single"):  # the second is DTensor's since torch 2.13
        if hasattr(collectives, name):
            seam = f"{collectives.__name__}:{name}"
            op.instead(seam, on_dim_0, when=lambda tensor, gather_dim, *_, **__: gather_dim != 0)(fired)
