"""Whether two recordings of one training have the same optimizers, settings and learning rates."""

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
    """Compare optimizers and their settings, learning rates, and scales of the loss."""
    if not (baseline.optimizers and candidate.optimizers):
        return Result("recipe", Verdict.UNKNOWN, note="no step of an optimizer was seen in one of the recordings")
    findings = []
    if {*map(_settings, baseline.optimizers)} != {*map(_settings, candidate.optimizers)}:
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
    """Return the first step whose loss is scaled by another number; empty if none is.

    A resumed job begins with a scale if the first recording has one there.
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
    return scales[0] if len(scales) == 1 else scales or "none"


def _settings(optimizer: str) -> str:
    """Return class and settings, without the optimizer that contains it, such as ZeRO's."""
    kind, _, settings = optimizer.partition("(")
    return f"{kind.partition(' in ')[0]}({settings}"


def _differing_setting(baseline: tuple[str, ...], candidate: tuple[str, ...]) -> tuple[str, str, str]:
    """Return the one setting that differs, and both its values; all of both optimizers where more does."""
    expected_settings = dict(SETTING.findall(_settings(baseline[0])))
    observed_settings = dict(SETTING.findall(_settings(candidate[0])))
    classes = {_settings(text).partition("(")[0] for text in (*baseline, *candidate)}
    differing = [name for name in expected_settings if expected_settings[name] != observed_settings.get(name)]
    have_same_settings = expected_settings.keys() == observed_settings.keys()
    if len(baseline) == len(candidate) == len(classes) == len(differing) == 1 and have_same_settings:
        name = differing[0]
        return name, expected_settings[name], observed_settings[name]
    return "optimizer", ", ".join(sorted(baseline)), ", ".join(sorted(candidate))
