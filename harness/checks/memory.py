"""Between steps a rank keeps the bytes of its slices and no more: parameters, gradients and optimizer state.

The plan allows the padding of uneven chunks. Gradients may be freed; AdamW's state is two numbers a parameter. When training
has ended, no copies of weights or gradients are kept anywhere in the process: tensors of the shape of a parameter, or of the
rank's slice of one, and flat buffers, of floating-point numbers. Allowed are the buckets in which DDP reduces gradients, and
as much as tables of positions take, which may have such a shape. Other tensors (a mask, logits) are the trainer's business,
and so is what a pipeline's stages hand on, which has a parameter's shape by chance where samples lie end to end in a row.
"""

from __future__ import annotations

import math

from harness.case import Case
from harness.checks import verdict_of
from harness.evidence import HeldTensor
from harness.trial import Finding, Result, Trial, Verdict, bytes_text

STAGE = "structure"

COPIES = {"adamw": 2, "sgd": 0}


def check(trial: Trial) -> Result:
    findings, examined = [], 0
    copies = COPIES[trial.case.training.optimizer]
    for rank, evidence in sorted(trial.ranks.items()):
        least, most = trial.plan.parameter_bytes[rank]
        wanted = {"parameters": (least, most), "gradients": (0, most)}
        wanted["optimizer_state"] = (copies * least, copies * most)
        for step in evidence.steps:
            for kind, (low, high) in wanted.items():
                examined += 1
                held = step.memory.get(kind, 0)
                if not low <= held <= high:
                    planned = bytes_text(low) if low == high else f"{bytes_text(low)} to {bytes_text(high)}"
                    findings.append(Finding(f"rank {rank}, step {step.step}, {kind}", planned, bytes_text(held)))
        findings += _beside(trial, rank)
    unseen = [rank for rank, evidence in sorted(trial.ranks.items()) if evidence.held is None]
    if unseen and not findings:
        note = f"nobody looked what rank {unseen[0]} keeps besides parameters, gradients and optimizer state"
        return Result("memory", Verdict.UNKNOWN, examined, note=note)
    return verdict_of("memory", findings, examined)


def _beside(trial: Trial, rank: int) -> list[Finding]:
    held, most = copies_kept(trial, rank), trial.plan.spare_bytes[rank]
    if not kept_beside(trial, rank):
        return []
    shown = ", ".join(f"{tensor.dtype} {list(tensor.shape)}" for tensor in held[:3])
    observed = (
        f"{bytes_text(sum(tensor.bytes for tensor in held))} in {len(held)} tensors: {shown}{', ..' * (len(held) > 3)}"
    )
    return [Finding(f"rank {rank}, after the last step, beside them", f"at most {bytes_text(most)}", observed)]


def kept_beside(trial: Trial, rank: int) -> bool:
    return sum(tensor.bytes for tensor in copies_kept(trial, rank)) > trial.plan.spare_bytes[rank]


def copies_kept(trial: Trial, rank: int) -> list[HeldTensor]:
    """What may hold weights or gradients; one number may not."""
    own = {tensor.value.shape for tensor in trial.ranks[rank].parameters}
    shapes = own | set(trial.case.model.parameter_shapes().values())
    shapes = (shapes | {shape[::-1] for shape in shapes}) - _handed_on(trial.case)
    held = trial.ranks[rank].held or ()
    return [t for t in held if math.prod(t.shape) > 1 and (len(t.shape) == 1 or tuple(t.shape) in shapes)]


def _handed_on(case: Case) -> set[tuple[int, ...]]:
    """[tokens of a microbatch, dim], and with sequence parallel a tp rank's part of it."""
    lengths = {case.seq_len(step) // case.dims.cp for step in case.steps} if case.dims.pp > 1 else set()
    return {(case.local_batch * length // ways, case.model.dim) for length in lengths for ways in (1, case.dims.tp)}
