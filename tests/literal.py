"""Literal evidence: the trial that a correct run of a tiny case would leave, and ways to alter one thing in it.

No process, no torch. Slices and bytes come from the plan (tests/core/plan/test_plan.py judges that by literals); samples,
losses, gradients, parameters, claims and groups are made here, the optimizer in closed form instead of step by step.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from literal_ranks import APART, checkpoint_of, held_part, rank_evidence
from literal_reference import clip, optimize, recipe_of, reference_of, retrained

from harness.core.case.case import Case
from harness.core.case.dims import ParallelDims
from harness.core.case.features import Features
from harness.core.case.traits import TrainerTraits
from harness.core.checks import all_checks, run_check
from harness.core.evidence.provided import RECORDED
from harness.core.evidence.records import Collective, Exit, Run
from harness.core.judge import golden
from harness.core.judge.measured import with_measured_traits
from harness.core.judge.norms import norm_of_slices
from harness.core.judge.order import flatten_reference, flatten_trial
from harness.core.judge.result import Diagnosis, Result
from harness.core.judge.trial import Trial
from harness.core.plan.grid import coordinate_of_rank
from harness.core.plan.make_plan import make_plan
from harness.core.report.cause_text import diagnosis_line, evidence_rows
from harness.reference.config import ModelConfig, TrainingConfig

TINY = ModelConfig(name="tiny", dim=4, n_layers=1, n_heads=2, n_kv_heads=2, vocab_size=8, ffn_dim=8)
UNEVEN = replace(TINY, vocab_size=7, ffn_dim=5)  # no degree divides them
ADAMW = TrainingConfig(steps=3, global_batch=8, seq_len=4, optimizer="adamw", lr=0.01)
SGD = replace(ADAMW, optimizer="sgd", lr=0.05)


LAYOUTS = {
    "single": ParallelDims(),
    "ddp_2": ParallelDims(dp_replicate=2),
    "fsdp_2": ParallelDims(dp_shard=2),
    "hsdp_2x2": ParallelDims(dp_replicate=2, dp_shard=2),
    "tp_2": ParallelDims(tp=2),
    "fsdp_2_tp_2": ParallelDims(dp_shard=2, tp=2),
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


def trial_of(requested: Case, ran: Case | None = None, *, traits: TrainerTraits = APART) -> Trial:
    """A correct run of `ran`, judged as `requested` of a trainer with these traits. The groups of both exist: meshes are
    made, then not used.

    Of a case that resumes: what its last launch left, and in `saved` what the earlier ones did.
    """
    ran, reference = ran or requested, reference_of(requested)
    world = ran.dims.world_size
    own = make_plan(ran)
    oracle = flatten_reference(reference, own.column_blocks) if own.flat else reference
    seed = oracle if ran.model_of is None else reference_of(ran.first_launch)
    ranks = {rank: rank_evidence(requested, ran, rank, oracle, seed) for rank in range(world)}
    exits = tuple(Exit(rank, "ok", 0) for rank in range(world))
    run = Run("run", world, exits, ranks, checkpoint=checkpoint_of(ran, reference))
    repeat = run if requested.runs > 1 else None
    saved = tuple(trial_of(launch, traits=traits) for launch in requested.launches.values() if launch is not requested)
    plan = make_plan(requested, with_measured_traits(requested, traits, run))
    trial = Trial(requested, plan, run, reference, repeat, golden.golden_from_reference(reference), saved=saved)
    return flatten_trial(trial)


# ---- what is said of it

WORDS = {"contents", "shard groups", "replicate groups", "tp groups", "weights", "why", "stack", "not to blame", "also"}
ALL_IN_ONE_LINE = (  # nothing more is known where these are said
    "did not|do not|does not|has no|holds|trained|launched|left no evidence|too slow|raised|vanished|NaN"
    "|another shape|different bytes|memory held|wrappers or placements|outside forward and backward"
)


class LayoutCase(Case):
    """A case of which only the layout is requested, as of a recorded job."""

    is_complete = False


def of_layout_alone(trial: Trial) -> Trial:
    """Return the trial of the same ranks, recorded, of which only the layout is requested."""
    case = LayoutCase(**{field.name: getattr(trial.case, field.name) for field in dataclasses.fields(Case)})
    run = replace(trial.run, provided=RECORDED)
    return replace(trial, case=case, plan=replace(trial.plan, is_exact=False), run=run)


def cause_of(found: Diagnosis | None) -> str:
    """The first line. What stands below it begins with a check's name or one of a few words, and is there."""
    assert found is not None, "no check fails"
    known = {*all_checks(), *WORDS, *(f"rank {rank}" for rank in range(16))}
    below = [label for label, text in evidence_rows(found.evidence) if label in (*known, "explains") and text]
    rest = {label for label, _ in found.evidence if label not in known}
    proven = {
        "explains",
        "or else",
        "and",
        "tried",
        "not explained",
        "still failing",
        "not tried",
        "tested",
        "not tested",
    }
    assert rest <= {
        "",
        "also failing",
        "also seen",
        "if intended",
        "groups",
        "loss, gradients",
        "not diagnosed",
        "not seen",
        *proven,
    }, rest
    plain = any(one.finding is not None for one in found.causes)  # says where, expected and observed itself
    assert below or plain or re.search(ALL_IN_ONE_LINE, diagnosis_line(found)), diagnosis_line(found)
    return diagnosis_line(found)


# ---- altering one thing


def judged(check: str, trial: Trial) -> Result:
    result = run_check(check, all_checks()[check].check, trial)
    assert result.check == check, "a check says of itself, by its own name"
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
            seen = {fqn: change(rank, fqn)[held_part(trial.plan.slices[rank][fqn])] for fqn in step.gradients}
            scaled = {fqn: (later or 1.0) * gradient for fqn, gradient in step.gradients.items()}
            trial = with_step(trial, rank, step.step, gradients=seen if step.step == 1 else scaled)
    return with_updates_that_follow(trial)


def with_updates_that_follow(trial: Trial) -> Trial:
    """What the optimizer makes, rank by rank, of the gradients that are there, clipped by the norm of those of its replica."""
    steps, training = range(1, trial.case.training.steps + 1), trial.case.training
    replicas = {rank: _replica(trial, rank) for rank in trial.ranks}
    norms = {replica: [norm_of_slices(trial, step, replica) for step in steps] for replica in set(replicas.values())}
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
    place = coordinate_of_rank(trial.case.dims, rank)["dp_replicate"]
    return tuple(other for other in trial.ranks if coordinate_of_rank(trial.case.dims, other)["dp_replicate"] == place)


def trained_otherwise(
    trial: Trial, ranks: Sequence[int] = (), training: TrainingConfig | None = None, **otherwise: Any
) -> Trial:
    """What these ranks (all) leave if they train as `literal_reference.retrained` does; shown are norm and rate requested."""
    requested = trial.case.training
    made = retrained(training or requested, trial.reference, **otherwise)
    for rank, number in itertools.product(ranks or trial.ranks, range(1, requested.steps + 1)):
        step, cut = made.steps[number - 1], {f: held_part(part) for f, part in trial.plan.slices[rank].items()}
        last = number == requested.steps
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
