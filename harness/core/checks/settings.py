"""In every step, torch's settings are those the rank started with or the trainer declared, and the same on all ranks.

They are first read before any module of the trainer is imported. Anomaly detection, deterministic algorithms and a
distributed debug level cost time; TF32 changes numbers. Other switches are set for good reasons, but not in some steps or on
some ranks only. A case that runs twice may be deterministic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from harness.core.evidence.records import RankEvidence
from harness.core.judge.finding import Finding
from harness.core.judge.result import Result, verdict_of
from harness.core.judge.trial import Trial

STAGE = "structure"
NEEDS = frozenset({"structure", "declared", "values"})
AS_ELSEWHERE = "as elsewhere"
"""Behind what most ranks and steps have, where a trainer may choose."""

DETERMINISM = ("deterministic algorithms", "cudnn.deterministic")
TF32 = "TF32 in CUDA matmuls"
FLOAT32 = ("float32 matmul precision", TF32, "NVIDIA_TF32_OVERRIDE")
FREE_SETTINGS = (
    "cudnn.benchmark",
    "bfloat16 sums in CUDA matmuls",
    "CUBLAS_WORKSPACE_CONFIG",
)  # kernels that are all right


def check(trial: Trial) -> Result:
    """Judge the value of every torch switch on every rank, in every step. Examined is the number of values."""
    examined = 0
    for evidence in trial.ranks.values():
        examined += sum(len(step.settings) for step in evidence.steps)
    return verdict_of("settings", setting_findings(trial), examined)


def setting_findings(trial: Trial) -> list[Finding]:
    """Return the findings on settings that are not as requested, then those that are not the same everywhere."""
    return [*_changed_findings(trial), *_minority_findings(trial)]


def is_free_setting(trial: Trial, name: str) -> bool:
    """Return whether a trainer may set a switch as it likes, as long as it does so on all ranks and in all steps."""
    training = trial.case.training
    multiplies_float32 = "float32" in (training.compute_dtype or training.dtype, training.quantize and training.dtype)
    deterministic = trial.case.runs > 1 and name in DETERMINISM
    chosen = training.tf32 and name == FLOAT32[0]  # how TF32 is requested
    return name in FREE_SETTINGS or deterministic or chosen or (name in FLOAT32 and not multiplies_float32)


def permitted_values(trial: Trial, evidence: RankEvidence, name: str) -> tuple[str, ...]:
    """Return the values that a setting may have on a rank: the one that it started with or that was declared.

    TF32 is as the recipe says. The default dtype may also be the recipe's.
    """
    requested = "on" if name == TF32 and trial.case.training.tf32 else evidence.settings[name]
    return (requested, trial.case.training.dtype) if name == "default dtype" else (requested,)


def _changed_findings(trial: Trial) -> Iterator[Finding]:
    """Yield, for each rank and switch, a finding of the first step in which its value is not permitted.

    Switches that a trainer may set are left out.
    """
    for rank, evidence in sorted(trial.ranks.items()):
        for name in evidence.settings:
            allowed_values = permitted_values(trial, evidence, name)
            if is_free_setting(trial, name):
                continue
            for step in evidence.steps:
                if set(step.settings.get(name, allowed_values)) - set(allowed_values):
                    yield _setting_finding(rank, step.step, name, allowed_values[:1], step.settings[name])
                    break


def _minority_findings(trial: Trial) -> Iterator[Finding]:
    """Yield, for each switch that a trainer may set, a finding of the first rank and step with another value than most.

    The default dtype is compared, too.
    """
    names: set[str] = set()
    for evidence in trial.ranks.values():
        for step in evidence.steps:
            names.update(step.settings)
    for name in sorted(name for name in names if is_free_setting(trial, name) or name == "default dtype"):
        values_by_step: dict[tuple[int, int], tuple[str, ...]] = {}
        for rank, evidence in sorted(trial.ranks.items()):
            for step in evidence.steps:
                values_by_step[rank, step.step] = step.settings.get(name, ())
        ((usual_values, _),) = Counter(values_by_step.values()).most_common(1)
        for (rank, number), values in values_by_step.items():
            if values != usual_values:
                yield replace(_setting_finding(rank, number, name, usual_values, values), note=AS_ELSEWHERE)
                break


def _setting_finding(rank: int, step: int, name: str, expected: tuple[str, ...], observed: tuple[str, ...]) -> Finding:
    return Finding.at(rank, expected, observed or "not seen", step=step, kind="setting", name=name)
