"""How many bytes more or less a step gathers, by FSDP's own policy, because evaluation passes came before it."""

from __future__ import annotations

from collections import Counter

from harness.core.judge.traffic import TrafficKey, gathered_after_evaluation
from harness.core.judge.trial import Trial
from harness.core.plan.grid import coordinate_of_rank, gather_axis
from harness.core.plan.slices import BYTES, padded_numel


def prefetched_unit_bytes(trial: Trial, rank: int, step: int, key: TrafficKey) -> set[int]:
    """Return the bytes of the unit that backward gathers once more, without use, because an evaluation came before.

    The set has at most one number. FSDP2 gathers ahead in backward by the order in which units ended all forward passes since
    the last backward. After an evaluation the first unit of the training pass gathers the unit that ended evaluation. The
    root's unit is freed after all of backward, so the set is empty for it.
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
    """Return the unit whose modules' forward ends last, by the model's order; empty if that is the root module's."""
    last_fqn = list(trial.plan.slices[rank])[-1]
    root = trial.ranks[rank].structure.get("")
    if root and root.parameters:
        return ()
    return next((unit for unit in trial.plan.units[rank] if last_fqn in unit), ())


def unit_gather_bytes(trial: Trial, rank: int, unit: tuple[str, ...]) -> int:
    """Return the bytes of one all_gather of a unit: FSDP2 pads each parameter to equal parts, FSDP1 the vector of all."""
    case = trial.case
    tp_index = coordinate_of_rank(trial.plan.dims, rank)["tp"]
    element_bytes = BYTES[case.training.compute_dtype or case.training.dtype]
    flat = next((flat for flat in trial.plan.flat if unit[0] in flat.starts), None)
    if flat is not None:
        return element_bytes * flat.elements_per_rank(case.dims.dp_shard) * case.dims.dp_shard
    return element_bytes * sum(padded_numel(case, trial.traits, fqn, tp_index) for fqn in unit)


def extra_forward_bytes(trial: Trial, rank: int, step: int) -> dict[TrafficKey, int]:
    """Return how many bytes each collective of the next forward moves more or less than without an evaluation.

    A unit that evaluation left as the policy keeps it after forward is not gathered. If the policy keeps it in slices over
    some of the ranks, it is gathered over these instead.
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
    """Return whether the policy keeps as much after forward as evaluation left: (step before, parameter, bytes)."""
    _, fqn, left_bytes = retained
    kept = trial.plan.after_forward[rank][fqn]
    return kept.degree < trial.case.shards and left_bytes <= kept.bytes


def _shard_group(trial: Trial, rank: int) -> tuple[int, ...]:
    return trial.plan.peers(rank, trial.plan.shard_axis) if trial.plan.units[rank] else ()
