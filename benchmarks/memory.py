"""Peaks of a real step on CPU beside the plan's, by phase: `python -m benchmarks.memory`.

A model of 100 million parameters on one rank, in float32. Live storages are followed from operator to operator; an allocator's
share is in neither.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import Any

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.plan.figures.rank_bytes import RankBytes, rank_bytes
from harness.plan.make_plan import make_plan
from harness.reference.config import ModelConfig, TrainingConfig
from harness.reference.model import Llama
from harness.spec.case import Case
from harness.spec.features import Features
from harness.trainers.llama3.recompute import apply_checkpointing

MODEL = ModelConfig("100M", 512, 16, 8, 4, 50_304, 1536)
RECIPE = TrainingConfig(dtype="float32", global_batch=1, seq_len=1024)


class Live(TorchDispatchMode):
    """Bytes of the storages that operators returned, until nobody holds them; the most in each phase."""

    def __init__(self) -> None:
        super().__init__()
        self.phase, self.most, self._bytes, self._there = "before", defaultdict[str, int](int), 0, set[Any]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self.note(tensor)
        return made

    def note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if (of := weakref.ref(storage)) not in self._there:
            self._there.add(of)
            self._bytes += storage.nbytes()
            weakref.finalize(storage, self._gone, of, storage.nbytes())
        self.most[self.phase] = max(self.most[self.phase], self._bytes)

    def _gone(self, of: Any, size: int) -> None:
        self._there.discard(of)
        self._bytes -= size


def case_of(checkpointing: str, model: ModelConfig = MODEL, recipe: TrainingConfig = RECIPE) -> Case:
    return Case(
        name="one", why="-", model=model, training=recipe, features=Features(activation_checkpointing=checkpointing)
    )


def peaks(case: Case) -> dict[str, int]:
    """Of the second step, by phase: what is in use at the most in loss and in backward."""
    model, live = Llama(case.model), Live()
    apply_checkpointing(model, case)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    rows = torch.zeros(case.training.global_batch, case.training.seq_len, dtype=torch.int64)
    with live:
        for parameter in model.parameters():
            live.note(parameter)
        for _ in range(2):
            live.most.clear()
            live.phase = "forward"
            logits = model(rows)
            live.phase = "loss"
            logits.register_hook(lambda _: setattr(live, "phase", "backward"))
            loss = functional.cross_entropy(logits.flatten(0, 1), rows.flatten())
            del logits
            loss.backward()
            live.phase = "optimizer"
            optimizer.step()
            optimizer.zero_grad()
    return dict(live.most)


def planned(case: Case) -> RankBytes:
    return rank_bytes(case, make_plan(case), 0)


def main() -> None:
    print("checkpointing  phase     measured  planned")
    for checkpointing in ("none", "layer", "op", "full"):
        case = case_of(checkpointing)
        seen, plan = peaks(case), planned(case)
        for phase, size in (("loss", plan.loss), ("backward", plan.backward)):
            print(
                f"{checkpointing:<15}{phase:<10}{seen[phase] / 1e9:<10.3f}{size / 1e9:<8.3f}{size / seen[phase] - 1:+.1%}"
            )


if __name__ == "__main__":
    main()
