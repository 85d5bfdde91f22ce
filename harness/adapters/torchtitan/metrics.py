"""The metrics that torchtitan reports, recorded where it calls its logger."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from harness.core.evidence.numbers import VALIDATION, Number
from harness.core.trainers import Metrics


def note_logger(logger: Any, metrics: list[Metrics], shows: Callable[[], bool]) -> Any:
    """Patch the logger to append a Metrics for each of its calls, and return it.

    Recorded are the loss averaged over ranks, the largest loss, the gradient norm and lr, None where missing.
    shows: whether this rank knows the loss; else both losses are None.
    """
    original = logger.log

    def log(values: dict[str, Any], step: int, *args: Any, **kwargs: Any) -> None:
        norm = values.get("grad_norm", values.get("optim/grad_norm"))
        mean, largest = (float(values[f"loss_metrics/global_{which}_loss"]) for which in ("avg", "max"))
        loss, largest_shown = (mean, largest) if shows() else (None, None)
        metrics.append(Metrics(step, loss, norm, values.get("lr"), largest_shown))
        original(values, step, *args, **kwargs)

    logger.log = log
    return logger


def note_processor(
    processor: Any,
    metrics: list[Metrics],
    shows: Callable[[], bool] = lambda: True,
    *,
    tells_largest: bool = True,
    separately: bool = False,
) -> Any:
    """Patch the metrics processor to append a Metrics for each step that it logs, and return it.

    Without a gradient norm it is None.
    shows: whether this rank knows the loss; without a pipeline's last stage torchtitan shows -1, recorded as None.
    tells_largest: False where the largest loss is known to be wrong; it is None then.
    separately: the loss of a validation is one more number of its step. If not, it takes the place of the next step's
    loss.
    """
    original = processor.log
    validated: dict[int, float] = {}

    def log(step: int, average: float, largest: float, *norm: Any, **extra: Any) -> None:
        rate = (extra.get("extra_metrics") or {}).get("lr")
        loss, largest_shown = (float(average), float(largest)) if shows() else (None, None)
        if loss is not None and step in validated:
            loss = validated[step]
            largest_shown = None
        metrics.append(Metrics(step, loss, norm[0] if norm else None, rate, largest_shown if tells_largest else None))
        original(step, average, largest, *norm, **extra)

    def note(loss: float, step: int) -> None:
        """Keep the loss of a validation: for the next step, or as a number of its own step."""
        if not separately:
            validated[step + 1] = loss
        elif shows() and metrics and metrics[-1].step == step:
            metrics[-1] = dataclasses.replace(metrics[-1], numbers={VALIDATION: Number(loss, of=VALIDATION)})

    processor.log = log
    note_validation(processor, note)
    return processor


def note_validation(processor: Any, note: Callable[[float, int], None]) -> None:
    """Patch the processor to call note(loss, step) for each validation that it logs.

    Does nothing if it has no `log_validation`.
    """
    original = getattr(processor, "log_validation", None)

    def log_validation(loss: float, step: int, *args: Any, **kwargs: Any) -> None:
        note(float(loss), step)
        original(loss, step, *args, **kwargs)  # type: ignore[misc]

    if original is not None:
        processor.log_validation = log_validation
