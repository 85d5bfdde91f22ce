"""What a real step on CPU takes at its most, beside what the plan says of it, by phase."""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.core.case.case import Case
from harness.core.case.features import Features
from harness.core.plan.figures.rank_bytes import rank_bytes
from harness.core.plan.make_plan import make_plan
from harness.core.trainers.llama3.recompute import apply_checkpointing
from harness.reference.config import ModelConfig, TrainingConfig
from harness.reference.model import Llama


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


@pytest.mark.parametrize("checkpointing", ["none", "full", "op"])
def test_a_real_step_has_at_its_most_what_is_planned(checkpointing: str) -> None:
    """Both phases, of live storages. Unfused norms, rotary tables and expanded heads keep what the estimate leaves out."""
    case = Case(
        name="one",
        why="-",
        model=ModelConfig("small", 128, 4, 4, 2, 4096, 384),
        training=TrainingConfig(dtype="float32", global_batch=1, seq_len=256),
        features=Features(activation_checkpointing=checkpointing),
    )
    seen, plan = peaks(case), rank_bytes(case, make_plan(case), 0)
    assert plan.loss_peak == pytest.approx(seen["loss"], rel=0.15)
    assert plan.backward_peak == pytest.approx(seen["backward"], rel=0.15)
