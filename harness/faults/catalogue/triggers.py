"""Mistakes that only show where a recipe has two optimizer groups, documents, unequal lengths or ranks without labels."""

from __future__ import annotations

import os
from typing import Any

from harness.faults import Fired, fault, replace
from harness.faults.catalogue.loss import loss_averaged_per_rank


@fault(
    breaks="weight decay is applied to norm weights, which the recipe spares",
    bug="E04 huggingface/transformers #35927; Fast-LLM #542: weight decay on norm weights",
    case="fsdp_2_two_groups",
    caught_by="update",
    named="weight decay is applied to norm weights",
)
def norm_weights_decay(fired: Fired) -> None:
    from harness.trainers.llama3 import recipe

    def make(original: Any) -> Any:
        def like_matrices(fqn: str, training: Any) -> float:
            if "norm" in fqn:
                fired()
            return float(training.weight_decay)

        return like_matrices

    replace(recipe, "weight_decay", make)


@fault(
    breaks="the optimizer is built of the parameters that decay, the others are in no group and never move",
    bug="P13: parameters that no optimizer holds train without error and never change",
    case="fsdp_2_two_groups",
    caught_by="completed",
    named="not in the optimizer",
)
def norm_weights_in_no_optimizer_group(fired: Fired) -> None:
    from harness.trainers.llama3 import recipe

    def make(original: Any) -> Any:
        def only_decayed(*args: Any) -> Any:
            fired()
            return [group for group in original(*args) if group["weight_decay"]]

        return only_decayed

    replace(recipe, "parameter_groups", make)


@fault(
    breaks="the schedule is applied to the first optimizer group only, the second keeps the peak learning rate",
    bug="of the family of E01: warm-up written for one parameter group, the second one added later",
    case="tp_2_two_groups",
    caught_by="update",
    named="learning rate of 5 of 21 parameters",
)
def second_group_without_schedule(fired: Fired) -> None:
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def keep_peak(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups[1:]:
            fired()
            group["lr"] = group["initial_lr"]

    register_optimizer_step_pre_hook(keep_peak)


@fault(
    breaks="rank 1 makes one document of each row: its tokens see those of all documents before them",
    bug="of the family of K01: no block-diagonal mask on a part of the ranks (another attention kernel was chosen there)",
    case="fsdp_2_documents_variable",
    caught_by="loss gradients",
    named="documents see each other on rank 1",
)
def document_mask_lost_on_rank_1(fired: Fired) -> None:
    from harness.trainers.llama3 import data

    def make(original: Any) -> Any:
        def one_document(tokens: Any) -> Any:
            if int(os.environ.get("RANK", 0)) != 1:
                return original(tokens)
            fired()
            return original(tokens) * 0

        return one_document

    replace(data, "documents", make)


@fault(
    breaks="attention ignores the documents it is given and is causal over the whole row",
    bug="K01 huggingface/transformers #46634, #31629; NVIDIA/Megatron-LM #415: packed documents attend to each other",
    case="tp_2_documents",
    caught_by="loss gradients grad_norm",
    named="documents see each other",
)
def document_mask_ignored(fired: Fired) -> None:
    from harness.reference import model

    def make(original: Any) -> Any:
        def causal_only(self: Any, q: Any, k: Any, v: Any, documents: Any = None) -> Any:
            fired()
            return original(self, q, k, v)

        return causal_only

    replace(model.CausalAttention, "forward", make)


@fault(
    breaks="the document mask of the first batch is kept and used for all that follow",
    bug="of the family of K07: a mask of another batch, from a cache keyed by shape",
    case="tp_2_documents",
    caught_by="loss gradients",
    named="forward pass is right in step 1 and wrong from step 2 on",
)
def document_mask_of_the_first_batch_kept(fired: Fired) -> None:
    from harness.trainers.llama3 import data

    def make(original: Any) -> Any:
        kept: dict[Any, Any] = {}

        def cached(tokens: Any) -> Any:
            if tokens.shape in kept:
                fired()
            return kept.setdefault(tokens.shape, original(tokens))

        return cached

    replace(data, "documents", make)


@fault(
    breaks="the loss is divided by the number of valid tokens of the first step, in every step",
    bug="L-class: tokens per step taken for a constant, and then sequences of another length come",
    case="tp_2_variable_length",
    caught_by="gradients grad_norm reported_loss",
    named="divided by the number of valid tokens of step 1",
)
def token_count_of_the_first_step_kept(fired: Fired) -> None:
    from harness.trainers.llama3 import trainer

    def make(original: Any) -> Any:
        kept: list[int] = []

        def constant(*args: Any) -> int:
            kept.append(original(*args))
            if kept[0] != kept[-1]:
                fired()
            return kept[0]

        return constant

    replace(trainer, "count_valid", make)


@fault(
    breaks="each rank sums masked losses and divides by its own number of valid tokens, and one rank has none",
    bug="L-class: 0/0 on a rank whose samples are all masked, and after the reduction NaN on every rank",
    case="ddp_4_no_labels",
    caught_by="gradients reported_loss",
    named="rank 3 has no valid token",
)
def mean_over_no_valid_token(fired: Fired) -> None:
    from harness.reference.data import IGNORED
    from harness.trainers.llama3 import trainer

    def masked_mean(model: Any, part: Any) -> Any:
        fired()
        mask, targets = part.labels != IGNORED, part.labels.clamp(min=0).unsqueeze(-1)
        likelihoods = model(part.tokens).log_softmax(-1).gather(-1, targets).squeeze(-1)
        return -(likelihoods * mask).sum() / mask.sum()

    replace(trainer, "loss_of", lambda _: masked_mean)
    replace(trainer, "scaled", lambda _: lambda loss, **_: loss)  # DDP takes the mean of the ranks' gradients


@fault(
    breaks="each rank takes the mean over its own valid tokens, or over one where it has none",
    bug="L01 with the usual guard, max(count, 1), which hides the NaN and not the mistake",
    case="fsdp_4_no_labels_accum",
    caught_by="gradients grad_norm reported_loss",
    named="the loss is averaged per rank",
)
def mean_over_at_least_one_token(fired: Fired) -> None:
    from harness.trainers.llama3 import trainer

    loss_averaged_per_rank.apply(fired)
    replace(trainer, "count_valid", lambda local: lambda *args: local(*args) or 1)


@fault(
    breaks="the output projection uses a copy of the embedding's weight, so its part of the gradient is lost",
    bug="of the family of G13: a tied weight is untied by to_empty or by parallelize_module, and only one of the two learns",
    case="tp_2_tied",
    caught_by="gradients grad_norm",
    named="the output's part of the gradient of the tied weight is missing",
)
def tied_weight_is_a_copy(fired: Fired) -> None:
    from harness.reference import model

    def make(original: Any) -> Any:
        def copied(self: Any, x: Any, weight: Any) -> Any:
            fired()
            return original(self, x, weight.detach())

        return copied

    replace(model.TiedOutput, "forward", make)
