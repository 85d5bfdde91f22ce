"""Faults of other displayed numbers than loss, norm and rate: tokens, rates of them, the loss of a validation."""

from __future__ import annotations

from typing import Any

from harness.faults import fault
from harness.faults import operators as op

COUNT = ".trainer:count_tokens"

displayed_rate_divided_by_cp = fault(
    breaks="the tokens per second that are shown are divided by cp, although each sample is counted once",
    bug="L06 of pytorch/torchtitan's kind: what is shown for all devices is divided by those that share a sample",
    case="cp_2",
    caught_by="reported_numbers",
    named="wrong report",
    does=op.instead(
        ".trainer:Trainer.display",
        lambda original, trainer, metrics, seconds: original(trainer, metrics, seconds * trainer.case.dims.cp),
    ),
)
displayed_tokens_of_one_rank = fault(
    breaks="the tokens shown are those of each rank, not of all",
    bug="of the family of L06: a counter that is not reduced over the data ranks",
    case="hsdp_2x2",
    caught_by="reported_numbers",
    named="wrong report",
    does=op.instead(COUNT, lambda original, microbatches, case: sum(part.tokens.numel() for part in microbatches)),
)
displayed_tokens_counted_by_every_tp_rank = fault(
    breaks="the tokens shown are multiplied by the number of all ranks, those that share tokens along tp included",
    bug="of the family of L06: world size in place of the data ranks",
    case="fsdp_2_tp_2",
    caught_by="reported_numbers",
    named="wrong report",
    does=op.instead(COUNT, lambda original, microbatches, case: original(microbatches, case) * case.dims.tp),
)


def _with_padding(original: Any, trainer: Any, metrics: Any, seconds: float) -> Any:
    """Return the displayed numbers, with all of a rank's tokens as its valid ones."""
    shown = original(trainer, metrics, seconds)
    return shown | {"own valid tokens": trainer.tokens // (trainer.case.dims.dp * trainer.case.dims.cp)}


displayed_valid_tokens_with_padding = fault(
    breaks="tokens without a label are counted in the valid tokens that are shown",
    bug="L08 ByteDance-Seed/VeOmni #455, #618: padding among the tokens, here in what is shown alone",
    case="fsdp_2",
    caught_by="reported_numbers",
    named="wrong report",
    does=op.instead(".trainer:Trainer.display", _with_padding),
)


def _mean_of_means(original: Any, model: Any, parts: Any, mesh: Any, case: Any) -> float:
    """Return the mean over ranks of each rank's mean loss, in place of the mean over all valid tokens. parts: microbatches."""
    import torch

    from harness.core.trainers.llama3 import parallelize, trainer

    with torch.no_grad():
        total = sum(trainer.loss_of(model, part) for part in parts)
    ranks = case.dims.dp * case.dims.cp
    return float(parallelize.sum_over_data_ranks(total / trainer.own_valid_tokens(parts), mesh)) / ranks


validation_loss_averaged_over_ranks = fault(
    breaks="each rank takes the mean of its own part of the validation batch, and the ranks' means are averaged",
    bug="L01 pytorch/torchtitan #2206, in the validation: ranks have unequally many valid tokens",
    case="fsdp_2_validated",
    caught_by="reported_numbers",
    named="wrong report",
    does=op.instead(".trainer:evaluate_loss", _mean_of_means),
)


def _replace_displayed(change: Any) -> Any:
    """Return the operator that replaces some of the displayed numbers. change: (trainer, displayed) -> replaced numbers."""

    def display(original: Any, trainer: Any, metrics: Any, seconds: float) -> Any:
        shown = original(trainer, metrics, seconds)
        return shown | change(trainer, shown)

    return op.instead(".trainer:Trainer.display", display)


def _mean_of_rank_0(trainer: Any, shown: Any) -> dict[str, float]:
    """Return the mean of valid tokens per sample as rank 0 has it of its own samples. Empty if it is not displayed."""
    import torch.distributed as dist

    if "valid tokens per sample" not in shown:
        return {}
    own = [trainer.own_valid_tokens / trainer.own_samples]
    dist.broadcast_object_list(own)
    return {"valid tokens per sample": own[0]}


displayed_mean_is_that_of_rank_0 = fault(
    breaks="a mean over all samples is shown as rank 0 has it of its own",
    bug="L-class: hiyouga/LlamaFactory #10830, metrics of a distributed run describe rank 0 alone",
    case="hsdp_2x2",
    caught_by="reported_numbers",
    named="wrong report",
    does=_replace_displayed(_mean_of_rank_0),
)


def _mean_of_every_rank(trainer: Any, shown: Any) -> dict[str, float]:
    """Return the mean of all ranks' means of valid tokens per sample. Empty if it is not displayed."""
    import torch

    from harness.core.trainers.llama3 import parallelize

    if "valid tokens per sample" not in shown:
        return {}
    own = torch.tensor(trainer.own_valid_tokens / trainer.own_samples, dtype=torch.float64)
    return {"valid tokens per sample": float(parallelize.sum_over_data_ranks(own, trainer.mesh)) / trainer.case.dims.dp}


displayed_mean_of_the_means_of_ranks = fault(
    breaks="a mean over all samples is shown as the mean of the ranks' means, of which some are of fewer samples",
    bug="L-class: huggingface/trl #7045, shown means where the last batch is not divided evenly",
    case="ddp_2_last_batch_of_five",
    caught_by="reported_numbers",
    named="wrong report",
    does=_replace_displayed(_mean_of_every_rank),
)


def _norm_of_own_shards(trainer: Any, shown: Any) -> dict[str, float]:
    """Return the norm of the parameters' shards on this rank. Empty if no norm of parameters is displayed."""
    if "parameter norm" not in shown:
        return {}
    return {
        "parameter norm": sum(float(parameter.to_local().square().sum()) for parameter in trainer.parameters()) ** 0.5
    }


displayed_parameter_norm_of_own_shards = fault(
    breaks="the norm of the parameters that is shown is that of the shards that each rank holds",
    bug="of the family of C02, pytorch/torchtitan #766, in the norm of parameters",
    case="fsdp_2",
    caught_by="reported_numbers",
    named="wrong report",
    does=_replace_displayed(_norm_of_own_shards),
)


def _first_of_the_epoch(original: Any, batches: Any) -> Any:
    """Return batches of the epoch's first samples, this rank's share, in place of held-out ones."""
    import torch

    from harness.reference.data import sample_order

    case = batches.case
    dataset = batches.dataset
    ids = sample_order(case.training, len(dataset), 0)[: case.training.global_batch]
    tokens, labels = zip(*(dataset[id_] for id_ in ids[batches.loader.sampler.rank :: case.dims.dp]), strict=True)
    tokens_of_parts = torch.stack(tokens).split(case.local_batch)
    labels_of_parts = torch.stack(labels).split(case.local_batch)
    return list(zip(tokens_of_parts, labels_of_parts, strict=True))


validated_on_training_data = fault(
    breaks="the held-out samples are the first ones of the epoch, which the model has been trained on",
    bug="D-class: a validation split that is the training split",
    case="fsdp_2_validated",
    caught_by="reported_numbers",
    named="samples not held out",
    does=op.instead(".data:Microbatches.held_out", _first_of_the_epoch),
)
