"""A trainer brought from outside the package, and its adapter: DDP around a model whose parameters have other names.

`harness run ddp_2 --trainer tests/own_trainer.py`
"""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path
from typing import Any

from harness.adapters.support.requests import beyond
from harness.core.case.case import Case
from harness.core.trainers import Adapter, Metrics, StartedTrainer
from harness.core.trainers.support.names import pairs, renamed

NAMES = pairs("embed=tok_embeddings blocks=layers last=norm head=output")
KNOWN = {"dp_replicate": ..., "wrapper": ("ddp",), "all_valid": ..., "accumulation": ...}


class Own(Adapter):
    name = "own"
    reports = ("loss",)

    def unsupported(self, case: Case) -> str | None:
        return next(beyond(case, KNOWN, self.name), None)

    def fqn(self, name: str) -> str:
        return renamed(name, NAMES)

    def start(self, case: Case, weights: Path | None, device: str) -> StartedTrainer:
        return Started(case, weights)


class Started(StartedTrainer):
    def __init__(self, case: Case, weights: Path | None) -> None:
        import numpy as np
        import torch

        from harness.core.trainers.support import process_group
        from harness.reference.data import build_dataset
        from harness.reference.model import llama_from

        assert weights is not None
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        process_group.join("gloo")
        self.case, self.dataset = case, build_dataset(case.training, case.model)
        model = own_model(llama_from(np.load(weights), config=case.model, dtype=torch.float64))
        self.model = self.wrapped(model)
        recipe = case.training
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), recipe.lr, (recipe.beta1, recipe.beta2), recipe.eps, recipe.weight_decay
        )
        self.model_parts, self.metrics = [self.model], []

    def wrapped(self, model: Any) -> Any:
        import torch

        return torch.nn.parallel.DistributedDataParallel(model)

    def train(self, last_step: int) -> None:
        for step in range(1, last_step + 1):
            self.metrics.append(self.step(step))

    def step(self, step: int) -> Metrics:
        import torch.distributed as dist

        from harness.reference.train import lr_factor

        batches = self.batches(step)
        valid = sum((labels != -100).sum() for _, labels in batches)
        dist.all_reduce(valid)
        self.optimizer.zero_grad()
        self.scale = self.world_size / valid.double()  # DDP averages over ranks
        total: Any = 0.0
        for index, (tokens, labels) in enumerate(batches):
            with contextlib.nullcontext() if index == len(batches) - 1 else self.model.no_sync():
                loss = self.forward(tokens, labels)
                self.backward(loss * self.scale)
            total = total + self.kept(loss)
        self.clip(self.case.training.max_norm)
        rate = self.optimizer.param_groups[0]["lr"] = self.case.training.lr * lr_factor(step, self.case.training)
        self.optimizer.step()
        dist.all_reduce(total)
        return Metrics(step, float(total / valid), None, rate)

    def batches(self, step: int) -> list[tuple[Any, Any]]:
        """Tokens and labels of this rank's microbatches."""
        from harness.core.trainers.support.samples import rank_samples

        tokens, labels = rank_samples(self.case, self.dataset, step, self.rank, self.world_size)
        cut = self.case.features.accumulation
        return list(zip(tokens.chunk(cut), labels.chunk(cut), strict=True))

    def forward(self, tokens: Any, labels: Any) -> Any:
        return self.loss(self.model(tokens), labels)

    def loss(self, logits: Any, labels: Any) -> Any:
        """The sum over all valid tokens."""
        from torch.nn.functional import cross_entropy

        return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    def backward(self, loss: Any) -> None:
        loss.backward()

    def kept(self, loss: Any) -> Any:
        """What is summed up for the display."""
        return loss.detach().clone()

    def clip(self, max_norm: float | None) -> None:
        import torch

        torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm or math.inf)


def own_model(llama: Any) -> Any:
    """The reference's blocks in a model of its own."""
    from torch import nn

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.blocks = llama.tok_embeddings, nn.ModuleList(llama.layers.values())
            self.last, self.head = llama.norm, llama.output

        def forward(self, tokens: Any) -> Any:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return self.head(self.last(x))

    return Own()


adapter = Own()
