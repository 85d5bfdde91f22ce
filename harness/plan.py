"""What must be true of a case, by arithmetic alone: no torch, no DeviceMesh, nothing that a trainer uses.

The rank grid is arange(world_size) reshaped to the degrees, outermost axis first (pp, dp_replicate, dp_shard, cp, tp).
Groups are its lines; "dp_shard_cp" is dp_shard and cp folded into one, over which FSDP shards if both are there. A
pipeline deals out the layers, so that a rank holds only the parameters of its stages. Tensor parallel cuts a parameter
along one dim, data-parallel sharding then cuts dim 0 of what is left; both cut as torch.chunk does: equal chunks of
ceil(n / parts), the last ones shorter or empty.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from harness import releases, schedule
from harness.case import AXES, LOOPED, Case, ParallelDims
from harness.units import Observed, Unit, as_requested
from reference.config import ModelConfig, quantized_modules

Interval = tuple[int, int]
Slice = tuple[Interval, ...]
"""Half-open intervals of the full tensor, one a dim. A slice with an empty interval holds nothing."""

# Which dim tensor parallel cuts: 0 for column-parallel weights and the vocabulary, 1 for row-parallel weights.
# Norm weights are whole on every tp rank. (Llama's layout in Megatron-LM and torchtitan.)
TP_DIM = {
    "tok_embeddings": 0,
    "output": 0,
    "attention.wq": 0,
    "attention.wk": 0,
    "attention.wv": 0,
    "attention.wo": 1,
    "feed_forward.w1": 0,
    "feed_forward.w2": 1,
    "feed_forward.w3": 0,
}

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Flow:
    """Bytes that one rank must move over one axis in a step, for one purpose.

    Bytes count the unsharded tensor (all_gather's output, reduce_scatter's input, all_reduce's tensor), so they depend
    neither on bucketing nor on the algorithm behind the collective. optional: a trainer may as well do this outside of
    forward and backward, where it cannot be told from other small collectives; done inside, it has these bytes.
    first: in the first step only. later: in all others only.
    """

    axis: str
    role: str
    op: str
    phase: str
    bytes: int
    optional: bool = False
    first: bool = False
    later: bool = False


@dataclass(frozen=True)
class FlatUnit:
    """A module's parameters one after the other in a vector, which FSDP1 cuts in equal parts, one a rank.

    starts: where each parameter begins, by fqn. numel: elements of the vector, before it is padded to equal parts.
    """

    starts: dict[str, int]
    numel: int

    def part(self, ways: int) -> int:
        """Elements of each rank's part."""
        return -(-self.numel // ways)


@dataclass(frozen=True)
class Kept:
    """Of one parameter on one rank, between forward and backward: over how many ranks it is cut (1: it is whole), and the
    bytes of what is there; where that is more than the rank's own slice, the slice is there as well."""

    ways: int
    bytes: int


@dataclass(frozen=True)
class Plan:
    """groups: by axis of degree above 1, its groups' ranks. slices[rank][fqn]: what each rank must hold.

    shapes: of every parameter; where FSDP1 cuts flattened ones (`flat`: its units), of the vector: all is judged flattened.
    shard_axis: the one that FSDP shards over: dp_shard, cp or dp_shard_cp. stages[rank]: the pipeline stages it runs.
    flows[rank]: its traffic in odd steps, even_flows[rank] in even ones. parameter_bytes[rank]: (least, most) bytes of
    parameters a rank may keep between steps; the most counts the padding of uneven chunks. after_forward[rank][fqn]: what
    it keeps of a parameter when a forward pass has ended, nothing where no parameter is gathered;
    padding_after_forward[rank]: the bytes that padding may add to all of it. outside_bytes[rank]: the most it may move in
    a step outside forward and backward, where nobody plans; integer_bytes: of integers inside, in the first two steps;
    used_bytes: later.
    units[rank]: the parameters that FSDP gathers together, nothing with other wrappers; `observed`: they are those that
    wrappers tell of, for the case leaves them open.
    table_bytes: of tables of positions, which is also the most by which what is kept may grow from step to step.
    spare_bytes[rank]: of float tensors that are neither parameters, gradients nor optimizer state, the most it may keep;
    gradient_spare[rank]: of gradients, beyond those of its parameters.
    torch: the release that ran. quantized: the modules whose products run in 8 bits.
    """

    dims: ParallelDims
    shapes: dict[str, tuple[int, ...]]
    groups: dict[str, tuple[tuple[int, ...], ...]]
    shard_axis: str
    stages: dict[int, tuple[int, ...]]
    slices: dict[int, dict[str, Slice]]
    flows: dict[int, tuple[Flow, ...]]
    even_flows: dict[int, tuple[Flow, ...]]
    parameter_bytes: dict[int, tuple[int, int]]
    outside_bytes: dict[int, int]
    integer_bytes: int
    used_bytes: int
    spare_bytes: dict[int, int]
    units: dict[int, tuple[tuple[str, ...], ...]]
    table_bytes: int = 0
    observed: Observed | None = None
    gradient_spare: dict[int, int] = field(default_factory=dict)
    torch: str = ""
    flat: tuple[FlatUnit, ...] = ()
    after_forward: dict[int, dict[str, Kept]] = field(default_factory=dict)
    padding_after_forward: dict[int, int] = field(default_factory=dict)
    first_step: int = 1
    quantized: tuple[str, ...] = ()

    def flows_of(self, rank: int, step: int) -> tuple[Flow, ...]:
        """Its traffic in a step: even ones may train on shorter samples."""
        flows = self.flows[rank] if step % 2 else self.even_flows[rank]
        return tuple(flow for flow in flows if not (flow.later if step == self.first_step else flow.first))

    def group_of(self, rank: int, axis: str) -> tuple[int, ...]:
        return next(group for group in self.groups[axis] if rank in group)

    def peers(self, rank: int, axis: str) -> tuple[int, ...]:
        """The same, but of a rank alone where the axis has degree 1."""
        return self.group_of(rank, axis) if axis in self.groups else (rank,)


def rank_grid(dims: ParallelDims) -> np.ndarray:
    return np.arange(dims.world_size).reshape(dims.degrees)


def coordinate(dims: ParallelDims, rank: int) -> dict[str, int]:
    place = np.unravel_index(rank, dims.degrees)
    return {axis: int(index) for axis, index in zip(AXES, place, strict=True)}


def groups(dims: ParallelDims, *axes: str) -> tuple[tuple[int, ...], ...]:
    """The groups of ranks that differ only along `axes`, each ascending; a partition of the world."""
    grid = rank_grid(dims)
    moved = np.moveaxis(grid, [AXES.index(axis) for axis in axes], range(-len(axes), 0))
    lines = moved.reshape(-1, math.prod(getattr(dims, axis) for axis in axes))
    return tuple(tuple(sorted(int(rank) for rank in line)) for line in lines)


def make_plan(case: Case, observed: Observed | None = None, *, torch: str = "") -> Plan:
    """observed: FSDP's units where the case leaves them open; without evidence of them, those of a trainer that asks for
    none. torch: the release that the ranks ran; empty for the oldest supported."""
    dims = case.dims
    flat = flat_units(case) if case.wrapper == "fsdp1" else ()
    shapes = {fqn: (math.prod(shape),) if flat else shape for fqn, shape in case.model.parameter_shapes().items()}
    stages = {rank: stages_of_rank(case, rank) for rank in range(dims.world_size)}
    placed = {stage: parameters_of_stage(case, stage) for stage in range(case.n_stages)}
    held = {rank: {fqn: shapes[fqn] for stage in mine for fqn in placed[stage]} for rank, mine in stages.items()}
    if flat:
        slices = {rank: flat_slices(flat, held[rank], *shard_place(dims, rank)) for rank in held}
    else:
        slices = {rank: slices_of_rank(dims, rank, held[rank]) for rank in held}
    units = {rank: units_of_rank(case, rank, observed) for rank in held}
    flows = _flows_of_ranks(case, case.seq_len(1), units, torch)
    return Plan(
        dims=dims,
        first_step=case.steps.start,
        shapes=shapes,
        groups=_groups_by_axis(case, units),
        shard_axis=shard_axis(dims),
        stages=stages,
        slices=slices,
        flows=flows,
        even_flows=_flows_of_ranks(case, case.seq_len(2), units, torch) if case.training.variable_length else flows,
        outside_bytes={rank: _outside_bytes(case, rank, flows[rank]) for rank in slices},
        integer_bytes=_integer_bytes(case),
        used_bytes=_used_bytes(case),
        parameter_bytes={rank: _parameter_bytes(case, rank, slices[rank], flat) for rank in slices},
        units={rank: _held_units(case, slices[rank], units[rank]) for rank in slices},
        observed=observed,
        table_bytes=_table_bytes(case),
        spare_bytes={rank: _spare_bytes(case, rank, slices[rank]) for rank in slices},
        gradient_spare={rank: _gradient_spare(case, rank) for rank in slices},
        torch=torch,
        quantized=quantized_modules(case.model) if case.training.quantize else (),
        flat=flat,
        after_forward={rank: _after_forward(case, rank, slices[rank], units[rank]) for rank in slices},
        padding_after_forward={
            rank: _padding_after_forward(case, rank, slices[rank], flat, units[rank]) for rank in slices
        },
    )


def _groups_by_axis(case: Case, units: dict[int, list[Unit]]) -> dict[str, tuple[tuple[int, ...], ...]]:
    dims = case.dims
    found = {axis: groups(dims, axis) for axis in AXES if getattr(dims, axis) > 1}
    if dims.dp_shard > 1 and dims.cp > 1:
        found["dp_shard_cp"] = groups(dims, "dp_shard", "cp")
    for ways in sorted({unit.ways for mine in units.values() for unit in mine}):
        if (axis := _gathered_over(case, ways)) not in (shard_axis(dims), ""):
            found[axis] = _post_forward_groups(found[shard_axis(dims)], ways)
    return found


def _gathered_over(case: Case, ways: int) -> str:
    """The axis on which backward gathers what stayed cut over so many ranks; empty if it stayed whole."""
    if case.shards == 1 or ways == 1:
        return ""
    if isinstance(case.features.reshard_after_forward, int):
        return "post_forward"
    return shard_axis(case.dims) if ways == case.shards else f"post_forward_{ways}"


def _post_forward_groups(shards: tuple[tuple[int, ...], ...], ways: int) -> tuple[tuple[int, ...], ...]:
    """Neighbours in a shard group, `ways` of them: each such group holds all parameters between forward and backward."""
    return tuple(group[start : start + ways] for group in shards for start in range(0, len(group), ways))


def shard_axis(dims: ParallelDims) -> str:
    """Context parallel ranks hold equal parameters, so FSDP shards over them as well."""
    if dims.cp == 1:
        return "dp_shard"
    return "dp_shard_cp" if dims.dp_shard > 1 else "cp"


# ---- pipeline stages and positions


def stages_of_rank(case: Case, rank: int) -> tuple[int, ...]:
    return schedule.stages_of(
        case.features.schedule, case.dims.pp, case.stages_per_rank, coordinate(case.dims, rank)["pp"]
    )


def actions_of_rank(case: Case, rank: int) -> tuple[schedule.Action, ...]:
    """What a rank does in one pass of the schedule, in order; nothing without a pipeline."""
    if case.dims.pp == 1:
        return ()
    numbers = case.features.schedule, case.dims.pp, case.stages_per_rank, case.microbatches
    return schedule.actions(*numbers, coordinate(case.dims, rank)["pp"])


def layers_of_stage(case: Case, stage: int) -> range:
    """Consecutive layers, as equally many as can be; the first stages take what is left over."""
    least, more = divmod(case.model.n_layers, case.n_stages)
    start = stage * least + min(stage, more)
    return range(start, start + least + (stage < more))


def parameters_of_stage(case: Case, stage: int) -> list[str]:
    """The embedding is with the first stage's layers, the final norm and the output with the last one's."""
    prefixes = [f"layers.{layer}." for layer in layers_of_stage(case, stage)]
    prefixes += ["tok_embeddings."] if stage == 0 else []
    prefixes += ["norm.", "output."] if stage == case.n_stages - 1 else []
    return [fqn for fqn in _shapes(case.model) if fqn.startswith(tuple(prefixes))]


def positions(case: Case, rank: int, length: int) -> np.ndarray:
    """The token positions of a sample that a rank is fed, in its order. int64 [length / cp]

    Load balancing gives each cp rank the i-th chunk from the front and the i-th from the back: under a causal mask late
    tokens are more work.
    """
    cp, at = case.dims.cp, coordinate(case.dims, rank)["cp"]
    if cp > 1 and case.features.cp_load_balance:
        chunks = np.split(np.arange(length), 2 * cp)
        return np.concatenate([chunks[at], chunks[2 * cp - 1 - at]])
    return np.split(np.arange(length), cp)[at]


# ---- slices


def chunk(interval: Interval, parts: int, index: int) -> Interval:
    """The index-th of `parts` chunks of an interval, as torch.chunk cuts."""
    start, stop = interval
    size = -(-(stop - start) // parts)
    return min(start + index * size, stop), min(start + (index + 1) * size, stop)


def slices_of_rank(dims: ParallelDims, rank: int, shapes: dict[str, tuple[int, ...]]) -> dict[str, Slice]:
    tp, shard = (dims.tp, coordinate(dims, rank)["tp"]), shard_place(dims, rank)
    return {fqn: slice_of(fqn, shape, tp, shard) for fqn, shape in shapes.items()}


def shard_place(dims: ParallelDims, rank: int) -> tuple[int, int]:
    """(degree, index) of data-parallel sharding."""
    at = coordinate(dims, rank)
    return dims.dp_shard * dims.cp, at["dp_shard"] * dims.cp + at["cp"]


def flat_units(case: Case) -> tuple[FlatUnit, ...]:
    """FSDP1's, the root's first: it has what no block has. Each parameter begins at a multiple of 16 bytes."""
    blocks = [
        [fqn for fqn in _shapes(case.model) if fqn.startswith(f"layers.{n}.")] for n in range(case.model.n_layers)
    ]
    root = [fqn for fqn in _shapes(case.model) if not fqn.startswith("layers.")]
    return tuple(_flat_unit(case, names) for names in (root, *blocks))


def _flat_unit(case: Case, names: list[str]) -> FlatUnit:
    aligned, end, starts = 16 // BYTES[case.training.dtype], 0, {}
    for fqn in names:
        starts[fqn] = -(-end // aligned) * aligned
        end = starts[fqn] + math.prod(_shapes(case.model)[fqn])
    return FlatUnit(starts, end)


def flat_slices(
    units: Iterable[FlatUnit], shapes: dict[str, tuple[int, ...]], ways: int, index: int
) -> dict[str, Slice]:
    """Of each flattened parameter, what lies in the index-th of `ways` equal parts of its unit."""
    found: dict[str, Slice] = {}
    for unit in units:
        first = index * unit.part(ways)
        for fqn, start in unit.starts.items():
            bounds = (min(max(at - start, 0), shapes[fqn][0]) for at in (first, first + unit.part(ways)))
            found[fqn] = (tuple(bounds),)  # type: ignore[assignment]
    return {fqn: found[fqn] for fqn in shapes}


def slice_of(fqn: str, shape: tuple[int, ...], tp: tuple[int, int], shard: tuple[int, int]) -> Slice:
    """The part of a parameter at place (degree, index) of tensor parallel and, inside it, of data-parallel sharding."""
    intervals = [(0, size) for size in shape]
    dim = tp_dim(fqn)
    if dim is not None:
        intervals[dim] = chunk(intervals[dim], *tp)
    intervals[0] = chunk(intervals[0], *shard)
    return tuple(intervals)


def tp_dim(fqn: str) -> int | None:
    """The dim that tensor parallel cuts, None for a parameter that every tp rank holds whole."""
    module = fqn.removesuffix(".weight")
    return next((dim for suffix, dim in TP_DIM.items() if module == suffix or module.endswith("." + suffix)), None)


def numel(part: Slice) -> int:
    return math.prod(stop - start for start, stop in part)


def slice_text(part: Slice, shape: tuple[int, ...], *, flat: bool = False) -> str:
    """A slice as a person reads it: "1/8 of dim 0 [0:32]", "1/8 of its elements [0:2048]" or "whole"."""
    cuts = []
    for dim, ((start, stop), size) in enumerate(zip(part, shape, strict=True)):
        if (start, stop) != (0, size):
            parts = size / (stop - start) if stop > start else math.inf
            share = "nothing" if stop == start else f"1/{parts:.3g}"
            cuts.append(f"{share} of {'its elements' if flat else f'dim {dim}'} [{start}:{stop}]")
    return ", ".join(cuts) or "whole"


# ---- traffic and memory


def units_of_rank(case: Case, rank: int, observed: Observed | None) -> list[Unit]:
    """What wrappers tell of, where the case leaves units open and they tell of any; else what the case asks for."""
    seen = observed.get(rank, ()) if observed is not None else ()
    return [as_requested(case, unit) for unit in seen] or fsdp_units(case)


def fsdp_units(case: Case) -> list[Unit]:
    """Those that a case asks for, and that are assumed where nobody chose and nobody looked.

    The default policy keeps the last unit (final norm and output), whose backward follows at once, and under pp, where
    the next microbatch follows, every unit (torchtitan's policy). A tied embedding is the output's weight and belongs to
    that unit. FSDP1 never frees the root's unit: embedding, final norm and output.
    """
    ways, policy = case.shards, case.features.reshard_after_forward
    if case.wrapper == "fsdp1":
        root, *blocks = (tuple(unit.starts) for unit in flat_units(case))
        return [Unit(root, 1), *(Unit(block, 1 if policy == "never" else ways) for block in blocks)]
    if isinstance(policy, int):
        return [Unit(unit, policy) for unit in _fsdp2_units(case)]
    *most, last = _fsdp2_units(case)
    if case.features.fsdp_units == "root":
        return _root_units(case)
    kept = policy == "never" or (policy == "default" and case.dims.pp > 1)
    freed = policy == "always" or case.features.loss_chunks > 1
    return [*(Unit(unit, 1 if kept else ways) for unit in most), Unit(last, ways if freed else 1)]


def _root_units(case: Case) -> list[Unit]:
    """torchtitan's of 2024: the last block stays, whose backward follows soon, and what the root gathered is freed."""
    (first, *blocks, last), policy = _fsdp2_units(case), case.features.reshard_after_forward
    most = 1 if policy == "never" or (policy == "default" and case.dims.pp > 1) else case.shards
    end = Unit(blocks[-1], case.shards if policy == "always" else 1)
    return [Unit(first + last, most), *(Unit(block, most) for block in blocks[:-1]), end]


def _fsdp2_units(case: Case) -> list[tuple[str, ...]]:
    names = list(case.model.parameter_shapes())
    blocks = [tuple(n for n in names if n.startswith(f"layers.{layer}.")) for layer in range(case.model.n_layers)]
    last = ("norm.weight", "tok_embeddings.weight" if case.model.tied_embeddings else "output.weight")
    first = tuple(name for name in ("tok_embeddings.weight",) if name not in last)
    return [unit for unit in (first, *blocks, last) if unit]


def _flows_of_ranks(case: Case, length: int, units: dict[int, list[Unit]], torch: str) -> dict[int, tuple[Flow, ...]]:
    return {rank: _flows(case, rank, length, units[rank], torch) for rank in range(case.dims.world_size)}


def _flows(case: Case, rank: int, length: int, units: list[Unit], torch: str) -> tuple[Flow, ...]:
    data_parallel = _data_parallel_flows if case.dims.pp == 1 else _pipelined_data_parallel_flows
    flows = (
        *data_parallel(case, rank, units),
        *_tensor_parallel_flows(case, stages_of_rank(case, rank), length, torch),
        *_scale_flows(case, rank, length),
        *_context_parallel_flows(case, rank, length),
        *_recomputed_flows(case, rank, length),
        *_pipeline_flows(case, rank, length),
    )
    return tuple(flow for flow in flows if flow.bytes)


@functools.cache
def _shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Asked for once a parameter and rank: made anew each time it took 25 s for 405B on 32 ranks."""
    return model.parameter_shapes()


def _held_units(case: Case, held: dict[str, Slice], units: list[Unit]) -> tuple[tuple[str, ...], ...]:
    """Of FSDP's units, what a rank holds of them."""
    mine = (tuple(fqn for fqn in unit.parameters if fqn in held) for unit in units)
    return tuple(unit for unit in mine if unit) if case.wrapper in ("fsdp1", "fsdp2") else ()


def _padded_numel(case: Case, fqn: str, tp_index: int) -> int:
    """Elements FSDP2 moves for a parameter: its tp part with dim 0 padded to a multiple of the shard degree."""
    shape = list(_shapes(case.model)[fqn])
    dim = tp_dim(fqn)
    if dim is not None:
        start, stop = chunk((0, shape[dim]), case.dims.tp, tp_index)
        shape[dim] = stop - start
    ways = case.dims.dp_shard * case.dims.cp
    return -(-shape[0] // ways) * ways * math.prod(shape[1:])


def _data_parallel_flows(case: Case, rank: int, units: list[Unit]) -> Iterable[Flow]:
    if case.wrapper == "fsdp1":
        yield from _fsdp1_flows(case)
        return
    dims, features, tp_index = case.dims, case.features, coordinate(case.dims, rank)["tp"]
    stored = case.training.dtype
    gathered = BYTES[case.training.compute_dtype or stored]
    reduced = BYTES[features.reduce_dtype or case.training.compute_dtype or stored] * _reductions(case)
    everything = sum(_padded_numel(case, fqn, tp_index) for fqn in _shapes(case.model))
    shards, axis = dims.dp_shard * dims.cp, shard_axis(dims)
    if shards > 1:
        times = features.accumulation * gathered
        yield Flow(axis, "parameters", "all_gather", "forward", times * everything)
        for ways in sorted({unit.ways for unit in units} - {1}):
            again = sum(
                _padded_numel(case, fqn, tp_index) for unit in units if unit.ways == ways for fqn in unit.parameters
            )
            yield Flow(_gathered_over(case, ways), "parameters", "all_gather", "backward", times * again)
        yield Flow(axis, "gradients", "reduce_scatter", "backward", everything * reduced)
        yield from _gathered_for_the_loss(case, axis, units[-1], tp_index)
    if dims.dp_replicate > 1:
        yield Flow("dp_replicate", "gradients", "all_reduce", "backward", everything // shards * reduced)
    if case.wrapper == "replicate":  # it begins in its first forward what DDP does when it is made
        weights = everything * BYTES[stored]
        yield Flow("dp_replicate", "weights", "broadcast", "forward", weights, first=True)


def _gathered_for_the_loss(case: Case, axis: str, last: Unit, tp_index: int) -> Iterable[Flow]:
    """Final norm and output are a unit. A loss in chunks calls the output without the norm, so that from the second pass on
    FSDP2 takes the norm's call for the unit's last, frees it, and gathers it once more for the loss."""
    if case.features.loss_chunks > 1:
        size = BYTES[case.training.compute_dtype or case.training.dtype]
        once = sum(_padded_numel(case, fqn, tp_index) for fqn in last.parameters) * size
        yield Flow(axis, "parameters", "all_gather", "forward", (case.features.accumulation - 1) * once)
        yield Flow(axis, "parameters", "all_gather", "forward", once, later=True)


def _reductions(case: Case) -> int:
    """How often gradients are reduced over the data ranks in a step."""
    return 1 if case.features.defer_sync else case.features.accumulation


def _fsdp1_flows(case: Case) -> Iterable[Flow]:
    """Whole flat vectors, padded to equal parts. A unit that is kept after forward is kept after backward too, until one
    reduces gradients; but not the root's, whose strategy is to free it."""
    ways, size, passes = case.dims.dp_shard, BYTES[case.training.dtype], case.features.accumulation
    kept = case.features.reshard_after_forward == "never"
    moved = [unit.part(ways) * ways * size for unit in flat_units(case)]
    if ways > 1:
        times = _reductions(case) if kept else passes
        yield Flow("dp_shard", "parameters", "all_gather", "forward", times * sum(moved))
        yield Flow("dp_shard", "parameters", "all_gather", "backward", 0 if kept else passes * sum(moved[1:]))
        yield Flow("dp_shard", "gradients", "reduce_scatter", "backward", _reductions(case) * sum(moved))
    if case.dims.dp_replicate > 1:
        reduced = _reductions(case) * sum(moved) // ways
        yield Flow("dp_replicate", "gradients", "all_reduce", "backward", reduced)


def _pipelined_data_parallel_flows(case: Case, rank: int, units: list[Unit]) -> Iterable[Flow]:
    """Under pp torch gathers a stage when its schedule needs it, and reduces once a pass, after its last backward.
    DDP's hooks reduce in the last microbatch's backward of each pass."""
    dims, features, stored = case.dims, case.features, case.training.dtype
    tp_index = coordinate(dims, rank)["tp"]
    sizes = {
        stage: sum(_padded_numel(case, fqn, tp_index) for fqn in parameters_of_stage(case, stage))
        for stage in stages_of_rank(case, rank)
    }
    gathered = features.accumulation * BYTES[case.training.compute_dtype or stored]
    reduced = features.accumulation * BYTES[features.reduce_dtype or case.training.compute_dtype or stored]
    shards, axis = dims.dp_shard * dims.cp, shard_axis(dims)
    order, looped = actions_of_rank(case, rank), features.schedule in LOOPED
    freed = {fqn for unit in units if unit.ways == shards for fqn in unit.parameters}
    for again in (False, True) if shards > 1 else ():
        for (stage, phase), count in schedule.gathers(order, looped=looped, freed=again).items():
            mine = [fqn for fqn in parameters_of_stage(case, stage) if (fqn in freed) == again]
            size = sum(_padded_numel(case, fqn, tp_index) for fqn in mine)
            yield Flow(axis, "parameters", "all_gather", phase, count * size * gathered)
    if shards > 1:
        yield Flow(axis, "gradients", "reduce_scatter", "pipeline", sum(sizes.values()) * reduced)
    if dims.dp_replicate > 1:
        phase = "backward" if case.wrapper == "ddp" else "pipeline"
        yield Flow("dp_replicate", "gradients", "all_reduce", phase, sum(sizes.values()) // shards * reduced)


def _tensor_parallel_flows(case: Case, stages: tuple[int, ...], length: int, torch: str) -> Iterable[Flow]:
    """Every crossing of the residual stream: into and out of attention and feed-forward, out of embedding, into output.

    With sequence parallel a crossing is an all_gather or a reduce_scatter, and backward mirrors forward. Without it, it
    is an all_reduce, forward of what comes out, backward of what went in.
    """
    dims, model, training = case.dims, case.model, case.training
    if dims.tp == 1:
        return
    size = BYTES[training.compute_dtype or training.dtype]
    activation = case.local_batch * (length // dims.cp) * model.dim * size * case.passes
    layers = sum(len(layers_of_stage(case, stage)) for stage in stages)
    first, last = 0 in stages, case.n_stages - 1 in stages
    if case.features.sequence_parallel:
        yield Flow("tp", "activations", "all_gather", "forward", (2 * layers + last) * activation)
        yield Flow("tp", "activations", "reduce_scatter", "forward", (2 * layers + first) * activation)
        yield Flow("tp", "activations", "all_gather", "backward", (2 * layers + first) * activation)
        yield Flow("tp", "activations", "reduce_scatter", "backward", (2 * layers + last) * activation)
        norms = (2 * layers + last) * model.dim  # each rank's norms saw its part of the sequence
        phase = "pipeline" if dims.pp > 1 else "backward"
        size_of_sums = _bytes_of_norm_gradients(case, torch)
        yield Flow("tp", "norm gradients", "all_reduce", phase, norms * size_of_sums, optional=True)
    else:
        yield Flow("tp", "activations", "all_reduce", "forward", (2 * layers + first) * activation)
        yield Flow("tp", "activations", "all_reduce", "backward", (2 * layers + last) * activation)
    if not case.features.loss_parallel and last:
        vocabulary = -(-model.vocab_size // dims.tp) * dims.tp  # gathered in equal parts
        yield Flow("tp", "logits", "all_gather", "forward", activation // model.dim * vocabulary)


def _bytes_of_norm_gradients(case: Case, torch: str) -> int:
    """Of one element in a step. FSDP2 sums them over tp whenever it reduces: under pp at the end of every pass.

    A gradient that is not reduced in the backward that made it is kept in the dtype that it will be reduced in: under pp
    always, else if the reduction of several microbatches is deferred. One that is reduced at once is as computed, in torch
    up to 2.14.
    """
    computed, features = case.training.compute_dtype or case.training.dtype, case.features
    kept = case.dims.pp > 1 or (features.accumulation > 1 and features.defer_sync)
    kept = kept or (case.wrapper == "fsdp2" and releases.holds(releases.SUMS_IN_REDUCE_DTYPE, torch))
    times = features.accumulation if case.dims.pp > 1 else _reductions(case)
    return times * BYTES[features.reduce_dtype or computed if kept else computed]


def _scale_flows(case: Case, rank: int, length: int) -> Iterable[Flow]:
    """Float8: the largest entry of what is cut over tp, for its scale; one number a tensor, or one a row.

    Cut are all weights; in forward the inputs of wo and w2; in backward the gradients of the outputs of the other five,
    and with them the columns of their weights. (Under rowwise_with_gw_hp weights have one scale in backward.)
    """
    recipe, model = case.training.quantize, case.model
    if case.dims.tp == 1 or recipe not in SCALES_OVER_TP:
        return
    layers = sum(len(layers_of_stage(case, stage)) for stage in stages_of_rank(case, rank))
    tokens = case.local_batch * (length // case.dims.cp)
    size = layers * case.passes * BYTES["float64"]  # in which torchao computes scales
    for phase, (rows, columns, ones) in SCALES_OVER_TP[recipe].items():
        yield Flow("tp", "scales", "all_reduce", phase, (rows * tokens + columns * model.dim + ones) * size)


SCALES_OVER_TP = {
    "float8_tensorwise": {"forward": (0, 0, 7 + 2), "backward": (0, 0, 7 + 2 + 2 * 5)},
    "float8_rowwise": {"forward": (2, 2, 0), "backward": (5, 5, 0)},
    "float8_rowwise_with_gw_hp": {"forward": (2, 2, 0), "backward": (5, 0, 7)},
}
"""By recipe and phase, how many products of a layer need the scales of all tokens, of all features, and one scale."""


def _context_parallel_flows(case: Case, rank: int, length: int) -> Iterable[Flow]:
    """In every layer each rank needs the keys and values of all cp ranks, once forward and once more backward.

    They are of all heads that tp left here (of which ones: `cp_heads`). all_gather brings them at once; alltoall passes
    them on to the next rank, cp - 1 times. Their gradients are always passed on, cp times, until each is back where its
    keys are: in float64 as they are, else in float32, in which they are summed up. A compiler sees that it is the same
    keys and values twice: it keeps those of forward for backward.
    """
    dims, training = case.dims, case.training
    if dims.cp == 1:
        return
    again = not case.features.compile
    layers = sum(len(layers_of_stage(case, stage)) for stage in stages_of_rank(case, rank))
    dtype = training.compute_dtype or training.dtype
    passed = 2 * layers * case.passes * case.local_batch * (length // dims.cp) * _cp_width(case) // dims.tp
    if case.features.cp_rotation == "allgather":
        yield Flow("cp", "keys and values", "all_gather", "forward", dims.cp * passed * BYTES[dtype])
        yield Flow("cp", "keys and values", "all_gather", "backward", again * dims.cp * passed * BYTES[dtype])
    else:
        yield Flow("cp", "keys and values", "all_to_all", "forward", (dims.cp - 1) * passed * BYTES[dtype])
        yield Flow("cp", "keys and values", "all_to_all", "backward", again * (dims.cp - 1) * passed * BYTES[dtype])
    summed = BYTES["float64" if dtype == "float64" else "float32"]
    yield Flow("cp", "gradients of keys and values", "all_to_all", "backward", dims.cp * passed * summed)


def _cp_width(case: Case) -> int:
    """Of the keys that go round for a token, and of the values."""
    return (case.model.n_heads if case.features.cp_heads == "query" else case.model.n_kv_heads) * case.model.head_dim


def recomputed_layers(case: Case, rank: int) -> list[int]:
    """The rank's layers whose activations are computed again in backward; "layer": the second, fourth, .. of the model."""
    kind = case.features.activation_checkpointing
    layers = [layer for stage in stages_of_rank(case, rank) for layer in layers_of_stage(case, stage)]
    return [layer for layer in layers if kind in ("full", "op") or (kind == "layer" and layer % 2 == 1)]


def _recomputed_flows(case: Case, rank: int, length: int) -> Iterable[Flow]:
    """What activation checkpointing issues again in backward. Of FSDP nothing: it gathers once for all of backward.

    A block runs again only until the last activation that backward needs has come by, the input of w2. So the residual
    stream is brought into attention and feed-forward again, and out of attention, but not out of feed-forward (unless
    dropout follows, whose mask backward needs, or the trainer does not stop there: `ac_early_stop`). "op" keeps the
    results of reductions and of attention, and with the latter what context parallel gathered for it.
    """
    dims, model, training = case.dims, case.model, case.training
    layers, kept = len(recomputed_layers(case, rank)), case.features.activation_checkpointing == "op"
    size = BYTES[training.compute_dtype or training.dtype]
    activation = layers * case.local_batch * (length // dims.cp) * model.dim * size * case.passes
    if dims.tp > 1 and case.features.sequence_parallel:
        yield Flow("tp", "recomputed activations", "all_gather", "backward", 2 * activation)
    if dims.tp > 1 and not kept:
        op = "reduce_scatter" if case.features.sequence_parallel else "all_reduce"
        to_the_end = model.dropout or not case.features.ac_early_stop
        yield Flow("tp", "recomputed activations", op, "backward", (2 if to_the_end else 1) * activation)
    if dims.cp > 1 and not kept:
        gathered = case.features.cp_rotation == "allgather"
        op, times = ("all_gather", dims.cp) if gathered else ("all_to_all", dims.cp - 1)
        passed = 2 * activation * _cp_width(case) // model.dim // dims.tp
        yield Flow("cp", "recomputed keys and values", op, "backward", times * passed)


def _pipeline_flows(case: Case, rank: int, length: int) -> Iterable[Flow]:
    """A microbatch's activations go to the rank of the next stage, and their gradients come back; stages next to each
    other on one rank (the tip of a V) hand them over. With sequence parallel each tp rank sends its part."""
    dims, training = case.dims, case.training
    mine = stages_of_rank(case, rank)
    borders = [stage for stage in (*mine, *(stage + 1 for stage in mine)) if 0 < stage < case.n_stages]
    crossings = sum(borders.count(stage) == 1 for stage in borders)
    ways = dims.cp * (dims.tp if case.features.sequence_parallel else 1)
    size = BYTES[training.compute_dtype or training.dtype]
    moved = crossings * case.passes * case.local_batch * (length // ways) * case.model.dim * size
    if dims.pp > 1:
        yield Flow("pp", "activations and their gradients", "send", "pipeline", moved)
        yield Flow("pp", "activations and their gradients", "recv", "pipeline", moved)


def _outside_bytes(case: Case, rank: int, flows: Iterable[Flow]) -> int:
    """A norm for each parameter on each axis, eight numbers of each rank (losses, counts), and what is optional inside.

    With loss parallel the largest logit of a token, the sum of their exponentials, and the logit of its label go over tp.
    """
    dims, training = case.dims, case.training
    axes = sum(getattr(dims, axis) > 1 for axis in AXES)
    numbers = len(_shapes(case.model)) * axes + 8 * dims.world_size
    last = case.n_stages - 1 in stages_of_rank(case, rank)
    tokens = case.local_batch * case.passes * (training.seq_len // dims.cp)
    losses = 3 * tokens * BYTES[training.dtype] if dims.tp > 1 and case.features.loss_parallel and last else 0
    return numbers * BYTES["float64"] + losses + sum(flow.bytes for flow in flows if flow.optional)


def _integer_bytes(case: Case) -> int:
    """DDP compares the number and the shapes of all parameters, and later sends out in which bucket each of them is."""
    if case.wrapper not in ("ddp", "replicate"):
        return 0
    return (4 * len(_shapes(case.model)) + 2 * case.dims.world_size + 8) * 8  # int64


def _used_bytes(case: Case) -> int:
    """With find_unused_parameters or static_graph DDP's ranks tell each other which parameters they used, whenever they reduce:
    an int32 each, and one number."""
    if case.wrapper not in ("ddp", "replicate"):
        return 0
    return (4 * len(_shapes(case.model)) + 8) * case.passes


def _parameter_bytes(case: Case, rank: int, held: dict[str, Slice], flat: tuple[FlatUnit, ...]) -> tuple[int, int]:
    tp_index = coordinate(case.dims, rank)["tp"]
    size = BYTES[case.training.dtype]
    ways = case.dims.dp_shard * case.dims.cp
    least = sum(numel(part) for part in held.values()) * size
    if flat:
        return least, sum(unit.part(ways) for unit in flat) * size
    most = sum(_padded_numel(case, fqn, tp_index) // ways for fqn in held) * size
    return least, max(least, most)


def _table_bytes(case: Case) -> int:
    return 2 * case.training.seq_len * case.model.head_dim * BYTES["float64"]


def _spare_bytes(case: Case, rank: int, held: dict[str, Slice]) -> int:
    """A cosine and a sine for each position and entry of a head, with DDP one copy of the gradients, in buckets, and what
    FSDP2 gathered for a loss in chunks, where the trainer leaves it there (`keeps_loss_unit`)."""
    buckets = sum(numel(part) for part in held.values()) * BYTES[case.training.dtype]
    unit = BYTES[case.training.compute_dtype or case.training.dtype] * _padded_last_unit(case, rank)
    kept = case.features.keeps_loss_unit and case.features.loss_chunks > 1 and case.shards > 1
    return _table_bytes(case) + (buckets if case.wrapper in ("ddp", "replicate") else 0) + (unit if kept else 0)


def _gradient_spare(case: Case, rank: int) -> int:
    """In a pipeline a loss in chunks has FSDP2 reduce the output's gradient once for every microbatch, into one that is there
    already: what it was reduced in last stays, because the final norm's gradient lies there too."""
    last = case.n_stages - 1 in stages_of_rank(case, rank)
    if not (case.features.loss_chunks > 1 and case.dims.pp > 1 and case.wrapper == "fsdp2" and last):
        return 0
    return BYTES[case.training.dtype] * _padded_last_unit(case, rank)


def _padded_last_unit(case: Case, rank: int) -> int:
    return sum(_padded_numel(case, fqn, coordinate(case.dims, rank)["tp"]) for fqn in _fsdp2_units(case)[-1])


def _after_forward(case: Case, rank: int, held: dict[str, Slice], units: list[Unit]) -> dict[str, Kept]:
    shards, index = shard_place(case.dims, rank)
    if shards == 1:
        return {}
    stored, computed = BYTES[case.training.dtype], BYTES[case.training.compute_dtype or case.training.dtype]
    tp = case.dims.tp, coordinate(case.dims, rank)["tp"]
    kept = {}
    for unit, ways in units:
        for fqn in [fqn for fqn in unit if fqn in held]:
            there = numel(slice_of(fqn, _shapes(case.model)[fqn], tp, (ways, index % ways))) * computed
            kept[fqn] = Kept(ways, numel(held[fqn]) * stored if ways == shards else there)
    return kept


def _padding_after_forward(
    case: Case, rank: int, held: dict[str, Slice], flat: tuple[FlatUnit, ...], units: list[Unit]
) -> int:
    """That of the rank's own slices, and that of what stays gathered: of every parameter, or of its flat unit."""
    (shards, _), tp_index = shard_place(case.dims, rank), coordinate(case.dims, rank)["tp"]
    least, most = _parameter_bytes(case, rank, held, flat)
    computed, extra = BYTES[case.training.compute_dtype or case.training.dtype], 0
    there = _after_forward(case, rank, held, units)
    for number, (unit, ways) in enumerate(units if shards > 1 else ()):
        if ways < shards:
            padded = sum(_padded_numel(case, fqn, tp_index) for fqn in unit if fqn in held) // ways
            padded = flat[number].part(shards) * shards if flat else padded
            extra += padded * computed - sum(there[fqn].bytes for fqn in unit if fqn in held)
    return most - least + extra
