"""What torchtitan reports, noted where it tells its logger."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.trainers import Metrics


def note_logger(logger: Any, metrics: list[Metrics], shows: Callable[[], bool]) -> Any:
    """The same logger; what it is told to log is noted: the loss averaged over ranks, the gradient norm if it has one.

    shows: as of note_processor.
    """
    original = logger.log

    def log(values: dict[str, Any], step: int, *args: Any, **kwargs: Any) -> None:
        norm = values.get("grad_norm", values.get("optim/grad_norm"))
        loss = float(values["loss_metrics/global_avg_loss"]) if shows() else None
        metrics.append(Metrics(step, loss, norm, values.get("lr")))
        original(values, step, *args, **kwargs)

    logger.log = log
    return logger


def note_processor(processor: Any, metrics: list[Metrics], shows: Callable[[], bool] = lambda: True) -> Any:
    """The same metrics processor; what it is told to log is noted. Versions without a gradient norm tell none.

    shows: whether this rank knows the loss, when it comes to it; ranks without the last stage of a pipeline show -1.
    """
    original = processor.log

    def log(step: int, average: float, largest: float, *norm: Any, **extra: Any) -> None:
        rate = (extra.get("extra_metrics") or {}).get("lr")
        metrics.append(Metrics(step, float(average) if shows() else None, norm[0] if norm else None, rate))
        original(step, average, largest, *norm, **extra)

    processor.log = log
    return processor
