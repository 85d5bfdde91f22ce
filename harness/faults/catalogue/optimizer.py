"""Mistakes in the optimizer and its learning rate."""

from __future__ import annotations

from typing import Any

from harness.faults import Fired, fault, replace


@fault(
    breaks="the scheduler steps twice for each update, as one that also counts processes or microbatches does",
    bug="E01 huggingface/transformers #24088; huggingface/accelerate #963, #2926",
    case="fsdp_2",
    caught_by="update",
    named="learning rate of step 2 is 0.0003, the schedule's of step 3",
)
def scheduler_steps_twice(fired: Fired) -> None:
    from torch.optim.lr_scheduler import LambdaLR

    def make(original: Any) -> Any:
        def twice(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            if self.last_epoch > 0:  # the first call is the constructor's
                fired()
                original(self, *args, **kwargs)

        return twice

    replace(LambdaLR, "step", make)


@fault(
    breaks="the learning rate falls along a line, not a cosine: at the middle and at the end they are equal",
    bug="of the family of E02 pytorch/torchtitan #1284: a schedule that is right in some steps only",
    case="fsdp_2_eight_steps",
    caught_by="update",
    named="learning rate of step 3 is",
)
def linear_decay(fired: Fired) -> None:
    from torch.optim.lr_scheduler import LambdaLR

    def make(original: Any) -> Any:
        def straight(self: Any, optimizer: Any, lr_lambda: Any, *args: Any, **kwargs: Any) -> None:
            training = lr_lambda.keywords["training"]

            def factor(finished: int) -> float:
                past = finished + 1 - training.warmup_steps
                if past <= 0:
                    return lr_lambda(finished)
                fired()
                return 1 - (1 - training.final_lr_fraction) * past / (training.steps - training.warmup_steps)

            original(self, optimizer, factor, *args, **kwargs)

        return straight

    replace(LambdaLR, "__init__", make)


@fault(
    breaks="the warm-up is counted from 0, so that the first step has no learning rate and the peak comes a step late",
    bug="E02 pytorch/torchtitan #1284, #1010",
    case="fsdp_2",
    caught_by="update",
    named="learning rate of step 1 is 0, requested 0.0015",
)
def warmup_off_by_one(fired: Fired) -> None:
    from torch.optim.lr_scheduler import LambdaLR

    def make(original: Any) -> Any:
        def late(self: Any, optimizer: Any, lr_lambda: Any, *args: Any, **kwargs: Any) -> None:
            def factor(finished: int) -> float:
                fired()
                return lr_lambda(finished - 1) if finished else 0.0

            original(self, optimizer, factor, *args, **kwargs)

        return late

    replace(LambdaLR, "__init__", make)


@fault(
    breaks="rank 1's scheduler misses a step, so that replicas train with different learning rates",
    bug="of the family of E01: the scheduler steps where it should not, or not where it should",
    case="ddp_2",
    caught_by="update replica_agreement",
    named="learning rate of step 2 is 0.0015, the schedule's of step 1 on rank 1, requested 0.003",
)
def one_rank_misses_a_scheduler_step(fired: Fired) -> None:
    import os

    from torch.optim.lr_scheduler import LambdaLR

    def make(original: Any) -> Any:
        def step(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            if self.last_epoch == 1 and os.environ.get("RANK") == "1" and not hasattr(self, "missed"):
                fired()
                self.missed = True
                self.last_epoch = -1
                original(self, *args, **kwargs)

        return step

    replace(LambdaLR, "step", make)


@fault(
    breaks="after each step the weights pass through float32 (a logger, an average of weights), and come back rounded",
    bug="of the family of N02 huggingface/accelerate #3979: small updates vanish, as weights are kept in less than requested",
    case="fsdp_2",
    caught_by="update",
    named="weights are changed between steps 1 and 2, when the optimizer is done: rounded to float32, in every parameter",
)
def weights_rounded_after_each_step(fired: Fired) -> None:
    from harness.trainers.llama3.trainer import Trainer

    def make(original: Any) -> Any:
        def step(self: Any) -> float:
            lr: float = original(self)
            for weight in _held(self):
                fired()
                weight.copy_(weight.float())
            return lr

        return step

    replace(Trainer, "optimizer_step", make)


@fault(
    breaks="averaged weights are swapped in after the last step, for an evaluation, and never swapped out",
    bug="E-class: an average of the weights takes their place and is not taken out again",
    case="ddp_2",
    caught_by="update",
    named="weights are changed after the last step, when the optimizer is done: in every parameter",
)
def average_left_in_after_the_last_step(fired: Fired) -> None:
    from harness.trainers.llama3.trainer import Trainer

    def make(original: Any) -> Any:
        def train(self: Any, last_step: int | None = None, **options: Any) -> None:
            begun = [weight.clone() for weight in _held(self)]
            original(self, last_step, **options)
            for weight, before in zip(_held(self), begun, strict=True):
                fired()
                weight.lerp_(before, 0.5)

        return train

    replace(Trainer, "train", make)


def _held(trainer: Any) -> list[Any]:
    """What this rank holds of every parameter, for anybody to write to."""
    parameters = [parameter.detach() for part in trainer.model_parts for parameter in part.parameters()]
    return [getattr(parameter, "_local_tensor", parameter) for parameter in parameters]


@fault(
    breaks="the optimizer is given copies of the parameters, made before the model was parallelised: it trains orphans",
    bug="E06 huggingface/accelerate #3835, #3845",
    case="fsdp_2",
    caught_by="completed",
    named="does not update",
)
def optimizer_holds_orphans(fired: Fired) -> None:
    from torch.optim import Optimizer

    def make(original: Any) -> Any:
        def of_copies(self: Any, group: dict[str, Any]) -> None:
            fired()
            group["params"] = [parameter.detach().clone().requires_grad_() for parameter in group["params"]]
            original(self, group)

        return of_copies

    replace(Optimizer, "add_param_group", make)


@fault(
    breaks="from the second step on the optimizer's captured step does nothing",
    bug="O07 pytorch #115607 (TrainCheck): a compiled optimizer that saw no gradient once never updates again",
    case="fsdp_2",
    caught_by="update",
    named="the optimizer does not move any parameter in step 2",
)
def optimizer_frozen_after_the_first_step(fired: Fired) -> None:
    import torch

    def make(original: Any) -> Any:
        def once(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.state:
                fired()
                return None
            return original(self, *args, **kwargs)

        return once

    replace(torch.optim.AdamW, "step", make)


@fault(
    breaks="weight decay is lost on its way to the optimizer",
    bug="of the family of E04: parameter groups with another decay than requested",
    case="fsdp_2",
    caught_by="update",
    named="weight decay is not applied, requested 0.1",
)
def no_weight_decay(fired: Fired) -> None:
    from torch.optim import Optimizer

    def make(original: Any) -> Any:
        def without(self: Any, group: dict[str, Any]) -> None:
            fired()
            original(self, group | {"weight_decay": 0.0})

        return without

    replace(Optimizer, "add_param_group", make)


@fault(
    breaks="the recipe's betas do not reach the optimizer, which takes its own",
    bug="of the family of S09 NVIDIA/Megatron-LM #4705: hyper-parameters of another group, or the library's",
    case="fsdp_2",
    caught_by="update",
    named="beta2 is 0.999 in the optimizer, requested 0.95",
)
def default_betas(fired: Fired) -> None:
    import torch

    def make(original: Any) -> Any:
        def without(self: Any, params: Any, *args: Any, betas: Any = None, **kwargs: Any) -> None:
            fired()
            original(self, params, *args, **kwargs)

        return without

    replace(torch.optim.AdamW, "__init__", make)


@fault(
    breaks="a parameter that is registered anew is frozen: it has no gradient and never moves",
    bug="S13 pytorch/torchtitan #4267, #4593: requires_grad lost or gained when parallelism replaces a parameter",
    case="fsdp_2",
    caught_by="completed",
    named="has no gradient of layers.0.attention.wq.weight",
)
def requires_grad_lost(fired: Fired) -> None:
    from harness.trainers.llama3 import parallelize

    def make(original: Any) -> Any:
        def shard(model: Any, *args: Any) -> None:
            original(model, *args)
            fired()
            dict(model.named_parameters())["layers.0.attention.wq.weight"].requires_grad_(False)

        return shard

    replace(parallelize, "shard", make)


@fault(
    breaks="gradients are never zeroed, so that each step also takes those of all steps before",
    bug="G17 deepspeedai/DeepSpeed #7839",
    case="fsdp_2",
    caught_by="gradients grad_norm",
    named="gradients are not zeroed between steps",
)
def gradients_never_zeroed(fired: Fired) -> None:
    from torch.optim import Optimizer

    def keep(self: Any, set_to_none: bool = True) -> None:
        fired()

    replace(Optimizer, "zero_grad", lambda original: keep)


def _with_option(fired: Fired, **option: Any) -> None:
    """AdamW is made with an option that nobody requested."""
    from torch.optim import AdamW

    def make(original: Any) -> Any:
        def chosen(self: Any, *args: Any, **kwargs: Any) -> None:
            fired()
            original(self, *args, **kwargs)
            for group in self.param_groups:
                group.update(option)

        return chosen

    replace(AdamW, "__init__", make)


@fault(
    breaks="weight decay is added to the gradients, as Adam's is, so that AdamW's averages hold it too",
    bug="of the family of E04 huggingface/transformers #35927: weight decay where it does not belong",
    case="fsdp_2",
    caught_by="update",
    named="weight decay is added to the gradients (L2, as Adam does), requested decoupled (AdamW)",
)
def weight_decay_in_the_gradients(fired: Fired) -> None:
    _with_option(fired, decoupled_weight_decay=False)


@fault(
    breaks="AdamW divides by the largest second moment so far, not by the present one",
    bug="of the family of E04: an optimizer with another option than the recipe's",
    case="fsdp_2",
    caught_by="update memory",
    named="the optimizer is AMSGrad (it keeps max_exp_avg_sq and divides by that), requested AdamW without it",
)
def amsgrad_not_asked_for(fired: Fired) -> None:
    _with_option(fired, amsgrad=True)
