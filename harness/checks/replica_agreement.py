"""Ranks that hold the same slice of a parameter hold the same bytes of it after every step, and of its gradient.

Who holds the same slice is found from contents, so replicas of any kind are compared: dp_replicate, and tp for norms. Who
should is said by the plan: what is planned and not found was not compared, and is not a PASS.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from harness.evidence.text import ranks_text
from harness.judge.result import Finding, Result, Verdict, not_applicable, verdict_of
from harness.judge.trial import Trial
from harness.plan.slices import Slice, numel

STAGE = "numbers"

Replicated = tuple[str, Slice]
"""A parameter's fqn, and a slice of it."""


def check(trial: Trial) -> Result:
    families, planned = replica_families(trial), planned_families(trial)
    if not families and (not planned or trial.references):
        return not_applicable("replica_agreement", "no two ranks hold the same slice of anything")
    findings, examined = [], 0
    for step in trial.case.steps:
        for what, alike in (("gradients", gradient_families(trial, families)), ("parameters", families)):
            for (fqn, _), ranks in alike.items():
                examined += len(ranks) - 1
                findings += _differing(trial, step, what, fqn, ranks)
    apart = [key for key, ranks in planned.items() if not set(ranks) <= set(families.get(key, ()))]
    apart = [] if trial.references else apart
    if apart and not findings:
        text = f"ranks {ranks_text(planned[apart[0]])} should hold the same slice of {apart[0][0]} and do not"
        note = f"{text} ({len(apart)} of {len(planned)} such slices); see `shard_contents`"
        return Result("replica_agreement", Verdict.UNKNOWN, examined, note=note)
    return verdict_of("replica_agreement", findings, examined)


def planned_families(trial: Trial) -> dict[Replicated, list[int]]:
    return _shared({rank: trial.plan.slices[rank] for rank in sorted(trial.ranks)})


def replica_families(trial: Trial) -> dict[Replicated, list[int]]:
    """Of ranks that train by the same reference: a hypothesis may say that some train apart."""
    found: dict[Replicated, list[int]] = {}
    for together in _together(trial):
        held = {rank: {fqn: trial.slice_of(rank, fqn) for fqn in trial.holdings[rank]} for rank in together}
        found |= {key: ranks for key, ranks in _shared(held).items() if key not in found}
    return found


def gradient_families(trial: Trial, families: dict[Replicated, list[int]]) -> dict[Replicated, list[int]]:
    """Those of parameters, unless ZeRO cuts gradients apart: then as planned, for nothing else tells them."""
    apart = trial.plan.gradient_slices
    return _shared({rank: apart[rank] for rank in sorted(trial.ranks)}) if apart else families


def _together(trial: Trial) -> list[list[int]]:
    groups: dict[int, list[int]] = defaultdict(list)
    for rank in sorted(trial.ranks):
        groups[id(trial.reference_of(rank))].append(rank)
    return list(groups.values())


def _shared(held: Mapping[int, Mapping[str, Slice | None]]) -> dict[Replicated, list[int]]:
    """By parameter and slice, the ranks that hold it, where there are several."""
    families: dict[Replicated, list[int]] = defaultdict(list)
    for rank, slices in held.items():
        for fqn, part in slices.items():
            if part is not None and numel(part):
                families[fqn, part].append(rank)
    return {key: ranks for key, ranks in families.items() if len(ranks) > 1}


def _differing(trial: Trial, step: int, what: str, fqn: str, ranks: list[int]) -> list[Finding]:
    values = {rank: _value(trial, rank, step, what, fqn) for rank in ranks}
    first = values[ranks[0]]
    odd = [rank for rank in ranks[1:] if not _same_bytes(values[rank], first)]
    if not odd:
        return []
    where = f"step {step}, {what} of {fqn}, ranks {ranks_text(ranks)}"
    other = values[odd[0]]
    if other is None or first is None:
        observed = f"none of rank {odd[0] if other is None else ranks[0]} was seen"
    else:
        observed = f"rank {odd[0]} differs by {_distance(other, first)}"
    return [Finding(where, f"the bytes of rank {ranks[0]}", observed)]


def _value(trial: Trial, rank: int, step: int, what: str, fqn: str) -> np.ndarray | None:
    return next(getattr(s, what).get(fqn) for s in trial.ranks[rank].steps if s.step == step)


def _same_bytes(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and one.tobytes() == other.tobytes()


def _distance(one: np.ndarray, other: np.ndarray) -> str:
    if one.shape != other.shape:
        return "its shape"
    scale = float(np.max(np.abs(other))) or 1.0
    return f"{float(np.max(np.abs(one - other))) / scale:.2e} of the largest entry"
