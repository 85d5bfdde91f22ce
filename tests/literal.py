"""Literal evidence: the trial that a correct run of a tiny case would leave, and ways to alter one thing in it.

No process, no torch. Slices and bytes come from the plan (tests/plan/test_plan.py judges that by literals); samples, losses,
gradients, parameters, claims and groups are made here, the optimizer in closed form instead of step by step.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from literal_reference import clip, optimize, recipe_of, reference_of, retrained, sample_loss

from harness.checks import all_checks, run_check
from harness.checks.update import observed_norm
from harness.evidence.checkpoint_index import Checkpoint, SavedTensor
from harness.evidence.records import (
    Activity,
    AfterForward,
    Attention,
    Call,
    Collective,
    Exit,
    Group,
    Matmul,
    Microbatch,
    RankEvidence,
    Resumed,
    Run,
    StepEvidence,
    TensorEvidence,
    Wrapper,
)
from harness.judge import golden
from harness.judge.order import as_planned, flattened_reference
from harness.judge.result import Diagnosis, Result
from harness.judge.trial import Trial
from harness.plan.grid import coordinate
from harness.plan.make_plan import make_plan
from harness.plan.observed_units import observed_units
from harness.plan.slices import tp_dim
from harness.plan.stages import positions as positions_of
from harness.plan.units import units_of_rank
from harness.reference.config import ModelConfig, TrainingConfig
from harness.reference.record import ReferenceRun, ReferenceStep
from harness.spec.case import Case
from harness.spec.dims import ParallelDims
from harness.spec.features import Features
from harness.spec.traits import TrainerTraits

TINY = ModelConfig(name="tiny", dim=4, n_layers=1, n_heads=2, n_kv_heads=2, vocab_size=8, ffn_dim=8)
UNEVEN = replace(TINY, vocab_size=7, ffn_dim=5)  # no degree divides them
ADAMW = TrainingConfig(steps=3, global_batch=8, seq_len=4, optimizer="adamw", lr=0.01)
SGD = replace(ADAMW, optimizer="sgd", lr=0.05)

APART = TrainerTraits(fsdp_units="apart")

LAYOUTS = {
    "single": ParallelDims(),
    "ddp_2": ParallelDims(dp_replicate=2),
    "fsdp_2": ParallelDims(dp_shard=2),
    "hsdp_2x2": ParallelDims(dp_replicate=2, dp_shard=2),
    "tp_2": ParallelDims(tp=2),
    "fsdp_2_tp_2": ParallelDims(dp_shard=2, tp=2),
}
SETTINGS = {
    **{"autograd anomaly detection": "off", "deterministic algorithms": "off", "cudnn.benchmark": "off"},
    **{"float32 matmul precision": "highest", "default dtype": "float32", "threads": "1"},
}
EIGHT = replace(ADAMW, seq_len=8)  # tokens enough that every part of a sample is one of a kind


def tiny_case(layout: str | ParallelDims, training: TrainingConfig = ADAMW, **changes: Any) -> Case:
    """A case of the tiny model; keywords of Features go there, all others to the Case."""
    dims = LAYOUTS[layout] if isinstance(layout, str) else layout
    known = {f.name for f in dataclasses.fields(Features)}
    features = Features(**{key: value for key, value in changes.items() if key in known})
    rest = {key: value for key, value in changes.items() if key not in known}
    defaults: dict[str, Any] = {"name": "tiny", "why": "-", "model": TINY, "file": "cases/tiny.yaml"}
    return Case(**(defaults | rest), dims=dims, training=training, features=features)


# ---- what a correct run leaves


def trial_of(asked: Case, ran: Case | None = None, *, traits: TrainerTraits = APART) -> Trial:
    """A correct run of `ran`, judged as `asked` of a trainer with these traits. The groups of both exist: meshes are made, then
    not used.

    Of a case that resumes: what its last launch left, and in `saved` what the earlier ones did.
    """
    ran, reference = ran or asked, reference_of(asked)
    world = ran.dims.world_size
    oracle = flattened_reference(reference) if make_plan(ran).flat else reference
    ranks = {rank: _rank_evidence(asked, ran, rank, oracle) for rank in range(world)}
    exits = tuple(Exit(rank, "ok", 0) for rank in range(world))
    run = Run("run", world, exits, ranks, checkpoint=checkpoint_of(ran, reference))
    repeat = run if asked.runs > 1 else None
    saved = tuple(trial_of(launch, traits=traits) for launch in asked.launches.values() if launch is not asked)
    plan = make_plan(asked, traits, observed_units(asked, traits, ranks))
    trial = Trial(asked, plan, run, reference, repeat, golden.from_reference(reference), saved=saved)
    return as_planned(trial)


def _rank_evidence(asked: Case, ran: Case, rank: int, reference: ReferenceRun) -> RankEvidence:
    part = {fqn: _cut(part) for fqn, part in make_plan(ran).slices[rank].items()}
    return RankEvidence(
        rank=rank,
        world_size=ran.dims.world_size,
        parameters=tuple(_tensor(ran, fqn, full, full[part[fqn]]) for fqn, full in reference.weights.items()),
        groups=_groups(asked, ran, rank),
        collectives=_collectives(ran, rank),
        steps=tuple(_step(ran, rank, step, reference, part) for step in reference.steps if step.step in ran.steps),
        structure=_structure(ran, rank),
        compiler={"graphs": 2} if ran.features.compile else {},
        held=(),
        settings=SETTINGS,
        resumed=_resumed(reference.steps[ran.steps.start - 2], part) if ran.resume else None,
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


def _resumed(step: ReferenceStep, part: Any) -> Resumed:
    return Resumed({fqn: full[part[fqn]].copy() for fqn, full in step.parameters.items()}, _state(step, part))


def _state(step: ReferenceStep, part: Any) -> dict[str, dict[str, np.ndarray]]:
    """AdamW also keeps a counter for each parameter, which is nobody's slice."""
    counter = {"step": np.array(float(step.step), np.float32)} if any(step.optimizer_state.values()) else {}
    cut = {f: {key: full[part[f]].copy() for key, full in s.items()} for f, s in step.optimizer_state.items()}
    return {fqn: state | counter for fqn, state in cut.items()}


def _cut(part: Any) -> tuple[slice, ...]:
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
            "shard": "StridedShard(0)" if cut == 0 else "Shard(0)",
            "tp": "Replicate" if cut is None else f"Shard({cut})",
        }
        placements = tuple(words[axis] for axis in axes)
    return TensorEvidence(fqn, full.shape, str(full.dtype), mesh, placements, value.copy())


def _groups(asked: Case, ran: Case, rank: int) -> tuple[Group, ...]:
    world = tuple(range(ran.dims.world_size))
    lines = {line for case in (asked, ran) for lines in make_plan(case).groups.values() for line in lines}
    mine = sorted({line for line in lines if rank in line} | {world})
    return tuple(Group(str(line), line, "gloo") for line in mine)


def _structure(case: Case, rank: int) -> dict[str, Wrapper]:
    plan = make_plan(case)
    axes = {"dp_replicate": "replicate_ranks", plan.shard_axis: "shard_ranks"}
    used = {key: plan.group_of(rank, axis) for axis, key in axes.items() if axis in plan.groups}
    wrapper = Wrapper(case.wrapper, cpu_offload=case.features.cpu_offload, **used)
    ways = {fqn: unit.degree for unit in units_of_rank(case, APART, rank, None) for fqn in unit.parameters}
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
                found.append(Collective(flow.op, ranks, str(ranks), "float64", count, flow.phase, step, 0))
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


def _step(case: Case, rank: int, step: ReferenceStep, reference: ReferenceRun, part: Any) -> StepEvidence:
    parameters = {fqn: full[part[fqn]].copy() for fqn, full in step.parameters.items()}
    kept, state = step.step in (case.steps[-1], case.saved_step), _state(step, part)
    held = sum(value.nbytes for value in parameters.values())
    return StepEvidence(
        step=step.step,
        microbatches=_microbatches(case, rank, step.step, reference),
        reported_loss=step.loss,
        grad_norm=step.grad_norm,
        lr=step.lr,
        reported_lr=step.lr,
        gradients={fqn: full[part[fqn]].copy() for fqn, full in step.gradients.items()},
        parameters=parameters,
        optimizer_state=state if kept else {},
        changed={},
        memory={"parameters": held, "gradients": held, "optimizer_state": 2 * held if any(state.values()) else 0},
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
    matmuls = {Matmul("forward", dtype): 8 * passes, Matmul("backward", dtype): (16 + again) * passes}
    attention = {Attention("forward", "attention"): passes, Attention("backward", "attention_backward"): passes}
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


# ---- what is said of it

WORDS = {"contents", "shard groups", "replicate groups", "tp groups", "weights", "why", "stack", "not to blame", "also"}
ALL_IN_ONE_LINE = (  # nothing more is known where these are said
    "did not|do not|does not|has no|holds|trained|launched|left no evidence|too slow|raised|vanished|NaN"
    "|another shape|different bytes|memory held|wrappers or placements"
)


def cause_of(found: Diagnosis | None) -> str:
    """The first line. What stands below it begins with a law's name or one of a few words, and is there."""
    assert found is not None, "no law is broken"
    known = {*all_checks(), *WORDS, *(f"rank {rank}" for rank in range(16))}
    below = [label for label, text in found.evidence if label in (*known, "assuming this") and text]
    rest = {label for label, _ in found.evidence if label not in known}
    proven = {"assuming this", "or as well", "tried", "not explained", "not tried", "tested", "not tested"}
    assert rest <= {"", "also broken", "groups", "loss, gradients", "not diagnosed", "not seen", *proven}, rest
    plain = found.cause.partition(":")[0] in known  # no rule knows it
    assert below or plain or re.search(ALL_IN_ONE_LINE, found.cause), found.cause
    return found.cause


# ---- altering one thing


def judged(check: str, trial: Trial) -> Result:
    result = run_check(check, all_checks()[check].check, trial)
    assert result.check == check, "a law tells of itself, by its own name"
    return result


def with_rank(trial: Trial, rank: int, /, **changes: Any) -> Trial:
    ranks = trial.ranks | {rank: replace(trial.ranks[rank], **changes)}
    return replace(trial, run=replace(trial.run, ranks=ranks))


def with_every_rank(trial: Trial, change: Callable[[Trial, int], Trial]) -> Trial:
    for rank in trial.ranks:
        trial = change(trial, rank)
    return trial


def without_rank(trial: Trial, rank: int) -> Trial:
    ranks = {other: evidence for other, evidence in trial.ranks.items() if other != rank}
    return replace(trial, run=replace(trial.run, ranks=ranks))


def with_step(trial: Trial, rank: int, step: int, /, **changes: Any) -> Trial:
    steps = trial.ranks[rank].steps
    return with_rank(trial, rank, steps=tuple(replace(s, **changes) if s.step == step else s for s in steps))


def without_step(trial: Trial, rank: int, step: int) -> Trial:
    return with_rank(trial, rank, steps=tuple(s for s in trial.ranks[rank].steps if s.step != step))


def with_value(
    trial: Trial, rank: int, step: int, what: str, fqn: str, change: Callable[[np.ndarray], np.ndarray]
) -> Trial:
    """what: gradients or parameters."""
    values = getattr(trial.ranks[rank].steps[step - 1], what)
    return with_step(trial, rank, step, **{what: values | {fqn: change(values[fqn])}})


def with_step_1_gradients(
    trial: Trial, change: Callable[[int, str], np.ndarray], *, later: float | None = None
) -> Trial:
    """change(rank, fqn): that rank's whole gradient of step 1, of which it keeps its slice; `later` scales other steps.

    Norms and updates follow from what is seen, as they would on real ranks.
    """
    for rank, evidence in trial.ranks.items():
        for step in evidence.steps:
            seen = {fqn: change(rank, fqn)[_cut(trial.plan.slices[rank][fqn])] for fqn in step.gradients}
            scaled = {fqn: (later or 1.0) * gradient for fqn, gradient in step.gradients.items()}
            trial = with_step(trial, rank, step.step, gradients=seen if step.step == 1 else scaled)
    return with_updates_that_follow(trial)


def with_updates_that_follow(trial: Trial) -> Trial:
    """What the optimizer makes, rank by rank, of the gradients that are there, clipped by the norm of those of its replica."""
    steps, training = range(1, trial.case.training.steps + 1), trial.case.training
    replicas = {rank: _replica(trial, rank) for rank in trial.ranks}
    norms = {replica: [observed_norm(trial, step, replica) for step in steps] for replica in set(replicas.values())}
    for rank, evidence in trial.ranks.items():
        starts, own = {tensor.fqn: tensor.value for tensor in evidence.parameters}, norms[replicas[rank]]
        for step in steps:
            past = [(clip(norm, training), s.gradients) for norm, s in zip(own, evidence.steps[:step], strict=False)]
            results = {
                f: optimize(start, [c * g[f] for c, g in past], recipe_of(f, training)) for f, start in starts.items()
            }
            kept = {f: state for f, (_, state) in results.items()} if step == training.steps else {}
            parameters = {f: value for f, (value, _) in results.items()}
            changes = {"parameters": parameters, "optimizer_state": kept, "grad_norm": own[step - 1]}
            trial = with_step(trial, rank, step, **changes)
    return trial


def _replica(trial: Trial, rank: int) -> tuple[int, ...]:
    place = coordinate(trial.case.dims, rank)["dp_replicate"]
    return tuple(other for other in trial.ranks if coordinate(trial.case.dims, other)["dp_replicate"] == place)


def trained_otherwise(
    trial: Trial, ranks: Sequence[int] = (), training: TrainingConfig | None = None, **otherwise: Any
) -> Trial:
    """What these ranks (all) leave if they train as `literal_reference.retrained` does; shown are norm and rate requested."""
    asked = trial.case.training
    made = retrained(training or asked, trial.reference, **otherwise)
    for rank, number in itertools.product(ranks or trial.ranks, range(1, asked.steps + 1)):
        step, cut = made.steps[number - 1], {f: _cut(part) for f, part in trial.plan.slices[rank].items()}
        last = number == asked.steps
        kept = (
            {f: {k: v[cut[f]] for k, v in of.items()} for f, of in step.optimizer_state.items() if f in cut}
            if last
            else {}
        )
        changes = {
            "parameters": {f: v[cut[f]] for f, v in step.parameters.items() if f in cut},
            "optimizer_state": kept,
        }
        changes |= {
            "gradients": {f: g[cut[f]] for f, g in step.gradients.items() if f in cut},
            "grad_norm": step.grad_norm,
        }
        trial = with_step(trial, rank, number, **changes)
    return trial


def sum_of_samples(trial: Trial, fqn: str, weights: dict[int, float]) -> np.ndarray:
    """The whole gradient of step 1 in which each sample counts with its weight, 1 where none is given."""
    parts = trial.reference.sample_gradients[fqn]
    factors = [weights.get(id_, 1.0) for id_ in trial.reference.samples[0]]
    return np.tensordot(factors, parts, axes=1).reshape(trial.plan.shapes[fqn])


def with_parameter(trial: Trial, rank: int, fqn: str, /, **changes: Any) -> Trial:
    """What a rank holds, or claims of it, before the first step."""
    tensors = trial.ranks[rank].parameters
    return with_rank(trial, rank, parameters=tuple(replace(t, **changes) if t.fqn == fqn else t for t in tensors))


def with_collectives(trial: Trial, rank: int, change: Callable[[Collective], Iterable[Collective]]) -> Trial:
    """Each call of a rank replaced by none, one or several."""
    calls = [new for call in trial.ranks[rank].collectives for new in change(call)]
    return with_rank(trial, rank, collectives=tuple(calls))


def last_bit(array: np.ndarray) -> np.ndarray:
    """The array with its first entry's last bit flipped."""
    changed = array.copy()
    changed.reshape(-1).view(np.uint64)[0] ^= 1
    return changed
