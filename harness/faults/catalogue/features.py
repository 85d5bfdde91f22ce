"""Faults that change no number: options silently off or on, and extra work."""

from __future__ import annotations

from functools import partial
from typing import Any

from harness.faults import Fired, fault, replace
from harness.faults import operators as op

BLOCK = "harness.reference.model:TransformerBlock.forward"


barrier_before_each_block = fault(
    breaks="before each block all ranks wait for each other",
    bug="Z-class: a barrier that was put in to find a hang, and stayed",
    case="fsdp_2",
    caught_by="traffic",
    named="ranks wait",
    does=op.before_call(BLOCK, op.make_call("torch.distributed:barrier")),
)
anomaly_detection_left_on = fault(
    breaks="autograd's anomaly detection is left on: every operator of backward is checked for NaN and notes its stack",
    bug="Z-class: a debugging switch left on",
    case="fsdp_2",
    caught_by="settings",
    named="another setting",
    does=op.before_call(".trainer:build_parts", op.make_call("torch.autograd:set_detect_anomaly", True)),
)
deterministic_algorithms_left_on = fault(
    breaks="deterministic algorithms are switched on by rank 1, in a case that runs once",
    bug="Z-class: a debugging switch left on",
    case="fsdp_2",
    caught_by="settings",
    named="another setting",
    does=op.on_rank(
        1, op.before_call(".trainer:build_parts", op.make_call("torch:use_deterministic_algorithms", True))
    ),
)


def _compiled_in_pieces(original: Any, block: Any, **options: Any) -> None:
    """Compile a block without fullgraph, by a backend that takes no time.

    What is compiled, and how often, does not depend on the backend.
    """
    original(block, **(options | {"fullgraph": False, "backend": "aot_eager"}))


checkpointing_not_applied = fault(
    breaks="activation checkpointing is requested and no block is wrapped",
    bug="O03 pytorch/torchtitan #3455: a pass that was requested is silently skipped",
    case="fsdp_2_ac_full",
    caught_by="features",
    named="another feature",
    does=op.skip_call(".recompute:apply_checkpointing"),
)
random_state_not_restored = fault(
    breaks="recomputation draws its random numbers anew instead of restoring the generator's state",
    bug="A01 allenai/OLMo-core #828; pytorch/torchtitan #1323, #2380",
    case="fsdp_2_dropout_ac_full",
    caught_by="gradients",
    named="random state not restored",
    does=op.override_argument(".recompute:checkpoint_wrapper", preserve_rng_state=False),
)
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
    """Patch attention to break the graph, and blocks to be compiled without fullgraph."""
    import torch

    from harness.reference.model import CausalAttention

    def make(original: Any) -> Any:
        """Return `original`, changed to break the graph first."""

        def break_and_call(self: Any, *args: Any, **kwargs: Any) -> Any:
            torch._dynamo.graph_break()
            return original(self, *args, **kwargs)

        return break_and_call

    replace(CausalAttention, "forward", make)
    op.instead("harness.reference.model:TransformerBlock.compile", _compiled_in_pieces)(fired)


@fault(
    breaks="the model is left in eval mode after the first step, as by an evaluation, and goes on without dropout",
    bug="R-class: sgl-project/SpecForge #563, no train() behind the evaluation",
    case="fsdp_2_dropout",
    caught_by="features gradients",
    named="eval mode",
)
@partial(op.before_call, ".trainer:Trainer.forward_backward", when=lambda trainer, *_: trainer.step > 0)
def left_in_eval_mode(trainer: Any, *_: Any) -> None:
    """Put the model into eval mode before a step's forward pass, from the second step on."""
    for part in trainer.model_parts:
        part.eval()
