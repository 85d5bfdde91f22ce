"""The trainer of own_trainer.py with habits of real ones, none of which changes what it trains.

`harness run ddp_2 --trainer tests/habitual_trainer.py --source validates+clips_itself`
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from own_trainer import Own, Started
from torch.nn.utils import clip_grad_norm_

from harness.core.case.case import Case
from harness.core.trainers import StartedTrainer


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

    # ---- how it computes the loss

    def loss_by_rows(self) -> None:
        """One call a sample."""
        original = self.loss
        self.loss = lambda logits, labels: sum(  # type: ignore[method-assign]
            original(row[None], own[None]) for row, own in zip(logits, labels, strict=True)
        )

    def loss_by_positions(self) -> None:
        """Chunks along the sequence, each computed again in backward."""
        from torch.utils.checkpoint import checkpoint

        original = self.loss

        def chunked(logits: Any, labels: Any) -> Any:
            parts = zip(logits.chunk(3, dim=1), labels.chunk(3, dim=1), strict=True)
            return sum(checkpoint(original, *part, use_reentrant=False) for part in parts)

        self.loss = chunked  # type: ignore[method-assign]

    def loss_of_valid_tokens(self) -> None:
        """Tokens without a label are left out before."""
        original = self.loss

        def valid(logits: Any, labels: Any) -> Any:
            return original(logits[labels != -100][None], labels[labels != -100][None])

        self.loss = valid  # type: ignore[method-assign]

    def loss_by_nll(self) -> None:
        from torch.nn import NLLLoss

        def likelihood(logits: Any, labels: Any) -> Any:
            return NLLLoss(reduction="sum")(logits.flatten(0, 1).log_softmax(-1), labels.flatten())

        self.loss = likelihood  # type: ignore[method-assign]

    def loss_by_hand(self) -> None:
        """By logsumexp, where nobody can see it."""

        def by_hand(logits: Any, labels: Any) -> Any:
            chosen = logits.gather(-1, labels.clamp_min(0)[..., None])[..., 0]
            return ((logits.logsumexp(-1) - chosen) * (labels != -100)).sum()

        self.loss = by_hand  # type: ignore[method-assign]

    def logs_the_loss(self) -> None:
        """Of every token, without gradients, beside the one that trains."""
        import torch
        from torch.nn.functional import cross_entropy

        original = self.loss

        def logged(logits: Any, labels: Any) -> Any:
            with torch.no_grad():
                cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
            return original(logits, labels)

        self.loss = logged  # type: ignore[method-assign]

    # ---- clipping

    def clips_itself(self) -> None:
        """On what lies behind the gradients, which no version counter tells of."""
        self.clip = self._own_clip  # type: ignore[method-assign]

    def _own_clip(self, max_norm: float | None) -> None:
        gradients = [parameter.grad.data for parameter in self.model.parameters()]
        norm = sum(float(gradient.square().sum()) for gradient in gradients) ** 0.5
        for gradient in gradients:
            gradient.mul_(min(1.0, max_norm / (norm + 1e-6)))

    def clips_by_name(self) -> None:
        """By a function that was imported before anybody could look."""
        self.clip = lambda max_norm: clip_grad_norm_(self.model.parameters(), max_norm)  # type: ignore[method-assign]

    def measures_each_microbatch(self) -> None:
        """The norm of what has been accumulated, for a display; by clipping to infinity, as torch 2.5 knew no other way."""
        backward = self.backward

        def measured(loss: Any) -> None:
            backward(loss)
            clip_grad_norm_(self.model.parameters(), float("inf"))

        self.backward = measured  # type: ignore[method-assign]

    def scales_the_loss(self) -> None:
        """And divides gradients by that, before they are clipped."""
        original, clip = self.backward, self.clip

        def unscaled(max_norm: float | None) -> None:
            for parameter in self.model.parameters():
                parameter.grad.div_(1024)
            clip(max_norm)

        self.backward = lambda loss: original(loss * 1024)  # type: ignore[method-assign]
        self.clip = unscaled  # type: ignore[method-assign]

    # ---- validation

    def validates(self) -> None:
        """Before the first step, between microbatches and after each step, with a loss reduced over all ranks."""
        import torch

        self._around_training(torch.no_grad)

    def validates_in_inference_mode(self) -> None:
        import torch

        self._around_training(torch.inference_mode)

    def validates_with_gradients(self) -> None:
        """Nobody forbade autograd to record them; no backward follows."""
        import contextlib

        self._around_training(contextlib.nullcontext)

    def _around_training(self, mode: Any) -> None:
        import torch.distributed as dist
        from torch.nn.functional import cross_entropy

        def validate() -> None:
            self.model.eval()
            with mode():
                for tokens, labels in self.batches(1):
                    found = cross_entropy(self.model(tokens).flatten(0, 1), labels.flatten()).detach()
                    dist.all_reduce(found)
            self.model.train()

        def followed(method: Any) -> Any:
            def both(*args: Any) -> None:
                method(*args)
                validate()

            return both

        train = self.train
        self.backward, self.clip = followed(self.backward), followed(self.clip)  # type: ignore[method-assign]

        def around(last_step: int) -> None:
            validate()
            train(last_step)
            validate()

        self.train = around  # type: ignore[method-assign]


adapter = Habitual()
