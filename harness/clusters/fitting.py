"""Which layouts of a model fit on a number of GPUs, best first by an estimate of the step's time."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from harness.clusters.draft import LENGTH, Draft
from harness.core.case import case_files
from harness.core.case.case import Case, CaseError, to_json
from harness.core.case.dims import ParallelDims
from harness.core.case.loading import built_case, load_all
from harness.core.case.traits import MEGATRON, USUAL, TrainerTraits
from harness.core.plan.figures.gpus import MACHINES, Machine
from harness.core.plan.figures.rank_bytes import rank_bytes
from harness.core.plan.figures.step_time import Fit, Fitting, bubble_of, step_time
from harness.core.plan.make_plan import make_plan
from harness.core.plan.slices import BYTES
from harness.core.report.layout_text import kinds_of
from harness.reference.config import ModelConfig

CHECKPOINTING = ("none", "op", "full")
STAGES = (1, 2, 4)
"""Stages of a pipeline on each rank: 1F1B of one, interleaved of several."""
SHARDS = 32
"""Ranks that HSDP cuts parameters over; the other data ranks are replicas."""
MOST_MICROBATCHES = 64
LONG = 8192
"""Tokens of a sample beyond which context parallel is tried."""


@dataclass(frozen=True)
class Wanted:
    """What is to be trained, and on what."""

    model: ModelConfig
    world: int
    """Number of GPUs."""
    memory: float
    """Bytes of a GPU."""
    nodes_of: int
    """GPUs of a node."""
    seq: int | None = None
    """Tokens of a sample."""
    batch: int | None = None
    """Samples of a step; None: one for each GPU."""
    machine: Machine = MACHINES["H100"]
    """Speeds of a GPU and of its links."""


def fitting(wanted: Wanted) -> Fitting:
    """Return the layouts that fit, those that were published among them. Raises CaseError where there is none to look at."""
    own, unlisted = _known(wanted)
    looked = [*own, *(case for case in _cases(wanted) if not any(_same(case, one) for one in own))]
    if not looked:
        raise CaseError(
            f"--world {wanted.world}: no layout divides a batch of {_batch(wanted)} over these ranks: --batch N"
        )
    found = []
    for case in looked:
        named = case in own
        if not named and _least(case) >= wanted.memory:
            continue
        plan = make_plan(case, traits_of(case))
        ranks = [kind[0] for kind in kinds_of(plan)]
        most = max((rank_bytes(case, plan, rank) for rank in ranks), key=lambda one: one.reserved)
        if most.reserved <= wanted.memory:
            how = (wanted.machine, wanted.nodes_of, bubble_of(case))
            times = (step_time(case, plan, rank, *how) for rank in ranks)
            found.append(Fit(case, most, max(times, key=lambda one: one.seconds)))
        elif named:
            unlisted[case.name] = f"needs {most.reserved / 1e9:.1f} GB, by the estimate"
    best = sorted(found, key=lambda fit: (fit.time.seconds, fit.most.reserved))
    names = {place: fit.case.name for place, fit in enumerate(best) if fit.case in own}
    placed = {fit.case.dims: place for place, fit in reversed([*enumerate(best)])}
    degrees = {case.name: placed[case.dims] for case in own if case.dims in placed}
    return Fitting(tuple(best), len(looked), names, unlisted, degrees)


def traits_of(case: Case) -> TrainerTraits:
    """Return what is chosen by the trainers that published layouts with ZeRO 1 are of, and else what is usual."""
    return MEGATRON if case.wrapper == "zero1" else USUAL


def _known(wanted: Wanted) -> tuple[list[Case], dict[str, str]]:
    """Return the published layouts of this request, and why others of this model and number of GPUs are of another one."""
    mine = [one for one in _published() if (one.model, one.dims.world_size) == (wanted.model, wanted.world)]
    size = (_batch(wanted), wanted.seq or LENGTH)
    others = {one.name: one.training for one in mine if (one.training.global_batch, one.training.seq_len) != size}
    told = {
        name: f"has {of.global_batch:,} samples of {of.seq_len:,} tokens: --batch {of.global_batch} --seq {of.seq_len}"
        for name, of in others.items()
    }
    return [one for one in mine if one.name not in others], told


def _same(one: Case, other: Case) -> bool:
    return (one.dims, one.features, one.training) == (other.dims, other.features, other.training)


def _batch(wanted: Wanted) -> int:
    return wanted.batch or wanted.world


def _cases(wanted: Wanted) -> Iterator[Case]:
    """Return the layouts of powers of two that divide ranks and batch: FSDP over all data ranks, and HSDP."""
    seq, layers = wanted.seq or LENGTH, wanted.model.n_layers
    cps = _powers(wanted.world) if seq > LONG else [1]
    for tp in _powers(min(wanted.nodes_of, wanted.model.n_kv_heads)):
        for pp in _powers(layers // 2):
            for cp in cps:
                data, rest = divmod(wanted.world, tp * pp * cp)
                if rest or not data or _batch(wanted) % data:
                    continue
                for shards in (data, *[SHARDS] * (data > SHARDS and data % SHARDS == 0)):
                    dims = ParallelDims(dp_replicate=data // shards, dp_shard=shards, tp=tp, pp=pp, cp=cp)
                    for stages, kind in itertools.product(STAGES if pp > 1 else (1,), CHECKPOINTING):
                        yield from filter(None, [_case(wanted, dims, kind, stages)])


def _powers(most: int) -> list[int]:
    return [1 << n for n in range(most.bit_length()) if 1 << n <= most]


def _case(wanted: Wanted, dims: ParallelDims, checkpointing: str, stages: int) -> Case | None:
    """Return it with microbatches of one sample, as many as the batch has; None where there is no such case."""
    each = _batch(wanted) // dims.dp
    if each > MOST_MICROBATCHES or (dims.pp > 1 and each < dims.pp):
        return None
    several = {"schedule": "Interleaved1F1B", "stages_per_rank": stages} if stages > 1 else {}
    passes = {"microbatches": each, **several} if dims.pp > 1 else {"accumulation": each}
    features = {"reduce_dtype": "float32", "activation_checkpointing": checkpointing, **passes}
    draft = Draft(dims=dims, seq=wanted.seq, batch=_batch(wanted), features=features)
    try:
        case = draft.case(wanted.model, f"{wanted.model.name}_{wanted.world}", "a layout that may fit")
        return replace(built_case(to_json(case), "--world"), file="")
    except ValueError:  # CaseError is one
        return None


def _least(case: Case) -> float:
    """Return the bytes that a rank keeps of its share of the model, at the least."""
    return 4 * BYTES[case.training.dtype] * case.model.numel / (case.dims.tp * case.dims.pp * case.shards)


@functools.cache
def _published() -> tuple[Case, ...]:
    return tuple(load_all(case_files.LAYOUTS))
