"""Mistakes in what is computed twice and what is compiled: options that are silently off, or on in the wrong place."""

from __future__ import annotations

from functools import partial
from typing import Any

from harness.faults import Fired, fault, replace
from harness.faults import operators as op
from harness.faults.catalogue.cost import compiled_soon


def _prefer_recompute(*_: Any, **__: Any) -> Any:
    from torch.utils.checkpoint import CheckpointPolicy

    return CheckpointPolicy.PREFER_RECOMPUTE


def _keep_all(_: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    from torch.utils.checkpoint import CheckpointPolicy

    from harness.trainers.llama3.recompute import KEPT

    return CheckpointPolicy.MUST_SAVE if str(operator) in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


attention_computed_twice = fault(
    breaks="attention is computed twice, the first time for nothing",
    bug="A-class: work that is done again and that no number shows",
    case="fsdp_2",
    caught_by="features",
    named="odd traces",
    does=op.repeat_call("harness.reference.model:CausalAttention.forward"),
)
checkpointing_not_applied = fault(
    breaks="activation checkpointing is requested and no block is wrapped",
    bug="O03 pytorch/torchtitan #3455: a pass that was requested is silently skipped",
    case="fsdp_2_ac_full",
    caught_by="features",
    named="another feature",
    does=op.skip_call(".recompute:apply_checkpointing"),
)
checkpointing_on_the_wrong_blocks = fault(
    breaks="every second block is counted from the first one, so the blocks recomputed are the others",
    bug="of the family of A03 pytorch/torchtitan #3397: the count of what to keep begins elsewhere",
    case="fsdp_2_ac_layer",
    caught_by="features",
    named="odd traces",
    does=op.change_argument(".recompute:is_checkpointed", layer=lambda layer: layer + 1),
)


@fault(
    breaks="the attention of each block is checkpointed, and not the block",
    bug="O-class: a part of what is requested is applied",
    case="fsdp_2_ac_full",
    caught_by="features",
    named="odd traces",
)
@partial(op.instead, ".recompute:checkpointed")
def checkpointing_of_attention_alone(original: Any, block: Any, case: Any) -> Any:
    block.attention = original(block.attention, case)
    return block


selective_checkpointing_keeps_nothing = fault(
    breaks="selective checkpointing keeps no operator, so that all of a block is computed again",
    bug="of the family of A04 pytorch/torchtitan #820: the operators kept are not those meant",
    case="fsdp_2_ac_op",
    caught_by="features",
    named="another feature",
    does=op.instead(
        ".recompute:create_selective_checkpoint_contexts", lambda original, policy: original(_prefer_recompute)
    ),
)
selective_checkpointing_keeps_every_matmul = fault(
    breaks="selective checkpointing keeps the result of every matmul, not of every second one",
    bug="of the family of A04 pytorch/torchtitan #820: the operators kept are not those meant",
    case="fsdp_2_ac_op",
    caught_by="features",
    named="odd traces",
    does=op.instead(".recompute:create_selective_checkpoint_contexts", lambda original, policy: original(_keep_all)),
)
random_state_not_restored = fault(
    breaks="recomputation draws its random numbers anew instead of restoring the generator's state",
    bug="A01 allenai/OLMo-core #828; pytorch/torchtitan #1323, #2380",
    case="fsdp_2_dropout_ac_full",
    caught_by="gradients",
    named="random state not restored",
    does=op.override_argument(".recompute:checkpoint_wrapper", preserve_rng_state=False),
)
positions_not_passed_to_recomputation = fault(
    breaks="blocks are computed again in backward without the positions that forward gave them: each cp rank counts from 0",
    bug="E-class: arguments by keyword that a checkpointing wrapper keeps for forward alone",
    case="cp_2_variable_length_contiguous",
    caught_by="gradients",
    named="not explained",
    does=op.override_argument("harness.reference.model:TransformerBlock.forward", positions=None, when=op.in_backward),
)


@fault(
    breaks="dropout is applied to the sum with the residual stream, not to what is added to it",
    bug="E-class: a block rewritten with its additions moved into dropout",
    case="fsdp_2_dropout_ac_full",
    caught_by="loss gradients reported_loss",
    named="not explained",
)
@partial(op.instead, "harness.reference.model:TransformerBlock.forward")
def dropout_of_the_residual_stream(_: Any, block: Any, x: Any, *rest: Any) -> Any:
    x = block.attention_dropout(x + block.attention(block.attention_norm(x), *rest))
    return block.ffn_dropout(x + block.feed_forward(block.ffn_norm(x)))


compile_not_applied = fault(
    breaks="compile is requested and no block is compiled",
    bug="O03 pytorch/torchtitan #3455: a pass that was requested is silently skipped",
    case="fsdp_2_compile",
    caught_by="features",
    named="odd traces",
    does=op.skip_call(".recompute:apply_compile"),
)


@fault(
    breaks="attention breaks the graph, and fullgraph, which would have raised, is off: blocks are compiled in pieces",
    bug="O03: of the family of compiled regions that are not those requested",
    case="fsdp_2_compile",
    caught_by="features",
    named="odd traces",
)
def graph_break_in_attention(fired: Fired) -> None:
    import torch

    from harness.reference.model import CausalAttention

    def make(original: Any) -> Any:
        def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
            torch._dynamo.graph_break()
            return original(self, *args, **kwargs)

        return broken

    replace(CausalAttention, "forward", make)
    compiled_soon(fullgraph=False)(fired)
