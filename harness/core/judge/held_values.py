"""Parameters of a trial as values: whole, put together from all ranks; and the part that one rank's optimizer steps on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from harness.core.judge.contents import take

if TYPE_CHECKING:
    from harness.core.judge.trial import Trial


def weights_after(trial: Trial, step: int) -> dict[str, np.ndarray]:
    """Return whole parameters as ranks held them after a step, NaN where none did."""
    whole: dict[str, np.ndarray] = {}
    for rank, record in trial.own_steps():
        for fqn, value in record.parameters.items() if record.step == step else ():
            full = whole.setdefault(fqn, np.full(trial.plan.shapes[fqn], np.nan, value.dtype))
            part = trial.slice_of(rank, fqn)
            if part is not None and take(full, part).shape == value.shape:
                take(full, part)[...] = value
    return whole


def stepped_part(trial: Trial, rank: int, fqn: str, held: np.ndarray) -> np.ndarray:
    """Return the part of a held parameter that the rank's own optimizer steps on: under ZeRO-1 and 2 not all of it."""
    part, wanted = trial.slice_of(rank, fqn), trial.plan.state_slices and trial.plan.state_slices[rank].get(fqn)
    if not part or not wanted or part == wanted:
        return held
    return held[tuple(slice(lo - start, hi - start) for (lo, hi), (start, _) in zip(wanted, part, strict=True))]


def order_of_entries(trial: Trial) -> dict[str, Any]:
    """Return how the reference's entries lie, in the words of reference.counterfactual.

    Its rows are in the trainer's order, and its vectors as tp ranks flatten them. A model that is given such weights needs it.
    """
    rows, columns = trial.reference.rows, trial.plan.columns
    return {**({"rows": rows} if rows else {}), **({"columns": columns} if columns else {})}
