"""The bytes that a rank's parameters, gradients and gathered units take. Trap: FSDP pads dim 0, so bounds are ranges."""

from __future__ import annotations

from harness.core.case.case import Case
from harness.core.case.features import ZERO
from harness.core.case.measured import Unit
from harness.core.case.traits import TrainerTraits
from harness.core.plan.frozen import trained_values
from harness.core.plan.grid import coordinate_of_rank, shard_degree_and_index
from harness.core.plan.plan import Kept
from harness.core.plan.slices import (
    BYTES,
    FlatUnit,
    Slice,
    numel,
    padded_numel,
    padded_numels,
    parameter_shapes,
    slice_of,
)
from harness.core.plan.stages import stages_of_rank
from harness.core.plan.units import fqns_of_separate_units
from harness.core.plan.zero import kept_parameter_dtype, vectors_of_parameters, zero_degree
from harness.reference.config import rule_of


def parameter_bytes(
    case: Case, traits: TrainerTraits, rank: int, slices: dict[str, Slice], flat: tuple[FlatUnit, ...]
) -> tuple[int, int]:
    """Return (least, most) bytes of parameters that a rank keeps between steps: its slices, and its slices with padding."""
    tp_index = coordinate_of_rank(case.dims, rank)["tp"]
    size = BYTES[kept_parameter_dtype(case)]
    degree = case.data_dims.shards
    least_bytes = sum(numel(part) for part in slices.values()) * size
    if flat:
        parts = sum(unit.elements_per_rank(degree) for unit in vectors_of_parameters(flat, slices))
        return least_bytes, parts * (degree // case.shards) * size
    numels = padded_numels(case, traits, tp_index)
    padded_bytes = sum(numels[fqn] // degree for fqn in slices) * size
    return least_bytes, max(least_bytes, padded_bytes)


def state_bytes(case: Case, slices: dict[str, Slice], flat: tuple[FlatUnit, ...]) -> tuple[int, int]:
    """Return (least, most) bytes of one number for each element of a rank's slices under ZeRO; the most counts padding.

    An optimizer keeps several such numbers, AdamW two.
    """
    size = BYTES[case.training.dtype]
    padded = sum(unit.elements_per_rank(zero_degree(case)) for unit in vectors_of_parameters(flat, slices))
    return sum(map(numel, slices.values())) * size, padded * size


def muon_bytes(case: Case, slices: dict[str, Slice]) -> int:
    """Return the bytes of the rank's slices that Muon steps; 0 with other optimizers.

    Its state is one number for each element, and AdamW's is two.
    """
    stepped = (part for fqn, part in slices.items() if rule_of(case.training, fqn) == "muon")
    return sum(map(numel, stepped)) * BYTES[case.training.dtype]


def table_bytes(case: Case) -> int:
    """Return the bytes of the rotary table that a model may keep: cosine and sine of each position and entry of a head, in
    float64."""
    return 2 * case.training.seq_len * case.model.head_dim * BYTES["float64"]


def spare_bytes(
    case: Case, traits: TrainerTraits, rank: int, slices: dict[str, Slice], flat: tuple[FlatUnit, ...]
) -> int:
    """Return the most bytes that a rank keeps beside parameters, gradients and optimizer state.

    The table has a cosine and a sine for each position and entry of a head. DDP has one copy of the gradients, in buckets.
    ZeRO has the weights on which its optimizer steps, if these are a copy (`master_weights`). FSDP2 has what it gathered for a
    loss in chunks, if the trainer leaves it there (`keeps_loss_unit`).
    """
    table = table_bytes(case)
    if case.wrapper in ZERO:
        return table + traits.master_weights * state_bytes(case, slices, flat)[1]
    if case.wrapper in ("ddp", "replicate"):
        buckets = sum(map(numel, trained_values(case, slices).values())) * BYTES[case.training.dtype]
    else:
        buckets = 0
    unit = 0
    if traits.keeps_loss_unit and traits.chunks_behind_forward and case.shards > 1:
        unit = BYTES[case.training.compute_dtype or case.training.dtype] * _padded_last_unit(case, traits, rank)
    return table + buckets + unit


def gradient_spare_bytes(case: Case, traits: TrainerTraits, rank: int) -> int:
    """Return the most bytes of gradients that a rank keeps beyond those of its parameters; 0 but for one case.

    In a pipeline a loss in chunks has FSDP2 reduce the output's gradient once for every microbatch, added to the one
    that is there. The last stage keeps the buffer of the last reduction, because the final norm's gradient lies in it,
    too.
    """
    has_last_stage = case.n_stages - 1 in stages_of_rank(case, rank)
    if not (traits.chunks_behind_forward and case.dims.pp > 1 and case.wrapper == "fsdp2" and has_last_stage):
        return 0
    return BYTES[case.training.dtype] * _padded_last_unit(case, traits, rank)


def _padded_last_unit(case: Case, traits: TrainerTraits, rank: int) -> int:
    """Return the elements that FSDP2 moves for its last unit, padded, as cut to this rank's tp slice."""
    return sum(
        padded_numel(case, traits, fqn, coordinate_of_rank(case.dims, rank)["tp"])
        for fqn in fqns_of_separate_units(case)[-1]
    )


def kept_after_forward(
    case: Case, traits: TrainerTraits, rank: int, slices: dict[str, Slice], units: list[Unit]
) -> dict[str, Kept]:
    """Return what a rank keeps of each parameter between forward and backward, by fqn; empty where nothing is sharded."""
    shards, index = shard_degree_and_index(case.data_dims, rank)
    if case.shards == 1:
        return {}
    stored_size = BYTES[case.training.dtype]
    computed_size = BYTES[case.training.compute_dtype or case.training.dtype]
    tp = (case.dims.tp, coordinate_of_rank(case.dims, rank)["tp"])
    kept = {}
    for unit in units:
        degree = unit.degree
        for fqn in unit.parameters:
            if fqn not in slices:
                continue
            shape = parameter_shapes(case.model)[fqn]
            cut_dim = traits.measured.cut_dims.get(fqn, 0)
            gathered_bytes = numel(slice_of(fqn, shape, tp, (degree, index % degree), cut_dim)) * computed_size
            kept[fqn] = Kept(degree, numel(slices[fqn]) * stored_size if degree == shards else gathered_bytes)
    return kept


def padding_after_forward(
    case: Case,
    traits: TrainerTraits,
    rank: int,
    slices: dict[str, Slice],
    flat: tuple[FlatUnit, ...],
    units: list[Unit],
) -> int:
    """Return the bytes of padding between forward and backward: of the rank's own slices, and of what stays gathered.

    FSDP2 pads each parameter, FSDP1 each flat vector.
    """
    shards = case.shards
    tp_index = coordinate_of_rank(case.dims, rank)["tp"]
    least_bytes, most_bytes = parameter_bytes(case, traits, rank, slices, flat)
    computed_size = BYTES[case.training.compute_dtype or case.training.dtype]
    kept = kept_after_forward(case, traits, rank, slices, units)
    if shards == 1:
        return most_bytes - least_bytes
    gathered_padding = 0
    for number, unit in enumerate(units):
        if unit.degree < shards:
            fqns = [fqn for fqn in unit.parameters if fqn in slices]
            numels = padded_numels(case, traits, tp_index)
            padded = sum(numels[fqn] for fqn in fqns) // unit.degree
            padded = flat[number].elements_per_rank(shards) * shards if flat else padded
            gathered_padding += padded * computed_size - sum(kept[fqn].bytes for fqn in fqns)
    return most_bytes - least_bytes + gathered_padding
