"""The trainer of own_trainer.py with habits of real ones, none of which changes what it trains.

`harness run ddp_2 --trainer tests/habitual_trainer.py --source validates+clips_itself`
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from own_trainer import Own, Started

from harness.case import Case
from harness.trainers import StartedTrainer


class Habitual(Own):
    name = "habitual"

    def __init__(self, habits: str = "") -> None:
        self.habits = habits.split("+")

    def of(self, habits: str) -> Habitual:
        return Habitual(habits)

    def start(self, case: Case, weights: Path | None, device: str) -> StartedTrainer:
        unknown = set(self.habits) - {name for name in vars(HabitualStarted) if not name.startswith("_")}
        assert not unknown, unknown
        started = HabitualStarted(case, weights)
        for name in self.habits:
            getattr(started, name)()
        return started


class HabitualStarted(Started):
    """Each habit replaces a method of this trainer, or does something around one."""

    # ---- what it shows

    def shows_by_all_reduce(self) -> None:
        """The usual idiom: the loss that was differentiated is itself reduced."""
        import torch.distributed as dist

        def reduced(loss: Any) -> Any:
            shown = loss.detach()
            dist.all_reduce(shown)
            return shown / self.world_size  # for `step` sums over the ranks once more

        self.kept = reduced  # type: ignore[method-assign]

    def reuses_a_buffer(self) -> None:
        """Labels of all microbatches lie in one place, one after the other."""
        original, buffers = self.loss, {}

        def filled(logits: Any, labels: Any) -> Any:
            buffer = buffers.setdefault(labels.shape, labels.clone())
            return original(logits, buffer.copy_(labels))

        self.loss = filled  # type: ignore[method-assign]


adapter = Habitual()
