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
from harness.core.judge.exports import OUTPUT_WEIGHT, expected_export, rounding_units, weights_to_export
from harness.core.judge.finding import Finding
from harness.core.judge.result import Result, Verdict, not_applicable, verdict_of
from harness.core.judge.trial import Trial

STAGE = "data"
NEEDS = frozenset({"reference", "values", "declared"})
ROUNDING_ERROR = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 1.001 * 2.0**-8}
"""Dtype of a file -> how far rounding moves a number, relative to it. bfloat16 is rounded twice, by way of float32."""
TABLE_SUFFIXES = ("inv_freq",)
"""Ends of names of tables that are no weights."""


def check(trial: Trial) -> Result:
    """Compare the exported tensors with what ranks held after the last step.

    NOT APPLICABLE without an export, and for earlier launches. UNKNOWN if no rank read the export. UNKNOWN as well if
    replicas hold different values of some tensors and no other tensor is wrong.
    """
    if trial.case.features.export is None or trial.case.last_step is not None:
        return not_applicable("export", "no export is requested")
    exported_tensors = recorded_export(trial)
    if exported_tensors is None:
        return Result("export", Verdict.UNKNOWN, note="what was exported was not read")
    wanted = expected_export(trial.case, weights_to_export(trial, trial.case.steps[-1])) | dict(
        trial.assumption.exported
    )
    wrong_names = wrong_tensor_names(exported_tensors, wanted, rounding_units_by_name(trial))
    missing = wanted.keys() - exported_tensors.keys() - ({OUTPUT_WEIGHT} if trial.case.model.tied_embeddings else set())
    unexpected = [name for name in exported_tensors if name not in wanted and not name.endswith(TABLE_SUFFIXES)]
    findings = [_tensor_finding(name, str(wanted[name].shape), "not exported") for name in sorted(missing)]
    findings += [_tensor_finding(name, "not exported", str(exported_tensors[name].value.shape)) for name in unexpected]
    undecided = differing_tensor_names(trial)
    last = trial.case.steps[-1]
    findings += [
        _tensor_finding(name, f"the weights after step {last}", "others")
        for name in wrong_names
        if name not in undecided
    ]
    if undecided and not findings:
        note = f"ranks hold different values of {len(undecided)} of {len(exported_tensors)} tensors, and it has one of them"
        return Result("export", Verdict.UNKNOWN, len(exported_tensors) - len(undecided), note=note)
    return verdict_of("export", findings, len(exported_tensors) - len(undecided))


def differing_tensor_names(trial: Trial) -> set[str]:
    """Return the names of the exported tensors of which replicas hold different values after the last step.

    Empty if none differ. A fused or merged tensor differs if one of its parts does.
    """
    local_shards = {
        rank: record.parameters for rank, record in trial.own_steps() if record.step == trial.case.steps[-1]
    }
    differing: set[str] = set()
    for (fqn, _), ranks in replica_families(trial).items():
        contents = {local_shards[rank][fqn].tobytes() for rank in ranks if fqn in local_shards.get(rank, {})}
        if len(contents) > 1:
            differing.add(fqn)
    weights = weights_to_export(trial, trial.case.steps[-1])
    if not differing:
        return set()
    # A NaN marks each tensor of the file that a differing parameter went into.
    marked = {fqn: np.full_like(value, np.nan) if fqn in differing else value for fqn, value in weights.items()}
    return {name for name, value in expected_export(trial.case, marked).items() if np.isnan(value).any()}


def recorded_export(trial: Trial) -> dict[str, ExportedTensor] | None:
    """Return the tensors of the export by name, as the rank that read it recorded them. None if no rank did."""
    return next((evidence.exported for evidence in trial.ranks.values() if evidence.exported is not None), None)


def rounding_units_by_name(trial: Trial) -> dict[str, Any]:
    """Return, by exported name, an array of how many units of rounding each number may be off.

    Empty for a model without LoRA.
    """
    return rounding_units(trial.case, weights_to_export(trial, trial.case.steps[-1]))


def wrong_tensor_names(
    exported_tensors: dict[str, ExportedTensor], wanted: dict[str, Any], roundings_by_name: dict[str, Any]
) -> list[str]:
    """Return the names of exported tensors that hold something else than wanted.

    Names that only one side has are left out. roundings_by_name: as `rounding_units_by_name` returns it.
    """
    return [
        name
        for name in exported_tensors
        if name in wanted and not is_exported_value(exported_tensors[name], wanted[name], roundings_by_name.get(name))
    ]


def is_exported_value(tensor: ExportedTensor, value: Any, units: Any = None) -> bool:
    """Return whether a tensor of a file has the shape and the numbers of `value`, in the file's dtype.

    units: by entry, how far it may be off, as a multiple of the rounding error of value's dtype; None if nothing was
    rounded. Where it is above 0, one rounding to the file's dtype is allowed too. Elsewhere numbers must be equal.
    """
    if tensor.value.shape != value.shape:
        return False
    exported = as_exported(value, tensor.dtype)
    if units is None or not units.any():
        return tensor.value.tobytes() == exported.tobytes()
    exact = value.astype(np.float64)
    bound = ROUNDING_ERROR[tensor.dtype] * np.abs(exact) + ROUNDING_ERROR[str(value.dtype)] * units
    within_bound = np.abs(tensor.value - exact) <= bound
    return bool(np.where(units > 0, within_bound, tensor.value == exported).all())


def _tensor_finding(name: str, expected: str, observed: str) -> Finding:
    return Finding(kind="parameter", name=name, quantity="exported tensor", expected=expected, observed=observed)
