"""FSDP's units: which parameters are gathered together, and over how many ranks they stay cut after forward."""

from __future__ import annotations

from harness.core.case.case import Case
from harness.core.case.measured import Unit
from harness.core.case.traits import TrainerTraits
from harness.core.plan.slices import Slice, flat_units, parameter_shapes


def units_of_rank(case: Case, traits: TrainerTraits, rank: int) -> list[Unit]:
    """Return the units of a rank: those that its wrappers were measured to claim, else those that the case or the
    trainer names.

    A trainer that gathers the output once per loss in chunks (`holds_output`) has all units freed after forward.
    """
    claimed = (traits.measured.units or {}).get(rank, ())
    units = [with_requested_degree(case, unit) for unit in claimed] or fsdp_units(case, traits)
    if traits.holds_output and traits.loss_chunks > 1:  # torch frees all that there is at the end of a chunk's backward
        return [Unit(unit.parameters, case.shards) for unit in units]
    return units


def with_requested_degree(case: Case, unit: Unit) -> Unit:
    """Return the unit with the degree that it stays cut over after forward, as the case requests it.

    With the default policy that is what its wrapper claims.
    """
    policy = case.features.reshard_after_forward
    if policy == "default":
        return unit
    if isinstance(policy, int):
        return unit._replace(degree=policy)
    return unit._replace(degree=case.shards if policy == "always" else 1)


def unit_of_output_alone(units: list[Unit]) -> Unit | None:
    """Return the unit that has the output's weight and nothing else. None if the output shares a unit."""
    return next((unit for unit in units if unit.parameters == ("output.weight",)), None)


def unit_called_in_chunks(case: Case, traits: TrainerTraits, units: list[Unit]) -> Unit | None:
    """Return the unit of several modules, the output among them, whose output forward calls once per chunk of the loss.

    None if no unit is like that, or if the loss is whole, outside of forward, or in a pipeline. FSDP2 takes the first
    call of each module for the unit's forward, and the second call of the output for the next one. So it begins two in
    a pass, however many chunks there are.
    """
    if traits.loss_chunks == 1 or not traits.loss_in_forward or case.dims.pp > 1:
        return None
    return next((unit for unit in units if unit.modules > 1 and output_weight(case) in unit.parameters), None)


def fsdp_units(case: Case, traits: TrainerTraits) -> list[Unit]:
    """Return the units that a case requests or the trainer chose, else assumed ones: each block, the embedding, norm
    with output.

    The default policy (torchtitan's) keeps the last unit, final norm and output, whose backward follows at once. Under
    pp, where the next microbatch follows, it keeps every unit. A tied embedding is the output's weight and belongs to
    that unit. FSDP1 never frees the root's unit: embedding, final norm and output. ZeRO-3 gathers each parameter by
    itself.
    """
    degree = case.shards
    policy = case.features.reshard_after_forward
    if case.wrapper == "fsdp1":
        root, *blocks = (tuple(unit.starts) for unit in flat_units(case, traits.vector_order))
        return [Unit(root, 1), *(Unit(block, 1 if policy == "never" else degree) for block in blocks)]
    if case.wrapper == "zero3":
        return [Unit((fqn,), degree) for fqn in parameter_shapes(case.model)]
    *first_units, last = fqns_of_separate_units(case)
    if isinstance(policy, int):
        return [*(Unit(unit, policy) for unit in first_units), Unit(last, policy, modules=2)]
    if traits.unit_policy(case) == "root":
        return _root_units(case)
    kept = policy == "never" or (policy == "default" and case.dims.pp > 1)
    freed = policy == "always" or traits.chunks_behind_forward
    end = Unit(last, degree if freed else 1, modules=2)  # norm and output
    return [*(Unit(unit, 1 if kept else degree) for unit in first_units), end]


def _root_units(case: Case) -> list[Unit]:
    """Return torchtitan's units of 2024, the root's first, which has embedding, norm and output together.

    By default the last block is kept, whose backward follows soon, and what the root gathered is freed.
    """
    first, *blocks, last = fqns_of_separate_units(case)
    policy = case.features.reshard_after_forward
    kept = policy == "never" or (policy == "default" and case.dims.pp > 1)
    degree = 1 if kept else case.shards
    end = Unit(blocks[-1], case.shards if policy == "always" else 1)
    return [Unit(first + last, degree), *(Unit(block, degree) for block in blocks[:-1]), end]


def output_weight(case: Case) -> str:
    """Return the fqn of the output's weight, which the embedding's is where they are tied."""
    return "tok_embeddings.weight" if case.model.tied_embeddings else "output.weight"


def fqns_of_separate_units(case: Case) -> list[tuple[str, ...]]:
    """Return the fqns of each unit, if each is wrapped separately, in forward's order: embedding, each block, norm with
    output.

    A tied embedding is in the last; in a pipeline it is by itself. A model without these names is one unit.
    """
    names = list(case.model.parameter_shapes())
    names_by_layer: dict[str, list[str]] = {f"{layer}": [] for layer in range(case.model.n_layers)}
    for name in names:
        group, _, rest = name.partition(".")
        layer, _, _ = rest.partition(".")
        if group == "layers" and layer in names_by_layer:  # a recorded job's model may have layers, and say of none
            names_by_layer[layer].append(name)
    blocks = map(tuple, names_by_layer.values())
    alone = case.model.tied_embeddings and case.dims.pp > 1
    last = ("norm.weight",) if alone else ("norm.weight", output_weight(case))
    if not {*last} <= {*names}:
        return [tuple(names)]  # a model without a policy
    first = tuple(name for name in ("tok_embeddings.weight",) if name not in last)
    return [unit for unit in (first, *blocks, last) if unit]


def parameters_of_units(case: Case, slices: dict[str, Slice], units: list[Unit]) -> tuple[tuple[str, ...], ...]:
    """Return the fqns of each of FSDP's units, those that the rank holds; () with other wrappers.

    A unit of which the rank holds nothing is left out.
    """
    if case.wrapper not in ("fsdp1", "fsdp2"):
        return ()
    held_parameters = []
    for unit in units:
        fqns = tuple(fqn for fqn in unit.parameters if fqn in slices)
        if fqns:
            held_parameters.append(fqns)
    return tuple(held_parameters)
