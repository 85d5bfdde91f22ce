"""A checkpoint holds each parameter and its optimizer state once, whole, in the dtype of training, and no other large data.

What it should hold is what the ranks held when it was written. It may also have single numbers, integers and small objects:
counters, rates, generator states. The check reads its index, not its numbers; the check `resume` compares those. Entries below
16 KiB that are not floating-point tensors are not examined.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from harness.core.evidence.checkpoint_index import TIED_OUTPUT_FQN, Checkpoint, SavedTensor
from harness.core.judge.finding import Finding, Limit
from harness.core.judge.result import Result, Verdict, not_applicable, verdict_of
from harness.core.judge.trial import Trial

STAGE = "data"
NEEDS = frozenset({"checkpoint"})

TensorKey = tuple[str, str]
"""The quantity (parameter, or the optimizer's name for its state) and the parameter's fqn."""

PARAMETER = "parameter"
SMALL_BYTES = 16 * 1024


def check(trial: Trial) -> Result:
    """Judge the index of the checkpoint that this launch wrote.

    UNKNOWN if it was not read; NOT APPLICABLE if it writes none.
    """
    if trial.case.saved_step is None:
        return not_applicable("checkpoint", "this launch writes none")
    checkpoint = trial.run.checkpoint
    if checkpoint is None or checkpoint.unread:
        note = checkpoint.unread if checkpoint else "what was saved was not examined"
        return Result("checkpoint", Verdict.UNKNOWN, note=note)
    findings = [*_excess_findings(trial, checkpoint), *_tensor_findings(trial, checkpoint)]
    return verdict_of("checkpoint", findings, examined=len(checkpoint.tensors))


def expected_tensors(trial: Trial) -> dict[TensorKey, set[str]]:
    """Return, by quantity and fqn, each tensor that should be saved, with the names of the dtypes that it may have.

    Single numbers of the optimizer are left out. Evidence stores a bfloat16 as float32, so a state in float32 of a
    bfloat16 parameter may have either.
    """
    types: dict[TensorKey, set[str]] = defaultdict(set)
    for evidence in trial.ranks.values():
        own_dtypes = {tensor.fqn: tensor.dtype for tensor in evidence.parameters}
        for fqn, dtype in own_dtypes.items():
            types[PARAMETER, fqn].add(dtype)
        for step in evidence.steps:
            if step.step != trial.case.saved_step:
                continue
            for fqn, state in step.optimizer_state.items():
                for name, value in state.items():
                    dtypes: set[str] = {str(value.dtype)} if value.ndim else set()
                    if value.ndim and value.dtype == "float32" and own_dtypes.get(fqn) == "bfloat16":
                        dtypes.add("bfloat16")
                    types[name, fqn] |= dtypes
    return {key: names for key, names in types.items() if names}


def saved_tensors_by_key(trial: Trial, checkpoint: Checkpoint) -> dict[TensorKey, list[SavedTensor]]:
    """Return, by quantity and fqn, the saved floating-point tensors that belong to a parameter.

    Single numbers are left out. The quantity is an optimizer's state if a part of the saved name is that state's name,
    otherwise the parameter.
    """
    names = {name for name, _ in expected_tensors(trial)} - {PARAMETER}
    by_key: dict[TensorKey, list[SavedTensor]] = defaultdict(list)
    for tensor in checkpoint.tensors:
        if tensor.fqn and _is_examined(tensor):
            name = next((name for name in names if name in tensor.name.split(".")), PARAMETER)
            by_key[name, tensor.fqn].append(tensor)
    return dict(by_key)


def count_allowed_tensors(trial: Trial, key: TensorKey) -> int:
    """Return how many tensors of this quantity and parameter a checkpoint may have: 1 or 0.

    A tied weight may be saved under both of its names.
    """
    is_tied_weight = trial.case.model.tied_embeddings and key == (PARAMETER, TIED_OUTPUT_FQN)
    return int(key in expected_tensors(trial) or is_tied_weight)


def tensors_of_no_parameter(trial: Trial, checkpoint: Checkpoint) -> list[SavedTensor]:
    """Return the saved floating-point tensors that belong to no parameter of the model. Single numbers are left out."""
    return [tensor for tensor in checkpoint.tensors if not tensor.fqn and _is_examined(tensor)]


def _is_examined(tensor: SavedTensor) -> bool:
    """Return whether a saved tensor has floating-point numbers, and more than one."""
    return "float" in tensor.dtype and math.prod(tensor.shape) > 1


def _excess_findings(trial: Trial, checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield a finding for each tensor, object or set of files of a checkpoint that is too much or too large.

    Objects up to SMALL_BYTES are allowed, and as many bytes outside the index for each rank.
    """
    for (name, fqn), tensors in saved_tensors_by_key(trial, checkpoint).items():
        allowed_count = count_allowed_tensors(trial, (name, fqn))
        if len(tensors) > allowed_count:
            names = ", ".join(tensor.name for tensor in tensors)
            subject: dict[str, Any] = {"kind": "parameter", "name": fqn, "quantity": name, "unit": "tensors"}
            yield Finding(**subject, expected=allowed_count, observed=len(tensors), note=names)
    for tensor in tensors_of_no_parameter(trial, checkpoint):
        observed = f"{tensor.dtype} {tensor.shape}"
        yield Finding(kind="file", name=tensor.name, expected="a parameter or its optimizer state", observed=observed)
    for name, size in (checkpoint.objects or {}).items():
        if size > SMALL_BYTES:
            yield Finding(kind="file", name=name, expected=Limit(most=SMALL_BYTES), observed=size, unit="bytes")
    allowed_bytes = SMALL_BYTES * trial.case.dims.world_size
    if checkpoint.unindexed > allowed_bytes:
        limit = Limit(most=allowed_bytes)
        yield Finding(
            kind="file", name="files outside the index", expected=limit, observed=checkpoint.unindexed, unit="bytes"
        )


def _tensor_findings(trial: Trial, checkpoint: Checkpoint) -> Iterator[Finding]:
    """Yield findings of tensors that are lacking, not whole, stored more than once, or of another dtype."""
    saved_tensors = saved_tensors_by_key(trial, checkpoint)
    shapes = trial.case.model.parameter_shapes()
    for (name, fqn), types in expected_tensors(trial).items():
        if (name, fqn) not in saved_tensors:
            yield Finding(kind="parameter", name=fqn, quantity=name, expected="saved", observed="missing")
        for tensor in saved_tensors.get((name, fqn), ()):
            if tensor.shape != shapes[fqn]:
                yield Finding(
                    **_subject_of(name, fqn, tensor), expected=shapes[fqn], observed=tensor.shape, unit="shape"
                )
            elif tensor.numbers != math.prod(tensor.shape):
                elements = math.prod(tensor.shape)
                yield Finding(
                    **_subject_of(name, fqn, tensor), expected=elements, observed=tensor.numbers, unit="elements"
                )
            if tensor.dtype not in types:
                dtypes_text = " or ".join(sorted(types))
                yield Finding(
                    **_subject_of(name, fqn, tensor), expected=dtypes_text, observed=tensor.dtype, unit="dtype"
                )


def _subject_of(name: str, fqn: str, tensor: SavedTensor) -> dict[str, Any]:
    """Return the fields of a finding that name a saved tensor: kind, name, quantity and note."""
    return {"kind": "parameter", "name": fqn, "quantity": name, "note": f"saved as {tensor.name}"}
