"""Dropout that is left out of training, or that draws the masks of another step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from harness.core.causes.assume import another_reference
from harness.core.causes.differences import first_wrong_step, spans
from harness.core.causes.hypothesis import Broken, Hypothesis
from harness.core.causes.words import from_step
from harness.core.judge.result import Cause
from harness.core.judge.trial import Trial


def lacks_dropout(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    step = first_wrong_step(trial) if "loss" in broken and trial.case.model.dropout else None
    for when, steps, more in spans(trial, step) if step is not None else ():
        cause = Cause("eval mode", f"the model trains without dropout{when}", hint="as in eval mode")
        cause = replace(cause, details=(("steps", tuple(steps)),))
        yield Hypothesis(cause, partial(_in_eval_mode, steps=steps), 1 + more)


def other_masks(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Each step draws the dropout masks of one other step, or of one as many steps away."""
    step = first_wrong_step(trial) if "loss" in broken and trial.case.model.dropout else None
    if step is None:
        return
    late = [one for one in trial.case.steps if one >= step]
    when = "in every step" if step == 1 else from_step(trial, step)
    for other in {*range(trial.case.steps[-1] + 2)} - {step}:
        by = other - step
        away = f"{abs(by)} step{'s' * (abs(by) > 1)} {'later' if by > 0 else 'earlier'}"
        same, shifted = dict.fromkeys(late, other), {one: one + by for one in late}
        for text, detail, masks in ((f"step {other}", ("step", other), same), (away, ("by", by), shifted)):
            cause = Cause("masks of another step", f"dropout's masks are those of {text} {when}", details=(detail,))
            yield Hypothesis(cause, partial(_masks_of, masks=masks))


def _masks_of(trial: Trial, masks: Mapping[int, int]) -> Trial:
    from harness.reference.model import seed_masks

    def altered(model: Any, step: int) -> None:
        seed_masks(model, trial.case.training.seed, masks.get(step, step))

    return another_reference(trial, altered=altered)


def _in_eval_mode(trial: Trial, steps: Sequence[int]) -> Trial:
    from harness.reference.spellings import evaluating

    return another_reference(trial, altered=evaluating(steps)).assuming(undrawn=frozenset(steps))
