"""Evidence under the reference's names."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TypeVar

from harness.core.evidence.records import RankEvidence, Resumed
from harness.core.evidence.step import StepEvidence

T = TypeVar("T")


def with_reference_names(evidence: RankEvidence, fqn: Callable[[str], str]) -> RankEvidence:
    """Return the evidence with parameters and modules under the names that `fqn` returns. It is called once for each name."""
    fqn = functools.cache(fqn)
    keys = functools.partial(_rename_keys, fqn)
    parameters = tuple(dataclasses.replace(tensor, fqn=fqn(tensor.fqn)) for tensor in evidence.parameters)
    resumed = evidence.resumed and Resumed(keys(evidence.resumed.parameters), keys(evidence.resumed.optimizer_state))
    after_evaluation = tuple(
        dataclasses.replace(after, bytes=keys(after.bytes), gathered=tuple(map(fqn, after.gathered)))
        for after in evidence.after_evaluation
    )
    structure = {
        fqn(module): dataclasses.replace(wrapper, parameters=tuple(map(fqn, wrapper.parameters)))
        for module, wrapper in evidence.structure.items()
    }
    return dataclasses.replace(
        evidence,
        steps=tuple(_step_with_reference_names(step, fqn) for step in evidence.steps),
        parameters=parameters,
        resumed=resumed,
        structure=structure,
        switches=keys(evidence.switches),
        after_evaluation=after_evaluation,
    )


def _step_with_reference_names(step: StepEvidence, fqn: Callable[[str], str]) -> StepEvidence:
    keys = functools.partial(_rename_keys, fqn)
    return dataclasses.replace(
        step,
        gradients=keys(step.gradients),
        unsettled=keys(step.unsettled),
        parameters=keys(step.parameters),
        optimizer_state=keys(step.optimizer_state),
        activity=dataclasses.replace(
            step.activity,
            calls={call._replace(fqn=fqn(call.fqn)): count for call, count in step.activity.calls.items()},
            quantized={
                matmul._replace(fqn=fqn(matmul.fqn)): count for matmul, count in step.activity.quantized.items()
            },
            other_states=keys(step.activity.other_states),
            inputs=keys(step.activity.inputs),
        ),
        changed=None if step.changed is None else keys(step.changed),
        after_forward=tuple(dataclasses.replace(after, bytes=keys(after.bytes)) for after in step.after_forward),
        gathered=None if step.gathered is None else tuple(map(fqn, step.gathered)),
    )


def _rename_keys(fqn: Callable[[str], str], by_name: dict[str, T]) -> dict[str, T]:
    """Return the dict with its keys renamed by `fqn`."""
    return {fqn(name): value for name, value in by_name.items()}
