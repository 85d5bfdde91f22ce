"""Between steps a rank keeps the bytes of its slices and no more: parameters, gradients and optimizer state.

The plan allows the padding of uneven chunks. A DTensor's gradient that clipping or the optimizer is yet to cut may be larger
than the slice. Gradients may be freed; AdamW's state is two numbers a parameter, Muon's one.
When training has ended, no copies of weights or gradients are kept anywhere in the process. These are floating-point tensors
of the shape of a parameter or of the rank's slice of one, and flat buffers. Allowed are the buckets in which DDP reduces
gradients, and as much as tables of positions take, which may have such a shape. Other tensors (a mask, logits) are the
trainer's business. So is what a pipeline's stages hand on: it has a parameter's shape by chance where samples lie end to end
in a row. But nothing grows from step to step, whatever its shape, except single numbers. Within a step there are copies of
no more weights at once than of two parameters, also of those made before its forward pass. No autograd graph that backward
retains lives on in the next forward pass. What a case or an adapter allows in addition is added, and the report states it.
"""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

from harness.core.case.case import Case
from harness.core.evidence.records import HeldTensor, RankEvidence
from harness.core.evidence.text import count_text
from harness.core.judge.explained import (
    ExplainedDifference,
    allowances_text,
    allowed_bytes,
    explained_total,
    without_allowances_of_kind,
)
from harness.core.judge.finding import Finding, Limit
from harness.core.judge.result import Result, Verdict, verdict_of
from harness.core.judge.trial import Trial
from harness.core.judge.unsettled import partial_gradient_bytes
from harness.core.plan.memory import muon_bytes
from harness.core.plan.slices import BYTES, numel

STAGE = "structure"
NEEDS = frozenset({"structure", "slices", "sizes"})

BEFORE_FORWARD = "before forward"
"""Stands for a phase: copies that were there when a step began, and were given up in it."""
STATE_COPIES = {"adamw": 2, "sgd": 0, "muon": 2}
UNACCOUNTED = "unaccounted tensors after the last step"
BUCKET_WRAPPERS = ("ddp", "replicate")
"""Wrappers that reduce gradients in buckets, which they keep."""


def check(trial: Trial) -> Result:
    """Return the result, with findings on what a rank kept and copied beyond the plan. UNKNOWN if that was not observed.

    If the plan is not exact, only the most bytes of parameters, gradients and optimizer state are judged.
    """
    if not trial.plan.is_exact:
        return _judge_most_bytes(trial)
    findings, examined = [], 0
    for rank, evidence in sorted(trial.ranks.items()):
        wanted = planned_bytes_by_kind(trial, rank)
        examined += len(evidence.steps) * len(wanted)
        findings += _memory_findings(evidence, wanted)
        findings += (
            _unaccounted_memory_findings(trial, rank)
            + _growth_findings(trial, rank)
            + _copy_findings(trial, rank)
            + _retained_graph_findings(evidence)
        )
        examined += sum(len(measurements) for measurements in (kept_bytes_by_step(evidence), copies_at_once(evidence)))
    if findings:
        return verdict_of("memory", findings, examined, note=_text_of_allowances(trial))
    if unlooked := _unmeasured_steps(trial):
        note = f"what rank {unlooked[0][0]} holds after step {unlooked[0][1]} was not observed: no optimizer stepped"
        return Result("memory", Verdict.UNKNOWN, examined, note=note)
    unseen = [rank for rank, evidence in sorted(trial.ranks.items()) if evidence.held is None]
    if unseen:
        note = f"what rank {unseen[0]} keeps besides parameters, gradients and optimizer state was not observed"
        return Result("memory", Verdict.UNKNOWN, examined, note=note)
    return verdict_of("memory", findings, examined, note=_text_of_allowances(trial))


def _unmeasured_steps(trial: Trial) -> list[tuple[int, int]]:
    """Return ranks and steps without a measurement: memory is measured as an optimizer has stepped."""
    return [
        (rank, step.step)
        for rank, evidence in sorted(trial.ranks.items())
        for step in evidence.steps
        if "parameters" not in step.memory
    ]


def planned_bytes_by_kind(trial: Trial, rank: int) -> dict[str, tuple[int, int]]:
    """Return the least and the most bytes that a rank holds between steps, by kind."""
    smallest, largest = trial.plan.parameter_bytes[rank]
    copies = STATE_COPIES[trial.case.training.optimizer] + trial.assumption.optimizer.copies
    muon_saving = muon_bytes(trial.case, trial.plan.slices[rank])
    _, gradients = trial.plan.gradient_bytes.get(rank, (smallest, largest))
    of_state = trial.plan.state_bytes.get(rank, (smallest, largest))
    return {
        "parameters": (smallest, largest + explained_total(allowed_bytes(trial, rank, "gathered"))),
        "gradients": (0, gradients + trial.plan.gradient_spare.get(rank, 0)),
        "optimizer_state": (copies * of_state[0] - muon_saving, copies * of_state[1] - muon_saving),
    }


def _memory_findings(evidence: RankEvidence, wanted: dict[str, tuple[int, int]]) -> list[Finding]:
    """Return a finding for each step and kind whose bytes are not within the plan's. What was not looked at is left out.

    wanted: kind -> the least and the most bytes.
    """
    findings = []
    for step in evidence.steps:
        for kind, (low, high) in wanted.items():
            held_bytes = step.memory.get(kind)
            if kind == "gradients":
                high += partial_gradient_bytes(step)
            if held_bytes is not None and not low <= held_bytes <= high:
                expected = low if low == high else Limit(low, high)
                subject: dict[str, Any] = {"step": step.step, "quantity": kind, "unit": "bytes"}
                findings.append(Finding.at(evidence.rank, expected, held_bytes, **subject))
    return findings


def _judge_most_bytes(trial: Trial) -> Result:
    """Return the result, with findings where parameters, gradients or optimizer state are larger than the slices allow.

    Parameters may not be smaller, either. The plan of a layout does not state which of them have gradients and state, nor what
    else
    a job keeps. The state is judged if all optimizers are of torch's classes that are known. UNKNOWN if no optimizer stepped.
    """
    findings, examined = [], 0
    copies = _most_state_copies(trial)
    for rank, evidence in sorted(trial.ranks.items()):
        smallest, largest = trial.plan.parameter_bytes[rank]
        wanted = {"parameters": (smallest, largest), "gradients": (0, largest)}
        wanted |= {} if copies is None else {"optimizer_state": (0, copies * largest)}
        examined += len(evidence.steps) * len(wanted)
        findings += _memory_findings(evidence, wanted)
    if (unlooked := _unmeasured_steps(trial)) and not findings:
        rank, step = unlooked[0]
        return Result("memory", Verdict.UNKNOWN, examined, note=f"rank {rank}, step {step}: no optimizer stepped")
    return verdict_of("memory", findings, examined, note="other tensors are not recorded")


def _most_state_copies(trial: Trial) -> int | None:
    """Return how many numbers a parameter the optimizers that were seen keep at most.

    None if one is of a class that is not known, or none was seen.
    """
    counts = {_state_copies_of(text) for summary in trial.run.summaries.values() for text in summary.modules.optimizers}
    return max((count or 0 for count in counts), default=None) if None not in counts else None


def _state_copies_of(text: str) -> int | None:
    """Return how many numbers a parameter an optimizer keeps, from the text of its settings; None for an unknown class."""
    if text.startswith(("Adam(", "AdamW(")):
        return 3 if re.search("amsgrad [^,)]*True", text) else 2
    return (1 if "momentum 0," not in f"{text}," else 0) if text.startswith("SGD(") else None


def most_kept_bytes(trial: Trial, rank: int) -> int:
    """Return the most bytes that may be kept when training has ended."""
    return explained_total(explained_kept(trial, rank))


def spare_bytes(trial: Trial, rank: int) -> int:
    """Return the bytes that the plan explains of what is kept when training has ended."""
    return explained_total(without_allowances_of_kind(explained_kept(trial, rank), "kept"))


def explained_kept(trial: Trial, rank: int) -> list[ExplainedDifference]:
    """Return what may be kept when training has ended.

    Around a single rank, too, DDP has its buckets, though no case requests it there.
    """
    requested = trial.case.wrapper in BUCKET_WRAPPERS
    unrequested = not requested and any(
        wrapper.kind in BUCKET_WRAPPERS for wrapper in trial.ranks[rank].structure.values()
    )
    buckets = trial.plan.parameter_bytes[rank][0] if unrequested else 0
    return [
        ExplainedDifference("kept", trial.plan.spare_bytes[rank]),
        ExplainedDifference("kept", buckets),
        ExplainedDifference("kept", staged_bytes(trial, rank)),
        *allowed_bytes(trial, rank, "kept"),
    ]


def staged_bytes(trial: Trial, rank: int) -> int:
    """Return the bytes that a save in the background copies first: parameters and optimizer state, until they are written."""
    if not trial.case.features.async_save:
        return 0
    return sum(planned_bytes_by_kind(trial, rank)[kind][1] for kind in ("parameters", "optimizer_state"))


def _text_of_allowances(trial: Trial) -> str:
    """Return what is allowed to be kept and copied, and which of it nothing uses."""
    kept = False
    copied = False
    for rank, evidence in trial.ranks.items():
        bytes_of_copies = sum(tensor.bytes for tensor in possible_copies(trial, rank))
        kept |= bytes_of_copies > spare_bytes(trial, rank)
        copied |= any(size > copied_by_plan(trial, rank, phase, step) for step, phase, size in copies_at_once(evidence))
    return allowances_text(trial, {"kept": lambda _: kept, "copied": lambda _: copied})


def _unaccounted_memory_findings(trial: Trial, rank: int) -> list[Finding]:
    """Return the finding that more is kept after training than the plan and allowances explain; else nothing."""
    copies, limit = possible_copies(trial, rank), most_kept_bytes(trial, rank)
    if not has_unaccounted_tensors(trial, rank):
        return []
    shown = ", ".join(f"{tensor.dtype} {list(tensor.shape)}" for tensor in copies[:3])
    note = f"{count_text(len(copies), 'tensor')}: {shown}{', ..' * (len(copies) > 3)}"
    total = sum(tensor.bytes for tensor in copies)
    return [Finding.at(rank, Limit(most=limit), total, quantity=UNACCOUNTED, unit="bytes", note=note)]


def has_unaccounted_tensors(trial: Trial, rank: int) -> bool:
    """Return whether a rank keeps more after training than the plan and allowances explain."""
    return sum(tensor.bytes for tensor in possible_copies(trial, rank)) > most_kept_bytes(trial, rank)


def kept_bytes_by_step(evidence: RankEvidence) -> list[tuple[int, int]]:
    """Return, by step, the bytes of tensors of more than one number that lived on when it was over, where measured."""
    return [
        (step.step, sum(_without_single_numbers(step.kept).values()))
        for step in evidence.steps
        if step.kept is not None
    ]


def _without_single_numbers(kept: dict[str, int]) -> dict[str, int]:
    """Return bytes by "dtype shape". A list of losses grows, and may."""
    return {key: size for key, size in kept.items() if set(key.partition(" ")[2].strip("[]").split(", ")) - {"", "1"}}


def growth_per_step(evidence: RankEvidence) -> float:
    """Return how many bytes more are kept after each step, the least of all intervals looked at; 0.0 if there are not two.

    A cache that fills once grows in one interval, a buffer that is filled anew in none.
    """
    kept_by_step = kept_bytes_by_step(evidence)
    rates = [(later - sooner) / (end - begin) for (begin, sooner), (end, later) in itertools.pairwise(kept_by_step)]
    return max(0.0, min(rates)) if len(rates) > 1 else 0.0


def grown_tensors(evidence: RankEvidence) -> dict[str, int]:
    """Return, by "dtype shape", how many bytes more are kept after the last step than after the first, most first.

    Single numbers are left out. Raises ValueError if fewer than two steps were looked at.
    """
    first, *_, last = [_without_single_numbers(step.kept) for step in evidence.steps if step.kept is not None]
    growth_by_tensor = {key: size - first.get(key, 0) for key, size in last.items() if size > first.get(key, 0)}
    return dict(sorted(growth_by_tensor.items(), key=lambda item: -item[1]))


def unwaited_growth(evidence: RankEvidence) -> int:
    """Return how many functional collectives were never waited for, first step to last, where each step brought more.

    0 where some step brought none, or torch does not count them.
    """
    counts = [step.unwaited for step in evidence.steps if step.unwaited is not None]
    return (
        counts[-1] - counts[0] if all(later > sooner for sooner, later in itertools.pairwise(counts)) and counts else 0
    )


def _growth_findings(trial: Trial, rank: int) -> list[Finding]:
    """Return the finding that more is kept after each step, beyond the bytes of tables of positions; else nothing."""
    evidence, limit = trial.ranks[rank], trial.plan.table_bytes
    if (rate := growth_per_step(evidence)) <= limit:
        return []
    kept = kept_bytes_by_step(evidence)
    note = f"steps {kept[0][0]} to {kept[-1][0]}: {', '.join(list(grown_tensors(evidence))[:3])}"
    if never_waited := unwaited_growth(evidence):
        note += f"; torch keeps the results of {never_waited} functional collectives that nothing waited for"
    return [
        Finding.at(
            rank, Limit(most=limit), math.ceil(rate), quantity="retained more after each step", unit="bytes", note=note
        )
    ]


def _retained_graph_findings(evidence: RankEvidence) -> list[Finding]:
    """Return a finding for each step in which graphs that backward retained lived on."""
    retained = [(step.step, step.graphs_retained) for step in evidence.steps if step.graphs_retained]
    name = "autograd graphs that live on in the next forward pass"
    return [Finding.at(evidence.rank, 0, count, step=step, quantity=name) for step, count in retained]


def copies_at_once(evidence: RankEvidence) -> list[tuple[int, str, int]]:
    """Return (step, phase, bytes) of copies of weights, the most at once; a step without copies has 0 bytes in no phase.

    Steps that were not looked at are left out.
    """
    copies = []
    for step in evidence.steps:
        if step.copied is not None:
            copies += [(step.step, phase, size) for phase, size in step.copied.items()] or [(step.step, "", 0)]
    return copies


def most_copied_bytes(trial: Trial, rank: int, phase: str, step: int) -> int:
    """Return the most bytes that may be copied at once."""
    return explained_total(explained_copied(trial, rank, phase, step))


def copied_by_plan(trial: Trial, rank: int, phase: str, step: int) -> int:
    """Return the bytes that may be copied without an allowance for copies."""
    return explained_total(without_allowances_of_kind(explained_copied(trial, rank, phase, step), "copied"))


def explained_copied(trial: Trial, rank: int, phase: str, step: int) -> list[ExplainedDifference]:
    """Return what may be copied at once.

    It is twice the largest parameter: who copies one after the other has two while the second is made. Outside of forward and
    backward, where nothing is gathered, it is twice the largest slice. What is written in the background is copied first.
    """
    inside = phase in ("forward", "backward", "pipeline")
    parts = trial.plan.slices[rank]
    largest = max(math.prod(trial.plan.shapes[fqn]) if inside else numel(part) for fqn, part in parts.items())
    saving = staged_bytes(trial, rank) if step > (trial.case.saved_step or 0) else 0
    explained = [
        ExplainedDifference("copied", 2 * largest * BYTES[trial.case.training.dtype]),
        ExplainedDifference("copied", saving),
        *allowed_bytes(trial, rank, "copied"),
    ]
    if phase == BEFORE_FORWARD:
        explained += allowed_bytes(trial, rank, "kept")  # which may be replaced in each step
    return explained


def excessive_copies(trial: Trial, rank: int) -> list[tuple[int, int, str]]:
    """Return (bytes, step, phase) where more weights are copied at once than may be, most first."""
    copies = copies_at_once(trial.ranks[rank])
    return sorted(
        ((size, step, phase) for step, phase, size in copies if size > most_copied_bytes(trial, rank, phase, step)),
        reverse=True,
    )


def _copy_findings(trial: Trial, rank: int) -> list[Finding]:
    """Return a finding for each step and phase in which more weights are copied at once than may be."""
    return [
        Finding.at(
            rank,
            Limit(most=most_copied_bytes(trial, rank, phase, step)),
            size,
            step=step,
            phase=phase,
            quantity="copies of weights at once",
            unit="bytes",
            note="two may be there at a time",
        )
        for size, step, phase in excessive_copies(trial, rank)
    ]


def possible_copies(trial: Trial, rank: int) -> list[HeldTensor]:
    """Return the unaccounted tensors that may hold weights or gradients: flat ones, and those of a parameter's shape.

    A single number may not, nor what a pipeline's stage hands on.
    """
    local_shapes = {tensor.value.shape for tensor in trial.ranks[rank].parameters}
    shapes = local_shapes | set(trial.case.model.parameter_shapes().values())
    shapes = (shapes | {shape[::-1] for shape in shapes}) - _stage_output_shapes(trial.case)
    held_tensors = trial.ranks[rank].held or ()
    return [
        held_tensor
        for held_tensor in held_tensors
        if math.prod(held_tensor.shape) > 1 and (len(held_tensor.shape) == 1 or tuple(held_tensor.shape) in shapes)
    ]


def _stage_output_shapes(case: Case) -> set[tuple[int, ...]]:
    """Return the shapes of what pipeline stages hand on; empty without pp.

    These are [tokens of a microbatch, dim], and with sequence parallel a tp rank's part of it.
    """
    lengths = {case.seq_len(step) // case.dims.cp for step in case.steps} if case.dims.pp > 1 else set()
    return {(case.local_batch * length // ways, case.model.dim) for length in lengths for ways in (1, case.dims.tp)}
