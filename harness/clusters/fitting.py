"""The layouts of a model that fit on a number of GPUs, best first by an estimate of the step's time."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from harness.clusters.draft import DEFAULT_LENGTH, Draft
from harness.core.case import case_files
from harness.core.case.case import Case, CaseError, to_json
from harness.core.case.dims import ParallelDims
from harness.core.case.loading import build_case, load_all
from harness.core.case.traits import MEGATRON_TRAITS, USUAL_TRAITS, TrainerTraits
from harness.core.plan.figures.gpus import MACHINES, Machine
from harness.core.plan.figures.rank_bytes import rank_bytes
from harness.core.plan.figures.step_time import FittingLayout, FittingLayouts, bubble_ratio_of, step_time
from harness.core.plan.make_plan import make_plan
from harness.core.plan.slices import BYTES
from harness.core.report.layout_text import rank_classes
from harness.reference.config import ModelConfig

CHECKPOINTING = ("none", "op", "full")
STAGES_PER_RANK = (1, 2, 4)
"""Stages of a pipeline on each rank: 1F1B of one, interleaved of several."""
HSDP_SHARDS = 32
"""Ranks that HSDP cuts parameters over; the other data ranks are replicas."""
CP_FROM_LENGTH = 8192
"""Tokens of a sample beyond which context parallel is tried."""


@dataclass(frozen=True)
class FittingRequest:
    """A model to train, and the machine to train it on."""

    model: ModelConfig
    world: int
    """Number of GPUs."""
    memory: float
    """Bytes of a GPU."""
    gpus_per_node: int
    """GPUs of a node."""
    seq: int | None = None
    """Tokens of a sample."""
    batch: int | None = None
    """Samples of a step; None: one for each GPU."""
    machine: Machine = MACHINES["H100"]
    """Speeds of a GPU and of its links."""


def find_fitting_layouts(request: FittingRequest) -> FittingLayouts:
    """Return the layouts that fit, fastest first by estimate, among them the published ones for this model and number
    of GPUs.

    Published ones that do not fit, or train otherwise, are listed with the reason. CaseError if no layout divides the
    batch.
    """
    published, unlisted = _published_of_request(request)
    candidates = [*published]
    for case in _candidate_cases(request):
        if not any(_is_same_layout(case, published_case) for published_case in published):
            candidates.append(case)
    if not candidates:
        raise CaseError(
            f"--world {request.world}: no layout divides a batch of {_global_batch(request)} over these ranks: --batch N"
        )
    fits = []
    for case in candidates:
        is_published = case in published
        if not is_published and _least_bytes(case) >= request.memory:
            continue
        plan = make_plan(case, traits_of(case))
        ranks = [kind[0] for kind in rank_classes(plan)]
        largest = max(
            (rank_bytes(case, plan, rank) for rank in ranks), key=lambda bytes_of_rank: bytes_of_rank.reserved
        )
        if largest.reserved <= request.memory:
            speeds = (request.machine, request.gpus_per_node, bubble_ratio_of(case))
            rank_times = (step_time(case, plan, rank, *speeds) for rank in ranks)
            fits.append(FittingLayout(case, largest, max(rank_times, key=lambda rank_time: rank_time.seconds)))
        elif is_published:
            unlisted[case.name] = f"needs {largest.reserved / 1e9:.1f} GB, by the estimate"
    best = sorted(fits, key=lambda fit: (fit.time.seconds, fit.peak_rank.reserved))
    names = {position: fit.case.name for position, fit in enumerate(best) if fit.case in published}
    positions_of_dims = {fit.case.dims: position for position, fit in reversed([*enumerate(best)])}
    degrees = {case.name: positions_of_dims[case.dims] for case in published if case.dims in positions_of_dims}
    return FittingLayouts(tuple(best), len(candidates), names, unlisted, degrees)


def traits_of(case: Case) -> TrainerTraits:
    """Return the traits of a published layout's trainer: Megatron's for wrapper zero1, else the usual ones."""
    return MEGATRON_TRAITS if case.wrapper == "zero1" else USUAL_TRAITS


def _published_of_request(request: FittingRequest) -> tuple[list[Case], dict[str, str]]:
    """Return the published layouts of this request's model, ranks, batch and length.

    And, by name, why others of this model and number of GPUs are left out: their batch or length, as options.
    """
    same_size = [
        published
        for published in _published_cases()
        if (published.model, published.dims.world_size) == (request.model, request.world)
    ]
    batch_and_length = (_global_batch(request), request.seq or DEFAULT_LENGTH)
    other_trainings = {
        published.name: published.training
        for published in same_size
        if (published.training.global_batch, published.training.seq_len) != batch_and_length
    }
    reasons: dict[str, str] = {}
    for name, training in other_trainings.items():
        options = f"--batch {training.global_batch} --seq {training.seq_len}"
        reasons[name] = f"has {training.global_batch:,} samples of {training.seq_len:,} tokens: {options}"
    return [published for published in same_size if published.name not in other_trainings], reasons


def _is_same_layout(first_case: Case, second_case: Case) -> bool:
    """Return whether two cases have the same layout, features and recipe."""
    return (first_case.dims, first_case.features, first_case.training) == (
        second_case.dims,
        second_case.features,
        second_case.training,
    )


def _global_batch(request: FittingRequest) -> int:
    """Return the samples of a step, by default one for each GPU."""
    return request.batch or request.world


def _candidate_cases(request: FittingRequest) -> Iterator[Case]:
    """Yield a case for each layout whose degrees are powers of two and divide ranks and batch: FSDP over all data
    ranks, and HSDP.

    Each comes with every CHECKPOINTING and, in a pipeline, number of stages. dp is the quotient, of any size.
    """
    seq = request.seq or DEFAULT_LENGTH
    layers = request.model.n_layers
    cps = _powers_of_two(request.world) if seq > CP_FROM_LENGTH else [1]
    for tp in _powers_of_two(min(request.gpus_per_node, request.model.n_kv_heads)):
        for pp in _powers_of_two(layers // 2):
            for cp in cps:
                data, rest = divmod(request.world, tp * pp * cp)
                if rest or not data or _global_batch(request) % data:
                    continue
                shard_degrees = [data]
                if data > HSDP_SHARDS and data % HSDP_SHARDS == 0:
                    shard_degrees.append(HSDP_SHARDS)
                for shards in shard_degrees:
                    dims = ParallelDims(dp_replicate=data // shards, dp_shard=shards, tp=tp, pp=pp, cp=cp)
                    for stages, kind in itertools.product(STAGES_PER_RANK if pp > 1 else (1,), CHECKPOINTING):
                        if case := _candidate_case(request, dims, kind, stages):
                            yield case


def _powers_of_two(limit: int) -> list[int]:
    """Return the powers of two up to and with `limit`, ascending; empty below 1."""
    return [1 << n for n in range(limit.bit_length()) if 1 << n <= limit]


def _candidate_case(request: FittingRequest, dims: ParallelDims, checkpointing: str, stages: int) -> Case | None:
    """Return the case with microbatches of one sample, as many as a data rank has samples.

    None if these are fewer than pp, or the case is not valid.
    """
    batch_of_rank = _global_batch(request) // dims.dp
    if dims.pp > 1 and batch_of_rank < dims.pp:
        return None
    interleaved = {"schedule": "Interleaved1F1B", "stages_per_rank": stages} if stages > 1 else {}
    passes = {"microbatches": batch_of_rank, **interleaved} if dims.pp > 1 else {"accumulation": batch_of_rank}
    features = {"reduce_dtype": "float32", "activation_checkpointing": checkpointing, **passes}
    draft = Draft(dims=dims, seq=request.seq, batch=_global_batch(request), features=features)
    try:
        case = draft.build_case(request.model, f"{request.model.name}_{request.world}", "a layout that may fit")
        return replace(build_case(to_json(case), "--world"), file="")
    except ValueError:  # CaseError is one
        return None


def _least_bytes(case: Case) -> float:
    """Return the least bytes that a rank needs for parameters, gradients and optimizer state, when cut over all its axes."""
    return 4 * BYTES[case.training.dtype] * case.model.numel / (case.dims.tp * case.dims.pp * case.shards)


@functools.cache
def _published_cases() -> tuple[Case, ...]:
    """Return the cases of layouts/."""
    return tuple(load_all(case_files.LAYOUTS))
