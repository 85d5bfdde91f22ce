"""After forward each rank keeps of every parameter what the policy keeps and gathers the rest again; after backward, its slice.

What is kept is read from storages at the end of every forward pass; what is gathered again, from the bytes of all_gather
in backward. A unit freed on paper only, whose memory is still there, is a unit that was kept. When the optimizer steps no
unit is gathered: the next forward pass would compute with weights from before the step. After a pass that trains nothing no
backward frees what it left: then a rank has what the policy keeps after forward, and no more.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from harness.core.case.allowance import Allowance, said
from harness.core.evidence.records import RankEvidence
from harness.core.evidence.step import AfterForward
from harness.core.judge import after_evaluation
from harness.core.judge.finding import Finding, Limit, Value
from harness.core.judge.result import Result, Verdict, not_applicable, verdict_of
from harness.core.judge.traffic import Key, observed, of_collective, own_bytes, planned, still_gathered
from harness.core.judge.trial import Trial
from harness.core.judge.units_seen import untold_units
from harness.core.plan.slices import BYTES, numel

STAGE = "structure"
NEEDS = frozenset({"structure", "slices"})
AFTER_FORWARD, AFTER_BACKWARD, AFTER_EVALUATION = "after forward", "after backward", "after evaluation"


def check(trial: Trial) -> Result:
    if not any(trial.plan.after_forward.values()):
        return not_applicable("reshard", f"nothing is gathered: {_why_not(trial)}")
    if reason := untold_units(trial):
        return Result("reshard", Verdict.UNKNOWN, note=reason)
    if "declared" not in trial.provided:
        return _at_most(trial)
    findings, examined = [], 0
    for rank, evidence in sorted(trial.ranks.items()):
        for step in evidence.steps:
            here = partial(_of_parameter, rank, step.step)
            recorded = {fqn for record in step.after_forward for fqn in record.bytes}
            findings += [here(fqn, "a record of it", None, AFTER_FORWARD) for fqn in _unrecorded(trial, rank, recorded)]
            for record in step.after_forward:
                examined += len(record.bytes)
                findings += _kept(trial, step.step, rank, record)
            left = [] if gathered_by_choice(trial) else left_by_backward(trial, evidence, step.step)
            findings += [here(fqn, "freed", "still gathered", AFTER_BACKWARD) for fqn in left]
            findings += _gathered_again(trial, evidence, step.step)
        findings += [
            replace(
                _of_parameter(rank, step, fqn, "freed", observed_value(trial, rank, fqn, held), AFTER_EVALUATION),
                note=until(trial, step),
            )
            for step, fqn, held in left_by_evaluation(trial, rank)
        ]
    findings.sort(key=lambda finding: (finding.ranks, finding.step) != ((0,), 1))
    used = any(left_by_backward(trial, trial.ranks[rank], step.step) for rank, step in trial.own_steps())
    allowed = said(dict.fromkeys(gathered_by_choice(trial), used))
    return verdict_of("reshard", findings, examined, "; ".join(filter(None, [_kept_text(trial), allowed])))


def _at_most(trial: Trial) -> Result:
    """Judge a job that declares no passes: no more is there than wrappers claim. A unit that no pass needed is not there."""
    findings, examined = [], 0
    for rank, evidence in sorted(trial.ranks.items()):
        for step in evidence.steps:
            for record in step.after_forward:
                examined += len(record.bytes)
                findings += _more_than_kept(trial, step.step, rank, record)
                if step.step > 1:
                    findings += _more_in_memory(trial, step.step, rank, record)
    return verdict_of("reshard", findings, examined)


def _of_parameter(rank: int, step: int, fqn: str, expected: Value, observed: Value, when: str) -> Finding:
    unit = "bytes" if isinstance(observed, int) else ""
    what: dict[str, Any] = {"step": step, "kind": "parameter", "name": fqn, "quantity": f"memory {when}", "unit": unit}
    return Finding.at(rank, expected, observed, **what)


def _of_all(rank: int, step: int, expected: Value, observed: Value) -> Finding:
    return Finding.at(
        rank, expected, observed, step=step, quantity=f"memory of all parameters {AFTER_FORWARD}", unit="bytes"
    )


def _not_as_kept(trial: Trial, rank: int, step: int, fqn: str, held: int) -> Finding:
    kept, seen = trial.plan.after_forward[rank][fqn], observed_value(trial, rank, fqn, held)
    wanted = kept.bytes if isinstance(seen, int) else kept_text(trial, kept.degree)
    root = trial.ranks[rank].structure.get("")
    with_root = root is not None and fqn in root.parameters and seen == "gathered"
    finding = _of_parameter(rank, step, fqn, wanted, seen, AFTER_FORWARD)
    return replace(finding, note="with the unit of the root") if with_root else finding


def _more_than_kept(trial: Trial, step: int, rank: int, record: AfterForward) -> list[Finding]:
    wanted = trial.plan.after_forward[rank]
    return [
        _not_as_kept(trial, rank, step, fqn, held)
        for fqn, held in record.bytes.items()
        if fqn in wanted and held > wanted[fqn].bytes
    ]


def _more_in_memory(trial: Trial, step: int, rank: int, record: AfterForward) -> list[Finding]:
    """Behind all parameters. Not planned where some are in no unit, nor in the first step, in which what they were made from
    may be there yet."""
    wanted = trial.plan.after_forward[rank]
    if not record.bytes.keys() <= wanted.keys() or _more_than_kept(trial, step, rank, record):
        return []
    most = sum(bytes_after_forward(trial, rank, fqn) for fqn in record.bytes) + trial.plan.padding_after_forward[rank]
    if record.storage <= most:
        return []
    return [_of_all(rank, step, Limit(most=most), record.storage)]


def _kept_text(trial: Trial) -> str:
    """What evaluation left, if it is what the policy keeps."""
    left = sorted({fqn for rank in trial.ranks for _, fqn, _ in still_gathered(trial, rank)})
    return f"evaluation leaves {', '.join(left)} gathered until the next step, as the policy keeps it" if left else ""


def left_by_backward(trial: Trial, evidence: RankEvidence, step: int) -> list[str]:
    """Parameters, of those that a rank gathers, that are still gathered after the backward pass of a step."""
    left = next(({*one.gathered} for one in evidence.steps if one.step == step and one.gathered), set())
    return [fqn for fqn in trial.plan.after_forward[evidence.rank] if fqn in left]


def gathered_by_choice(trial: Trial) -> list[Allowance]:
    """Return the allowances for what is left gathered until the optimizer has stepped. `memory` judges how much that may be,
    `traffic` that the next forward pass gathers it anew."""
    return [one for one in trial.allow if one.what == "gathered"]


def left_by_evaluation(trial: Trial, rank: int) -> list[tuple[int, str, int]]:
    """(step before, parameter, bytes of it still there), of those of which the policy keeps less after forward."""
    return [left for left in still_gathered(trial, rank) if not after_evaluation.keeps(trial, rank, left)]


def until(trial: Trial, step: int) -> str:
    """The time after a step, in words."""
    if step < trial.case.steps[0]:
        return "before the first step"
    return "after the last step" if step >= trial.case.steps[-1] else f"between steps {step} and {step + 1}"


def _why_not(trial: Trial) -> str:
    wrapper = trial.case.wrapper
    if wrapper is None:
        return "no data parallelism"
    if wrapper in ("zero1", "zero2"):
        return f"wrapper {wrapper} leaves parameters whole"
    return f"wrapper {wrapper}" + (" with one rank a shard group" if wrapper.startswith("fsdp") else " shards nothing")


def _unrecorded(trial: Trial, rank: int, recorded: set[str]) -> list[str]:
    return [fqn for fqn in trial.plan.after_forward[rank] if fqn not in recorded]


def _kept(trial: Trial, step: int, rank: int, record: AfterForward) -> list[Finding]:
    """One model part after one forward pass: each parameter, and the memory behind all of them."""
    wanted = trial.plan.after_forward[rank]
    findings = [
        _not_as_kept(trial, rank, step, fqn, held)
        for fqn, held in record.bytes.items()
        if fqn in wanted and held != wanted[fqn].bytes
    ]
    least = sum(bytes_after_forward(trial, rank, fqn) for fqn in record.bytes if fqn in wanted)
    most = least + trial.plan.padding_after_forward[rank]
    if not least <= record.storage <= most:
        findings.append(_of_all(rank, step, least if least == most else Limit(least, most), record.storage))
    return findings


def bytes_after_forward(trial: Trial, rank: int, fqn: str) -> int:
    """Return what is kept of a parameter, and the rank's own slice beside it if that is something else."""
    kept, own = trial.plan.after_forward[rank][fqn], own_bytes(trial, rank, fqn)
    return kept.bytes if kept.degree == trial.plan.shards else kept.bytes + own


def kept_text(trial: Trial, degree: int) -> str:
    if degree == 1:
        return "gathered"
    return "freed" if degree == trial.plan.shards else f"sharded over {degree} ranks"


def observed_value(trial: Trial, rank: int, fqn: str, held: int) -> str | int:
    """Return a word, if it is one of the ways to keep a parameter, else the bytes."""
    text = {own_bytes(trial, rank, fqn): "freed", whole_bytes(trial, rank, fqn): "gathered"}.get(held)
    return text or held


def whole_bytes(trial: Trial, rank: int, fqn: str) -> int:
    """Return what a shard group holds of it: with tensor parallel only this tp rank's part."""
    group = trial.plan.peers(rank, trial.plan.shard_axis)
    size = BYTES[trial.case.training.compute_dtype or trial.case.training.dtype]
    return sum(numel(trial.plan.slices[peer][fqn]) for peer in group) * size


def _gathered_again(trial: Trial, evidence: RankEvidence, step: int) -> list[Finding]:
    """Gathering over the groups in which parameters are sharded, during forward or after it."""
    wanted, seen = planned(trial, evidence.rank, step), observed(trial, evidence, step)
    shards = trial.plan.peers(evidence.rank, trial.plan.shard_axis)
    after = [axis for axis in trial.plan.groups if axis.startswith("post_forward")]
    ours = {shards, *(trial.plan.peers(evidence.rank, axis) for axis in after)}
    ours |= {ranks for ranks, op, _ in seen if op == "all_gather" and set(ranks) < set(shards)}
    keys: list[Key] = [(ranks, "all_gather", "backward") for ranks in sorted(ours) if len(ranks) > 1]
    return [
        Finding.at(
            evidence.rank,
            wanted.get(key, 0),
            seen.get(key, 0),
            step=step,
            **of_collective(trial, key),
            quantity="again",
        )
        for key in keys
        if wanted.get(key, 0) != seen.get(key, 0)
        if seen.get(key, 0) - wanted.get(key, 0) not in after_evaluation.prefetched(trial, evidence.rank, step, key)
    ]
