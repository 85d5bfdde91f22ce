"""Mistakes in what is computed twice and what is compiled: options that are silently off, or on in the wrong place."""

from __future__ import annotations

from typing import Any

from harness.faults import Fired, fault, replace


@fault(
    breaks="attention is computed twice, the first time for nothing",
    bug="A-class: work that is done again and that no number shows",
    case="fsdp_2",
    caught_by="features",
    named="attention is computed 2 times",
)
def attention_computed_twice(fired: Fired) -> None:
    from harness.reference import model

    def make(original: Any) -> Any:
        def forward(self: Any, q: Any, k: Any, v: Any, documents: Any = None) -> Any:
            fired()
            original(self, q.detach(), k.detach(), v.detach(), documents)
            return original(self, q, k, v, documents)

        return forward

    replace(model.CausalAttention, "forward", make)


@fault(
    breaks="activation checkpointing is requested and no block is wrapped",
    bug="O03 pytorch/torchtitan #3455: a pass that was requested is silently skipped",
    case="fsdp_2_ac_full",
    caught_by="features",
    named="activation checkpointing full is requested, none took place",
)
def checkpointing_not_applied(fired: Fired) -> None:
    from harness.trainers.llama3 import recompute

    replace(recompute, "apply_checkpointing", lambda original: lambda model, case: fired())


@fault(
    breaks="every second block is counted from the first one, so the blocks recomputed are the others",
    bug="of the family of A03 pytorch/torchtitan #3397: the count of what to keep begins elsewhere",
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
    bug="of the family of A04 pytorch/torchtitan #820: the operators kept are not those meant",
    case="fsdp_2_ac_op",
    caught_by="features",
    named="activation checkpointing op is requested, full is observed",
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


@fault(
    breaks="recomputation draws its random numbers anew instead of restoring the generator's state",
    bug="A01 allenai/OLMo-core #828; pytorch/torchtitan #1323, #2380",
    case="fsdp_2_dropout_ac_full",
    caught_by="gradients",
    named="recomputation of layers.0, layers.1 began with another random state than forward",
)
def random_state_not_restored(fired: Fired) -> None:
    from harness.trainers.llama3 import recompute

    def make(original: Any) -> Any:
        def careless(block: Any, **options: Any) -> Any:
            fired()
            return original(block, **(options | {"preserve_rng_state": False}))

        return careless

    replace(recompute, "checkpoint_wrapper", make)


@fault(
    breaks="compile is requested and no block is compiled",
    bug="O03 pytorch/torchtitan #3455: a pass that was requested is silently skipped",
    case="fsdp_2_compile",
    caught_by="features",
    named="compile is requested, no block ran compiled",
)
def compile_not_applied(fired: Fired) -> None:
    from harness.trainers.llama3 import recompute

    replace(recompute, "apply_compile", lambda original: lambda model, mesh, case: fired())


@fault(
    breaks="attention breaks the graph, and fullgraph, which would have raised, is off: blocks are compiled in pieces",
    bug="O03: of the family of compiled regions that are not those requested",
    case="fsdp_2_compile",
    caught_by="features",
    named="compiled blocks break into pieces",
)
def graph_break_in_attention(fired: Fired) -> None:
    import torch

    from harness.reference.model import CausalAttention, TransformerBlock

    def make(original: Any) -> Any:
        def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
            torch._dynamo.graph_break()
            return original(self, *args, **kwargs)

        return broken

    def in_pieces(original: Any) -> Any:
        def compile(self: Any, **options: Any) -> None:
            fired()
            original(self, **(options | {"fullgraph": False, "backend": "aot_eager"}))

        return compile

    replace(CausalAttention, "forward", make)
    replace(TransformerBlock, "compile", in_pieces)
