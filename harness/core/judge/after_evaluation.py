"""The bytes that a step gathers more or less, by FSDP's own policy, because evaluation passes came before it."""

from __future__ import annotations

from collections import Counter

from harness.core.judge.traffic import TrafficKey, gathered_after_evaluation
from harness.core.judge.trial import Trial
from harness.core.plan.grid import coordinate_of_rank, gather_axis
from harness.core.plan.slices import BYTES, padded_numel


def prefetched_unit_bytes(trial: Trial, rank: int, step: int, key: TrafficKey) -> set[int]:
    """Return the bytes of the unit that backward of `step` gathers once more, without use. At most one number.

    FSDP2 gathers ahead in backward by the order in which units ended all forward passes since the last backward. So the
    first unit of the training pass gathers the unit that ended evaluation. The root's unit is freed after all of
    backward and not gathered. Empty without an evaluation before the step, without FSDP2, and for any key but the shard
    group's all_gather in backward.
    """
    ranks, op, phase = key
    evaluated = any(record.step == step - 1 for record in trial.ranks[rank].after_evaluation)
    if not evaluated or trial.case.wrapper != "fsdp2":
        return set()
    if (ranks, op, phase) != (_shard_group(trial, rank), "all_gather", "backward"):
        return set()
    ended_last = _unit_that_ended_last(trial, rank)
    return {unit_gather_bytes(trial, rank, ended_last)} if ended_last else set()


def _unit_that_ended_last(trial: Trial, rank: int) -> tuple[str, ...]:
    """Return the fqns of the unit whose modules' forward ends last, by the model's order.

    Empty if the root module wraps parameters, for then its unit ends last.
    """
    last_fqn = list(trial.plan.slices[rank])[-1]
    root = trial.ranks[rank].structure.get("")
    if root and root.parameters:
        return ()
    return next((unit for unit in trial.plan.units[rank] if last_fqn in unit), ())


def unit_gather_bytes(trial: Trial, rank: int, unit: tuple[str, ...]) -> int:
    """Return the bytes of one all_gather of a unit, with padding.

    FSDP2 pads each parameter to equal parts, FSDP1 the vector of all.
    """
    case = trial.case
    tp_index = coordinate_of_rank(trial.plan.dims, rank)["tp"]
    element_bytes = BYTES[case.training.compute_dtype or case.training.dtype]
    flat = next((flat for flat in trial.plan.flat if unit[0] in flat.starts), None)
    if flat is not None:
        return element_bytes * flat.elements_per_rank(case.dims.dp_shard) * case.dims.dp_shard
    return element_bytes * sum(padded_numel(case, trial.traits, fqn, tp_index) for fqn in unit)


def extra_forward_bytes(trial: Trial, rank: int, step: int) -> dict[TrafficKey, int]:
    """Return, by (ranks, op, phase), the bytes that forward gathers more, or fewer (negative), after an evaluation.

    A unit that evaluation left as the policy keeps it after forward is not gathered. If the policy keeps it in slices
    over some of the ranks, it is gathered over these instead. Empty if no unit was left so. step: the one after the
    evaluation.
    """
    kept_after_forward = trial.plan.after_forward[rank]
    extra_bytes = Counter[TrafficKey]()
    retained_fqns = {
        gathered[1]
        for gathered in gathered_after_evaluation(trial, rank)
        if gathered[0] == step - 1 and policy_keeps(trial, rank, gathered)
    }
    for unit in trial.plan.units[rank]:
        if retained_fqns & {*unit}:
            unit_bytes = unit_gather_bytes(trial, rank, unit)
            extra_bytes[_shard_group(trial, rank), "all_gather", "forward"] -= unit_bytes
            if axis := gather_axis(trial.case, kept_after_forward[unit[0]].degree):
                extra_bytes[trial.plan.peers(rank, axis), "all_gather", "forward"] += unit_bytes
    return dict(extra_bytes)


def policy_keeps(trial: Trial, rank: int, retained: tuple[int, str, int]) -> bool:
    """Return whether the policy keeps more than the rank's slice after forward, and as many bytes as evaluation left.

    retained: (step before, fqn, bytes) of a parameter.
    """
    _, fqn, left_bytes = retained
    kept = trial.plan.after_forward[rank][fqn]
    return kept.degree < trial.case.shards and left_bytes <= kept.bytes


def _shard_group(trial: Trial, rank: int) -> tuple[int, ...]:
    """Return the ranks over which this rank's units are gathered; empty if it has none."""
    return trial.plan.peers(rank, trial.plan.shard_axis) if trial.plan.units[rank] else ()
