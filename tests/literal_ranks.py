"""What each rank of a correct run of a tiny case leaves: claims, groups, collectives, microbatches, steps, a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from literal_reference import sample_loss

from harness.core.case.case import Case
from harness.core.case.features import ZERO
from harness.core.case.traits import TrainerTraits
from harness.core.evidence.checkpoint_index import Checkpoint, SavedTensor
from harness.core.evidence.records import Collective, Group, RankEvidence, Resumed, TensorEvidence, Wrapper
from harness.core.evidence.step import Activity, AfterForward, Attention, Call, Matmul, Microbatch, StepEvidence
from harness.core.plan.frozen import count_differentiated_layers, matmuls_left_out
from harness.core.plan.make_plan import make_plan
from harness.core.plan.slices import tp_dim
from harness.core.plan.stages import token_positions_of_rank as positions_of
from harness.core.plan.traffic.flow import OUTSIDE
from harness.core.plan.units import units_of_rank
from harness.reference.record import ReferenceRun, ReferenceStep

APART = TrainerTraits(fsdp_units="apart")

SETTINGS = {
    **{"autograd anomaly detection": "off", "deterministic algorithms": "off", "cudnn.benchmark": "off"},
    **{"TF32 in CUDA matmuls": "off"},
    **{"float32 matmul precision": "highest", "default dtype": "float32", "threads": "1"},
}


def rank_evidence(
    requested: Case, ran: Case, rank: int, reference: ReferenceRun, seed: ReferenceRun | None = None
) -> RankEvidence:
    """seed: the reference that begins with the weights that the trainer is built with; None: it is the one of the launch."""
    plan, seed = make_plan(ran), (seed or reference).weights
    part = {fqn: held_part(part) for fqn, part in plan.slices[rank].items()}
    cut = {fqn: held_part(part) for fqn, part in (plan.gradient_slices or plan.slices)[rank].items()}
    return RankEvidence(
        rank=rank,
        world_size=ran.dims.world_size,
        parameters=tuple(_tensor(ran, fqn, full, full[part[fqn]]) for fqn, full in seed.items()),
        groups=_groups(requested, ran, rank),
        collectives=_collectives(ran, rank),
        steps=tuple(_step(ran, rank, step, reference, part, cut) for step in reference.steps if step.step in ran.steps),
        structure=_structure(ran, rank),
        compiler={"graphs": 2} if ran.features.compile else {},
        held=(),
        settings=SETTINGS,
        resumed=_resumed(ran, reference, part) if ran.resume else None,
    )


def checkpoint_of(case: Case, reference: ReferenceRun) -> Checkpoint | None:
    """Parameters and moments, each once and whole, and a counter."""
    if case.saved_step is None:
        return None
    state = reference.steps[case.saved_step - 1].optimizer_state
    names = [(f"model.{fqn}", fqn) for fqn in reference.weights]
    names += [(f"optimizer.{fqn}.{key}", fqn) for fqn, held in state.items() for key in held]
    shapes = case.model.parameter_shapes()
    tensors = [SavedTensor(name, fqn, shapes[fqn], "float64", math.prod(shapes[fqn])) for name, fqn in names]
    return Checkpoint((*tensors, SavedTensor("step", "", (), "float32", 1)), {"samples": 100})


def _resumed(ran: Case, reference: ReferenceRun, part: Any) -> Resumed:
    if ran.model_of is not None:
        return Resumed({fqn: full[part[fqn]] for fqn, full in reference.weights.items()}, {})
    step = reference.steps[ran.steps.start - 2]
    return Resumed({fqn: full[part[fqn]].copy() for fqn, full in step.parameters.items()}, _state(step, part))


def _state(step: ReferenceStep, part: Any) -> dict[str, dict[str, np.ndarray]]:
    """AdamW also keeps a counter for each parameter, which is nobody's slice."""
    counter = {"step": np.array(float(step.step), np.float32)} if any(step.optimizer_state.values()) else {}
    cut = {f: {key: full[part[f]].copy() for key, full in s.items()} for f, s in step.optimizer_state.items()}
    return {fqn: state | counter for fqn, state in cut.items()}


def held_part(part: Any) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in part)


def _tensor(case: Case, fqn: str, full: np.ndarray, value: np.ndarray) -> TensorEvidence:
    dims, mesh, placements = case.dims, None, ()
    if (dims.dp_shard * dims.cp > 1 and case.wrapper == "fsdp2") or dims.tp > 1:
        degrees = {"dp_replicate": dims.dp_replicate, "shard": dims.dp_shard * dims.cp, "tp": dims.tp}
        axes = [axis for axis in degrees if degrees[axis] > 1]
        mesh = np.arange(dims.world_size).reshape([degrees[axis] for axis in axes]).tolist()
        cut = tp_dim(fqn) if dims.tp > 1 else None
        words = {
            "dp_replicate": "Replicate",
            "shard": "Replicate" if case.wrapper in ZERO else "StridedShard(0)" if cut == 0 else "Shard(0)",
            "tp": "Replicate" if cut is None else f"Shard({cut})",
        }
        placements = tuple(words[axis] for axis in axes)
    return TensorEvidence(fqn, full.shape, str(full.dtype), mesh, placements, value.copy())


def _groups(requested: Case, ran: Case, rank: int) -> tuple[Group, ...]:
    world = tuple(range(ran.dims.world_size))
    lines = {line for case in (requested, ran) for lines in make_plan(case).groups.values() for line in lines}
    mine = sorted({line for line in lines if rank in line} | {world})
    return tuple(Group(str(line), line, "gloo") for line in mine)


def _structure(case: Case, rank: int) -> dict[str, Wrapper]:
    plan = make_plan(case)
    axes = {"dp_replicate": "replicate_ranks", plan.shard_axis: "shard_ranks"}
    used = {key: plan.group_of(rank, axis) for axis, key in axes.items() if axis in plan.groups}
    wrapper = Wrapper(case.wrapper, cpu_offload=case.features.cpu_offload, **used)
    ways = {fqn: unit.degree for unit in units_of_rank(case, APART, rank) for fqn in unit.parameters}
    units = {
        ",".join(unit): replace(wrapper, parameters=unit, ranks_after_forward=ways[unit[0]])
        for unit in plan.units[rank]
    }
    return (units or {"layers.0": wrapper}) if used else {}


def _collectives(case: Case, rank: int) -> tuple[Collective, ...]:
    """The plan's bytes in two buckets each, and a loss summed over all ranks outside of forward and backward."""
    plan, found, world = make_plan(case), [], tuple(range(case.dims.world_size))
    for step in case.steps if len(world) > 1 else ():
        for flow in plan.flows_of(rank, step):
            ranks = plan.group_of(rank, flow.axis)
            for count in (8, flow.bytes - 8):
                phase = "other" if flow.phase == OUTSIDE else flow.phase
                found.append(Collective(flow.op, ranks, str(ranks), "float64", count, phase, step, 0))
        found.append(Collective("all_reduce", world, str(world), "float64", 8, "other", step, 0))
    return tuple(replace(call, seq=index) for index, call in enumerate(found))


def after_forward_of(case: Case, rank: int) -> AfterForward:
    """What is kept of each parameter, and beside it the rank's own slice; float64, and no padding."""
    plan = make_plan(case)
    kept, slices = plan.after_forward[rank], plan.slices[rank]
    own = {fqn: 8 * math.prod(stop - start for start, stop in part) for fqn, part in slices.items()}
    held = {fqn: kept[fqn].bytes if kept else own[fqn] for fqn in own}
    beside = [fqn for fqn in kept if kept[fqn].degree < case.dims.dp_shard * case.dims.cp]
    return AfterForward(held, sum(held.values()) + sum(own[fqn] for fqn in beside))


def _step(case: Case, rank: int, step: ReferenceStep, reference: ReferenceRun, part: Any, cut: Any) -> StepEvidence:
    """part: what the rank holds of parameters; cut: of their gradients and optimizer state."""
    parameters = {fqn: full[part[fqn]].copy() for fqn, full in step.parameters.items()}
    kept, state = step.step in (case.steps[-1], case.saved_step), _state(step, cut)
    held = sum(value.nbytes for value in parameters.values())
    gradients = {fqn: full[cut[fqn]].copy() for fqn, full in step.gradients.items()}
    reduced = sum(value.nbytes for value in gradients.values())
    return StepEvidence(
        step=step.step,
        microbatches=_microbatches(case, rank, step.step, reference),
        reported_loss=step.loss,
        grad_norm=step.grad_norm,
        lr=step.lr,
        reported_lr=step.lr,
        gradients=gradients,
        parameters=parameters,
        optimizer_state=state if kept else {},
        changed={},
        memory={
            "parameters": held,
            "gradients": reduced,
            "optimizer_state": sum(value.nbytes for of in state.values() for value in of.values() if value.ndim),
        },
        activity=_activity(case),
        graphs=2 if case.features.compile else 0,
        settings={name: (value,) for name, value in SETTINGS.items()},
        after_forward=(after_forward_of(case, rank),) * case.features.accumulation,
        positions=(positions_of(case, rank, case.seq_len(step.step)),) if case.dims.cp > 1 else (),
    )


def _activity(case: Case) -> Activity:
    """The calls and matmuls of the tiny model's one layer, whose seven matmuls and the output's count twice in backward."""
    passes, dtype = case.passes, case.training.compute_dtype or case.training.dtype
    kind, compiled = case.features.activation_checkpointing, case.features.compile
    calls = {Call("forward", ""): passes}
    calls |= {} if compiled else {Call("forward", "layers.0"): passes, Call("forward", "layers.0.attention.wq"): passes}
    recomputed = ("layers.0", "layers.0.ffn_norm") if kind in ("full", "op") and not compiled else ()
    calls |= {Call("backward", fqn): passes for fqn in recomputed}
    again = {"full": 6, "op": 3}.get(kind, 0)
    backward = (16 + again) * passes - matmuls_left_out(case, [0], outputs=1)
    matmuls = {Matmul("forward", dtype): 8 * passes, Matmul("backward", dtype): backward}
    attention = {Attention("forward", "attention"): passes}
    attention |= {Attention("backward", "attention_backward"): passes} if count_differentiated_layers(case, [0]) else {}
    attention |= {Attention("backward", "attention"): passes} if kind == "full" else {}
    attention = attention if case.dims.cp == 1 else {}
    return Activity(calls, matmuls, attention, {"forward": 2 * passes} if case.model.dropout else {})


def _microbatches(case: Case, rank: int, step: int, reference: ReferenceRun) -> tuple[Microbatch, ...]:
    share = rank // (case.dims.cp * case.dims.tp)  # the innermost axes: such peers are neighbours, with one share
    size, times = case.local_batch, case.features.accumulation
    ids = reference.samples[step - 1][share * size * times : (share + 1) * size * times]
    at = positions_of(case, rank, case.seq_len(step))
    return tuple(microbatch_of(reference, ids[i * size : (i + 1) * size], at, case.dims.cp) for i in range(times))


def microbatch_of(reference: ReferenceRun, ids: Iterable[int], at: np.ndarray | None = None, cp: int = 1) -> Microbatch:
    """at: the positions that receive; of cp ranks that share a sample each has as large a share of its loss."""
    rows, at = list(ids), np.arange(reference.tokens.shape[1]) if at is None else at
    labels, total = reference.labels[rows][:, at], math.fsum(sample_loss(id_) / cp for id_ in rows)
    return Microbatch(reference.tokens[rows][:, at], labels, total, int((labels != -100).sum()))
