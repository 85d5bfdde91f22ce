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

from harness.core.evidence.checkpoint_index import TIED, Checkpoint, SavedTensor
from harness.core.judge.finding import Finding, Limit
from harness.core.judge.result import Result, Verdict, not_applicable, verdict_of
from harness.core.judge.trial import Trial

STAGE = "data"
NEEDS = frozenset({"checkpoint"})

Key = tuple[str, str]
"""What it is (parameter, or the optimizer's name for it) and the parameter's fqn."""

PARAMETER = "parameter"
SMALL = 16 * 1024


def check(trial: Trial) -> Result:
    if trial.case.saved_step is None:
        return not_applicable("checkpoint", "this launch writes none")
    held = trial.run.checkpoint
    if held is None or held.unread:
        return Result("checkpoint", Verdict.UNKNOWN, note=held.unread if held else "what was saved was not examined")
    findings = [*_beyond(trial, held), *_wrong(trial, held)]
    return verdict_of("checkpoint", findings, examined=len(held.tensors))


def wanted(trial: Trial) -> dict[Key, set[str]]:
    """What should be saved, with the types it may have: a bfloat16 is stored as float32 in evidence."""
    types: dict[Key, set[str]] = defaultdict(set)
    for evidence in trial.ranks.values():
        own = {tensor.fqn: tensor.dtype for tensor in evidence.parameters}
        for fqn, dtype in own.items():
            types[PARAMETER, fqn].add(dtype)
        for step in evidence.steps:
            for fqn, state in step.optimizer_state.items() if step.step == trial.case.saved_step else ():
                for name, value in state.items():
                    narrow = {own[fqn]} if own.get(fqn) == "bfloat16" and value.dtype == "float32" else set()
                    types[name, fqn] |= {str(value.dtype), *narrow} if value.ndim else set()
    return {key: names for key, names in types.items() if names}


def saved(trial: Trial, held: Checkpoint) -> dict[Key, list[SavedTensor]]:
    """The tensors of floating-point numbers that are about a parameter, by what they are taken for."""
    names = {name for name, _ in wanted(trial)} - {PARAMETER}
    found: dict[Key, list[SavedTensor]] = defaultdict(list)
    for tensor in held.tensors:
        if tensor.fqn and _counts(tensor):
            found[next((name for name in names if name in tensor.name.split(".")), PARAMETER), tensor.fqn].append(
                tensor
            )
    return dict(found)


def may_be(trial: Trial, key: Key) -> int:
    """How many tensors; a tied weight may be saved under both of its names."""
    return int(key in wanted(trial) or (trial.case.model.tied_embeddings and key == (PARAMETER, TIED)))


def unknown(trial: Trial, held: Checkpoint) -> list[SavedTensor]:
    """Tensors of floating-point numbers that are about no parameter of the model."""
    return [tensor for tensor in held.tensors if not tensor.fqn and _counts(tensor)]


def _counts(tensor: SavedTensor) -> bool:
    return "float" in tensor.dtype and math.prod(tensor.shape) > 1


def _beyond(trial: Trial, held: Checkpoint) -> Iterator[Finding]:
    """More than there should be."""
    for (name, fqn), tensors in saved(trial, held).items():
        if len(tensors) > (most := may_be(trial, (name, fqn))):
            seen = ", ".join(tensor.name for tensor in tensors)
            what: dict[str, Any] = {"kind": "parameter", "name": fqn, "quantity": name, "unit": "tensors"}
            yield Finding(**what, expected=most, observed=len(tensors), note=seen)
    for tensor in unknown(trial, held):
        seen = f"{tensor.dtype} {tensor.shape}"
        yield Finding(kind="file", name=tensor.name, expected="a parameter or its optimizer state", observed=seen)
    for name, size in (held.objects or {}).items():
        if size > SMALL:
            yield Finding(kind="file", name=name, expected=Limit(most=SMALL), observed=size, unit="bytes")
    if held.unindexed > (most := SMALL * trial.case.dims.world_size):
        limit = Limit(most=most)
        yield Finding(
            kind="file", name="files outside the index", expected=limit, observed=held.unindexed, unit="bytes"
        )


def _wrong(trial: Trial, held: Checkpoint) -> Iterator[Finding]:
    """What is lacking, not whole, stored more than once, or of another type."""
    found, shapes = saved(trial, held), trial.case.model.parameter_shapes()
    for (name, fqn), types in wanted(trial).items():
        if (name, fqn) not in found:
            yield Finding(kind="parameter", name=fqn, quantity=name, expected="saved", observed="missing")
        for tensor in found.get((name, fqn), ()):
            if tensor.shape != shapes[fqn]:
                yield Finding(**_of(name, fqn, tensor), expected=shapes[fqn], observed=tensor.shape, unit="shape")
            elif tensor.numbers != math.prod(tensor.shape):
                elements = math.prod(tensor.shape)
                yield Finding(**_of(name, fqn, tensor), expected=elements, observed=tensor.numbers, unit="elements")
            if tensor.dtype not in types:
                wanted_types = " or ".join(sorted(types))
                yield Finding(**_of(name, fqn, tensor), expected=wanted_types, observed=tensor.dtype, unit="dtype")


def _of(name: str, fqn: str, tensor: SavedTensor) -> dict[str, Any]:
    """Return what a finding is about."""
    return {"kind": "parameter", "name": fqn, "quantity": name, "note": f"saved as {tensor.name}"}
