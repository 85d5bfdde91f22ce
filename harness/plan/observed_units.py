"""FSDP2's units as the wrappers claim them: which parameters are gathered together, and what is kept of them after forward.

What a trainer wraps together is its choice. Where a case leaves it open, the plan is made of the units that were observed; a
policy that the case requests is planned all the same, whatever the wrappers say of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from harness.evidence.records import RankEvidence
from harness.spec.case import Case
from harness.spec.traits import OBSERVED, TrainerTraits


class Unit(NamedTuple):
    """Parameters gathered together, over how many ranks they stay cut after forward (1 if they stay whole), and whether
    backward gathers those that do not."""

    parameters: tuple[str, ...]
    degree: int
    backward_gathers: bool = True


Observed = Mapping[int, tuple[Unit, ...]]
"""By rank. None where the case requests units, an empty tuple for a rank whose wrappers claim none."""


def observed_units(case: Case, traits: TrainerTraits, ranks: Mapping[int, RankEvidence]) -> Observed | None:
    """By rank, the units that its wrappers claim; None where the plan does not depend on them: another wrapper, or units
    that the case or the trainer's traits name."""
    if traits.units_of(case) != OBSERVED or case.wrapper != "fsdp2":
        return None
    return {rank: claimed_units(evidence) for rank, evidence in sorted(ranks.items())}


def as_laid_out(case: Case, traits: TrainerTraits, ranks: Mapping[int, RankEvidence]) -> TrainerTraits:
    """With the order of parameters in FSDP1's vectors, which is that of the model's modules. All ranks have that of the first:
    what each really holds the checks find by comparing bytes."""
    if case.wrapper != "fsdp1" or traits.flat_order or not ranks:
        return traits
    claims = (one for one in ranks[min(ranks)].structure.values() if one.kind == "fsdp1")
    return replace(traits, flat_order=tuple(fqn for one in claims for fqn in one.parameters))


def claimed_units(evidence: RankEvidence) -> tuple[Unit, ...]:
    """Modules that were wrapped as one claim the same unit."""
    found = {}
    for wrapper in evidence.structure.values():
        if wrapper.kind == "fsdp2" and wrapper.parameters:
            unit = Unit(wrapper.parameters, wrapper.ranks_after_forward, wrapper.backward_gathers)
            found[frozenset(wrapper.parameters)] = unit
    return tuple(found.values())


def as_requested(case: Case, unit: Unit) -> Unit:
    """With what the case requests to be kept after forward; by default what the trainer says that it keeps."""
    policy = case.features.reshard_after_forward
    if policy == "default":
        return unit
    return unit._replace(degree=policy if isinstance(policy, int) else case.shards if policy == "always" else 1)


def units_text(units: Iterable[Unit], shards: int, *, most: int = 12) -> str:
    """In the words of a report: "tok_embeddings, norm, output (3 parameters) kept; layers.0 (9) freed"."""
    texts = [f"{modules_text(unit.parameters)} ({len(unit.parameters)}) {_kept_text(unit, shards)}" for unit in units]
    more = f"; and {len(texts) - most} more" if len(texts) > most else ""
    return "; ".join(texts[:most]) + more


def _kept_text(unit: Unit, shards: int) -> str:
    return "whole" if shards == 1 else {1: "kept", shards: "freed"}.get(unit.degree, f"over {unit.degree} ranks")


def modules_text(parameters: Iterable[str]) -> str:
    """The blocks and other modules that parameters belong to; of one parameter alone, its own module."""
    names = [fqn.removesuffix(".weight") for fqn in parameters]
    if len(names) == 1:
        return names[0]
    modules = list(dict.fromkeys(".".join(name.split(".")[: 2 if name.startswith("layers.") else 1]) for name in names))
    return ", ".join(modules) if len(modules) < 5 else f"{modules[0]} to {modules[-1]}"
