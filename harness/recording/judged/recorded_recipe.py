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


def recipe(one: Numbers, other: Numbers, steps: list[int]) -> Result:
    """Optimizers and their settings, learning rates, and scales of the loss."""
    if not (one.optimizers and other.optimizers):
        return Result("recipe", Verdict.UNKNOWN, note="no step of an optimizer was seen in one of the recordings")
    findings = []
    if {*map(_settings, one.optimizers)} != {*map(_settings, other.optimizers)}:
        name, expected, observed = _other_setting(one.optimizers, other.optimizers)
        findings.append(Finding(kind="setting", name=name, expected=expected, observed=observed))
    for step in steps:
        rates = [of.rates.get(step, ()) for of in (one, other)]
        if all(rates) and {*rates[0]} != {*rates[1]}:
            what = {"step": step, "kind": "setting", "name": "learning rate"}
            findings.append(Finding(**what, expected=rates[0][0], observed=rates[1][0]))  # type: ignore[arg-type]
    findings += _scales(one, other, steps)
    return verdict_of("recipe", findings, len(one.optimizers) + len(steps))


def _scales(one: Numbers, other: Numbers, steps: list[int]) -> list[Finding]:
    """The first step whose loss is scaled otherwise. A resumed job begins with a scale if the first recording has one there."""
    for step in steps:
        wanted, seen = one.scales.get(step, ()), other.scales.get(step, ())
        if wanted != seen and wanted and (seen or step == one.after + 1 > 1):
            return [Finding(step=step, kind="setting", name=SCALE, expected=_one_of(wanted), observed=_one_of(seen))]
    return []


def _one_of(scales: tuple[float, ...]) -> Value:
    return scales[0] if len(scales) == 1 else scales or "none"


def _settings(optimizer: str) -> str:
    """Return class and settings, without the optimizer that contains it, such as ZeRO's."""
    kind, _, settings = optimizer.partition("(")
    return f"{kind.partition(' in ')[0]}({settings}"


def _other_setting(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, str, str]:
    """Return the one setting that differs, and both its values; all of both optimizers where more does."""
    mine, theirs = (dict(SETTING.findall(_settings(of[0]))) for of in (one, other))
    classes = {_settings(text).partition("(")[0] for text in (*one, *other)}
    odd = [name for name in mine if mine[name] != theirs.get(name)]
    if len(one) == len(other) == len(classes) == len(odd) == 1 and mine.keys() == theirs.keys():
        return odd[0], mine[odd[0]], theirs[odd[0]]
    expected, observed = (", ".join(sorted(of)) for of in (one, other))
    return "optimizer", expected, observed
