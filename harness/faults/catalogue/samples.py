"""Mistakes in which samples a rank receives."""

from __future__ import annotations

import os
from typing import Any

from harness.faults import Fired, fault, replace


@fault(
    breaks="the data loader divides by global rank, so that tp peers add up activations of different samples",
    bug="D06 huggingface/accelerate #3173, #3390; NVIDIA/Megatron-LM #3268",
    case="fsdp_2_tp_2",
    caught_by="samples loss",
    named="tp peers receive different samples",
)
def tp_peers_read_different_samples(fired: Fired) -> None:
    from harness.trainers.llama3 import data

    def make(original: Any) -> Any:
        def by_global_rank(dataset: Any, case: Any, dp_rank: int) -> Any:
            fired()
            return original(dataset, case, int(os.environ["RANK"]) % case.dims.dp)

        return by_global_rank

    replace(data, "build_loader", make)


@fault(
    breaks="the loader's shuffle is seeded with 42, whatever seed was requested",
    bug="D02 huggingface/accelerate #3459",
    case="fsdp_2",
    caught_by="samples loss",
    named="on all ranks: another seed, order or data set",
)
def seed_of_the_shuffle_ignored(fired: Fired) -> None:
    from torch.utils.data import DistributedSampler

    def make(original: Any) -> Any:
        def fixed(self: Any, *args: Any, **kwargs: Any) -> None:
            fired()
            original(self, *args, **(kwargs | {"seed": 42}))

        return fixed

    replace(DistributedSampler, "__init__", make)


@fault(
    breaks="rows are collated in the order in which the loader's workers deliver them",
    bug="of the family of D08: an order that cannot be reproduced",
    case="fsdp_4_twice",
    caught_by="determinism",
    named="the same case run twice gives different bytes",
)
def rows_in_order_of_arrival(fired: Fired) -> None:
    import torch

    from harness.trainers.llama3 import data

    def make(original: Any) -> Any:
        def shuffled(self: Any, *args: Any) -> Any:
            fired()
            orders = [torch.randperm(self.case.local_batch, generator=_by_time()) for _ in range(1)]
            return [(tokens[order], labels[order]) for tokens, labels in original(self, *args) for order in orders]

        return shuffled

    replace(data.Microbatches, "step", make)


def _by_time() -> Any:
    import torch

    return torch.Generator().manual_seed(int.from_bytes(os.urandom(4)))


@fault(
    breaks="the order is not shuffled: every epoch reads the data as it lies on disk",
    bug="D08 pytorch/torchtitan #3023, #2865",
    case="fsdp_2",
    caught_by="samples loss",
    named="on all ranks: another seed, order or data set",
)
def never_shuffled(fired: Fired) -> None:
    from torch.utils.data import DistributedSampler

    def make(original: Any) -> Any:
        def in_order(self: Any, *args: Any, **kwargs: Any) -> None:
            fired()
            original(self, *args, **(kwargs | {"shuffle": False}))

        return in_order

    replace(DistributedSampler, "__init__", make)


@fault(
    breaks="a resumed loader starts a step too late, so that the first global batch is never read",
    bug="of the family of D04 pytorch/torchtitan #816: the loader's position is lost or counted twice",
    case="fsdp_2",
    caught_by="samples loss",
    named="step 1 trains on samples of step 2: the sampler is at another place of the data",
)
def first_batch_skipped(fired: Fired) -> None:
    from harness.trainers.llama3 import data

    def make(original: Any) -> Any:
        def __init__(self: Any, case: Any, dp_rank: int) -> None:
            original(self, case, dp_rank)
            fired()
            self.seek(case.training.global_batch)

        return __init__

    replace(data.Microbatches, "__init__", make)


@fault(
    breaks="the last sample of each microbatch is dropped, as the rest of a batch that does not divide",
    bug="of the family of P12 pytorch #126600: the tail of a batch that does not divide is dropped",
    case="fsdp_2",
    caught_by="samples gradients",
    named="samples received by nobody: 2 of 16",
)
def tail_of_the_batch_dropped(fired: Fired) -> None:
    from harness.trainers.llama3 import data

    def make(original: Any) -> Any:
        def without_last(self: Any, *args: Any) -> Any:
            fired()
            return [(tokens[:-1], labels[:-1]) for tokens, labels in original(self, *args)]

        return without_last

    replace(data.Microbatches, "step", make)
