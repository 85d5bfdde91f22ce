"""After forward each rank keeps of every parameter what the policy keeps and gathers the rest again; after backward, its slice.

What is kept is read from storages at the end of every forward pass; what is gathered again, from the bytes of all_gather
in backward. A unit freed on paper only, whose memory is still there, is a unit that was kept. When the optimizer steps no
unit is gathered: the next forward pass would compute with weights from before the step. After a pass that trains nothing no
backward frees what it left: then a rank has what the policy keeps after forward, and no more.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

from harness.core.evidence.records import RankEvidence
from harness.core.evidence.step import AfterForward
from harness.core.judge import after_evaluation
from harness.core.judge.explained import allowances_of_kind, allowances_text
from harness.core.judge.finding import Finding, Limit, Value
from harness.core.judge.result import Result, Verdict, not_applicable, verdict_of
from harness.core.judge.traffic import (
    TrafficKey,
    collective_finding_fields,
    gathered_after_evaluation,
    observed_bytes_by_collective,
    own_bytes,
    planned_bytes_by_collective,
)
from harness.core.judge.trial import Trial
from harness.core.judge.units_seen import unknown_units_reason
from harness.core.plan.slices import BYTES, numel

STAGE = "structure"
NEEDS = frozenset({"structure", "slices"})
AFTER_FORWARD = "after forward"
AFTER_BACKWARD = "after backward"
AFTER_EVALUATION = "after evaluation"


def check(trial: Trial) -> Result:
    """Return the result, with findings on what a rank kept of parameters after forward, backward and evaluation.

    NOT APPLICABLE if nothing is gathered; UNKNOWN if FSDP's units are not known. If the plan is not exact, only the most bytes
    after forward are judged.
    """
    if not any(trial.plan.after_forward.values()):
        return not_applicable("reshard", f"nothing is gathered: {_why_nothing_is_gathered(trial)}")
    if reason := unknown_units_reason(trial):
        return Result("reshard", Verdict.UNKNOWN, note=reason)
    if not trial.plan.is_exact:
        return _judge_most_bytes(trial)
    findings: list[Finding] = []
    examined = 0
    for rank, evidence in sorted(trial.ranks.items()):
        for step in evidence.steps:
            finding_of = partial(_parameter_finding, rank, step.step)
            recorded = {*itertools.chain.from_iterable(record.bytes for record in step.after_forward)}
            findings += [
                finding_of(fqn, "a record of it", None, AFTER_FORWARD)
                for fqn in _unrecorded_fqns(trial, rank, recorded)
            ]
            for record in step.after_forward:
                examined += len(record.bytes)
                findings += _kept_findings(trial, step.step, rank, record)
            # Where that is allowed, `memory` judges how much it may be, and `traffic` that the next forward gathers it anew.
            may_be_left = bool(allowances_of_kind(trial, "gathered"))
            still_gathered_fqns = [] if may_be_left else gathered_after_backward(trial, evidence, step.step)
            findings += [finding_of(fqn, "freed", "still gathered", AFTER_BACKWARD) for fqn in still_gathered_fqns]
            findings += _gathered_again_findings(trial, evidence, step.step)
        findings += [
            replace(
                _parameter_finding(
                    rank, step, fqn, "freed", state_or_bytes(trial, rank, fqn, held_bytes), AFTER_EVALUATION
                ),
                note=time_after_step(trial, step),
            )
            for step, fqn, held_bytes in left_by_evaluation(trial, rank)
        ]
    findings.sort(key=lambda finding: (finding.ranks, finding.step) != ((0,), 1))
    used = any(gathered_after_backward(trial, trial.ranks[rank], step.step) for rank, step in trial.own_steps())
    allowed = allowances_text(trial, {"gathered": lambda _: used})
    return verdict_of("reshard", findings, examined, "; ".join(filter(None, [_evaluation_note(trial), allowed])))


def _judge_most_bytes(trial: Trial) -> Result:
    """Return the result, with a finding where more is there after forward than wrappers claim; less is not judged.

    The plan of a layout states no passes, and a unit that no pass needed is not there.
    """
    findings: list[Finding] = []
    examined = 0
    for rank, evidence in sorted(trial.ranks.items()):
        for step in evidence.steps:
            for record in step.after_forward:
                examined += len(record.bytes)
                findings += _excess_findings(trial, step.step, rank, record)
                if step.step > 1:
                    findings += _excess_total_findings(trial, step.step, rank, record)
    return verdict_of("reshard", findings, examined)


def _parameter_finding(rank: int, step: int, fqn: str, expected: Value, observed: Value, time: str) -> Finding:
    """Return a finding on the memory of a parameter. time: AFTER_FORWARD, AFTER_BACKWARD or AFTER_EVALUATION."""
    unit = "bytes" if isinstance(observed, int) else ""
    subject: dict[str, Any] = {
        "step": step,
        "kind": "parameter",
        "name": fqn,
        "quantity": f"memory {time}",
        "unit": unit,
    }
    return Finding.at(rank, expected, observed, **subject)


def _total_finding(rank: int, step: int, expected: Value, observed: Value) -> Finding:
    """Return a finding on the memory of all parameters together, in bytes."""
    return Finding.at(
        rank, expected, observed, step=step, quantity=f"memory of all parameters {AFTER_FORWARD}", unit="bytes"
    )


def _kept_finding(trial: Trial, rank: int, step: int, fqn: str, held_bytes: int) -> Finding:
    """Return the finding that a parameter has other bytes after forward than the policy keeps.

    It says "freed" and "gathered" where the bytes are those, and notes a parameter that is gathered with the root's unit.
    """
    planned = trial.plan.after_forward[rank][fqn]
    observed = state_or_bytes(trial, rank, fqn, held_bytes)
    wanted = planned.bytes if isinstance(observed, int) else kept_text(trial, planned.degree)
    root = trial.ranks[rank].structure.get("")
    with_root = root is not None and fqn in root.parameters and observed == "gathered"
    finding = _parameter_finding(rank, step, fqn, wanted, observed, AFTER_FORWARD)
    return replace(finding, note="with the unit of the root") if with_root else finding


def _excess_findings(trial: Trial, step: int, rank: int, record: AfterForward) -> list[Finding]:
    """Return a finding for each parameter of which more bytes are there after forward than the policy keeps."""
    wanted = trial.plan.after_forward[rank]
    return [
        _kept_finding(trial, rank, step, fqn, held_bytes)
        for fqn, held_bytes in record.bytes.items()
        if fqn in wanted and held_bytes > wanted[fqn].bytes
    ]


def _excess_total_findings(trial: Trial, step: int, rank: int, record: AfterForward) -> list[Finding]:
    """Return a finding if the memory behind all parameters is more than wrappers claim.

    No number is planned where some parameters are in no unit. Nor is one in the first step, in which what parameters were made
    from may still be there.
    """
    wanted = trial.plan.after_forward[rank]
    if not record.bytes.keys() <= wanted.keys() or _excess_findings(trial, step, rank, record):
        return []
    largest = (
        sum(bytes_after_forward(trial, rank, fqn) for fqn in record.bytes) + trial.plan.padding_after_forward[rank]
    )
    if record.storage <= largest:
        return []
    return [_total_finding(rank, step, Limit(most=largest), record.storage)]


def _evaluation_note(trial: Trial) -> str:
    """Return a text on what evaluation left gathered, if that is what the policy keeps. Empty if it left nothing."""
    fqns: set[str] = set()
    for rank in trial.ranks:
        fqns.update(fqn for _, fqn, _ in gathered_after_evaluation(trial, rank))
    if not fqns:
        return ""
    return f"evaluation leaves {', '.join(sorted(fqns))} gathered until the next step, as the policy keeps it"


def gathered_after_backward(trial: Trial, evidence: RankEvidence, step: int) -> list[str]:
    """Return the fqns of parameters that are still gathered after the backward pass of a step."""
    gathered = next(({*record.gathered} for record in evidence.steps if record.step == step and record.gathered), set())
    return [fqn for fqn in trial.plan.after_forward[evidence.rank] if fqn in gathered]


def left_by_evaluation(trial: Trial, rank: int) -> list[tuple[int, str, int]]:
    """Return (step before, fqn, bytes that are still there) of parameters of which the policy keeps less after forward."""
    return [
        tensor
        for tensor in gathered_after_evaluation(trial, rank)
        if not after_evaluation.policy_keeps(trial, rank, tensor)
    ]


def time_after_step(trial: Trial, step: int) -> str:
    """Return the time after a step, in words."""
    if step < trial.case.steps[0]:
        return "before the first step"
    return "after the last step" if step >= trial.case.steps[-1] else f"between steps {step} and {step + 1}"


def _why_nothing_is_gathered(trial: Trial) -> str:
    """Return the reason, from the case's wrapper, why no parameter is gathered."""
    wrapper = trial.case.wrapper
    if wrapper is None:
        return "no data parallelism"
    if wrapper in ("zero1", "zero2"):
        return f"wrapper {wrapper} leaves parameters whole"
    return f"wrapper {wrapper}" + (" with one rank a shard group" if wrapper.startswith("fsdp") else " shards nothing")


def _unrecorded_fqns(trial: Trial, rank: int, recorded: set[str]) -> list[str]:
    """Return the parameters that the policy is about, and of which nothing was recorded."""
    return [fqn for fqn in trial.plan.after_forward[rank] if fqn not in recorded]


def _kept_findings(trial: Trial, step: int, rank: int, record: AfterForward) -> list[Finding]:
    """Return findings of a model part after a forward pass: of each parameter, and of the memory behind all of them."""
    wanted = trial.plan.after_forward[rank]
    findings = [
        _kept_finding(trial, rank, step, fqn, held_bytes)
        for fqn, held_bytes in record.bytes.items()
        if fqn in wanted and held_bytes != wanted[fqn].bytes
    ]
    smallest = sum(bytes_after_forward(trial, rank, fqn) for fqn in record.bytes if fqn in wanted)
    largest = smallest + trial.plan.padding_after_forward[rank]
    if not smallest <= record.storage <= largest:
        findings.append(
            _total_finding(rank, step, smallest if smallest == largest else Limit(smallest, largest), record.storage)
        )
    return findings


def bytes_after_forward(trial: Trial, rank: int, fqn: str) -> int:
    """Return the bytes that are kept of a parameter, with those of the rank's own slice if that is something else."""
    planned_slice = trial.plan.after_forward[rank][fqn]
    own_slice_bytes = own_bytes(trial, rank, fqn)
    return (
        planned_slice.bytes
        if planned_slice.degree == trial.plan.shard_degree
        else planned_slice.bytes + own_slice_bytes
    )


def kept_text(trial: Trial, degree: int) -> str:
    """Return the state of a parameter that stays cut over this many ranks, in words."""
    if degree == 1:
        return "gathered"
    return "freed" if degree == trial.plan.shard_degree else f"sharded over {degree} ranks"


def state_or_bytes(trial: Trial, rank: int, fqn: str, held_bytes: int) -> str | int:
    """Return "freed" or "gathered" if a parameter has just these bytes in memory, else the bytes."""
    text = {own_bytes(trial, rank, fqn): "freed", gathered_bytes(trial, rank, fqn): "gathered"}.get(held_bytes)
    return text or held_bytes


def gathered_bytes(trial: Trial, rank: int, fqn: str) -> int:
    """Return the bytes of all slices of a parameter that the ranks of a rank's shard group hold, in the compute dtype.

    With tensor parallel only those of this tp rank. Without a compute dtype it is the dtype of training.
    """
    group = trial.plan.peers(rank, trial.plan.shard_axis)
    size = BYTES[trial.case.training.compute_dtype or trial.case.training.dtype]
    return sum(numel(trial.plan.slices[peer][fqn]) for peer in group) * size


def _gathered_again_findings(trial: Trial, evidence: RankEvidence, step: int) -> list[Finding]:
    """Return findings of bytes gathered again in backward, over the groups in which parameters are sharded."""
    planned_bytes = planned_bytes_by_collective(trial, evidence.rank, step)
    observed_bytes = observed_bytes_by_collective(trial, evidence, step)
    shards = trial.plan.peers(evidence.rank, trial.plan.shard_axis)
    post_forward_axes = [axis for axis in trial.plan.groups if axis.startswith("post_forward")]
    groups = {shards, *(trial.plan.peers(evidence.rank, axis) for axis in post_forward_axes)}
    groups |= {ranks for ranks, op, _ in observed_bytes if op == "all_gather" and set(ranks) < set(shards)}
    keys: list[TrafficKey] = [(ranks, "all_gather", "backward") for ranks in sorted(groups) if len(ranks) > 1]
    return [
        Finding.at(
            evidence.rank,
            planned_bytes.get(key, 0),
            observed_bytes.get(key, 0),
            step=step,
            **collective_finding_fields(trial, key),
            quantity="again",
        )
        for key in keys
        if planned_bytes.get(key, 0) != observed_bytes.get(key, 0)
        if observed_bytes.get(key, 0) - planned_bytes.get(key, 0)
        not in after_evaluation.prefetched_unit_bytes(trial, evidence.rank, step, key)
    ]
