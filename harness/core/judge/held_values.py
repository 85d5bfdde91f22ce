"""Values of a trial's parameters: whole ones put together from all ranks, and the slice that one rank's optimizer updates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from harness.core.judge.contents import view_of_slice

if TYPE_CHECKING:
    from harness.core.judge.trial import Trial


def whole_weights_after(trial: Trial, step: int) -> dict[str, np.ndarray]:
    """Return whole parameters by fqn, put together from the slices that ranks held after a step.

    An entry that no rank held is NaN. Where replicas differ, the value of the highest rank is taken. Empty if no rank
    has the step.
    """
    weights: dict[str, np.ndarray] = {}
    for rank, record in trial.own_steps():
        if record.step != step:
            continue
        for fqn, value in record.parameters.items():
            full = weights.setdefault(fqn, np.full(trial.plan.shapes[fqn], np.nan, value.dtype))
            part = trial.slice_of(rank, fqn)
            if part is not None and view_of_slice(full, part).shape == value.shape:
                view_of_slice(full, part)[...] = value
    return weights


def optimizer_slice(trial: Trial, rank: int, fqn: str, local_shard: np.ndarray) -> np.ndarray:
    """Return the view of a rank's local parameter that its own optimizer updates: under ZeRO-1 and 2 only a part of it.

    The whole local parameter where the optimizer updates all of it, or where the rank holds no slice.
    """
    part = trial.slice_of(rank, fqn)
    state_slice = trial.plan.state_slices and trial.plan.state_slices[rank].get(fqn)
    if not part or not state_slice or part == state_slice:
        return local_shard
    # The local shard begins at the start of `part`, so the slice is counted from there.
    return local_shard[
        tuple(slice(lo - start, hi - start) for (lo, hi), (start, _) in zip(state_slice, part, strict=True))
    ]


def reference_order_arguments(trial: Trial) -> dict[str, Any]:
    """Return the order of the reference's entries as arguments of reference.counterfactual.Changes: `rows`, `columns`.

    A model that is given such weights needs both: rows are in the trainer's order, and flattened matrices as tp ranks
    flatten them. A key is left out where its order is the usual one.
    """
    order: dict[str, Any] = {}
    if trial.reference.rows:
        order["rows"] = trial.reference.rows
    if trial.plan.column_blocks:
        order["columns"] = trial.plan.column_blocks
    return order
