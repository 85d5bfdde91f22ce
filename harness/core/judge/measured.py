"""What the evidence of one launch shows of its trainer: the traits that are not declared."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace

from harness.core.case.case import Case
from harness.core.case.measured import Measured, Observed, Unit
from harness.core.case.traits import OBSERVED, TrainerTraits
from harness.core.evidence.records import RankEvidence, Run


def measured(case: Case, traits: TrainerTraits, run: Run) -> TrainerTraits:
    """Return the traits with what they and the case leave open as the ranks show it.

    What a trainer wraps together is its choice. A policy that the case requests is planned all the same, whatever the wrappers
    claim.
    """
    units: Observed | None = None
    if traits.units_of(case) == OBSERVED and case.wrapper == "fsdp2":
        known = case.model.parameter_shapes()
        claimed = {rank: claimed_units(evidence) for rank, evidence in sorted(run.ranks.items())}
        units = {rank: tuple(_of_model(unit, known) for unit in each) for rank, each in claimed.items()}
    return replace(traits, measured=Measured(units, _flat_order(case, traits, run), torch=torch_of(run)))


def _of_model(unit: Unit, known: Collection[str]) -> Unit:
    """Return the unit without names that the model does not have, as a tied output's is: a plan moves a weight once."""
    return unit._replace(parameters=tuple(fqn for fqn in unit.parameters if fqn in known))


def undeclared(traits: TrainerTraits) -> tuple[str, ...]:
    """Return what the plan takes from a run, for neither the case nor the adapter declares it."""
    found = traits.measured
    units = ("FSDP2's units",) if found.units is not None else ()
    return units + (("the places of parameters in FSDP1's vectors",) if found.flat_order else ())


def claimed_units(evidence: RankEvidence) -> tuple[Unit, ...]:
    """Return FSDP2's units as the rank's wrappers claim them. Modules that were wrapped as one claim the same unit."""
    claims = evidence.structure.values()
    wrappers = [wrapper for wrapper in claims if wrapper.kind == "fsdp2" and wrapper.parameters]
    modules = Counter(frozenset(wrapper.parameters) for wrapper in wrappers)
    units = {}
    for wrapper in wrappers:
        names = frozenset(wrapper.parameters)
        units[names] = Unit(wrapper.parameters, wrapper.ranks_after_forward, wrapper.backward_gathers, modules[names])
    return tuple(units.values())


def claimed_cut_dims(ranks: Iterable[RankEvidence]) -> dict[str, int]:
    """Return, by fqn, the dim along which FSDP2 cuts a parameter, where it is not the first (shard_placement_fn)."""
    found: dict[str, int] = {}
    for evidence in ranks:
        units = {fqn for w in evidence.structure.values() if w.kind == "fsdp2" for fqn in w.parameters}
        for tensor in evidence.parameters:
            cuts = [kind for kind in tensor.placements if "Shard" in kind]
            if tensor.fqn in units and len(cuts) == 1 and cuts[0].startswith("Shard("):
                found[tensor.fqn] = int(cuts[0].removeprefix("Shard(").rstrip(")"))
    return {fqn: dim for fqn, dim in found.items() if dim}


def _flat_order(case: Case, traits: TrainerTraits, run: Run) -> tuple[str, ...]:
    """Return the places of parameters in FSDP1's vectors, which is that of the model's modules. All ranks have that of the
    first: what each really holds the checks find by comparing bytes."""
    if case.wrapper != "fsdp1" or traits.flat_order or not run.ranks:
        return ()
    claims = (one for one in run.ranks[min(run.ranks)].structure.values() if one.kind == "fsdp1")
    return tuple(fqn for one in claims for fqn in one.parameters)


def torch_of(run: Run) -> str:
    """Return the release that the ranks report; without any evidence, the one installed where they were started."""
    releases = (evidence.environment.get("torch", "") for evidence in run.ranks.values())
    return next(filter(None, releases), run.made.get("torch", ""))
