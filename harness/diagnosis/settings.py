"""A switch of torch is another than the rank was started with. Some change numbers, most only cost time."""

from __future__ import annotations

from harness.checks import settings
from harness.diagnosis.words import Broken, finding_line, on_ranks
from harness.judge.result import Diagnosis, Finding, one_cause
from harness.judge.trial import Trial

NUMBERS = (*settings.FLOAT32, "default dtype")


def wrong_precision(trial: Trial, broken: Broken) -> Diagnosis | None:
    """What explains wrong numbers is asked before them."""
    return _diagnosis(trial, broken, [finding for finding in settings.findings(trial) if _name(finding) in NUMBERS])


def wrong_settings(trial: Trial, broken: Broken) -> Diagnosis | None:
    return _diagnosis(trial, broken, settings.findings(trial))


def _diagnosis(trial: Trial, broken: Broken, found: list[Finding]) -> Diagnosis | None:
    if "settings" not in broken or not found:
        return None
    first, name = found[0], _name(found[0])
    ranks = [int(finding.where.split(",")[0].removeprefix("rank ")) for finding in found if _name(finding) == name]
    step = first.where.split(", ")[1]
    text = f"{name} {_verb(name)} {first.observed}{on_ranks(trial, ranks)} from {step} on, requested {first.expected}"
    return one_cause(text, (finding_line("settings", broken["settings"]),))


def _verb(name: str) -> str:
    return "are" if name.endswith("s") else "is"


def _name(finding: Finding) -> str:
    return finding.where.rpartition(", ")[2]
