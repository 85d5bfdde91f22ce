"""FSDP2's units: which parameters are gathered together."""

from __future__ import annotations

from harness.core.case.case import Case
from harness.core.case.measured import Unit
from harness.core.case.traits import TrainerTraits
from harness.core.plan.slices import Slice, flat_units, parameter_shapes


def units_of_rank(case: Case, traits: TrainerTraits, rank: int) -> list[Unit]:
    """What wrappers claim, where the case leaves units open and they claim any; else what the case requests."""
    seen = (traits.measured.units or {}).get(rank, ())
    units = [as_requested(case, unit) for unit in seen] or fsdp_units(case, traits)
    if traits.holds_output and traits.loss_chunks > 1:  # torch frees all that there is at the end of a chunk's backward
        return [Unit(unit.parameters, case.shards) for unit in units]
    return units


def as_requested(case: Case, unit: Unit) -> Unit:
    """Return the unit with what the case requests to be kept after forward; by default what its wrapper claims to keep."""
    policy = case.features.reshard_after_forward
    if policy == "default":
        return unit
    return unit._replace(degree=policy if isinstance(policy, int) else case.shards if policy == "always" else 1)


def output_alone(units: list[Unit]) -> Unit | None:
    """The output's unit, where nothing else is in it."""
    return next((unit for unit in units if unit.parameters == ("output.weight",)), None)


def unit_called_in_chunks(case: Case, traits: TrainerTraits, units: list[Unit]) -> Unit | None:
    """Return the unit of several modules of which forward calls the output once per chunk; None if there is none.

    FSDP2 takes the first call of each module for the unit's forward, and the second call of the output for the next one. So
    it begins two in a pass, however many chunks there are.
    """
    if traits.loss_chunks == 1 or not traits.loss_in_forward or case.dims.pp > 1:
        return None
    return next((unit for unit in units if unit.modules > 1 and output_weight(case) in unit.parameters), None)


def fsdp_units(case: Case, traits: TrainerTraits) -> list[Unit]:
    """Return the units that a case requests or the trainer chose, else those that are assumed.

    The default policy (torchtitan's) keeps the last unit, final norm and output, whose backward follows at once. Under pp,
    where the next microbatch follows, it keeps every unit. A tied embedding is the output's weight and belongs to that
    unit. FSDP1 never frees the root's unit: embedding, final norm and output. ZeRO-3 gathers each parameter by itself.
    """
    degree, policy = case.shards, case.features.reshard_after_forward
    if case.wrapper == "fsdp1":
        root, *blocks = (tuple(unit.starts) for unit in flat_units(case, traits.vector_order))
        return [Unit(root, 1), *(Unit(block, 1 if policy == "never" else degree) for block in blocks)]
    if case.wrapper == "zero3":
        return [Unit((fqn,), degree) for fqn in parameter_shapes(case.model)]
    *most, last = fsdp2_units(case)
    if isinstance(policy, int):
        return [*(Unit(unit, policy) for unit in most), Unit(last, policy, modules=2)]
    if traits.units_of(case) == "root":
        return _root_units(case)
    kept = policy == "never" or (policy == "default" and case.dims.pp > 1)
    freed = policy == "always" or traits.chunks_behind_forward
    end = Unit(last, degree if freed else 1, modules=2)  # norm and output
    return [*(Unit(unit, 1 if kept else degree) for unit in most), end]


def _root_units(case: Case) -> list[Unit]:
    """torchtitan's of 2024: the last block is kept, whose backward follows soon, and what the root gathered is freed."""
    (first, *blocks, last), policy = fsdp2_units(case), case.features.reshard_after_forward
    most = 1 if policy == "never" or (policy == "default" and case.dims.pp > 1) else case.shards
    end = Unit(blocks[-1], case.shards if policy == "always" else 1)
    return [Unit(first + last, most), *(Unit(block, most) for block in blocks[:-1]), end]


def output_weight(case: Case) -> str:
    """Return the name of the output's weight, which the embedding's is where they are tied."""
    return "tok_embeddings.weight" if case.model.tied_embeddings else "output.weight"


def fsdp2_units(case: Case) -> list[tuple[str, ...]]:
    """The units "apart", each wrapped separately, in forward's order: embedding, each block, norm with output. A tied
    embedding is in the last; in a pipeline it is by itself."""
    names = list(case.model.parameter_shapes())
    blocks = [tuple(n for n in names if n.startswith(f"layers.{layer}.")) for layer in range(case.model.n_layers)]
    alone = case.model.tied_embeddings and case.dims.pp > 1
    last = ("norm.weight",) if alone else ("norm.weight", output_weight(case))
    if not {*last} <= {*names}:
        return [tuple(names)]  # a model without a policy
    first = tuple(name for name in ("tok_embeddings.weight",) if name not in last)
    return [unit for unit in (first, *blocks, last) if unit]


def held_units(case: Case, held: dict[str, Slice], units: list[Unit]) -> tuple[tuple[str, ...], ...]:
    """Return what a rank holds of FSDP's units."""
    mine = (tuple(fqn for fqn in unit.parameters if fqn in held) for unit in units)
    return tuple(unit for unit in mine if unit) if case.wrapper in ("fsdp1", "fsdp2") else ()
