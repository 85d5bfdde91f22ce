"""Gradients are right in the first step and wrong later, or a loss is wrong beside right gradients."""

from __future__ import annotations

import functools
import math

import numpy as np

from harness.checks import resume, run_check
from harness.diagnosis.differences import (
    common_factor,
    expected_gradient,
    loss_off,
    seen_gradients,
    where_text,
    wrong_pairs,
)
from harness.diagnosis.factors import times_text
from harness.diagnosis.gradients import scaled_by_powers
from harness.diagnosis.words import Broken, finding_line
from harness.judge import tolerance
from harness.judge.result import Diagnosis, Lines, Verdict, one_cause
from harness.judge.trial import Trial


def wrong_later_gradients(trial: Trial, broken: Broken) -> Diagnosis | None:
    """Right in step 1, and parameters are what the optimizer makes of them: the mistake carries over between steps."""
    if "gradients" not in broken or "update" in broken:
        return None
    step = next((step for step in trial.case.steps if step > 1 and wrong_pairs(trial, step)), None)
    if step is None:
        return None
    wrong, line = wrong_pairs(trial, step), finding_line("gradients", broken["gradients"])
    if step == trial.first_step:
        text = f"gradients are wrong from step {step} on, the first after resuming, {where_text(trial, wrong)}"
        as_saved = run_check("resume", resume.check, trial).verdict is Verdict.PASS
        why = ": parameters, optimizer state and samples are those that were saved" if as_saved else ""
        return one_cause(text + why, (line,))
    if all(_is_sum_of_steps(trial, rank, fqn, step) for rank, fqn in wrong):
        return one_cause(f"gradients are not zeroed between steps: those of step {step} hold step 1's as well", (line,))
    where, factor = where_text(trial, wrong), common_factor(trial, wrong, step)
    if factor is not None:
        text = f"gradients are right in step {trial.first_step} and from step {step} on {times_text(factor)}"
        text += f" what they should be {where}"
        return one_cause(text + _count_of_another_step(trial, step, factor), (line,))
    powers = scaled_by_powers(trial, wrong, step)
    if powers:
        return one_cause(f"from step {step} on {powers}", (line,))
    off = loss_off(trial, step)
    if off:
        text = f"the forward pass is right in step {trial.first_step} and wrong from step {step} on (loss off by {off:.1e})"
        return one_cause(text, (line, *_what_may_be_kept(trial)))
    return one_cause(f"gradients are right in step {trial.first_step} and wrong from step {step} on {where}", (line,))


def _what_may_be_kept(trial: Trial) -> Lines:
    """What there is of a step, besides its samples, that a forward pass may keep; evidence tells neither that nor which."""
    things = {
        "the document mask": trial.case.training.document_mask,
        "gathered parameters": trial.case.wrapper in ("fsdp2", "fsdp1"),
        "what depends on the length": trial.case.training.variable_length,
    }
    chosen = [thing for thing, there in things.items() if there]
    return (("not seen", f"whether it uses {' or '.join(chosen)} of an earlier step"),) if chosen else ()


def _count_of_another_step(trial: Trial, step: int, factor: float) -> str:
    counts = {other.step: other.valid_tokens for other in trial.reference.steps}
    for other, count in counts.items():
        if other != step and math.isclose(factor, counts[step] / count, rel_tol=1e-6):
            return f": divided by the number of valid tokens of step {other} ({count}, not {counts[step]})"
    return ""


def _is_sum_of_steps(trial: Trial, rank: int, fqn: str, step: int) -> bool:
    parts = [expected_gradient(trial, rank, fqn, number) for number in range(1, step + 1)]
    if any(part is None for part in parts):
        return False
    limit = trial.case.training.max_norm
    clips = [tolerance.clip_coefficient(trial.reference.steps[i].grad_norm, limit) for i in range(step - 1)]
    seen = seen_gradients(trial, rank, step)[fqn]
    for weights in ([*clips, 1.0], [1.0] * step):  # clipping works in place
        total = functools.reduce(np.add, [w * part for w, part in zip(weights, parts, strict=True) if part is not None])
        if tolerance.relative_difference(seen, total) < 1e-7:
            return True
    return False


def wrong_loss(trial: Trial, broken: Broken) -> Diagnosis | None:
    """Gradients of step 1 are right, its loss is not: what was seen of the loss contradicts itself."""
    if "loss" not in broken or wrong_pairs(trial, 1):
        return None
    off, line = loss_off(trial), finding_line("loss", broken["loss"])
    if off:
        close = f"its gradients match within the bound of {trial.bounds.gradient[1]:.1e}"
        return one_cause(f"the loss of step 1 is off by {off:.1e}, {close}", (line,))
    first = broken["loss"].findings[0]
    if first.where.startswith("rank") and first.where.endswith("step 1"):
        return one_cause(f"ranks compute different losses from the same tokens: {first.where}", (line,))
    return None
