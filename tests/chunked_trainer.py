"""The trainer from outside with FSDP2 and a loss in chunks, whose output layer is a unit of its own.

`harness run fsdp_2 --trainer tests/chunked_trainer.py --source freed`
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from own_fsdp import KNOWN, Fsdp, Shard, StartedFsdp

from harness.adapters.support.requests import beyond
from harness.core.case.case import Case
from harness.core.case.traits import TrainerTraits
from harness.core.trainers import StartedTrainer

CHUNKS = 4


class Chunked(Fsdp):
    """way: words. After forward FSDP2 has the output "kept", "halved" or freed; the loss is "checkpointed"; it is computed
    "behind" the model's forward; there each chunk has a backward of its own, and the output is "held" for all of them."""

    name = "chunked"

    def __init__(self, way: str = "") -> None:
        self.way = way

    def of(self, way: str) -> Chunked:
        return Chunked(way)

    def unsupported(self, case: Case) -> str | None:
        return next(beyond(case, KNOWN | {"accumulation": ..., "defer_sync": ...}, self.name), None)

    def wrap(self, model: Any, shard: Shard) -> None:
        for block in model.blocks:
            shard(block)
        shard(model.head, reshard_after_forward=2 if "halved" in self.way else "kept" not in self.way)
        shard(model)

    def habit(self, started: Any, step: int) -> None:
        pass

    def traits(self, case: Case) -> TrainerTraits:
        held = "held" in self.way
        inside = not held and "behind" not in self.way
        return TrainerTraits(
            loss_chunks=CHUNKS,
            loss_in_forward=inside,
            recomputes_output="checkpointed" in self.way,
            holds_output=held,
        )

    def start(self, case: Case, weights: Path | None, device: str) -> StartedTrainer:
        return StartedChunked(case, weights, self)


class StartedChunked(StartedFsdp):
    def wrapped(self, model: Any) -> Any:
        from harness.core.probe import chunks

        way = self.adapter.way
        loss = {"behind": behind_forward, "held": held}.get(way.partition("_")[0])
        self.loss_behind = chunks.forward(loss) if loss else None

        def forward(tokens: Any, labels: Any) -> Any:
            x = model.embed(tokens)
            for block in model.blocks:
                x = block(x)
            x = model.last(x)
            return x if self.loss_behind else in_chunks(model.head, x, labels, "checkpointed" in way)

        @contextlib.contextmanager
        def no_sync() -> Iterator[None]:
            model.set_requires_gradient_sync(not self.case.features.defer_sync)
            self.synchronises = not self.case.features.defer_sync
            yield
            model.set_requires_gradient_sync(True)
            self.synchronises = True

        model.forward, model.no_sync, self.synchronises = forward, no_sync, True
        return super().wrapped(model)

    def forward(self, tokens: Any, labels: Any) -> Any:
        found = self.model(tokens, labels)
        return self.loss_behind(self, found, labels) if self.loss_behind else found


def of_one(head: Any, hidden: Any, labels: Any) -> Any:
    from torch.nn.functional import cross_entropy

    return cross_entropy(head(hidden).flatten(0, 1), labels.flatten(), reduction="sum")


def in_chunks(head: Any, hidden: Any, labels: Any, checkpointed: bool = False) -> Any:
    from torch.utils.checkpoint import checkpoint

    total: Any = 0.0
    for part in zip(hidden.chunk(CHUNKS, dim=1), labels.chunk(CHUNKS, dim=1), strict=True):
        total = total + (checkpoint(of_one, head, *part, use_reentrant=False) if checkpointed else of_one(head, *part))
    return total


def behind_forward(started: StartedChunked, hidden: Any, labels: Any) -> Any:
    return in_chunks(started.model.head, hidden, labels)


def held(started: StartedChunked, hidden: Any, labels: Any) -> Any:
    """As torchtitan's loss does it."""
    import torch

    head, leaf = started.model.head, hidden.detach().requires_grad_()
    head.set_reshard_after_forward(False)
    head.set_reshard_after_backward(False)
    head.set_requires_gradient_sync(False)
    head.unshard()
    total: Any = 0.0
    for index, part in enumerate(zip(leaf.chunk(CHUNKS, dim=1), labels.chunk(CHUNKS, dim=1), strict=True)):
        if index == CHUNKS - 1:
            head.set_requires_gradient_sync(started.synchronises)
        loss = of_one(head, *part)
        (loss * started.scale).backward()
        total = total + loss.detach()
    head.set_reshard_after_forward(True)
    head.set_reshard_after_backward(True)
    head.set_requires_gradient_sync(started.synchronises)
    head.reshard()

    class Joined(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: Any, gradient: Any, total: Any) -> Any:
            ctx.gradient = gradient
            return total.clone()

        @staticmethod
        def backward(ctx: Any, upstream: Any) -> Any:
            return ctx.gradient, None, None

    return Joined.apply(hidden, leaf.grad, total)


adapter = Chunked()
