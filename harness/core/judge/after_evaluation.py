"""How many bytes more or less a step gathers, by FSDP's own policy, because evaluation passes came before it."""

from __future__ import annotations

from collections import Counter

from harness.core.judge.traffic import Key, still_gathered
from harness.core.judge.trial import Trial
from harness.core.plan.grid import coordinate, gathered_over
from harness.core.plan.slices import BYTES, padded_numel


def prefetched(trial: Trial, rank: int, step: int, key: Key) -> set[int]:
    """FSDP2 gathers ahead in backward by the order in which units ended all forward passes since the last backward. After an
    evaluation the first unit of the training pass gathers the unit that ended evaluation once more, without use. Return the
    bytes of that unit; there are none for the root's, which is freed after all of backward."""
    ranks, op, phase = key
    evaluated = any(record.step == step - 1 for record in trial.ranks[rank].after_evaluation)
    if not evaluated or trial.case.wrapper != "fsdp2":
        return set()
    if (ranks, op, phase) != (_shards(trial, rank), "all_gather", "backward"):
        return set()
    ended_last = _ended_last(trial, rank)
    return {gathered_bytes(trial, rank, ended_last)} if ended_last else set()


def _ended_last(trial: Trial, rank: int) -> tuple[str, ...]:
    """The unit whose modules' forward ends last, by the model's order; empty if that is the root module's."""
    last = list(trial.plan.slices[rank])[-1]
    root = trial.ranks[rank].structure.get("")
    return () if root and root.parameters else next((unit for unit in trial.plan.units[rank] if last in unit), ())


def gathered_bytes(trial: Trial, rank: int, unit: tuple[str, ...]) -> int:
    """Return the bytes of one all_gather of a unit: FSDP2 pads each parameter to equal parts, FSDP1 the vector of all."""
    case, tp_index = trial.case, coordinate(trial.plan.dims, rank)["tp"]
    size = BYTES[case.training.compute_dtype or case.training.dtype]
    flat = next((flat for flat in trial.plan.flat if unit[0] in flat.starts), None)
    if flat is not None:
        return size * flat.part(case.dims.dp_shard) * case.dims.dp_shard
    return size * sum(padded_numel(case, trial.traits, fqn, tp_index) for fqn in unit)


def spared(trial: Trial, rank: int, step: int) -> dict[Key, int]:
    """Return how many bytes each collective of the next forward moves more or less. A unit that evaluation left as the policy
    keeps it after forward is not gathered. One that lies over some of the ranks is gathered over these instead."""
    kept, differing = trial.plan.after_forward[rank], Counter[Key]()
    found = (each for each in still_gathered(trial, rank) if each[0] == step - 1 and keeps(trial, rank, each))
    left = {fqn for _, fqn, _ in found}
    for unit in trial.plan.units[rank]:
        if left & {*unit}:
            size = gathered_bytes(trial, rank, unit)
            differing[_shards(trial, rank), "all_gather", "forward"] -= size
            if axis := gathered_over(trial.case, kept[unit[0]].degree):
                differing[trial.plan.peers(rank, axis), "all_gather", "forward"] += size
    return dict(differing)


def keeps(trial: Trial, rank: int, left: tuple[int, str, int]) -> bool:
    """Whether as much is kept after forward of what evaluation left: (step before, parameter, bytes)."""
    _, fqn, held = left
    kept = trial.plan.after_forward[rank][fqn]
    return kept.degree < trial.case.shards and held <= kept.bytes


def _shards(trial: Trial, rank: int) -> tuple[int, ...]:
    return trial.plan.peers(rank, trial.plan.shard_axis) if trial.plan.units[rank] else ()
