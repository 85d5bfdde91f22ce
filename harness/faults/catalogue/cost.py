"""Mistakes that change no number: what is done besides, more slowly or somewhere else, and only the bill shows."""

from __future__ import annotations

import itertools
from typing import Any

from harness.faults import Fired, fault, replace


@fault(
    breaks="attention runs as plain matmuls: the fused kernels are switched off",
    bug="A-class: a fused kernel is silently not used, and only memory and time show it",
    case="fsdp_2",
    caught_by="features",
    named="attention falls back to plain matmuls",
)
def attention_falls_back_to_matmuls(fired: Fired) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from harness.reference.model import CausalAttention

    def make(original: Any) -> Any:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            fired()
            with sdpa_kernel(SDPBackend.MATH):
                return original(self, *args, **kwargs)

        return forward

    replace(CausalAttention, "forward", make)


@fault(
    breaks="after backward the model inside DDP runs forward once more, with gradients recorded and thrown away",
    bug="L-class: a metric is computed by a second pass of the model",
    case="ddp_2",
    caught_by="features",
    named="the model runs besides its training passes",
)
def bare_model_runs_again(fired: Fired) -> None:
    from harness.trainers.llama3 import trainer

    def make(original: Any) -> Any:
        def forward_backward(model: Any, microbatches: Any, **options: Any) -> Any:
            total = original(model, microbatches, **options)
            fired()
            model.module(microbatches[0].tokens)
            return total

        return forward_backward

    replace(trainer, "forward_backward", make)


@fault(
    breaks="before each block all ranks wait for each other",
    bug="Z-class: a barrier that was put in to find a hang, and stayed",
    case="fsdp_2",
    caught_by="traffic",
    named="ranks wait for each other in forward",
)
def barrier_before_each_block(fired: Fired) -> None:
    import torch.distributed as dist

    from harness.reference.model import TransformerBlock

    def make(original: Any) -> Any:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            fired()
            dist.barrier()
            return original(self, *args, **kwargs)

        return forward

    replace(TransformerBlock, "forward", make)


@fault(
    breaks="blocks read a number that is another one in every step, so that each step compiles them anew",
    bug="O-class: a guard that no two steps have in common",
    case="fsdp_2_compile",
    caught_by="features",
    named="blocks are compiled anew in step 3",
)
def blocks_compiled_in_every_step(fired: Fired) -> None:
    from harness.reference.model import TransformerBlock
    from harness.trainers.llama3 import trainer

    steps = itertools.count(1)

    def make(original: Any) -> Any:
        def forward(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
            return original(self, x + 0 * self.step, *args, **kwargs)

        return forward

    def count(original: Any) -> Any:
        def train_step(self: Any) -> Any:
            fired()
            setattr(TransformerBlock, "step", next(steps))  # noqa: B010
            return original(self)

        return train_step

    replace(TransformerBlock, "forward", make)
    replace(trainer.Trainer, "train_step", count)


@fault(
    breaks="autograd's anomaly detection is left on: every operator of backward is checked for NaN and notes its stack",
    bug="Z-class: a debugging switch left on",
    case="fsdp_2",
    caught_by="settings",
    named="autograd anomaly detection is on",
)
def anomaly_detection_left_on(fired: Fired) -> None:
    import torch

    from harness.trainers.llama3 import trainer

    def make(original: Any) -> Any:
        def build(*args: Any, **kwargs: Any) -> Any:
            fired()
            torch.autograd.set_detect_anomaly(True)
            return original(*args, **kwargs)

        return build

    replace(trainer, "build_parts", make)


@fault(
    breaks="what blocks save for backward is moved to the host, which nobody requested",
    bug="A-class: activations are offloaded although memory is not short",
    case="fsdp_2",
    caught_by="features",
    named="activations saved for backward go through torch.autograd.graph.save_on_cpu",
)
def activations_saved_on_the_host(fired: Fired) -> None:
    from torch.autograd.graph import save_on_cpu

    from harness.reference.model import TransformerBlock

    def make(original: Any) -> Any:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            fired()
            with save_on_cpu():
                return original(self, *args, **kwargs)

        return forward

    replace(TransformerBlock, "forward", make)


@fault(
    breaks="deterministic algorithms are switched on by rank 1, in a case that runs once",
    bug="Z-class: a debugging switch left on",
    case="fsdp_2",
    caught_by="settings",
    named="deterministic algorithms are on on rank 1 from step 1 on, requested off",
)
def deterministic_algorithms_left_on(fired: Fired) -> None:
    import torch
    import torch.distributed as dist

    from harness.trainers.llama3 import trainer

    def make(original: Any) -> Any:
        def build(*args: Any, **kwargs: Any) -> Any:
            if dist.get_rank() == 1:
                fired()
                torch.use_deterministic_algorithms(True)
            return original(*args, **kwargs)

        return build

    replace(trainer, "build_parts", make)


@fault(
    breaks="blocks read a number that is another one in every step, and what cannot be compiled again runs eagerly",
    bug="O-class: at the limit of recompilations torch.compile gives up, which only a warning tells",
    case="fsdp_2_compile",
    caught_by="features",
    named="recompile limit",
)
def recompile_limit_reached(fired: Fired) -> None:
    import torch

    from harness.reference.model import TransformerBlock

    blocks_compiled_in_every_step.apply(fired)
    torch._dynamo.config.recompile_limit = 1

    def in_pieces(original: Any) -> Any:
        def compile(self: Any, **options: Any) -> None:
            original(self, **(options | {"fullgraph": False, "backend": "aot_eager"}))

        return compile

    replace(TransformerBlock, "compile", in_pieces)
