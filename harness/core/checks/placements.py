"""What parameters and parallel wrappers claim (mesh ranks, placements, groups in use) is what the plan says.

A claim is judged by its ranks, never by the names of its axes, and an FSDP unit by the parameters that it gathers. The
DTensor of a slice claims that it is this one. A mesh that lists its ranks in another order claims another one, and a
checkpoint written by those claims is torn. Where a case leaves the units to the trainer, each parameter is in one of them,
and ranks that hold the same parameters agree on them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np

from harness.core.case.measured import Unit
from harness.core.evidence.records import TensorEvidence, Wrapper
from harness.core.evidence.text import ranks_text
from harness.core.judge.claims import claimed_slice
from harness.core.judge.contents import is_at
from harness.core.judge.finding import Finding, Part, Value
from harness.core.judge.kept_alike import joined_in_step
from harness.core.judge.result import Result, Verdict, verdict_of
from harness.core.judge.trial import Trial
from harness.core.judge.units_seen import units_seen, untold_rank
from harness.core.plan.grid import coordinate
from harness.core.plan.slices import tp_dim
from harness.core.plan.units_text import units_text

STAGE = "structure"
NEEDS = frozenset({"structure", "claims", "members"})
APART = "FSDP units that others lack"
LEFT_OUT = "parameters left out"
Claim = set[tuple[str, tuple[int, ...]]]


def check(trial: Trial) -> Result:
    findings, examined = [], 0
    for rank, evidence in sorted(trial.ranks.items()):
        for tensor in evidence.parameters:
            examined += 1
            findings += _tensor_findings(trial, rank, tensor)
        for module, wrapper in evidence.structure.items():
            examined += 1
            findings += _wrapper_findings(trial, rank, module, wrapper)
        examined += len(trial.plan.units[rank]) if units_seen(trial, rank) else 0
        findings += _missing_replication(trial, rank) + _wrong_units(trial, rank)
    findings += disagreements(trial)
    unseen = [rank for rank in sorted(trial.ranks) if trial.plan.units[rank] and not units_seen(trial, rank)]
    if unseen and not findings:
        return Result("placements", Verdict.UNKNOWN, examined, note=untold_rank(unseen[0]))
    findings.sort(key=lambda finding: finding.rank != 0)
    return verdict_of("placements", findings, examined, note=_units_text(trial) if not findings else "")


def _units_text(trial: Trial) -> str:
    """Return the units of the first rank of each pipeline stage, where they are the trainer's choice."""
    found: dict[tuple[str, ...], tuple[Unit, ...]] = {}
    for rank, units in (trial.plan.observed or {}).items():
        found.setdefault(tuple(trial.plan.slices[rank]), units)
    every = [unit for units in found.values() for unit in units]
    return f"{len(every)} FSDP units observed: {units_text(every, trial.case.shards)}" if every else ""


def disagreements(trial: Trial) -> list[Finding]:
    """Yield ranks whose units differ from those of most ranks that hold the same parameters."""
    alike: dict[tuple[str, ...], dict[frozenset[Unit], list[int]]] = {}
    for rank, seen in (trial.plan.observed or {}).items():
        same = frozenset(Unit(tuple(sorted(unit.parameters)), unit.degree) for unit in seen)
        alike.setdefault(_held(trial, rank), {}).setdefault(same, []).append(rank)
    findings = []
    for kinds in alike.values():
        (most, ranks), *others = sorted(kinds.items(), key=lambda kind: -len(kind[1]))
        for units, those in others:
            expected, observed = (_units_line(trial, one) for one in (most - units, units - most))
            what: dict[str, Any] = {
                "kind": "unit",
                "quantity": APART,
                "note": f"expected: as on ranks {ranks_text(ranks)}",
            }
            findings.append(Finding(ranks=tuple(those), expected=expected, observed=observed, **what))
    return findings


def _held(trial: Trial, rank: int) -> tuple[str, ...]:
    """The parameters that a rank holds as planned, or where that is not derived, as it has them."""
    return tuple(trial.plan.slices[rank]) or tuple(sorted(tensor.fqn for tensor in trial.run.like(rank).parameters))


def _units_line(trial: Trial, units: frozenset[Unit]) -> str:
    return units_text(sorted(units), trial.case.shards, most=4) or "no others"


def _tensor_findings(trial: Trial, rank: int, tensor: TensorEvidence) -> list[Finding]:
    """Shards must be claimed exactly; replication may be claimed by the tensor or by its wrapper."""
    if tensor.fqn not in trial.plan.slices[rank]:
        return _over_stages(trial, rank, tensor)
    wanted = planned_shards(trial, rank, tensor.fqn)
    claimed = {(kind, ranks) for kind, ranks in claims(rank, tensor) if kind.startswith("dim ")}
    if claimed == wanted:
        return _another_slice(trial, rank, tensor)
    if _claims_nothing(trial, rank, tensor):
        return []
    return [_claimed(rank, tensor.fqn, _text(wanted), _text(claimed))]


def _another_slice(trial: Trial, rank: int, tensor: TensorEvidence) -> list[Finding]:
    """Yield the claims that a slice is another one, with other contents, where it is the one that the plan puts there."""
    full = trial.seed_weights.get(tensor.fqn)
    if trial.plan.flat or full is None or len(tensor.global_shape) != full.ndim:
        return []  # of a part of a flattened vector no mesh claims which
    held, claim = trial.holdings[rank].get(tensor.fqn), claimed_slice(rank, tensor)
    if tensor.mesh is None or claim is None or held != trial.plan.slices[rank][tensor.fqn]:
        return []
    if claim == held or is_at(tensor.value, full, claim):
        return []
    expected, observed = (Part(part, trial.plan.shapes[tensor.fqn]) for part in (held, claim))
    return [replace(_claimed(rank, tensor.fqn, expected, observed), note="expected: the slice that it holds")]


def _over_stages(trial: Trial, rank: int, tensor: TensorEvidence) -> list[Finding]:
    """What is not derived may lie in many ways, but two stages of a pipeline hold no parameter together."""
    stage = _stage(trial, rank)
    wrong = {(kind, ranks) for kind, ranks in claims(rank, tensor) if any(_stage(trial, one) != stage for one in ranks)}
    return [_claimed(rank, tensor.fqn, "on one pipeline stage", _text(wrong))] if wrong else []


def _stage(trial: Trial, rank: int) -> int:
    return coordinate(trial.case.dims, rank)["pp"]


def _claims_nothing(trial: Trial, rank: int, tensor: TensorEvidence) -> bool:
    """A plain tensor of a trainer's own parallel layers, as large as the rank's slice: what is in it the check shard_contents
    judges. One that is as large as the whole claims to be it."""
    part, whole = trial.plan.slices[rank][tensor.fqn], trial.plan.shapes[tensor.fqn]
    size = tuple(stop - start for start, stop in part)
    return tensor.mesh is None and tensor.global_shape == tensor.value.shape == size != tuple(whole)


def planned_shards(trial: Trial, rank: int, fqn: str) -> Claim:
    """The groups whose members hold other parts, by the dim in which these differ. FSDP1's slices look like plain tensors: its
    wrapper claims them. What ZeRO flattens tp may have cut."""
    plan = trial.plan
    shards: Claim = set()
    if plan.flat and (dim := tp_dim(fqn)) is not None and plan.dims.tp > 1:
        shards.add((f"dim {dim}", plan.peers(rank, "tp")))
    for axis in () if plan.flat else ("tp", plan.shard_axis):
        parts = [plan.slices[peer][fqn] for peer in plan.peers(rank, axis)]
        cut = (dim for dim, intervals in enumerate(zip(*parts, strict=True)) if len(set(intervals)) > 1)
        shards |= {(f"dim {dim}", plan.peers(rank, axis)) for dim in cut}
    return shards


def claims(rank: int, tensor: TensorEvidence) -> Claim:
    """For each mesh axis of degree above 1: what it does to the tensor, and this rank's line of ranks along it."""
    if tensor.mesh is None:
        return set()
    mesh = np.array(tensor.mesh)
    found: Claim = set()
    for axis, placement in enumerate(tensor.placements):
        if mesh.shape[axis] > 1 and rank in mesh:
            place = list(np.argwhere(mesh == rank)[0])
            place[axis] = slice(None)
            ranks = tuple(sorted(int(r) for r in mesh[tuple(place)]))
            found.add((_kind(placement), ranks))
    return found


def _kind(placement: str) -> str:
    """ "Shard(0)" and "StridedShard(0)" both cut dim 0."""
    return "dim " + placement.split("(")[1].rstrip(")") if "Shard" in placement else placement.lower()


def _wrapper_findings(trial: Trial, rank: int, module: str, wrapper: Wrapper) -> list[Finding]:
    findings = []
    claimed = {"shard_ranks": wrapper.shard_ranks, "replicate_ranks": wrapper.replicate_ranks}
    for (key, ranks), axis in zip(claimed.items(), (trial.plan.shard_axis, trial.plan.replicate_axis), strict=True):
        wanted, used = trial.plan.peers(rank, axis), tuple(sorted(ranks or (rank,)))
        alone = axis == trial.plan.replicate_axis and used == (rank,) and wrapper.shard_ranks  # DDP of one rank is none
        if used != wanted and not (alone and joined_in_step(trial, rank, wanted)):
            what: dict[str, Any] = {
                "kind": "wrapper",
                "name": module or "the root",
                "quantity": f"{wrapper.kind} {key}",
            }
            findings.append(Finding.at(rank, wanted, used, **what, axis=axis, unit="ranks"))
    return findings


def _missing_replication(trial: Trial, rank: int) -> list[Finding]:
    """An axis requested that no wrapper and no parameter knows of."""
    axis = trial.plan.replicate_axis
    if axis not in trial.plan.groups:
        return []
    evidence, wanted = trial.ranks[rank], trial.plan.group_of(rank, axis)
    by_wrapper = any(tuple(sorted(wrapper.replicate_ranks)) == wanted for wrapper in evidence.structure.values())
    by_tensor = any(("replicate", wanted) in claims(rank, tensor) for tensor in evidence.parameters)
    if by_wrapper or by_tensor or joined_in_step(trial, rank, wanted):
        return []
    return [Finding.at(rank, "a wrapper or parameter that is replicated", None, kind="group", axis=axis, group=wanted)]


def _wrong_units(trial: Trial, rank: int) -> list[Finding]:
    seen, findings = units_seen(trial, rank), []
    if trial.plan.observed is not None:
        return _parameters_not_in_one_unit(trial, rank)
    for unit in trial.plan.units[rank] if seen else ():
        parts = [part for part in seen if part & set(unit)]
        if parts != [frozenset(unit)]:
            others = {fqn for part in parts for fqn in part - set(unit)}
            text = f"in {len(parts)} units" + (f", together with {len(others)} others" if others else "")
            if left_out := tuple(fqn for fqn in unit if not any(fqn in part for part in seen)):
                what: dict[str, Any] = {"kind": "unit", "name": unit[0], "quantity": LEFT_OUT}
                findings.append(Finding.at(rank, (), left_out, **what))
                continue
            together = f"its {len(unit)} parameters gathered together, and no others"
            findings.append(Finding.at(rank, together, text, kind="unit", name=unit[0]))
    return findings


def _parameters_not_in_one_unit(trial: Trial, rank: int) -> list[Finding]:
    assert trial.plan.observed is not None
    units = trial.plan.observed.get(rank, ())
    counted = Counter(fqn for unit in units for fqn in unit.parameters)
    wrong = [fqn for fqn in trial.plan.slices[rank] if counted[fqn] != 1] if units else []
    what: dict[str, Any] = {"kind": "parameter", "quantity": "FSDP units"}
    return [Finding.at(rank, 1, counted[fqn], name=fqn, **what) for fqn in wrong]


def _claimed(rank: int, fqn: str, expected: Value, observed: Value) -> Finding:
    return Finding.at(rank, expected, observed, kind="parameter", name=fqn, quantity="placement")


def _text(claim: Claim) -> str:
    return " and ".join(f"{kind} over {ranks_text(ranks)}" for kind, ranks in sorted(claim)) or "whole on every rank"
