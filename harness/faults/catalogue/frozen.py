"""Faults of frozen weights and adapters: what is not reduced, not frozen, not zero, or scaled twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from harness.faults import fault
from harness.faults import operators as op

LAST = "layers.1."


def _frozen_parameters(trainer: Any) -> list[Any]:
    """Return the trainer's parameters that need no gradient."""
    parameters = []
    for part in trainer.model_parts:
        parameters += [parameter for parameter in part.parameters() if not parameter.requires_grad]
    return parameters


# ---- adapters


@fault(
    breaks="what is whole of an adapter on every tp rank keeps the gradient of that rank's part of its matrix",
    bug="T15 modelscope/mcore-bridge PR #173",
    case="lora_tp_2",
    caught_by="gradients grad_norm replica_agreement",
    named="gradients not reduced",
)
@partial(op.before_call, ".parallelize:settle_gradients")
def adapters_not_reduced_over_tp(parameters: list[Any]) -> None:
    """Label gradients with their parameters' placements, so that sums over tp that are still due are left out."""
    from torch.distributed.tensor import DTensor

    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.placements != parameter.placements:
            parameter.grad = DTensor.from_local(
                parameter.grad.to_local(), parameter.device_mesh, parameter.placements, run_check=False
            )


@fault(
    breaks="adapters of the last block are added behind the wrapper: nobody reduces their gradients",
    bug="G22 hao-ai-lab/FastVideo PR #1666; huggingface/transformers PR #48873",
    case="lora_ddp_2",
    caught_by="gradients traffic replica_agreement",
    named="gradients not reduced",
)
@partial(op.before_call, ".parallelize:apply_ddp")
def adapters_added_behind_the_wrapper(model: Any, *_: Any) -> None:
    """Have DDP ignore the adapters of layer 1."""
    from torch.nn.parallel import DistributedDataParallel

    names = [name for name, _ in model.named_parameters() if ".lora_" in name and name.startswith(LAST)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)


@fault(
    breaks="B of adapters is what memory held once it was allocated, so that training begins elsewhere",
    bug="R07 saforem2/ezpz PR #207; PrimeIntellect-ai/prime-rl PR #1375",
    case="lora_fsdp_2",
    caught_by="initial_weights",
    named="other initial weights",
)
@partial(op.after_call, ".trainer:load_weights")
def adapters_begin_with_what_was_in_memory(parts: list[Any], *_: Any) -> None:
    """Fill B of all adapters with 0.01 after weights are loaded."""
    for name, p in parts[0].named_parameters():
        if ".lora_b." in name:
            p.to_local().data.fill_(0.01)


@fault(
    breaks="each tp rank adds the whole of an adapter's result, which then counts tp times",
    bug="T16 NVIDIA-NeMo/Megatron-Bridge #5634: an adapter's result that is not of the kind of its matrix's",
    case="lora_tp_2",
    caught_by="gradients grad_norm",
    named="adapters scaled",
)
@partial(op.after_call, ".lora:put_back")
def adapters_scaled_twice_under_tp(model: Any, *_: Any) -> None:
    """Double the scale of all adapters."""
    from harness.core.trainers.llama3.lora import modules_with_adapters

    for module in modules_with_adapters(model).values():
        module.scale *= 2


@fault(
    breaks="adapters are scaled by alpha, not by alpha / rank",
    bug="E15 Blaizzy/mlx-vlm #841",
    case="lora_fsdp_2",
    caught_by="gradients grad_norm",
    named="adapters scaled",
)
@partial(op.after_call, "harness.reference.model:Adapted.__init__")
def adapters_scaled_by_alpha(module: Any, inputs: int, outputs: int, lora: Any) -> None:
    module.scale = lora.alpha


merged_without_alpha = fault(
    breaks="the export adds B A to each matrix, without alpha / rank",
    bug="S16 hao-ai-lab/FastVideo PR #870",
    case="lora_fsdp_2",
    caught_by="export",
    named="wrong export",
    does=op.instead(
        ".lora:with_merged_adapters", lambda original, state, lora: original(state, replace(lora, alpha=lora.rank))
    ),
)


@fault(
    breaks="the checkpoint has rank 0's slices of adapters alone: on other ranks they begin anew after resuming",
    bug="S17 huggingface/accelerate PR #4206",
    case="lora_fsdp_2_to_fsdp_2",
    caught_by="resume",
    named="parameters not loaded",
)
@partial(op.after_call, ".checkpoint:read")
def adapters_of_other_ranks_not_loaded(state: Mapping[str, Any], *_: Any, **__: Any) -> None:
    """Set B of all adapters to zero after loading, on all ranks but rank 0."""
    for name, value in state["model"].items():
        if ".lora_b." in name and op.this_rank():
            value.to_local().zero_()


# ---- frozen weights


def _freeze_before(model: Any, *_: Any) -> None:
    """Freeze all parameters but adapters, before tensor parallel is applied."""
    from harness.reference.config import TrainingConfig
    from harness.reference.model import freeze

    freeze(model, TrainingConfig(trainable=("*.lora_?.weight",)))


norms_trained_since_sequence_parallel = fault(
    breaks="parameters are frozen before tensor parallel: torch's SequenceParallel makes norms anew, which are trained",
    bug="S15 pytorch/pytorch #171523, PR #171709",
    case="lora_tp_2",
    caught_by="completed features memory traffic",
    named="not frozen",
    does=op.together(
        op.before_call(".parallelize:apply_tensor_parallel", _freeze_before), op.skip_call(".parallelize:freeze")
    ),
)


@fault(
    breaks="weight decay shrinks frozen weights, whose gradients are zero",
    bug="E13 huggingface/diffusers #1009",
    case="frozen_fsdp_2",
    caught_by="update",
    named="weight decay",
)
@partial(op.before_call, ".trainer:Trainer.optimizer_step")
def frozen_weights_decayed(trainer: Any) -> None:
    """Shrink frozen weights by weight decay before each optimizer step."""
    group = trainer.optimizers[0].param_groups[0]
    for p in _frozen_parameters(trainer):
        p.mul_(1 - group["lr"] * group["weight_decay"])


def _with_frozen(original: Callable[..., Any], model: Any, training: Any) -> Any:
    frozen = [p for p in model.parameters() if not p.requires_grad]
    return [*original(model, training), {"params": frozen, "lr": 0.0, "weight_decay": 0.0}]


def _with_zeros(trainer: Any) -> None:
    """Give frozen parameters a gradient of zeros."""
    import torch

    for p in _frozen_parameters(trainer):
        p.grad = torch.zeros_like(p)


frozen_weights_have_a_rate_of_zero = fault(
    breaks="frozen weights are in a group of the optimizer with a rate of zero: they have gradients and state, and stay",
    bug="E14 deepspeedai/DeepSpeed #2615; ServiceNow/Fast-LLM #183",
    case="frozen_fsdp_2",
    caught_by="memory update",
    named="not explained",
    does=op.together(
        op.instead(".recipe:parameter_groups", _with_frozen),
        op.before_call(".trainer:Trainer.optimizer_step", _with_zeros),
    ),
)
