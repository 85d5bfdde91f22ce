"""Mistakes in what is computed twice and what is compiled: options that are silently off, or on in the wrong place."""

from __future__ import annotations

from typing import Any

from harness.faults import Fired, fault, replace


@fault(
    breaks="activation checkpointing is asked for and no block is wrapped",
    bug="O01, and X01 pytorch/torchtitan #1880: an option asked for is silently off",
    case="fsdp_2_ac_full",
    caught_by="features",
    named="activation checkpointing full is asked for, none took place",
)
def checkpointing_not_applied(fired: Fired) -> None:
    from harness.trainers.llama3 import recompute

    replace(recompute, "apply_checkpointing", lambda original: lambda model, case: fired())


@fault(
    breaks="every second block is counted from the first one, so the blocks recomputed are the others",
    bug="O01: of the family of filters that match other modules than those meant",
    case="fsdp_2_ac_layer",
    caught_by="features",
    named="activation checkpointing layer is in the wrong place",
)
def checkpointing_on_the_wrong_blocks(fired: Fired) -> None:
    from harness.trainers.llama3 import recompute

    def others(layer: int, case: Any) -> bool:
        fired()
        return layer % 2 == 0

    replace(recompute, "is_checkpointed", lambda original: others)


@fault(
    breaks="selective checkpointing keeps no operator, so that all of a block is computed again",
    bug="O01: the list of operators to keep does not match the operators that run (a renamed attention operator)",
    case="fsdp_2_ac_op",
    caught_by="features",
    named="activation checkpointing op is asked for, full is in force",
)
def selective_checkpointing_keeps_nothing(fired: Fired) -> None:
    from torch.utils.checkpoint import CheckpointPolicy

    from harness.trainers.llama3 import recompute

    def make(original: Any) -> Any:
        def keep_nothing(_: Any) -> Any:
            fired()
            return original(lambda *args, **kwargs: CheckpointPolicy.PREFER_RECOMPUTE)

        return keep_nothing

    replace(recompute, "create_selective_checkpoint_contexts", make)
