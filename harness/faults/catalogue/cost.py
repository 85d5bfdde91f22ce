"""Mistakes that change no number: what is done besides, more slowly or somewhere else, and only the bill shows."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

from harness.faults import Fired, fault, replace
from harness.faults import operators as op

BLOCK = "harness.reference.model:TransformerBlock.forward"


@fault(
    breaks="attention runs as plain matmuls: the fused kernels are switched off",
    bug="A-class: a fused kernel is silently not used, and only memory and time show it",
    case="fsdp_2",
    caught_by="features",
    named="odd traces",
)
@partial(op.instead, "harness.reference.model:CausalAttention.forward")
def attention_falls_back_to_matmuls(original: Any, *args: Any, **kwargs: Any) -> Any:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        return original(*args, **kwargs)


@fault(
    breaks="what blocks save for backward is moved to the host, not requested",
    bug="A-class: activations are offloaded although memory is not short",
    case="fsdp_2",
    caught_by="features",
    named="odd traces",
)
@partial(op.instead, BLOCK)
def activations_saved_on_the_host(original: Any, *args: Any, **kwargs: Any) -> Any:
    from torch.autograd.graph import save_on_cpu

    with save_on_cpu():
        return original(*args, **kwargs)


def _add_up_a_count(*_: Any, **__: Any) -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones((), dtype=torch.int64))


bare_model_runs_again = fault(
    breaks="after backward the model inside DDP runs forward once more, with gradients recorded and thrown away",
    bug="L-class: a metric is computed by a second pass of the model",
    case="ddp_2",
    caught_by="features",
    named="odd traces",
    does=op.after_call(".trainer:forward_backward", lambda model, parts, **_: model.module(parts[0].tokens)),
)
barrier_before_each_block = fault(
    breaks="before each block all ranks wait for each other",
    bug="Z-class: a barrier that was put in to find a hang, and stayed",
    case="fsdp_2",
    caught_by="traffic",
    named="ranks wait",
    does=op.before_call(BLOCK, op.call("torch.distributed:barrier")),
)
counts_added_up_before_each_block = fault(
    breaks="before each block DDP's ranks add up a number of tokens that nobody reads",
    bug="Z-class: a count for a log, exchanged inside of forward",
    case="ddp_2",
    caught_by="traffic",
    named="traffic of no plan",
    does=op.before_call(BLOCK, _add_up_a_count),
)
anomaly_detection_left_on = fault(
    breaks="autograd's anomaly detection is left on: every operator of backward is checked for NaN and notes its stack",
    bug="Z-class: a debugging switch left on",
    case="fsdp_2",
    caught_by="settings",
    named="another setting",
    does=op.before_call(".trainer:build_parts", op.call("torch.autograd:set_detect_anomaly", True)),
)
deterministic_algorithms_left_on = fault(
    breaks="deterministic algorithms are switched on by rank 1, in a case that runs once",
    bug="Z-class: a debugging switch left on",
    case="fsdp_2",
    caught_by="settings",
    named="another setting",
    does=op.on_rank(1, op.before_call(".trainer:build_parts", op.call("torch:use_deterministic_algorithms", True))),
)


# ---- compiled blocks: what stands in for them must compile, so it cannot say that it fired


def _by_a_number_of_the_step(fired: Fired) -> None:
    from harness.reference.model import TransformerBlock

    steps = itertools.count(1)

    def make(original: Any) -> Any:
        def forward(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
            return original(self, x + 0 * self.step, *args, **kwargs)

        return forward

    replace(TransformerBlock, "forward", make)
    op.before_call(".trainer:Trainer.train_step", lambda _: setattr(TransformerBlock, "step", next(steps)))(fired)


def compiled_soon(fullgraph: bool) -> op.Operator:
    """By a backend that takes no time: what is compiled, and how often, does not depend on it."""

    def compiled(original: Any, block: Any, **options: Any) -> None:
        original(block, **(options | {"fullgraph": fullgraph, "backend": "aot_eager"}))

    return op.instead("harness.reference.model:TransformerBlock.compile", compiled)


@fault(
    breaks="blocks read a number that is another one in every step, so that each step compiles them anew",
    bug="O-class: a guard that no two steps have in common",
    case="fsdp_2_compile",
    caught_by="features",
    named="odd traces",
)
def blocks_compiled_in_every_step(fired: Fired) -> None:
    _by_a_number_of_the_step(fired)
    compiled_soon(fullgraph=True)(lambda: None)


@fault(
    breaks="blocks read a number that is another one in every step, and what cannot be compiled again runs eagerly",
    bug="O-class: at the limit of recompilations torch.compile gives up, which only a warning tells",
    case="fsdp_2_compile",
    caught_by="features",
    named="odd traces",
)
def recompile_limit_reached(fired: Fired) -> None:
    import torch

    _by_a_number_of_the_step(fired)
    torch._dynamo.config.recompile_limit = 1
    compiled_soon(fullgraph=False)(lambda: None)
