"""Gradients are right in the first step and wrong later, or a loss is wrong beside right gradients."""

from __future__ import annotations

from harness.checks import resume, run_check
from harness.diagnosis.differences import (
    loss_off,
    where_text,
    wrong_pairs,
)
from harness.diagnosis.words import Broken, finding_line
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
    where = where_text(trial, wrong)
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
