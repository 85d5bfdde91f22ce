"""Comparison of the optimizers, their settings, learning rates and loss scales of two recordings of one training."""

from __future__ import annotations

import re

from harness.core.judge.finding import Finding, Value
from harness.core.judge.result import Result, Verdict, verdict_of
from harness.recording.judged.judge_sketched import Numbers

SCALE = "loss scale"
"""Name of a finding on what a loss scaler multiplied the loss by."""
SETTING = re.compile(
    r"(betas|momentum|eps|weight_decay|amsgrad) (.*?)(?=, (?:betas|momentum|eps|weight_decay|amsgrad) |\)$)"
)
"""Name and value of a setting, in the words in which the recorder tells an optimizer."""


def compare_recipes(baseline: Numbers, candidate: Numbers, steps: list[int]) -> Result:
    """Return whether optimizers and their settings, learning rates and loss scales are the same: a finding for each
    difference.

    Learning rates are compared in these steps where both are known. UNKNOWN if no optimizer's step was seen in one
    recording.
    """
    if not (baseline.optimizers and candidate.optimizers):
        return Result("recipe", Verdict.UNKNOWN, note="no step of an optimizer was seen in one of the recordings")
    findings = []
    if {*map(_class_and_settings, baseline.optimizers)} != {*map(_class_and_settings, candidate.optimizers)}:
        name, expected, observed = _differing_setting(baseline.optimizers, candidate.optimizers)
        findings.append(Finding(kind="setting", name=name, expected=expected, observed=observed))
    for step in steps:
        expected_rates = baseline.rates.get(step, ())
        observed_rates = candidate.rates.get(step, ())
        if expected_rates and observed_rates and {*expected_rates} != {*observed_rates}:
            findings.append(
                Finding(
                    step=step,
                    kind="setting",
                    name="learning rate",
                    expected=expected_rates[0],
                    observed=observed_rates[0],
                )
            )
    findings += _scale_findings(baseline, candidate, steps)
    return verdict_of("recipe", findings, len(baseline.optimizers) + len(steps))


def _scale_findings(baseline: Numbers, candidate: Numbers, steps: list[int]) -> list[Finding]:
    """Return one finding for the first step whose loss is scaled by another number; empty if none is.

    Steps without a scale in one recording are left out. In the first step after a checkpoint, a missing scale of the
    second is a finding.
    """
    for step in steps:
        expected = baseline.scales.get(step, ())
        observed = candidate.scales.get(step, ())
        if expected != observed and expected and (observed or step == baseline.after + 1 > 1):
            return [
                Finding(
                    step=step,
                    kind="setting",
                    name=SCALE,
                    expected=_scale_value(expected),
                    observed=_scale_value(observed),
                )
            ]
    return []


def _scale_value(scales: tuple[float, ...]) -> Value:
    """Return the one scale, all of them if ranks have several, "none" if there is none."""
    return scales[0] if len(scales) == 1 else scales or "none"


def _class_and_settings(optimizer: str) -> str:
    """Return class and settings of an optimizer's text, without the optimizer that contains it, such as ZeRO's."""
    kind, _, settings = optimizer.partition("(")
    return f"{kind.partition(' in ')[0]}({settings}"


def _differing_setting(baseline: tuple[str, ...], candidate: tuple[str, ...]) -> tuple[str, str, str]:
    """Return the name of the one setting that differs, and its value in both; "optimizer" and all optimizers if more
    differs."""
    expected_settings = dict(SETTING.findall(_class_and_settings(baseline[0])))
    observed_settings = dict(SETTING.findall(_class_and_settings(candidate[0])))
    classes = {_class_and_settings(text).partition("(")[0] for text in (*baseline, *candidate)}
    differing = [name for name in expected_settings if expected_settings[name] != observed_settings.get(name)]
    have_same_settings = expected_settings.keys() == observed_settings.keys()
    if len(baseline) == len(candidate) == len(classes) == len(differing) == 1 and have_same_settings:
        name = differing[0]
        return name, expected_settings[name], observed_settings[name]
    return "optimizer", ", ".join(sorted(baseline)), ", ".join(sorted(candidate))
