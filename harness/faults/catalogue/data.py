"""Mistakes in what a rank starts from: samples and weights."""

from __future__ import annotations

from typing import Any

from harness.faults import Fired, fault, replace


@fault(
    breaks="each dp rank shuffles with a seed of its own before it takes every n-th sample",
    bug="D01 huggingface/accelerate #2694, issue #2268",
    case="fsdp_4",
    caught_by="samples",
    named="overlapping samples",
)
def dp_ranks_shuffle_differently(fired: Fired) -> None:
    from harness.trainers.llama3 import data

    def make(original: Any) -> Any:
        class OwnSeed(original):
            def __init__(self, *args: Any, rank: int, seed: int, **kwargs: Any) -> None:
                fired()
                super().__init__(*args, rank=rank, seed=seed + rank, **kwargs)

        return OwnSeed

    replace(data, "ResumableSampler", make)


@fault(
    breaks="all dp ranks read the same share of the batch",
    bug="D03 same stream on every rank: duplicates in a global batch",
    case="ddp_4",
    caught_by="samples loss gradients",
    named="received the same samples",
)
def dp_ranks_read_the_same_samples(fired: Fired) -> None:
    from harness.trainers.llama3 import data

    def make(original: Any) -> Any:
        def same_share(dataset: Any, case: Any, dp_rank: int) -> Any:
            fired()
            return original(dataset, case, 0)

        return same_share

    replace(data, "build_loader", make)


@fault(
    breaks="every tp rank initialises its shard alike, so all shards are equal",
    bug="R01 InternLM #405; modelscope/ms-swift #7944",
    case="tp_2",
    caught_by="shard_contents initial_weights",
    named="ranks along tp start from the same shard",
)
def tp_shards_are_equal(fired: Fired) -> None:
    from harness.trainers.support import weights

    def make(original: Any) -> Any:
        def first_shard(full: Any, parameter: Any) -> Any:
            for axis, placement in enumerate(getattr(parameter, "placements", ())):
                if parameter.device_mesh.mesh_dim_names[axis] == "tp" and placement.is_shard():
                    fired()
                    return full.chunk(parameter.device_mesh.size(axis), placement.dim)[0]
            return original(full, parameter)

        return first_shard

    replace(weights, "local_slice", make)


@fault(
    breaks="the sampler is never told the epoch, so that the second one replays the order of the first",
    bug="D08 pytorch/torchtitan #3023, #2865",
    case="fsdp_2_two_epochs",
    caught_by="samples",
    named="step 65 trains on samples of step 1: the sampler is at another place of the data",
)
def second_epoch_replays_the_first(fired: Fired) -> None:
    from harness.trainers.llama3.data import ResumableSampler

    def make(original: Any) -> Any:
        def set_epoch(self: Any, epoch: int) -> None:
            if epoch:
                fired()
            original(self, 0)

        return set_epoch

    replace(ResumableSampler, "set_epoch", make)
