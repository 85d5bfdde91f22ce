"""The bytes that a rank's parameters, gradients and gathered units take. Trap: FSDP pads dim 0, so bounds are ranges."""

from __future__ import annotations

from harness.core.case.case import Case
from harness.core.case.features import ZERO
from harness.core.case.measured import Unit
from harness.core.case.traits import TrainerTraits
from harness.core.plan.frozen import trained
from harness.core.plan.grid import coordinate, shard_place
from harness.core.plan.plan import Kept
from harness.core.plan.slices import BYTES, FlatUnit, Slice, numel, padded_numel, parameter_shapes, slice_of
from harness.core.plan.stages import stages_of_rank
from harness.core.plan.units import fsdp2_units
from harness.core.plan.zero import kept_dtype, units_held, zero_degree
from harness.reference.config import rule_of


def parameter_bytes(
    case: Case, traits: TrainerTraits, rank: int, held: dict[str, Slice], flat: tuple[FlatUnit, ...]
) -> tuple[int, int]:
    """(least, most) bytes of its parameters that a rank keeps between steps: its slices, and those with their padding."""
    tp_index = coordinate(case.dims, rank)["tp"]
    size = BYTES[kept_dtype(case)]
    degree = case.data_dims.shards
    least = sum(numel(part) for part in held.values()) * size
    if flat:
        parts = sum(unit.part(degree) for unit in units_held(flat, held))
        return least, parts * (degree // case.shards) * size
    most = sum(padded_numel(case, traits, fqn, tp_index) // degree for fqn in held) * size
    return least, max(least, most)


def state_bytes(case: Case, held: dict[str, Slice], flat: tuple[FlatUnit, ...]) -> tuple[int, int]:
    """Return the bytes of each number that ZeRO's optimizer keeps for each element: (least, most), the most with padding."""
    size = BYTES[case.training.dtype]
    padded = sum(unit.part(zero_degree(case)) for unit in units_held(flat, held))
    return sum(map(numel, held.values())) * size, padded * size


def muon_bytes(case: Case, held: dict[str, Slice]) -> int:
    """Return the bytes of the parameters that Muon steps: its state is one number for each, and AdamW's is two."""
    stepped = (part for fqn, part in held.items() if rule_of(case.training, fqn) == "muon")
    return sum(map(numel, stepped)) * BYTES[case.training.dtype]


def table_bytes(case: Case) -> int:
    """Bytes of the rotary table that a model may keep: cosine and sine of each position and entry of a head, in float64."""
    return 2 * case.training.seq_len * case.model.head_dim * BYTES["float64"]


def spare_bytes(
    case: Case, traits: TrainerTraits, rank: int, held: dict[str, Slice], flat: tuple[FlatUnit, ...]
) -> int:
    """The table has a cosine and a sine for each position and entry of a head. DDP has one copy of the gradients, in buckets.
    ZeRO has the weights on which its optimizer steps, if these are a copy (`master_weights`). FSDP2 has what it gathered for a
    loss in chunks, if the trainer leaves it there (`keeps_loss_unit`)."""
    if case.wrapper in ZERO:
        return table_bytes(case) + traits.master_weights * state_bytes(case, held, flat)[1]
    buckets = sum(map(numel, trained(case, held).values())) * BYTES[case.training.dtype]
    unit = BYTES[case.training.compute_dtype or case.training.dtype] * _padded_last_unit(case, traits, rank)
    kept = traits.keeps_loss_unit and traits.chunks_behind_forward and case.shards > 1
    return table_bytes(case) + (buckets if case.wrapper in ("ddp", "replicate") else 0) + (unit if kept else 0)


def gradient_spare(case: Case, traits: TrainerTraits, rank: int) -> int:
    """In a pipeline a loss in chunks has FSDP2 reduce the output's gradient once for every microbatch, added to the one that is
    there. The buffer of the last reduction is kept, because the final norm's gradient lies in it, too."""
    last = case.n_stages - 1 in stages_of_rank(case, rank)
    if not (traits.chunks_behind_forward and case.dims.pp > 1 and case.wrapper == "fsdp2" and last):
        return 0
    return BYTES[case.training.dtype] * _padded_last_unit(case, traits, rank)


def _padded_last_unit(case: Case, traits: TrainerTraits, rank: int) -> int:
    return sum(padded_numel(case, traits, fqn, coordinate(case.dims, rank)["tp"]) for fqn in fsdp2_units(case)[-1])


def kept_after_forward(
    case: Case, traits: TrainerTraits, rank: int, held: dict[str, Slice], units: list[Unit]
) -> dict[str, Kept]:
    """Return, by fqn, what is kept of each parameter between forward and backward; empty where nothing is sharded."""
    shards, index = shard_place(case.data_dims, rank)
    if case.shards == 1:
        return {}
    stored, computed = BYTES[case.training.dtype], BYTES[case.training.compute_dtype or case.training.dtype]
    tp = case.dims.tp, coordinate(case.dims, rank)["tp"]
    kept = {}
    for unit in units:
        degree = unit.degree
        for fqn in [fqn for fqn in unit.parameters if fqn in held]:
            shape, cut_dim = parameter_shapes(case.model)[fqn], traits.measured.cut_dims.get(fqn, 0)
            there = numel(slice_of(fqn, shape, tp, (degree, index % degree), cut_dim)) * computed
            kept[fqn] = Kept(degree, numel(held[fqn]) * stored if degree == shards else there)
    return kept


def padding_after_forward(
    case: Case,
    traits: TrainerTraits,
    rank: int,
    held: dict[str, Slice],
    flat: tuple[FlatUnit, ...],
    units: list[Unit],
) -> int:
    """Return the padding of the rank's own slices and of what is kept gathered: by parameter, or by its flat unit."""
    shards, tp_index = case.shards, coordinate(case.dims, rank)["tp"]
    least, most = parameter_bytes(case, traits, rank, held, flat)
    computed, extra = BYTES[case.training.compute_dtype or case.training.dtype], 0
    there = kept_after_forward(case, traits, rank, held, units)
    if shards == 1:
        return most - least
    for number, unit in enumerate(units):
        if unit.degree < shards:
            mine = [fqn for fqn in unit.parameters if fqn in held]
            padded = sum(padded_numel(case, traits, fqn, tp_index) for fqn in mine) // unit.degree
            padded = flat[number].part(shards) * shards if flat else padded
            extra += padded * computed - sum(there[fqn].bytes for fqn in mine)
    return most - least + extra
