"""A wrong tensor of an export: whose value is it? It may be of an earlier step, of another parameter, or in another order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from harness.core.causes.hypothesis import Broken, Fact, Hypothesis, seen
from harness.core.causes.words import finding_line
from harness.core.checks.export import exported, held_differently, roundings, same, wrong
from harness.core.evidence.exported import ExportedTensor, as_exported
from harness.core.judge.exports import FUSED, Arrays, export_of, halves, weights_of
from harness.core.judge.result import Cause
from harness.core.judge.trial import Trial

Details = tuple[tuple[str, object], ...]
KIND = "wrong export"
MOST = 3


def wrong_exports(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Explain all wrong tensors, each by the first value on record that it has."""
    held = exported(trial) if "export" in broken else None
    if not held:
        return
    off, open_ = roundings(trial), held_differently(trial)
    odd = wrong(held, export_of(trial.case, weights_of(trial, trial.case.steps[-1])), off)
    odd = [name for name in odd if name not in open_]
    found: dict[str, tuple[Details, np.ndarray]] = {}
    for details, values in itertools.chain(_on_record(trial), _as_held(trial, held, odd)):
        for name in (name for name in odd if name not in found):
            others = [name, *(other for other in values if other != name)] if details else [*values]
            match = next(
                (other for other in others if other in values and same(held[name], values[other], off.get(name))), None
            )
            if match is not None:
                found[name] = (details if match == name else (("as", match), *details), values[match])
    if not odd or len(found) < len(odd):
        return
    alike: dict[Details, list[str]] = {}
    for name in odd:
        alike.setdefault(found[name][0], []).append(name)
    texts = [f"{_names(names)} {'are' if names[1:] else 'is'} exported {_words(how)}" for how, names in alike.items()]
    details = tuple(pair for how, names in alike.items() for pair in (("tensors", tuple(names)), *how))
    values = {name: value for name, (_, value) in found.items()}
    cause = Cause(KIND, "; ".join(texts), details=details)
    yield Hypothesis(cause, lambda trial: trial.assuming(exported=values), lines=(finding_line(broken["export"]),))


def odd_exports(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """State what is wrong with an export where no value on record is it."""
    if "export" in broken:
        yield seen(broken, "export", KIND, "the export is wrong")


def _on_record(trial: Trial) -> Iterator[tuple[Details, dict[str, np.ndarray]]]:
    """Yield exports that somebody may have made instead, likely ones first."""
    case, last = trial.case, trial.case.steps[-1]
    weights = weights_of(trial, last)
    asked = case.features.export != "hf_interleaved"
    yield (), export_of(case, weights)
    rows = (("with rows of q and k", "in the order for halves" if not asked else "not in the order for halves"),)
    yield rows, export_of(case, weights, permuted=not asked)
    if case.features.export == "hf_fused":
        for name, parts in FUSED.items():
            for order in itertools.permutations(range(len(parts))):
                text = tuple(parts[place] for place in order)
                yield (("with parts in the order", text),), export_of(case, weights, orders={name: order})
    if case.model.lora is not None:
        yield (("with adapters", "left out"),), export_of(case, _without_adapters(weights))
        unscaled = replace(case, model=replace(case.model, lora=replace(case.model.lora, alpha=case.model.lora.rank)))
        yield (("with adapters", "not scaled by alpha / rank"),), export_of(unscaled, weights)
    for step in reversed([step for step in case.steps if step != last]):
        yield (("as after step", step),), export_of(case, weights_of(trial, step))
    yield (("as", "before training"),), export_of(case, weights_of(trial, 0))


def _as_held(
    trial: Trial, held: Mapping[str, ExportedTensor], odd: list[str]
) -> Iterator[tuple[Details, dict[str, np.ndarray]]]:
    """Yield exports that are like what is held: adapters times a factor, rows of heads of another size, rows in some order."""
    case, weights = trial.case, weights_of(trial, trial.case.steps[-1])
    whole, turned = export_of(case, weights), case.features.export == "hf"
    if case.model.lora is not None and (
        factor := _factor(held, odd, whole, export_of(case, _without_adapters(weights)))
    ):
        lora = replace(case.model.lora, alpha=case.model.lora.alpha * factor)
        times = replace(case, model=replace(case.model, lora=lora))
        yield (("with adapters", f"scaled by {factor:.4g} times alpha / rank"),), export_of(times, weights)
    plain = export_of(case, weights, permuted=False) if turned else {}
    of_heads = [name for name in odd if name in plain and name.endswith(("q_proj.weight", "k_proj.weight"))]
    for heads in (case.model.n_heads, case.model.n_kv_heads):
        sizes = {name: divmod(len(plain[name]), 2 * heads) for name in of_heads}
        values = {name: halves(plain[name], 2 * size) for name, (size, rest) in sizes.items() if size and not rest}
        yield (("with rows turned as those of", f"{heads} head{'s' * (heads > 1)}"),), values
    yield (
        (("with rows", "in another order"),),
        {name: held[name].value for name in odd if _same_rows(held[name], whole[name])},
    )


def _factor(held: Mapping[str, ExportedTensor], odd: list[str], whole: Arrays, plain: Arrays) -> float:
    """Fit by what adapters are multiplied in the first wrong tensor; it is 0 if there is none in it."""
    name = odd[0]
    if name not in plain or held[name].value.shape != plain[name].shape:
        return 0.0
    added, due = ((of - plain[name]).astype(np.float64).ravel() for of in (held[name].value, whole[name]))
    return round(float(added @ due / (due @ due)), 12) if due.any() and np.isfinite(added).all() else 0.0


def _same_rows(one: ExportedTensor, other: np.ndarray) -> bool:
    """Whether they have the same rows, each different from the others."""
    if one.value.shape != other.shape or other.ndim != 2:
        return False
    rows = [{row.tobytes() for row in value} for value in (one.value, as_exported(other, one.dtype))]
    return rows[0] == rows[1] and len(rows[0]) == len(other)


def _without_adapters(weights: Arrays) -> dict[str, np.ndarray]:
    return {fqn: value for fqn, value in weights.items() if ".lora_" not in fqn}


def _words(details: Details) -> str:
    return ", ".join(f"{name} {' '.join(v) if isinstance(v, tuple) else v}" for name, v in details)


def _names(names: list[str]) -> str:
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    return ", ".join(names[:MOST]) + more
