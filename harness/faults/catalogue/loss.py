"""Faults of the loss: what it is divided by, its value, and what is reported of it and of the learning rate."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from harness.faults import fault
from harness.faults import operators as op

CROSS_ENTROPY = "torch.nn.functional:cross_entropy"
REPORTED = ".trainer:reported_loss"
STEP = ".trainer:Trainer.optimizer_step"


def count_own_tokens(microbatches: Any) -> int:
    """Return the number of this rank's valid tokens."""
    return sum(int((part.labels >= 0).sum()) for part in microbatches)


def tokens_times_ranks(original: Any, microbatches: Any, mesh: Any, device: Any) -> int:
    """Return this rank's valid tokens times the number of ranks.

    Divided by that, and averaged over ranks, a loss is the mean of the ranks' own means.
    """
    return (1 if mesh is None else mesh.size()) * count_own_tokens(microbatches)


# ---- what it is divided by

loss_averaged_per_rank = fault(
    breaks="each rank divides its loss by its own number of valid tokens, and the ranks' means are averaged",
    bug="L01 pytorch/torchtitan #2206; also transformers #35203, torchtune #1875",
    case="fsdp_4",
    caught_by="gradients grad_norm reported_loss",
    named="averaged locally",
    does=op.instead(".trainer:count_valid", tokens_times_ranks),
)
loss_averaged_per_microbatch = fault(
    breaks="each microbatch's loss is averaged over its own valid tokens, and the means are averaged",
    bug="L01 huggingface/transformers #35203; pytorch/torchtune #1875: gradient accumulation",
    case="single_accum",
    caught_by="gradients grad_norm",
    named="averaged locally",
    does=op.together(
        op.instead(
            ".trainer:loss_of",
            lambda original, *of: op.with_scaled_gradient(original(*of), 1 / count_own_tokens(of[1:])),
        ),
        op.instead(".trainer:scale_loss", lambda original, loss, **_: loss / 2),  # two microbatches
    ),
)
padding_counted_as_tokens = fault(
    breaks="padding is counted in the number of tokens that the loss is divided by",
    bug="L08 ByteDance-Seed/VeOmni #455, #618: dummy tokens in the normaliser",
    case="fsdp_2",
    caught_by="gradients grad_norm reported_loss",
    named="gradients scaled",
    does=op.change_argument(
        ".trainer:count_valid", microbatches=lambda parts: [part._replace(labels=part.tokens) for part in parts]
    ),
)

last_window_divided_by_all_microbatches = fault(
    breaks="the mean over microbatches divides by the usual number of them, also where an epoch leaves fewer",
    bug="L01 of the family of huggingface/transformers #35203: the last window of accumulation is shorter",
    case="ddp_2_accum_last_window",
    caught_by="gradients grad_norm",
    named="gradients scaled",
    does=op.instead(
        ".trainer:count_valid",
        lambda original, parts, *of: original(parts, *of) * 2,
        when=lambda parts, *_: len(parts) == 1,  # of two
    ),
)


def _masked_mean(original: Any, model: Any, part: Any) -> Any:
    """Return the mean loss of the microbatch's valid tokens: NaN if there is none."""
    mask = part.labels >= 0
    targets = part.labels.clamp(min=0).unsqueeze(-1)
    likelihoods = model(part.tokens).log_softmax(-1).gather(-1, targets).squeeze(-1)
    return -(likelihoods * mask).sum() / mask.sum()


mean_over_no_valid_token = fault(
    breaks="each rank sums masked losses and divides by its own number of valid tokens, and one rank has none",
    bug="L-class: 0/0 on a rank whose samples are all masked, and after the reduction NaN on every rank",
    case="ddp_4_no_labels",
    caught_by="gradients reported_loss finite",
    named="not finite",
    does=op.together(
        op.instead(".trainer:loss_of", _masked_mean),
        op.instead(
            ".trainer:scale_loss", lambda original, loss, **_: loss
        ),  # DDP takes the mean of the ranks' gradients
    ),
)
mean_over_at_least_one_token = fault(
    breaks="each rank takes the mean over its own valid tokens, or over one where it has none",
    bug="L01 with the usual guard, max(count, 1), which hides the NaN and not the mistake",
    case="fsdp_4_no_labels_accum",
    caught_by="gradients grad_norm reported_loss",
    named="averaged locally",
    does=op.instead(".trainer:count_valid", lambda *of: tokens_times_ranks(*of) or 1),
)


# ---- its value


def _every_logit_twice(logits: Any) -> Any:
    """Return the logits with a copy of them beside them, which has no gradient."""
    import torch

    return torch.cat([logits, logits.detach()], dim=-1)


gathered_logits_counted_tp_times = fault(
    breaks="the vocabulary-parallel loss is applied to logits that were gathered: each is counted tp times below the line",
    bug="T06 NVIDIA/Megatron-LM #7452",
    case="tp_2_no_loss_parallel",
    caught_by="loss gradients reported_loss",
    named="not explained",
    does=op.change_argument(CROSS_ENTROPY, input=_every_logit_twice),
)


@fault(
    breaks="the mask of the prompt is one label too long, so that the first token of each answer is not trained",
    bug="K03 pytorch/torchtitan #2755; ByteDance-Seed/VeOmni #873",
    case="fsdp_2",
    caught_by="samples gradients",
    named="wrong labels",
)
@partial(op.change_result, "harness.reference.data:TokenDataset.__getitem__")
def prompt_mask_one_too_long(sample: Any) -> Any:
    """Return a sample whose first valid label is ignored."""
    tokens, labels = sample
    labels = labels.clone()
    labels[int((labels >= 0).int().argmax())] = -100
    return tokens, labels


@fault(
    breaks="the loss is computed in chunks along the sequence, and the last one is lost",
    bug="of the family of L08 ByteDance-Seed/VeOmni #455: what is summed up is not all that is divided by",
    case="fsdp_2",
    caught_by="samples loss gradients",
    named="labels lost",
)
@partial(op.instead, ".trainer:token_loss")
def last_chunk_of_the_loss_lost(original: Any, logits: Any, labels: Any) -> Any:
    """Return the sum of the loss over the first three of four chunks of the sequence."""
    parts = list(zip(logits.chunk(4, dim=1), labels.chunk(4, dim=1), strict=True))
    return sum(original(*part) for part in parts[:-1])


@fault(
    breaks="the loss in chunks has the value of the mean of all tokens, and the gradient of the mean of the chunks' means",
    bug="of the family of L01: deepspeedai/DeepSpeed #8587, TiledLoss",
    case="fsdp_2",
    caught_by="gradients grad_norm",
    named="averaged locally",
)
@partial(op.instead, ".trainer:token_loss")
def chunks_averaged_in_backward(original: Any, logits: Any, labels: Any) -> Any:
    """Return the sum of the loss, with the gradient of the mean of four chunks' means.

    Chunks without valid labels are left out.
    """
    parts = list(zip(logits.chunk(4, dim=1), labels.chunk(4, dim=1), strict=True))
    total = int((labels >= 0).sum())
    counts = [int((part >= 0).sum()) for _, part in parts]
    shares = [total / (4 * count) if count else 0.0 for count in counts]
    return sum(op.with_scaled_gradient(original(*p), share) for p, share in zip(parts, shares, strict=True) if share)


# ---- what is reported


def _report_later_rate(rate_of: Any) -> Any:
    """Return the operator that steps as usual, and reports rate_of(scheduler)[0] afterwards as the step's learning rate."""

    def step_and_read(original: Any, trainer: Any) -> float:
        original(trainer)
        return float(rate_of(trainer.schedulers[0])[0])

    return op.instead(STEP, step_and_read)


displayed_loss_averaged_over_ranks = fault(
    breaks="the reported loss is averaged over the ranks although each one's is a share of a global mean already",
    bug="L06 pytorch/torchtitan #2366, #4167, #2314",
    case="fsdp_4",
    caught_by="reported_loss",
    named="wrong report",
    does=op.scale_result(REPORTED, 1 / 4),  # four ranks
)
displayed_loss_divided_by_accumulation = fault(
    breaks="the reported loss is divided by the number of microbatches once more",
    bug="L05 pytorch/torchtitan #1758: a loss function that rescales, shared with what only looks",
    case="single_accum",
    caught_by="reported_loss",
    named="wrong report",
    does=op.scale_result(REPORTED, 1 / 2),  # two microbatches
)
loss_displayed_once = fault(
    breaks="the loss is reported in step 1 only",
    bug="of the family of L05: a display that is wrong where nobody looks, here by being left out",
    case="fsdp_2",
    caught_by="reported_loss",
    named="report lacking",
    does=op.together(
        op.change_result(
            ".trainer:Trainer.train_step", lambda m: m if m.step == 1 else dataclasses.replace(m, loss=None)
        ),
        op.skip_call(".trainer:Trainer.display"),
    ),
)
displayed_largest_of_the_global_tokens = fault(
    breaks="the largest loss reported is of the ranks' sums over all valid tokens, not over each rank's own",
    bug="L06 pytorch/torchtitan #2314: the largest loss is below the mean",
    case="fsdp_2",
    caught_by="reported_loss",
    named="wrong report",
    does=op.change_result(
        ".trainer:Trainer.train_step", lambda m: dataclasses.replace(m, largest=m.loss and m.loss / 2)
    ),
)
displayed_rate_of_the_next_step = fault(
    breaks="the reported learning rate is read after the scheduler has stepped, so it is that of the next step",
    bug="E07 huggingface/transformers #35942, #28124: logged after lr_scheduler.step()",
    case="fsdp_2",
    caught_by="reported_rate",
    named="wrong report",
    does=_report_later_rate(lambda scheduler: scheduler.get_last_lr()),
)
displayed_rate_as_configured = fault(
    breaks="the learning rate reported is the configured one, without warm-up and decay",
    bug="of the family of L06: what is reported is not what was done",
    case="fsdp_2_eight_steps",
    caught_by="reported_rate",
    named="wrong report",
    does=_report_later_rate(lambda scheduler: scheduler.base_lrs),
)
