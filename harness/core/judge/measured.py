"""The traits of a trainer that nobody declared, taken from the evidence of one launch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace

from harness.core.case.case import Case
from harness.core.case.measured import MeasuredTraits, Observed, Unit
from harness.core.case.traits import OBSERVED, TrainerTraits
from harness.core.evidence.records import RankEvidence, Run


def with_measured_traits(case: Case, traits: TrainerTraits, run: Run) -> TrainerTraits:
    """Return the traits with FSDP2's units, FSDP1's order of parameters and torch's release as the evidence has them.

    Units are measured only under FSDP2, if neither traits nor case name them; the order only under FSDP1, if the traits
    do not. A policy that the case requests is planned all the same, whatever the wrappers claim.
    """
    units: Observed | None = None
    if traits.unit_policy(case) == OBSERVED and case.wrapper == "fsdp2":
        known = case.model.parameter_shapes()
        claimed = {}
        for rank, evidence in sorted(run.ranks.items()):
            claimed[rank] = tuple(_without_unknown_parameters(unit, known) for unit in claimed_units(evidence))
        units = claimed
    return replace(
        traits, measured=MeasuredTraits(units, _measured_flat_order(case, traits, run), torch=torch_release(run))
    )


def _without_unknown_parameters(unit: Unit, known: Collection[str]) -> Unit:
    """Return the unit without names that the model does not have, as a tied output's is: a plan moves a weight once."""
    return unit._replace(parameters=tuple(fqn for fqn in unit.parameters if fqn in known))


def undeclared_traits_text(traits: TrainerTraits) -> tuple[str, ...]:
    """Return a phrase for each thing that the plan takes from the run, because neither case nor adapter declares it.

    Empty if none.
    """
    phrases: tuple[str, ...] = ()
    if traits.measured.units is not None:
        phrases += ("FSDP2's units",)
    if traits.measured.flat_order:
        phrases += ("the places of parameters in FSDP1's vectors",)
    return phrases


def claimed_units(evidence: RankEvidence) -> tuple[Unit, ...]:
    """Return FSDP2's units as the rank's wrappers claim them, in the order of the wrappers. Empty without FSDP2.

    Modules that were wrapped as one claim the same unit. It is returned once, with their number.
    """
    claims = evidence.structure.values()
    wrappers = [wrapper for wrapper in claims if wrapper.kind == "fsdp2" and wrapper.parameters]
    modules = Counter(frozenset(wrapper.parameters) for wrapper in wrappers)
    units = {}
    for wrapper in wrappers:
        names = frozenset(wrapper.parameters)
        units[names] = Unit(wrapper.parameters, wrapper.ranks_after_forward, wrapper.backward_gathers, modules[names])
    return tuple(units.values())


def claimed_cut_dims(ranks: Iterable[RankEvidence]) -> dict[str, int]:
    """Return, by fqn, the dim along which FSDP2 cuts a parameter, where it is not dim 0 (shard_placement_fn).

    Parameters that something else cuts, too, are left out.
    """
    cut_dims: dict[str, int] = {}
    for evidence in ranks:
        wrapped_fqns: set[str] = set()
        for wrapper in evidence.structure.values():
            if wrapper.kind == "fsdp2":
                wrapped_fqns.update(wrapper.parameters)
        for tensor in evidence.parameters:
            shards = [placement for placement in tensor.placements if "Shard" in placement]
            if tensor.fqn in wrapped_fqns and len(shards) == 1 and shards[0].startswith("Shard("):
                cut_dims[tensor.fqn] = int(shards[0].removeprefix("Shard(").rstrip(")"))
    return {fqn: dim for fqn, dim in cut_dims.items() if dim}


def _measured_flat_order(case: Case, traits: TrainerTraits, run: Run) -> tuple[str, ...]:
    """Return the fqns of all parameters in the order in which FSDP1 flattens them, by the lowest rank's wrappers.

    Empty if the traits declare the order, without FSDP1, or without evidence. The checks compare bytes to find what
    each other rank really holds.
    """
    if case.wrapper != "fsdp1" or traits.flat_order or not run.ranks:
        return ()
    fqns: list[str] = []
    for wrapper in run.ranks[min(run.ranks)].structure.values():
        if wrapper.kind == "fsdp1":
            fqns += wrapper.parameters
    return tuple(fqns)


def torch_release(run: Run) -> str:
    """Return the first release of torch that a rank reports, else the one installed where they were started.

    Empty if unknown.
    """
    releases = (evidence.environment.get("torch", "") for evidence in run.ranks.values())
    return next(filter(None, releases), run.made.get("torch", ""))
