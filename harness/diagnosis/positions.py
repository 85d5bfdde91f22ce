"""Ranks are told other positions of their tokens than the plan says, or turn keys and queries by others."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from harness.checks.positions import right_rows, wrong_rows
from harness.diagnosis.assume import another_reference
from harness.diagnosis.hypothesis import Broken, Hypothesis
from harness.diagnosis.words import finding_line
from harness.evidence.text import positions_text
from harness.judge.received_samples import positions_received
from harness.judge.result import Cause
from harness.judge.trial import Trial
from harness.plan.stages import layers_of_stage, positions


def other_positions(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Tokens are right, and the model turns their queries and keys by the angles of other positions."""
    if "positions" not in broken or (cause := wrong_positions(trial)) is None:
        return
    by_step = {step: _positions_by_layer(trial, step) for step in trial.case.steps}
    lines = (finding_line(broken["positions"]),)
    yield Hypothesis(cause, partial(_turned_by, by_step), 1, lines, ("positions",))


def wrong_positions(trial: Trial) -> Cause | None:
    """Those that are not the positions of the tokens received, wherever these stand."""
    wrong: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for rank, step, _ in trial.steps():
        found = positions_received(trial, rank, step.step)
        wanted = positions(trial.case, rank, trial.case.seq_len(step.step)) if found is None else found
        for row in wrong_rows(step.positions, right_rows(trial, wanted, step.step)):
            wrong.setdefault(rank, (row, wanted))
    if not wrong:
        return None
    rank, (row, wanted) = next(iter(wrong.items()))
    text = f"rank {rank} receives positions {positions_text(row)} for its tokens at {positions_text(wanted)}"
    restarted = all(np.array_equal(row, np.arange(len(row))) for row, _ in wrong.values())
    every = set(wrong) == {r for r in trial.ranks if positions(trial.case, r, trial.case.seq_len(1))[0] != 0}
    what = "rotary positions restart at 0 on each cp rank" if restarted and every else "wrong rotary positions"
    if not set(wrong) & set(trial.first_stages()):
        what = "later pipeline stages use other rotary positions than the first"
    return Cause("positions", what, hint=text)


def _positions_by_layer(trial: Trial, step: int) -> dict[int, np.ndarray]:
    """[positions], put together from the cp ranks of the first of all replicas."""
    found: dict[int, np.ndarray] = {}
    length = trial.case.seq_len(step)
    for rank in sorted(trial.ranks, reverse=True):
        given = next((record.positions for record in trial.ranks[rank].steps if record.step == step), ())
        for stage in trial.plan.stages[rank]:
            for layer in layers_of_stage(trial.case, stage):
                row = found.setdefault(layer, np.arange(length))
                if len(given) == 1:
                    row[positions(trial.case, rank, length)] = given[0].reshape(-1, given[0].shape[-1])[0]
    return found


def _turned_by(by_step: dict[int, dict[int, np.ndarray]], trial: Trial) -> Trial:
    from harness.reference.spellings import turned_by

    return another_reference(trial, altered=turned_by(by_step))
