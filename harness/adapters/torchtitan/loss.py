"""torchtitan's own cross entropy, shown to the probe."""

from __future__ import annotations

from typing import Any

from harness.core.probe import chunks
from harness.core.probe.losses import noted


def show_loss(loss: Any) -> None:
    """Note the cross entropy that torchtitan itself has for sharded logits since 2026-06, where the probe does not look.
    Until 2026-04-27 its loss is a function, which calls torch's."""
    each = getattr(loss, "loss_fn", loss)
    if hasattr(each, "fn"):
        each.fn = chunks.no_forward(noted(each.fn, reduction="sum"))
    if hasattr(loss, "num_chunks"):
        type(loss).__call__ = chunks.forward(type(loss).__call__)
