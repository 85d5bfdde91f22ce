"""Conversion of a reference or trial to a trainer's order of entries.

Rows of the reference are put into the order in which a trainer stores them. Tensors become vectors where the plan cuts
flattened parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeVar

import numpy as np

from harness.core.evidence.records import RankEvidence, Resumed, Run
from harness.core.evidence.step import StepEvidence
from harness.core.judge.trial import Trial
from harness.reference import columns
from harness.reference.record import ReferenceRun, ReferenceStep

Step = TypeVar("Step", StepEvidence, ReferenceStep)
State = TypeVar("State", StepEvidence, ReferenceStep, Resumed)
USUAL: Mapping[str, int] = MappingProxyType({})


def flatten_trial(trial: Trial) -> Trial:
    """Return the trial with every tensor of ranks and reference as a vector, if the plan cuts flattened parameters.

    Otherwise the trial itself. Matrices that tp cuts by columns are flattened block by block in the reference.
    """
    if not trial.plan.flat:
        return trial
    run = _flatten_run(trial.run)
    repeat = trial.repeat and _flatten_run(trial.repeat)
    reference = flatten_reference(trial.reference, trial.plan.column_blocks)
    return dataclasses.replace(trial, reference=reference, run=run, repeat=repeat)


def reorder_reference(reference: ReferenceRun, rows: Mapping[str, np.ndarray]) -> ReferenceRun:
    """Return the reference with its weights, gradients, parameters and optimizer state in a trainer's order of rows.

    rows: by fqn, for each row of the trainer's the index of the model's row. Parameters that are not in it stay as they
    are.
    """

    def reorder_arrays(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {fqn: array[rows[fqn]] if fqn in rows else array for fqn, array in arrays.items()}

    def state(fqn: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return a parameter's optimizer state with its rows in the trainer's order."""
        if fqn not in rows:
            return arrays
        return {key: array[rows[fqn]] for key, array in arrays.items()}

    steps = []
    for step in reference.steps:
        reordered_step = dataclasses.replace(
            step,
            gradients=reorder_arrays(step.gradients),
            parameters=reorder_arrays(step.parameters),
            optimizer_state={fqn: state(fqn, arrays) for fqn, arrays in step.optimizer_state.items()},
        )
        steps.append(reordered_step)
    return dataclasses.replace(
        reference, weights=reorder_arrays(reference.weights), steps=tuple(steps), rows=dict(rows)
    )


def flatten_reference(reference: ReferenceRun, blocks: Mapping[str, int] = USUAL) -> ReferenceRun:
    """Return the reference with every array as a vector, as FSDP1 holds slices of flattened units.

    blocks: by fqn, the number of blocks of columns that are flattened one after the other, because each tp rank flattens its
    own block. 1 by default.
    """
    steps = tuple(_flatten_step(step, blocks) for step in reference.steps)
    return dataclasses.replace(reference, weights=_flatten_arrays(reference.weights, blocks), steps=steps)


def _flatten_run(run: Run) -> Run:
    return dataclasses.replace(run, ranks={rank: _flatten_rank(evidence) for rank, evidence in run.ranks.items()})


def _flatten_rank(evidence: RankEvidence) -> RankEvidence:
    """Return the evidence of a rank with parameters, steps and what it resumed as vectors."""
    parameters = tuple(dataclasses.replace(t, value=t.value.ravel()) for t in evidence.parameters)
    steps = tuple(_flatten_step(step) for step in evidence.steps)
    resumed = evidence.resumed and _flatten_state(evidence.resumed)
    return dataclasses.replace(evidence, parameters=parameters, steps=steps, resumed=resumed)


def _flatten_step(step: Step, blocks: Mapping[str, int] = USUAL) -> Step:
    return dataclasses.replace(_flatten_state(step, blocks), gradients=_flatten_arrays(step.gradients, blocks))


def _flatten_state(record: State, blocks: Mapping[str, int] = USUAL) -> State:
    """Return the record with parameters and optimizer state as vectors, by default each as one block.

    A value of the optimizer without dims, as its step counter, stays as it is.
    """
    state: dict[str, dict[str, np.ndarray]] = {}
    for fqn, values in record.optimizer_state.items():
        state[fqn] = {
            key: columns.flatten_by_blocks(value, blocks.get(fqn, 1)) if value.ndim else value
            for key, value in values.items()
        }
    return dataclasses.replace(record, parameters=_flatten_arrays(record.parameters, blocks), optimizer_state=state)


def _flatten_arrays(arrays: dict[str, np.ndarray], blocks: Mapping[str, int]) -> dict[str, np.ndarray]:
    return {fqn: columns.flatten_by_blocks(array, blocks.get(fqn, 1)) for fqn, array in arrays.items()}
