"""What parameters and parallel wrappers claim (mesh ranks, placements, groups in use) is what the plan says.

A claim is judged by its ranks, never by the names of its axes, and an FSDP unit by the parameters that it gathers. The
DTensor of a slice claims that it is this one. A mesh that lists its ranks in another order claims another one, and a
checkpoint written by those claims is torn. Where a case leaves the units to the trainer, each parameter is in one of them,
and ranks that hold the same parameters agree on them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np

from harness.core.case.measured import Unit
from harness.core.evidence.records import TensorEvidence, Wrapper
from harness.core.evidence.text import ranks_text
from harness.core.judge.claims import claimed_slice
from harness.core.judge.contents import is_equal_at
from harness.core.judge.finding import Finding, Part, Value
from harness.core.judge.kept_alike import optimizer_joins_group
from harness.core.judge.result import Result, Verdict, verdict_of
from harness.core.judge.trial import Trial
from harness.core.judge.units_seen import claimed_unit_sets, unknown_rank_reason
from harness.core.plan.grid import coordinate_of_rank
from harness.core.plan.slices import tp_dim
from harness.core.plan.units_text import units_text

STAGE = "structure"
NEEDS = frozenset({"structure", "claims", "members"})
DIFFERING_UNITS = "FSDP units that others lack"
LEFT_OUT_PARAMETERS = "parameters left out"
Claims = set[tuple[str, tuple[int, ...]]]
"""(what is done to a tensor, the ranks over which), as ("dim 0", (0, 1)) or ("replicate", (0, 2))."""


def check(trial: Trial) -> Result:
    """Judge what each parameter, wrapper and unit of every rank claims.

    UNKNOWN if no wrapper of a rank claims its units, and nothing else is wrong. Findings of rank 0 come first.
    """
    findings: list[Finding] = []
    examined = 0
    for rank, evidence in sorted(trial.ranks.items()):
        for tensor in evidence.parameters:
            examined += 1
            findings += _tensor_findings(trial, rank, tensor)
        for module, wrapper in evidence.structure.items():
            examined += 1
            findings += _wrapper_findings(trial, rank, module, wrapper)
        if claimed_unit_sets(trial, rank):
            examined += len(trial.plan.units[rank])
        findings += _missing_replication_findings(trial, rank) + _unit_findings(trial, rank)
    findings += unit_disagreement_findings(trial)
    without_units = [
        rank for rank in sorted(trial.ranks) if trial.plan.units[rank] and not claimed_unit_sets(trial, rank)
    ]
    if without_units and not findings:
        return Result("placements", Verdict.UNKNOWN, examined, note=unknown_rank_reason(without_units[0]))
    findings.sort(key=lambda finding: finding.rank != 0)
    return verdict_of("placements", findings, examined, note=_units_text(trial) if not findings else "")


def _units_text(trial: Trial) -> str:
    """Return a text of the observed units of the first rank of each pipeline stage.

    Empty if the units are not the trainer's choice.
    """
    units_by_stage: dict[tuple[str, ...], tuple[Unit, ...]] = {}
    for rank, units in (trial.plan.measured_units or {}).items():
        units_by_stage.setdefault(tuple(trial.plan.slices[rank]), units)
    all_units = list(itertools.chain.from_iterable(units_by_stage.values()))
    return f"{len(all_units)} FSDP units observed: {units_text(all_units, trial.case.shards)}" if all_units else ""


def unit_disagreement_findings(trial: Trial) -> list[Finding]:
    """Return a finding for each set of ranks whose units differ from those of most ranks that hold the same parameters.

    Empty if the units are not the trainer's choice, because they are compared with the plan's then.
    """
    by_parameters: dict[tuple[str, ...], dict[frozenset[Unit], list[int]]] = {}
    for rank, observed_units in (trial.plan.measured_units or {}).items():
        unit_set = frozenset(Unit(tuple(sorted(unit.parameters)), unit.degree) for unit in observed_units)
        by_parameters.setdefault(_held_fqns(trial, rank), {}).setdefault(unit_set, []).append(rank)
    findings = []
    for ranks_by_units in by_parameters.values():
        (common_units, ranks), *other_kinds = sorted(ranks_by_units.items(), key=lambda kind: -len(kind[1]))
        for units, differing_ranks in other_kinds:
            expected = _few_units_text(trial, common_units - units)
            observed = _few_units_text(trial, units - common_units)
            subject: dict[str, Any] = {
                "kind": "unit",
                "quantity": DIFFERING_UNITS,
                "note": f"expected: as on ranks {ranks_text(ranks)}",
            }
            findings.append(Finding(ranks=tuple(differing_ranks), expected=expected, observed=observed, **subject))
    return findings


def _held_fqns(trial: Trial, rank: int) -> tuple[str, ...]:
    """Return the fqns of the parameters that a rank holds by the plan, or that it has where the plan does not derive them."""
    return tuple(trial.plan.slices[rank]) or tuple(
        sorted(tensor.fqn for tensor in trial.run.evidence_for(rank).parameters)
    )


def _few_units_text(trial: Trial, units: frozenset[Unit]) -> str:
    """Return a text of at most four of these units; "no others" without any."""
    return units_text(sorted(units), trial.case.shards, most_units=4) or "no others"


def _tensor_findings(trial: Trial, rank: int, tensor: TensorEvidence) -> list[Finding]:
    """Return a finding if a parameter does not claim the planned shards, or claims to be another slice than it is.

    Shards must be claimed exactly; replication may be claimed by the tensor or by its wrapper. A parameter that the
    plan does not derive is judged by its pipeline stage alone.
    """
    if tensor.fqn not in trial.plan.slices[rank]:
        return _cross_stage_findings(trial, rank, tensor)
    wanted = planned_shards(trial, rank, tensor.fqn)
    claimed = {(kind, ranks) for kind, ranks in tensor_claims(rank, tensor) if kind.startswith("dim ")}
    if claimed == wanted:
        return _other_slice_findings(trial, rank, tensor)
    if _claims_nothing(trial, rank, tensor):
        return []
    return [_placement_finding(rank, tensor.fqn, _claims_text(wanted), _claims_text(claimed))]


def _other_slice_findings(trial: Trial, rank: int, tensor: TensorEvidence) -> list[Finding]:
    """Return a finding if a tensor claims another slice, with other contents, than the planned one that it holds.

    Empty for flattened parameters, because no mesh claims which part of a vector is there, and for plain tensors.
    """
    full = trial.seed_weights.get(tensor.fqn)
    if trial.plan.flat or full is None or len(tensor.global_shape) != full.ndim:
        return []  # of a part of a flattened vector no mesh claims which
    local_slice = trial.local_slices[rank].get(tensor.fqn)
    claim = claimed_slice(rank, tensor)
    if tensor.mesh is None or claim is None or local_slice != trial.plan.slices[rank][tensor.fqn]:
        return []
    if claim == local_slice or is_equal_at(tensor.value, full, claim):
        return []
    expected = Part(local_slice, trial.plan.shapes[tensor.fqn])
    observed = Part(claim, trial.plan.shapes[tensor.fqn])
    return [replace(_placement_finding(rank, tensor.fqn, expected, observed), note="expected: the slice that it holds")]


def _cross_stage_findings(trial: Trial, rank: int, tensor: TensorEvidence) -> list[Finding]:
    """Return a finding if a parameter that the plan does not derive is claimed over ranks of several pipeline stages.

    Such a parameter may lie in many ways, but two stages of a pipeline hold no parameter together.
    """
    stage = _pipeline_stage(trial, rank)
    wrong: Claims = set()
    for kind, ranks in tensor_claims(rank, tensor):
        if any(_pipeline_stage(trial, peer) != stage for peer in ranks):
            wrong.add((kind, ranks))
    return [_placement_finding(rank, tensor.fqn, "on one pipeline stage", _claims_text(wrong))] if wrong else []


def _pipeline_stage(trial: Trial, rank: int) -> int:
    """Return a rank's mesh coordinate along pp."""
    return coordinate_of_rank(trial.case.dims, rank)["pp"]


def _claims_nothing(trial: Trial, rank: int, tensor: TensorEvidence) -> bool:
    """Return whether a tensor is a plain one of a trainer's own parallel layers, as large as the rank's slice.

    The check shard_contents judges what is in it. One that is as large as the whole parameter claims to be it.
    """
    local_slice = trial.plan.slices[rank][tensor.fqn]
    full_shape = trial.plan.shapes[tensor.fqn]
    size = tuple(stop - start for start, stop in local_slice)
    return tensor.mesh is None and tensor.global_shape == tensor.value.shape == size != tuple(full_shape)


def planned_shards(trial: Trial, rank: int, fqn: str) -> Claims:
    """Return, for each axis that cuts a parameter, the dim that it cuts and the ranks of this rank's group.

    Where parameters are flattened only tp's cut is returned: FSDP1's slices look like plain tensors, and its wrapper
    claims them.
    """
    plan = trial.plan
    shards: Claims = set()
    if plan.flat and (dim := tp_dim(fqn)) is not None and plan.dims.tp > 1:
        shards.add((f"dim {dim}", plan.peers(rank, "tp")))
    if plan.flat:
        return shards
    for axis in ("tp", plan.shard_axis):
        parts = [plan.slices[peer][fqn] for peer in plan.peers(rank, axis)]
        cut = (dim for dim, intervals in enumerate(zip(*parts, strict=True)) if len(set(intervals)) > 1)
        shards |= {(f"dim {dim}", plan.peers(rank, axis)) for dim in cut}
    return shards


def tensor_claims(rank: int, tensor: TensorEvidence) -> Claims:
    """Return, for each mesh axis of degree above 1, what it does to the tensor, and the rank's line of ranks along it.

    Empty for a plain tensor, or for a rank outside the mesh.
    """
    if tensor.mesh is None:
        return set()
    mesh = np.array(tensor.mesh)
    claimed: Claims = set()
    for axis, placement in enumerate(tensor.placements):
        if mesh.shape[axis] > 1 and rank in mesh:
            index = list(np.argwhere(mesh == rank)[0])
            index[axis] = slice(None)
            ranks = tuple(sorted(int(peer) for peer in mesh[tuple(index)]))
            claimed.add((_placement_kind(placement), ranks))
    return claimed


def _placement_kind(placement: str) -> str:
    """Return what a placement does: "dim 0" for "Shard(0)" and "StridedShard(0)", else its word in lower case."""
    return "dim " + placement.split("(")[1].rstrip(")") if "Shard" in placement else placement.lower()


def _wrapper_findings(trial: Trial, rank: int, module: str, wrapper: Wrapper) -> list[Finding]:
    """Return a finding for each of a wrapper's two groups, shards and replicas, that is not the plan's.

    A wrapper without a group counts as a group of this rank alone. Such a group of replicas is right if the optimizer
    joins them.
    """
    findings = []
    claimed = {"shard_ranks": wrapper.shard_ranks, "replicate_ranks": wrapper.replicate_ranks}
    for (key, ranks), axis in zip(claimed.items(), (trial.plan.shard_axis, trial.plan.replicate_axis), strict=True):
        wanted = trial.plan.peers(rank, axis)
        used = tuple(sorted(ranks or (rank,)))
        # DDP of one rank is none
        is_single_replica = axis == trial.plan.replicate_axis and used == (rank,) and wrapper.shard_ranks
        if used != wanted and not (is_single_replica and optimizer_joins_group(trial, rank, wanted)):
            subject: dict[str, Any] = {
                "kind": "wrapper",
                "name": module or "the root",
                "quantity": f"{wrapper.kind} {key}",
            }
            findings.append(Finding.at(rank, wanted, used, **subject, axis=axis, unit="ranks"))
    return findings


def _missing_replication_findings(trial: Trial, rank: int) -> list[Finding]:
    """Return a finding if replicas are requested, and no wrapper, parameter or optimizer of the rank shows them."""
    axis = trial.plan.replicate_axis
    if axis not in trial.plan.groups:
        return []
    evidence = trial.ranks[rank]
    wanted = trial.plan.group_of(rank, axis)
    by_wrapper = any(tuple(sorted(wrapper.replicate_ranks)) == wanted for wrapper in evidence.structure.values())
    by_tensor = any(("replicate", wanted) in tensor_claims(rank, tensor) for tensor in evidence.parameters)
    if by_wrapper or by_tensor or optimizer_joins_group(trial, rank, wanted):
        return []
    return [Finding.at(rank, "a wrapper or parameter that is replicated", None, kind="group", axis=axis, group=wanted)]


def _unit_findings(trial: Trial, rank: int) -> list[Finding]:
    """Return a finding for each planned unit whose parameters the rank's wrappers do not gather together, and alone.

    Empty if no wrapper claims units. Where they are the trainer's choice, each parameter must be in one unit.
    """
    claimed_units = claimed_unit_sets(trial, rank)
    findings: list[Finding] = []
    if trial.plan.measured_units is not None:
        return _unit_membership_findings(trial, rank)
    if not claimed_units:
        return findings
    in_some_unit = frozenset[str]().union(*claimed_units)
    for unit in trial.plan.units[rank]:
        overlapping = [seen_unit for seen_unit in claimed_units if seen_unit & set(unit)]
        if overlapping == [frozenset(unit)]:
            continue
        left_out = tuple(fqn for fqn in unit if fqn not in in_some_unit)
        if left_out:
            subject: dict[str, Any] = {"kind": "unit", "name": unit[0], "quantity": LEFT_OUT_PARAMETERS}
            findings.append(Finding.at(rank, (), left_out, **subject))
            continue
        other_fqns = frozenset[str]().union(*overlapping) - set(unit)
        observed = f"in {len(overlapping)} units" + (f", together with {len(other_fqns)} others" if other_fqns else "")
        expected = f"its {len(unit)} parameters gathered together, and no others"
        findings.append(Finding.at(rank, expected, observed, kind="unit", name=unit[0]))
    return findings


def _unit_membership_findings(trial: Trial, rank: int) -> list[Finding]:
    """Return a finding for each parameter of the rank that is not in exactly one of its observed units.

    Precondition: the units are measured. Empty if the rank has none.
    """
    assert trial.plan.measured_units is not None
    units = trial.plan.measured_units.get(rank, ())
    if not units:
        return []
    counts: Counter[str] = Counter()
    for unit in units:
        counts.update(unit.parameters)
    wrong = [fqn for fqn in trial.plan.slices[rank] if counts[fqn] != 1]
    subject: dict[str, Any] = {"kind": "parameter", "quantity": "FSDP units"}
    return [Finding.at(rank, 1, counts[fqn], name=fqn, **subject) for fqn in wrong]


def _placement_finding(rank: int, fqn: str, expected: Value, observed: Value) -> Finding:
    return Finding.at(rank, expected, observed, kind="parameter", name=fqn, quantity="placement")


def _claims_text(claim: Claims) -> str:
    """Return a text of claims, as "dim 0 over [0-3]". "whole on every rank" without any."""
    return " and ".join(f"{kind} over {ranks_text(ranks)}" for kind, ranks in sorted(claim)) or "whole on every rank"
