"""Weights that are exported are the trained ones: each tensor of the export holds what ranks held after the last step.

Names are Hugging Face's, q and k in the requested order of rows, fused as requested. A tied output may be left out. Values are
compared in the dtype of the file, bit for bit. Tensors of which replicas hold different values are not judged. An adapter is
merged: alpha / rank * B A is added to its matrix, which is judged within rounding.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from harness.core.checks.replica_agreement import replica_families
from harness.core.evidence.exported import ExportedTensor, as_exported
from harness.core.judge.exports import OUTPUT, export_of, rounding_of, weights_of
from harness.core.judge.finding import Finding
from harness.core.judge.result import Result, Verdict, not_applicable, verdict_of
from harness.core.judge.trial import Trial

STAGE = "data"
NEEDS = frozenset({"reference", "values", "declared"})
ROUNDED = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 1.001 * 2.0**-8}
"""By dtype of a file, how far rounding moves a number, relative to it. To bfloat16 it is rounded twice, by way of float32."""
TABLES = ("inv_freq",)
"""Ends of names of tables that are no weights."""


def check(trial: Trial) -> Result:
    if trial.case.features.export is None or trial.case.last_step is not None:
        return not_applicable("export", "no export is requested")
    held = exported(trial)
    if held is None:
        return Result("export", Verdict.UNKNOWN, note="what was exported was not read")
    wanted = export_of(trial.case, weights_of(trial, trial.case.steps[-1])) | dict(trial.assumption.exported)
    odd = wrong(held, wanted, roundings(trial))
    missing = wanted.keys() - held.keys() - ({OUTPUT} if trial.case.model.tied_embeddings else set())
    beyond = [name for name in held if name not in wanted and not name.endswith(TABLES)]
    findings = [_finding(name, str(wanted[name].shape), "not exported") for name in sorted(missing)]
    findings += [_finding(name, "not exported", str(held[name].value.shape)) for name in beyond]
    open_, last = held_differently(trial), trial.case.steps[-1]
    findings += [_finding(name, f"the weights after step {last}", "others") for name in odd if name not in open_]
    if open_ and not findings:
        note = f"ranks hold different values of {len(open_)} of {len(held)} tensors, and it has one of them"
        return Result("export", Verdict.UNKNOWN, len(held) - len(open_), note=note)
    return verdict_of("export", findings, len(held) - len(open_))


def held_differently(trial: Trial) -> set[str]:
    """Return the names of the tensors of which ranks with the same slice hold different values after the last step."""
    seen = {rank: record.parameters for rank, record in trial.own_steps() if record.step == trial.case.steps[-1]}
    differ = {
        fqn
        for (fqn, _), ranks in replica_families(trial).items()
        if len({seen[rank][fqn].tobytes() for rank in ranks if fqn in seen.get(rank, {})}) > 1
    }
    weights = weights_of(trial, trial.case.steps[-1])
    open_ = {fqn: np.full_like(value, np.nan) if fqn in differ else value for fqn, value in weights.items()}
    return {name for name, value in export_of(trial.case, open_).items() if np.isnan(value).any()} if differ else set()


def exported(trial: Trial) -> dict[str, ExportedTensor] | None:
    """Return what the rank that read it found."""
    return next((one.exported for one in trial.ranks.values() if one.exported is not None), None)


def roundings(trial: Trial) -> dict[str, Any]:
    return rounding_of(trial.case, weights_of(trial, trial.case.steps[-1]))


def wrong(held: dict[str, ExportedTensor], wanted: dict[str, Any], off: dict[str, Any]) -> list[str]:
    """Return the names of tensors that hold something else. off: as `roundings` gives it."""
    return [name for name in held if name in wanted and not same(held[name], wanted[name], off.get(name))]


def same(held: ExportedTensor, value: Any, off: Any = None) -> bool:
    """Whether a tensor of a file holds these numbers, or others that are off by so many units of rounding."""
    if held.value.shape != value.shape:
        return False
    exported = as_exported(value, held.dtype)
    if off is None or not off.any():
        return held.value.tobytes() == exported.tobytes()
    exact = value.astype(np.float64)
    most = ROUNDED[held.dtype] * np.abs(exact) + ROUNDED[str(value.dtype)] * off
    return bool(np.where(off > 0, np.abs(held.value - exact) <= most, held.value == exported).all())


def _finding(name: str, expected: str, observed: str) -> Finding:
    return Finding(kind="parameter", name=name, quantity="exported tensor", expected=expected, observed=observed)
