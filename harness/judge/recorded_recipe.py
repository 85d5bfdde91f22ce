"""Whether two recordings of one training have the same optimizers, settings and learning rates."""

from __future__ import annotations

import re

from harness.judge.finding import Finding
from harness.judge.result import Result, Verdict, verdict_of
from harness.judge.sketched import Numbers

SETTING = re.compile(
    r"(betas|momentum|eps|weight_decay|amsgrad) (.*?)(?=, (?:betas|momentum|eps|weight_decay|amsgrad) |\)$)"
)
"""Name and value of a setting, in the words in which the recorder tells an optimizer."""


def recipe(one: Numbers, other: Numbers, steps: list[int]) -> Result:
    """Optimizers and their settings, learning rates, and the scale with which a resumed job begins."""
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
    if one.after and (step := one.after + 1) in one.scales and one.scales[step] != other.scales.get(step):
        wanted, seen = one.scales[step], other.scales.get(step, "none")
        findings.append(Finding(step=step, kind="setting", name="loss scale", expected=wanted, observed=seen))
    return verdict_of("recipe", findings, len(one.optimizers) + len(steps))


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
