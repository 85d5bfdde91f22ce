"""Causes of a wrong export, by values on record: of an earlier step, of another parameter, or in another order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from harness.core.causes.hypothesis import Broken, Fact, Hypothesis, fact_of_first_finding
from harness.core.causes.words import finding_line
from harness.core.checks.export import (
    differing_tensor_names,
    is_exported_value,
    recorded_export,
    rounding_units_by_name,
    wrong_tensor_names,
)
from harness.core.evidence.exported import ExportedTensor, as_exported
from harness.core.judge.exports import (
    FUSED_MATRICES,
    Arrays,
    expected_export,
    rows_in_half_order,
    tensors_with_row_order,
    weights_to_export,
)
from harness.core.judge.result import Cause
from harness.core.judge.trial import Trial

Details = tuple[tuple[str, object], ...]
WRONG_EXPORT = "wrong export"
MOST_NAMES = 3


def wrong_exports(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Yield one hypothesis that explains all wrong tensors of the export, each by the first value on record that it
    has.

    Nothing if the export does not fail or is not on record, or if some wrong tensor has no such value.
    """
    exported_tensors = recorded_export(trial) if "export" in broken else None
    if not exported_tensors:
        return
    bounds = rounding_units_by_name(trial)
    undecided = differing_tensor_names(trial)
    wrong_names = wrong_tensor_names(
        exported_tensors, expected_export(trial.case, weights_to_export(trial, trial.case.steps[-1])), bounds
    )
    wrong_names = [name for name in wrong_names if name not in undecided]
    matches: dict[str, tuple[Details, np.ndarray]] = {}
    for details, values in itertools.chain(
        _known_exports(trial), _fitted_exports(trial, exported_tensors, wrong_names)
    ):
        for name in (name for name in wrong_names if name not in matches):
            others = [name, *(other for other in values if other != name)] if details else [*values]
            candidates = (other for other in others if other in values)
            equal = (
                other
                for other in candidates
                if is_exported_value(exported_tensors[name], values[other], bounds.get(name))
            )
            match = next(equal, None)
            if match is not None:
                matches[name] = (details if match == name else (("as", match), *details), values[match])
    if not wrong_names or len(matches) < len(wrong_names):
        return
    names_by_details: dict[Details, list[str]] = {}
    for name in wrong_names:
        names_by_details.setdefault(matches[name][0], []).append(name)
    texts = []
    all_details: list[tuple[str, object]] = []
    for details, names in names_by_details.items():
        texts.append(f"{_names_text(names)} {'are' if names[1:] else 'is'} exported {_details_text(details)}")
        all_details += [("tensors", tuple(names)), *details]
    values = {name: value for name, (_, value) in matches.items()}
    cause = Cause(WRONG_EXPORT, "; ".join(texts), details=tuple(all_details))
    yield Hypothesis(
        cause, lambda trial: trial.with_assumption(exported=values), lines=(finding_line(broken["export"]),)
    )


def odd_exports(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """Yield the fact that an export is wrong, with its first finding.

    It is asked where no value on record explains it.
    """
    if "export" in broken:
        yield fact_of_first_finding(broken, "export", WRONG_EXPORT, "the export is wrong")


def _known_exports(trial: Trial) -> Iterator[tuple[Details, dict[str, np.ndarray]]]:
    """Yield (details, tensors by name) of exports that a mistake may make instead, likely ones first.

    Empty details are the right export: a wrong tensor may be another one's.
    """
    case = trial.case
    last = trial.case.steps[-1]
    weights = weights_to_export(trial, last)
    is_permuted = case.features.export != "hf_interleaved"
    yield (), expected_export(case, weights)
    rows = (("with rows of q and k", "in the order for halves" if not is_permuted else "not in the order for halves"),)
    yield rows, tensors_with_row_order(case, weights, permuted=not is_permuted)
    if case.features.export == "hf_fused":
        for name, parts in FUSED_MATRICES.items():
            for order in itertools.permutations(range(len(parts))):
                text = tuple(parts[position] for position in order)
                yield (("with parts in the order", text),), expected_export(case, weights, orders={name: order})
    if case.model.lora is not None:
        yield (("with adapters", "left out"),), expected_export(case, _without_adapters(weights))
        unscaled = replace(case, model=replace(case.model, lora=replace(case.model.lora, alpha=case.model.lora.rank)))
        yield (("with adapters", "not scaled by alpha / rank"),), expected_export(unscaled, weights)
    for step in reversed([step for step in case.steps if step != last]):
        yield (("as after step", step),), expected_export(case, weights_to_export(trial, step))
    yield (("as", "before training"),), expected_export(case, weights_to_export(trial, 0))


def _fitted_exports(
    trial: Trial, exported_tensors: Mapping[str, ExportedTensor], wrong_names: list[str]
) -> Iterator[tuple[Details, dict[str, np.ndarray]]]:
    """Yield (details, tensors by name) of exports that are fitted to the exported tensors.

    Adapters are multiplied by a factor, rows are turned as those of heads of another size, or rows have another order.
    The first is yielded only if a factor is found, with all tensors. The others have only tensors that they apply to,
    which may be none.
    """
    case = trial.case
    weights = weights_to_export(trial, trial.case.steps[-1])
    expected = expected_export(case, weights)
    is_permuted = case.features.export == "hf"
    if case.model.lora is not None and (
        factor := _adapter_factor(
            exported_tensors, wrong_names, expected, expected_export(case, _without_adapters(weights))
        )
    ):
        lora = replace(case.model.lora, alpha=case.model.lora.alpha * factor)
        rescaled = replace(case, model=replace(case.model, lora=lora))
        yield (("with adapters", f"scaled by {factor:.4g} times alpha / rank"),), expected_export(rescaled, weights)
    plain = tensors_with_row_order(case, weights, permuted=False) if is_permuted else {}
    of_heads = [name for name in wrong_names if name in plain and name.endswith(("q_proj.weight", "k_proj.weight"))]
    for heads in (case.model.n_heads, case.model.n_kv_heads):
        sizes = {name: divmod(len(plain[name]), 2 * heads) for name in of_heads}
        values = {
            name: rows_in_half_order(plain[name], 2 * size) for name, (size, rest) in sizes.items() if size and not rest
        }
        heads_text = f"{heads} heads" if heads > 1 else f"{heads} head"
        yield (("with rows turned as those of", heads_text),), values
    reordered = [name for name in wrong_names if _have_same_rows(exported_tensors[name], expected[name])]
    yield (("with rows", "in another order"),), {name: exported_tensors[name].value for name in reordered}


def _adapter_factor(
    exported_tensors: Mapping[str, ExportedTensor], wrong_names: list[str], expected: Arrays, plain: Arrays
) -> float:
    """Return the factor by which adapters are multiplied in the first wrong tensor, by best fit. 0 if it has no
    adapters.

    Precondition: there is a wrong name.
    """
    name = wrong_names[0]
    if name not in plain or exported_tensors[name].value.shape != plain[name].shape:
        return 0.0
    added = (exported_tensors[name].value - plain[name]).astype(np.float64).ravel()
    expected_added = (expected[name] - plain[name]).astype(np.float64).ravel()
    if not expected_added.any() or not np.isfinite(added).all():
        return 0.0
    return round(float(added @ expected_added / (expected_added @ expected_added)), 12)


def _have_same_rows(tensor: ExportedTensor, expected: np.ndarray) -> bool:
    """Return whether both matrices have the same rows, in any order, each different from the others.

    False if they are no matrices.
    """
    if tensor.value.shape != expected.shape or expected.ndim != 2:
        return False
    rows = {row.tobytes() for row in tensor.value}
    expected_rows = {row.tobytes() for row in as_exported(expected, tensor.dtype)}
    return rows == expected_rows and len(rows) == len(expected)


def _without_adapters(weights: Arrays) -> dict[str, np.ndarray]:
    """Return the weights without those of adapters."""
    return {fqn: value for fqn, value in weights.items() if ".lora_" not in fqn}


def _details_text(details: Details) -> str:
    """Return details as text, such as "with rows in another order"."""
    return ", ".join(f"{name} {' '.join(value) if isinstance(value, tuple) else value}" for name, value in details)


def _names_text(names: list[str]) -> str:
    """Return the first few names, and how many more there are."""
    others_text = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + others_text
