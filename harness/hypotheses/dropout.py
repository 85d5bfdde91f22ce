"""Causes that are about dropout: it is left out of training, or draws the masks of another step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from harness.core.causes.assume import assume_reference
from harness.core.causes.differences import first_wrong_step, step_choices
from harness.core.causes.hypothesis import Broken, Hypothesis
from harness.core.causes.words import from_step_text
from harness.core.judge.result import Cause
from harness.core.judge.trial import Trial


def lacks_dropout(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Yield hypotheses that the model trains without dropout: from the first wrong step on, and in it alone.

    Nothing if the model has no dropout or the loss does not fail.
    """
    step = first_wrong_step(trial) if "loss" in broken and trial.case.model.dropout else None
    if step is None:
        return
    for when, steps, extra_choices in step_choices(trial, step):
        cause = Cause("eval mode", f"the model trains without dropout{when}", hint="as in eval mode")
        cause = replace(cause, details=(("steps", tuple(steps)),))
        yield Hypothesis(cause, partial(_assume_eval_mode, steps=steps), 1 + extra_choices)


def other_masks(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Yield hypotheses that steps draw other dropout masks from the first wrong step on: all those of one step, or each
    shifted.

    Every step of the run is tried. Nothing if the model has no dropout or the loss does not fail.
    """
    step = first_wrong_step(trial) if "loss" in broken and trial.case.model.dropout else None
    if step is None:
        return
    later_steps = [number for number in trial.case.steps if number >= step]
    when = "in every step" if step == 1 else from_step_text(trial, step)
    for other in {*range(trial.case.steps[-1] + 2)} - {step}:
        offset = other - step
        noun = "steps" if abs(offset) > 1 else "step"
        away = f"{abs(offset)} {noun} {'later' if offset > 0 else 'earlier'}"
        same_step = dict.fromkeys(later_steps, other)
        shifted_steps = {number: number + offset for number in later_steps}
        choices = ((f"step {other}", ("step", other), same_step), (away, ("by", offset), shifted_steps))
        for text, detail, masks in choices:
            cause = Cause("masks of another step", f"dropout's masks are those of {text} {when}", details=(detail,))
            yield Hypothesis(cause, partial(_assume_masks, masks=masks))


def _assume_masks(trial: Trial, masks: Mapping[int, int]) -> Trial:
    """Return the trial under the assumption that steps draw the masks of others. masks: step -> the step whose masks
    it draws."""
    from harness.reference.model import seed_masks

    def reseed(model: Any, step: int) -> None:
        seed_masks(model, trial.case.training.seed, masks.get(step, step))

    return assume_reference(trial, altered=reseed)


def _assume_eval_mode(trial: Trial, steps: Sequence[int]) -> Trial:
    """Return the trial under the assumption that the model is in eval mode in these steps, so that no dropout mask
    is drawn."""
    from harness.reference.spellings import in_eval_mode

    return assume_reference(trial, altered=in_eval_mode(steps)).with_assumption(undrawn=frozenset(steps))
