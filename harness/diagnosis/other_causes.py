"""What is left when layout, data, gradients and updates are right: reports, replicas, traffic, repeats, the reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from harness.checks import memory
from harness.checks.traffic import check, waits
from harness.diagnosis.words import Broken, finding_line, on_ranks, traffic_lines
from harness.evidence.records import RankEvidence
from harness.evidence.text import bytes_text, ranks_text
from harness.judge.result import Diagnosis, Verdict, one_cause
from harness.judge.traffic import observed
from harness.judge.trial import Trial
from harness.plan.make_plan import make_plan
from harness.spec.case import Case

LOSS_AXES = ("dp_replicate", "dp_shard", "cp")  # ranks along these see different tokens


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
