"""Faults of data: which samples a rank receives, in which order, and in which documents their tokens are."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from harness.faults import fault
from harness.faults import operators as op

SAMPLER = "torch.utils.data:DistributedSampler.__init__"
BATCHES = ".data:Microbatches.step"


def _fill_up_order(original: Any, sampler: Any) -> Any:
    """Return an iterator over this rank's sample ids of an epoch, which begins again at the end until ranks divide it."""
    from harness.reference.data import epoch_order

    order = epoch_order(len(sampler.dataset), sampler.seed + sampler.epoch).tolist()
    order += order[: -len(order) % sampler.num_replicas]
    return iter(order[sampler.rank :: sampler.num_replicas])


def _keep_last_batch(original: Any, loader: Any, length: int | None = None) -> Any:
    """Return the step's batches, and keep the last one on the loader."""
    batches = original(loader, length)
    loader.kept = batches[-1]
    return batches


dp_ranks_shuffle_differently = fault(
    breaks="each dp rank shuffles with another seed before it takes every n-th sample",
    bug="D01 huggingface/accelerate #2694, issue #2268",
    case="fsdp_4",
    caught_by="samples",
    named="samples overlap",
    does=op.instead(SAMPLER, lambda original, *args, seed, **rest: original(*args, seed=seed + rest["rank"], **rest)),
)
dp_ranks_read_the_same_samples = fault(
    breaks="all dp ranks read the same share of the batch",
    bug="D03 same stream on every rank: duplicates in a global batch",
    case="ddp_4",
    caught_by="samples loss gradients",
    named="same samples",
    does=op.override_argument(".data:build_loader", dp_rank=0),
)
tp_peers_read_different_samples = fault(
    breaks="the data loader divides by global rank, so that tp peers add up activations of different samples",
    bug="D06 huggingface/accelerate #3173, #3390; NVIDIA/Megatron-LM #3268",
    case="fsdp_2_tp_2",
    caught_by="samples loss",
    named="peers differ",
    does=op.instead(  # two dp shares
        ".data:build_loader", lambda original, dataset, case, dp_rank: original(dataset, case, op.this_rank() % 2)
    ),
)
seed_of_the_shuffle_ignored = fault(
    breaks="the loader's shuffle is seeded with 42, whatever seed was requested",
    bug="D02 huggingface/accelerate #3459",
    case="fsdp_2",
    caught_by="samples loss",
    named="samples of no step",
    does=op.override_argument(SAMPLER, seed=42),
)
never_shuffled = fault(
    breaks="the order is not shuffled: every epoch reads the data as it lies on disk",
    bug="D08 pytorch/torchtitan #3023, #2865",
    case="fsdp_2",
    caught_by="samples loss",
    named="samples of no step",
    does=op.override_argument(SAMPLER, shuffle=False),
)
second_epoch_replays_the_first = fault(
    breaks="the sampler never gets the epoch, so that the second one replays the order of the first",
    bug="D08 pytorch/torchtitan #3023, #2865",
    case="fsdp_2_two_epochs",
    caught_by="samples",
    named="data position",
    does=op.override_argument(".data:ResumableSampler.set_epoch", epoch=0),
)
tail_of_the_batch_dropped = fault(
    breaks="the last sample of each microbatch is dropped, as the rest of a batch that does not divide",
    bug="of the family of P12 pytorch #126600: the tail of a batch that does not divide is dropped",
    case="fsdp_2",
    caught_by="samples gradients",
    named="samples lost",
    does=op.change_result(BATCHES, lambda batches: [(tokens[:-1], labels[:-1]) for tokens, labels in batches]),
)


@fault(
    breaks="rows are collated in the order in which the loader's workers deliver them",
    bug="of the family of D08: an order that cannot be reproduced",
    case="fsdp_4_twice",
    caught_by="determinism",
    named="not deterministic",
)
@partial(op.change_result, BATCHES)
def rows_in_order_of_arrival(batches: Any) -> Any:
    """Return each batch with its rows in an order that is drawn anew in each run."""
    import torch

    by_time = torch.Generator().manual_seed(int.from_bytes(os.urandom(4)))
    orders = [torch.randperm(len(tokens), generator=by_time) for tokens, _ in batches]
    return [(tokens[order], labels[order]) for (tokens, labels), order in zip(batches, orders, strict=True)]


document_mask_ignored = fault(
    breaks="attention ignores the documents it is given and is causal over the whole row",
    bug="K01 huggingface/transformers #46634, #31629; NVIDIA/Megatron-LM #415: packed documents attend to each other",
    case="tp_2_documents",
    caught_by="loss gradients grad_norm",
    named="not explained",
    does=op.override_argument("harness.reference.model:CausalAttention.forward", documents=None),
)


@fault(
    breaks="the batch is fetched once before the loop over microbatches: each microbatch of a step is the first one",
    bug="D-class: next(batches) stands before the loop over microbatches",
    case="fsdp_4_accum",
    caught_by="samples loss gradients",
    named="microbatches repeated",
)
@partial(op.instead, BATCHES)
def one_batch_for_all_microbatches(original: Any, self: Any, length: int | None = None) -> Any:
    """Return the first batch of a step once for each microbatch."""
    batches = original(self, length)
    return [batches[0]] * len(batches)


end_of_the_data_filled_up = fault(
    breaks="the sampler repeats samples of the epoch where ranks do not divide its end, as torch's does if nothing is dropped",
    bug="D-class: the end of an epoch, which ranks do not divide",
    case="fsdp_4_last_batch_of_two",
    caught_by="samples loss gradients",
    named="data position",
    does=op.instead(".data:ResumableSampler.own_sample_ids", _fill_up_order),
)
last_batch_again_where_data_ended = fault(
    breaks="a rank whose data has ended trains on its last batch again, so that no rank waits",
    bug="D-class: the end of an epoch, which ranks do not divide",
    case="fsdp_4_last_batch_of_two",
    caught_by="samples loss gradients",
    named="data position",
    does=op.together(
        op.instead(BATCHES, _keep_last_batch),
        op.instead(".data:Microbatches.empty_batch", lambda original, loader: loader.kept),
    ),
)
sampler_of_the_world = fault(
    breaks="the sampler deals the samples out to all ranks of the world, tp's among them, and is read by dp ranks",
    bug="D-class: num_replicas is the world's size",
    case="fsdp_2_tp_2",
    caught_by="samples loss gradients",
    named="samples dealt otherwise",
    does=op.change_argument(".data:DistributedSampler.__init__", num_replicas=lambda count: 2 * count),  # tp is 2
)
labels_shifted_in_the_loss_again = fault(
    breaks="labels that are the next tokens already are shifted in the loss once more, and each row loses its last",
    bug="E-class: the loss of a model that shifts labels itself, given labels that are shifted",
    case="pp_2_ddp_2",
    caught_by="samples loss gradients",
    named="labels shifted",
    does=op.change_argument(
        ".trainer:token_loss", logits=lambda logits: logits[:, :-1], labels=lambda labels: labels[:, 1:]
    ),
)


@fault(
    breaks="the labels of packed documents are not shifted: each token is its own label",
    bug="of the family of K03: NVIDIA/Megatron-LM #5682, the packed path of fine-tuning",
    case="fsdp_2_documents",
    caught_by="samples loss gradients",
    named="labels shifted",
)
@partial(op.change_result, "harness.reference.data:TokenDataset.__getitem__")
def tokens_are_their_own_labels(sample: Any) -> Any:
    """Return a sample whose valid labels are its tokens."""
    tokens, labels = sample
    return tokens, tokens.where(labels >= 0, labels)


@fault(
    breaks="samples that are too long lose their first tokens, not their last ones",
    bug="E-class: a tokenizer that truncates on the left",
    case="fsdp_2_variable_length",
    caught_by="samples",
    named="samples of no step",
)
@partial(op.instead, BATCHES)
def cut_on_the_left(original: Any, batches: Any, length: int | None = None) -> Any:
    """Return batches whose rows are cut to `length` by leaving out their first tokens."""
    return [(tokens[:, -(length or 0) :], labels[:, -(length or 0) :]) for tokens, labels in original(batches, None)]
