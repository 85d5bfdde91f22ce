"""Faults of the optimizer and its learning rate."""

from __future__ import annotations

from functools import partial
from typing import Any

from harness.faults import fault
from harness.faults import operators as op

SCHEDULER = "torch.optim.lr_scheduler:LambdaLR.__init__"
SCHEDULE = "torch.optim.lr_scheduler:LambdaLR.step"
GROUP = "torch.optim:Optimizer.add_param_group"

# ---- the learning rate


def _a_step_late(factor: Any) -> Any:
    return lambda finished: factor(finished - 1) if finished else 0.0


scheduler_steps_twice = fault(
    breaks="the scheduler steps twice for each update, as one that also counts processes or microbatches does",
    bug="E01 huggingface/transformers #24088; huggingface/accelerate #963, #2926",
    case="fsdp_2",
    caught_by="update",
    named="learning rate",
    does=op.repeat_call(SCHEDULE, when=lambda scheduler: scheduler.last_epoch >= 0),  # the constructor calls it too
)
warmup_off_by_one = fault(
    breaks="the warm-up is counted from 0, so that the first step has no learning rate and the peak comes a step late",
    bug="E02 pytorch/torchtitan #1284, #1010",
    case="fsdp_2",
    caught_by="update",
    named="learning rate",
    does=op.change_argument(SCHEDULER, lr_lambda=_a_step_late),
)


# ---- groups and options


def _orphans(group: dict[str, Any]) -> dict[str, Any]:
    return group | {"params": [parameter.detach().clone().requires_grad_() for parameter in group["params"]]}


optimizer_holds_orphans = fault(
    breaks="the optimizer is given copies of the parameters, made before the model was parallelised: it trains orphans",
    bug="E06 huggingface/accelerate #3835, #3845",
    case="fsdp_2",
    caught_by="completed",
    named="incomplete",
    does=op.change_argument(GROUP, param_group=_orphans),
)
norm_weights_decay = fault(
    breaks="weight decay is applied to norm weights, which the recipe spares",
    bug="E04 huggingface/transformers #35927; Fast-LLM #542: weight decay on norm weights",
    case="fsdp_2_two_groups",
    caught_by="update",
    named="weight decay",
    does=op.instead(".recipe:weight_decay", lambda original, fqn, training: float(training.weight_decay)),
)
norm_weights_in_no_optimizer_group = fault(
    breaks="the optimizer is built of the parameters that decay, the others are in no group and never move",
    bug="P13: parameters that no optimizer holds train without error and never change",
    case="fsdp_2_two_groups",
    caught_by="completed",
    named="incomplete",
    does=op.instead(".recipe:parameter_groups", lambda original, *of: [g for g in original(*of) if g["weight_decay"]]),
)
default_betas = fault(
    breaks="the recipe's betas do not reach the optimizer, which takes its own",
    bug="of the family of S09 NVIDIA/Megatron-LM #4705: hyper-parameters of another group, or the library's",
    case="fsdp_2",
    caught_by="update",
    named="beta2",
    does=op.override_argument("torch.optim:AdamW.__init__", betas=(0.9, 0.999)),
)
weight_decay_in_the_gradients = fault(
    breaks="weight decay is added to the gradients, as Adam's is, so that AdamW's averages hold it too",
    bug="of the family of E04 huggingface/transformers #35927: weight decay where it does not belong",
    case="fsdp_2",
    caught_by="update",
    named="weight decay in the gradients",
    does=op.override_argument("torch.optim:Adam.__init__", decoupled_weight_decay=False),
)
amsgrad_not_asked_for = fault(
    breaks="AdamW divides by the largest second moment so far, not by the present one",
    bug="of the family of E04: an optimizer with another option than the recipe's",
    case="fsdp_2",
    caught_by="update memory",
    named="amsgrad",
    does=op.override_argument("torch.optim:AdamW.__init__", amsgrad=True),
)
requires_grad_lost = fault(
    breaks="a parameter that is registered anew is frozen: it has no gradient and never moves",
    bug="S13 pytorch/torchtitan #4267, #4593: requires_grad lost or gained when parallelism replaces a parameter",
    case="fsdp_2",
    caught_by="completed",
    named="incomplete",
    does=op.after_call(
        ".parallelize:shard",
        lambda model, *_: model.get_parameter("layers.0.attention.wq.weight").requires_grad_(False),
    ),
)

# ---- steps and what comes after them


optimizer_frozen_after_the_first_step = fault(
    breaks="from the second step on the optimizer's captured step does nothing",
    bug="O07 pytorch #115607 (TrainCheck): a compiled optimizer that saw no gradient once never updates again",
    case="fsdp_2",
    caught_by="update",
    named="not stepped",
    does=op.skip_call("torch.optim:AdamW.step", when=lambda optimizer, *_: optimizer.state),
)
gradients_never_zeroed = fault(
    breaks="gradients are never zeroed, so that each step also takes those of all steps before",
    bug="G17 deepspeedai/DeepSpeed #7839",
    case="fsdp_2",
    caught_by="gradients grad_norm",
    named="gradients not zeroed",
    does=op.skip_call("torch.optim:Optimizer.zero_grad"),
)


@fault(
    breaks="after each step the weights pass through float32 (a logger, an average of weights), and come back rounded",
    bug="of the family of N02 huggingface/accelerate #3979: small updates vanish, as weights are kept in less than requested",
    case="fsdp_2",
    caught_by="update",
    named="weights changed",
)
@partial(op.after_call, ".trainer:Trainer.optimizer_step")
def weights_rounded_after_each_step(trainer: Any) -> None:
    """Round all weights to float32 after each optimizer step."""
    for part in trainer.model_parts:
        for parameter in part.parameters():
            weight = parameter.detach()
            weight.copy_(weight.float())


overflow_goes_into_the_weights = fault(
    breaks="a gradient that overflowed is not noticed before the optimizer uses it",
    bug="C11 pytorch/torchtitan #4226",
    case="fsdp_2",
    caught_by="gradients finite",
    named="not finite",
    does=op.scale_result(".trainer:scale_loss", float("inf")),
)


@fault(
    breaks="weight decay is multiplied by the peak of the schedule, not by the step's rate",
    bug="E-class: decoupled decay that does not follow the schedule",
    case="fsdp_2",
    caught_by="update",
    named="weight decay",
)
@partial(op.before_call, ".trainer:Trainer.optimizer_step")
def decays_at_the_peak_rate(trainer: Any) -> None:
    """Scale weights before each optimizer step so that weight decay is that of the schedule's peak rate."""
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            decay = group["weight_decay"]
            for weight in group["params"]:
                weight.detach().mul_((1 - group["initial_lr"] * decay) / (1 - group["lr"] * decay))


@fault(
    breaks="AdamW has made a step of zeros before the first one, so that its counter is one too high",
    bug="E-class: NVIDIA/Megatron-LM #5976, the optimizer's state is made by a step that counts",
    case="fsdp_2",
    caught_by="update",
    named="bias correction",
)
@partial(op.before_call, ".trainer:Trainer.optimizer_step", when=lambda trainer: trainer.step == 0)
def state_is_made_by_a_step_that_counts(trainer: Any) -> None:
    """Step all optimizers once with gradients of zero and a rate of zero, before the first step."""
    gradients = {}
    rates = []
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            rates.append((group, group["lr"]))
            for parameter in group["params"]:
                gradients[parameter] = parameter.grad.clone()
    for parameter in gradients:
        parameter.grad.zero_()
    for group, _ in rates:
        group["lr"] = 0.0
    for optimizer in trainer.optimizers:
        optimizer.step()
    for group, rate in rates:
        group["lr"] = rate
    for parameter, gradient in gradients.items():
        parameter.grad.copy_(gradient)
