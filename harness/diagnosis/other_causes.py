"""What is left when layout, data, gradients and updates are right: reports, replicas, traffic, repeats, the reference."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from harness.checks import memory
from harness.checks.traffic import check, waits
from harness.checks.update import observed_norm
from harness.diagnosis.factors import factor_text, times_text
from harness.diagnosis.updates import own_norm
from harness.diagnosis.words import Broken, finding_line, on_ranks, rank_words, traffic_lines
from harness.evidence.records import RankEvidence, StepEvidence
from harness.evidence.text import bytes_text, ranks_text
from harness.judge.losses import losses
from harness.judge.reporting import Read, due, silences
from harness.judge.result import Diagnosis, Verdict, one_cause
from harness.judge.tolerance import clip_coefficient
from harness.judge.traffic import observed
from harness.judge.trial import Trial
from harness.plan.grid import groups
from harness.plan.make_plan import make_plan
from harness.spec.case import Case

LOSS_AXES = ("dp_replicate", "dp_shard", "cp")  # ranks along these see different tokens


# ---- reports


def wrong_reports(trial: Trial, broken: Broken) -> Diagnosis | None:
    """Losses, gradients and updates were judged by themselves: only what is shown of them is wrong."""
    shown = {"reported_loss": "loss", "grad_norm": "gradient norm", "reported_rate": "learning rate"}
    wrong = [name for name in shown if name in broken]
    if not wrong or {"loss", "gradients", "update"} & set(broken):
        return None
    lines = tuple(finding_line(name, broken[name]) for name in wrong)
    if silent := [_silent(trial, shown[name], REPORTED[name]) for name in wrong if silences(trial, "", REPORTED[name])]:
        return one_cause("; ".join(silent), lines)
    if "grad_norm" in broken and (ratio := _length(trial)):
        cause = f"gradients are {ratio:.3g} times as long as the reference's, though no entry is beyond its noise"
        return one_cause(cause, (finding_line("grad_norm", broken["grad_norm"]),))
    hints = {name: HINTS[name](trial) for name in wrong}
    text = "; ".join(f"{shown[name]}: {hint}" if len(wrong) > 1 else hint for name, hint in hints.items())
    what = f"the reported {' and '.join(shown[name] for name in wrong)} {'are' if len(wrong) > 1 else 'is'} wrong"
    return one_cause(f"{what}, the training itself is right: {text}", lines)


REPORTED: dict[str, Read] = {
    "reported_loss": lambda step: step.reported_loss,
    "grad_norm": lambda step: step.grad_norm,
    "reported_rate": lambda step: step.reported_lr,
}


def _silent(trial: Trial, what: str, read: Read) -> str:
    """Of the first rank that is silent: in which steps it reports, and in which not."""
    rank = next(
        rank
        for rank, e in sorted(trial.ranks.items())
        if _reported_steps(e, read) and set(due(trial, rank)) - _reported_steps(e, read)
    )
    reported, wanted = sorted(_reported_steps(trial.ranks[rank], read)), due(trial, rank)
    silent = [step for step in wanted if step not in reported]
    return f"rank {rank} reports the {what} of {_steps(reported)} only, that of {_steps(silent)} is lacking"


def _reported_steps(evidence: RankEvidence, read: Read) -> set[int]:
    return {step.step for step in evidence.steps if read(step) is not None}


def _steps(steps: list[int]) -> str:
    return f"step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}"


def _length(trial: Trial) -> float | None:
    """By what factor the gradients seen are longer, where they are as long as reported. Noise hides that from `gradients`."""
    first, lengths = trial.first_step, {step: observed_norm(trial, step) for step in trial.case.steps}
    clipped = all(
        step.grad_norm and math.isclose(step.grad_norm, lengths[step.step], rel_tol=1e-4)
        for _, step, _ in trial.steps()
    )
    return None if trial.case.exact or not clipped else lengths[first] / trial.reference_step(first).grad_norm


def _shown_loss(trial: Trial) -> str:
    right = {step.step: step.loss for step in trial.reference.steps}
    seen = [_Shown(rank, step.step, step.reported_loss, _own_loss(step)) for rank, step, _ in trial.steps()]
    left_out = _axes_left_out(trial)
    return (
        f"it is not reduced over {left_out}" if left_out else _shown(trial, seen, right, "the loss of its own samples")
    )


def _axes_left_out(trial: Trial) -> str | None:
    """Each rank shows the loss of the tokens of its peers along the other axes. (Of none: that is its own loss.)"""
    axes = [axis for axis in LOSS_AXES if axis in trial.plan.groups]
    for count in range(1, len(axes) + 1):
        for missing in itertools.combinations(axes, count):
            reduced = [axis for axis in axes if axis not in missing]
            if (reduced or "cp" in missing) and all(_is_sum_over(trial, reduced, r, s) for r, s, _ in trial.steps()):
                return " and ".join(missing)
    return None


def _is_sum_over(trial: Trial, reduced: list[str], rank: int, step: StepEvidence) -> bool:
    """Divided by the valid tokens of those ranks, or by those of all."""
    peers = next(group for group in groups(trial.case.dims, *reduced) if rank in group) if reduced else (rank,)
    seen = [loss for peer in peers for loss in losses(trial, peer, step.step)]
    total, tokens = math.fsum(loss for loss, _ in seen), sum(count for _, count in seen)
    everyone = trial.reference.steps[step.step - 1].valid_tokens
    shown = step.reported_loss
    return shown is not None and any(_near(shown, total / count) for count in (tokens, everyone) if count)


def _shown_norm(trial: Trial) -> str:
    right = {step.step: step.grad_norm for step in trial.reference.steps}
    seen = [_Shown(rank, step.step, step.grad_norm, own_norm(step)) for rank, step, _ in trial.steps()]
    after = {step: norm * clip_coefficient(norm, trial.case.training.max_norm) for step, norm in right.items()}
    if after != right and all(math.isclose(one.number or 0.0, after[one.step], rel_tol=1e-5) for one in seen):
        return f"each rank shows the norm after clipping ({seen[0].number:.6g}), requested is the one before it"
    return _shown(trial, seen, right, "the norm of its own shards")


def _shown_rate(trial: Trial) -> str:
    right = {step.step: step.lr for step in trial.reference.steps}
    seen = [_Shown(rank, step.step, step.reported_lr, math.nan) for rank, step, _ in trial.steps()]
    return _shown(trial, seen, right, "that of its own")


HINTS: dict[str, Callable[[Trial], str]] = {
    "reported_loss": _shown_loss,
    "grad_norm": _shown_norm,
    "reported_rate": _shown_rate,
}


def _own_loss(step: StepEvidence) -> float:
    tokens = sum(m.valid_tokens or 0 for m in step.microbatches)
    return math.fsum(m.loss_sum or 0.0 for m in step.microbatches) / tokens if tokens else math.nan


@dataclass(frozen=True)
class _Shown:
    """What a rank reports in a step, and what its own share alone gives."""

    rank: int
    step: int
    number: float | None
    own: float


def _shown(trial: Trial, seen: list[_Shown], right: dict[int, float], own_words: str) -> str:
    """What is reported instead of what is right, in words."""
    odd = [(one, one.number) for one in seen if one.number is not None and not _near(one.number, right[one.step])]
    ranks = sorted({one.rank for one, _ in odd})
    who = "each rank shows" if len(ranks) == len(trial.ranks) else f"{rank_words(ranks)} show{'s' * (len(ranks) == 1)}"
    ratios = [number / right[one.step] for one, number in odd if right[one.step]]
    if len(trial.ranks) > 1 and all(_near(number, one.own) for one, number in odd):
        return f"{who} {own_words}"
    later = [(right[one.step - 1], number) for one, number in odd if one.step > trial.first_step]
    if later and all(_near(number, before) for before, number in later):
        return f"{who} that of the step before"
    earlier = [(right[one.step + 1], number) for one, number in odd if one.step + 1 in right]
    if earlier and all(_near(number, after) for after, number in earlier):
        return f"{who} that of the next step"
    if len(odd) == 1:
        (one, number), *_ = odd
        return f"{who} {number:.6g} once, where {right[one.step]:.6g} is right"
    if all(number == float(np.float32(right[one.step])) for one, number in odd):
        return f"{who} it rounded to float32"
    if ratios and all(times_text(ratio) == times_text(1.0) for ratio in ratios):
        return f"{who} a number that is off by {max(abs(ratio - 1) for ratio in ratios):.1e}"
    if ratios and all(_near(ratio, ratios[0]) for ratio in ratios):
        return f"{who} {times_text(ratios[0])} the right one{factor_text(trial, ratios[0])}"
    return f"{who} another number"


def _near(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-8)


# ---- replicas


def replicas_drift(trial: Trial, broken: Broken) -> Diagnosis | None:
    if "replica_agreement" not in broken:
        return None
    result = broken["replica_agreement"]
    first = result.findings[0]
    why = "within rounding of the reference, but replicas that differ in one bit drift on: they must be equal"
    lines = () if {"gradients", "update"} & set(broken) else (("why", why),)
    return one_cause(f"replicas drift apart: {first.where}: {first.observed}", lines)


# ---- traffic, groups, memory


def out_of_order(trial: Trial, broken: Broken) -> Diagnosis | None:
    """Numbers are wrong, and so is the order of collectives: gloo pairs what is of equal size, so it explains them."""
    if "collective_order" not in broken or not {"loss", "gradients", "grad_norm", "reported_loss"} & set(broken):
        return None
    first = broken["collective_order"].findings[0]
    text = f"{STRUCTURE['collective_order']}: {first.where}: {first.observed}, {first.expected}"
    return one_cause(text, (finding_line("collective_order", broken["collective_order"]),))


def ranks_wait(trial: Trial, broken: Broken) -> Diagnosis | None:
    """Collectives that move nothing. Asked late: ranks that wait compute the right thing."""
    for rank, step, _ in trial.steps() if "traffic" in broken else ():
        for (ranks, op, phase), count in sorted(waits(trial.ranks[rank], step.step).items()):
            text = f"{count} x {op} of no bytes over {ranks_text(ranks)} (rank {rank}, step {step.step})"
            return one_cause(
                f"ranks wait for each other in {phase}: {text}", (finding_line("traffic", broken["traffic"]),)
            )
    return None


def copies_kept(trial: Trial, broken: Broken) -> Diagnosis | None:
    """Matrices as large as weights are, which are none, nor gradients, nor the optimizer's."""
    ranks = [rank for rank in sorted(trial.ranks) if memory.kept_beside(trial, rank)]
    if "memory" not in broken or not ranks:
        return None
    held = memory.copies_kept(trial, ranks[0])
    size, dtypes = bytes_text(sum(tensor.bytes for tensor in held)), " and ".join(sorted({t.dtype for t in held}))
    cause = f"{size} of {dtypes} are retained in unaccounted tensors{on_ranks(trial, ranks)}"
    return one_cause(cause + _as_large_as(trial, ranks[0]), (finding_line("memory", broken["memory"]),))


def _as_large_as(trial: Trial, rank: int) -> str:
    """Whole or as this rank holds them, shapes of how many parameters are found among what is kept."""
    shapes = [tensor.shape for tensor in memory.copies_kept(trial, rank)]
    whole = [fqn for fqn, shape in trial.case.model.parameter_shapes().items() if shape in shapes]
    own = [tensor.fqn for tensor in trial.ranks[rank].parameters if tensor.value.shape in shapes]
    if not whole and not own:
        return f": {len(shapes)} tensors of no parameter's shape"
    return f": {len(shapes)} tensors of the shapes of {'whole parameters' if len(whole) >= len(own) else 'its slices'}"


def wrong_structure(trial: Trial, broken: Broken) -> Diagnosis | None:
    """Numbers are right, the way to them is not: a feature that did not take place, or collectives of no plan."""
    names = [n for n in ("collective_order", "process_groups", "traffic", "placements", "memory") if n in broken]
    if not names:
        return None
    cause = _features_in_force(trial) or _reduced_too_often(trial) if "traffic" in broken else None
    lines = tuple(finding_line(name, broken[name]) for name in names)
    if cause:
        return one_cause(cause, lines)
    return one_cause(f"{STRUCTURE[names[0]]}: {lines[0][1]}", (*lines[1:], *traffic_lines(trial)))


STRUCTURE = {
    "collective_order": "ranks of a group do not issue the same collectives",
    "process_groups": "process groups are not the plan's",
    "traffic": "bytes moved are not the plan's",
    "placements": "wrappers or placements claim something else than the plan",
    "memory": "memory held between steps is not the plan's",
}


def _features_in_force(trial: Trial) -> str | None:
    """The features whose plan the traffic is."""
    for key, asked, other, case in _other_cases(trial.case):
        plan = make_plan(case, trial.traits, trial.plan.observed, torch=trial.plan.torch)
        if check(replace(trial, case=case, plan=plan)).verdict is Verdict.PASS:
            return f"{key} {asked} is requested, {other} is observed: its traffic is what was seen"
    return None


def _other_cases(case: Case) -> Iterator[tuple[str, Any, Any, Case]]:
    """The case with one option changed: its name, the value requested, the other value."""
    features: dict[str, tuple[Any, ...]] = {
        "reshard_after_forward": ("default", "always", "never"),
        "sequence_parallel": (True, False),
        "loss_parallel": (True, False),
        "cp_rotation": ("allgather", "alltoall"),
        "reduce_dtype": ("float32", "bfloat16"),
    }
    for key, values in features.items():
        for value in values:
            if value != (asked := getattr(case.features, key)):
                yield key, asked, value, replace(case, features=replace(case.features, **{key: value}))
    for dtype in ("float32", "bfloat16", None):
        if dtype != (asked := case.training.compute_dtype):
            yield "compute_dtype", asked, dtype, replace(case, training=replace(case.training, compute_dtype=dtype))


def _reduced_too_often(trial: Trial) -> str | None:
    """Accumulation wants one reduction a step; after every microbatch is right and slow."""
    times = trial.case.features.accumulation
    seen = observed(trial.ranks[0], trial.first_step)
    flows = [flow for flow in trial.plan.flows[0] if flow.role == "gradients"]
    moved = [seen.get((trial.plan.group_of(0, flow.axis), flow.op, flow.phase), 0) for flow in flows]
    if times == 1 or not flows or any(count != times * flow.bytes for count, flow in zip(moved, flows, strict=True)):
        return None
    return f"gradients are reduced after every microbatch ({times} times a step), once a step is requested"


# ---- repeats and the reference


def not_deterministic(trial: Trial, broken: Broken) -> Diagnosis | None:
    if "determinism" not in broken:
        return None
    first = broken["determinism"].findings[0]
    text = f"the same case run twice gives different bytes{_fed_otherwise(trial)}"
    return one_cause(f"{text}, first on {first.where}: {first.observed}")


def _fed_otherwise(trial: Trial) -> str:
    """Where the repeat first received other rows, or the same ones in another order: each run by itself may be right."""
    assert trial.repeat is not None
    again = _fed_by_step(trial.repeat.ranks)
    for (step, rank), rows in sorted(_fed_by_step(trial.ranks).items()):
        if rows != (others := again.get((step, rank), [])):
            how = "the same samples in another order" if sorted(rows) == sorted(others) else "other samples"
            return f": the repeat received {how} (rank {rank}, step {step})"
    return ""


def _fed_by_step(ranks: dict[int, RankEvidence]) -> dict[tuple[int, int], list[bytes]]:
    """By step and rank, the rows of tokens in order."""
    return {
        (step.step, rank): [row.tobytes() for m in step.microbatches if m.tokens is not None for row in m.tokens]
        for rank, evidence in sorted(ranks.items())
        for step in evidence.steps
    }


def reference_moved(trial: Trial, broken: Broken) -> Diagnosis | None:
    if set(broken) != {"golden"}:
        return None
    first = broken["golden"].findings[0]
    cause = "the reference moved, not the trainer: model, data, recipe or torch changed since the golden was accepted"
    return one_cause(cause, (("golden", f"{first.where}: {first.expected} -> {first.observed}, bound {first.bound}"),))
